"""What adapters cost and save, on each side alone: memory, seconds and bytes of the trainer, tokens a second of the engine.

    python benchmarks/lora_costs.py [--models demo 125M] [--rank 16] [--turns 7]

1. The models: the demo's, and the random one of benchmarks/weight_sync.py with 16 layers.
2. Two processes of a side, with one thread each, take turns: the whole model, and adapters. A figure is a median over turns.
3. Trainer: a step of 16 samples of 64 tokens, then the version is written into shared memory, digests included. Peak memory is
   what the process takes at most, less what it takes before the model is built.
4. Engine: 32 requests of 16 tokens that sample 32 each, with an adapter whose A and B are random, and without one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.weight_sync import make_model  # noqa: E402
from torchtitan.experiments.rl.batching.batcher import Batcher  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL  # noqa: E402
from torchtitan.experiments.rl.generation.engine import GenerateRequest  # noqa: E402
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig  # noqa: E402
from torchtitan.experiments.rl.models.lora import LoRA  # noqa: E402
from torchtitan.experiments.rl.models.policy import ModelConfig  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig  # noqa: E402
from torchtitan.experiments.rl.training.learner import Learner  # noqa: E402
from torchtitan.experiments.rl.training.trainer import init_process_group  # noqa: E402
from torchtitan.experiments.rl.types import TrainingSample  # noqa: E402
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher  # noqa: E402
from torchtitan.experiments.rl.weights.snapshot import (  # noqa: E402
    Manifest,
    RankParts,
    SharedBuffer,
    buffer_bytes,
    digest,
    named,
    views,
    whole,
)

SAMPLES, LENGTH = 16, 64
REQUESTS, PROMPT, SAMPLED = 32, 16, 32


def trainer(model: str, rank: int) -> Iterator[dict[str, float]]:
    lora = LoRA.Config(rank=rank) if rank else None
    with tempfile.TemporaryDirectory() as folder:
        init_process_group(device="cpu", rank=0, world_size=1, url=f"file://{folder}/store")
        before = kibibytes("VmRSS")
        config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-5), lora=lora)
        sizes = dict(max_seq_len=512, total_steps=100)
        learner = Learner(
            config, model=ModelConfig(hf_assets_path=model), device="cpu", **sizes, run_dir=folder
        )
        publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.float32)
        shards = {name: whole(tensor.shape) for name, tensor in learner.hub_tensors.items()}
        version_bytes = buffer_bytes(shards, torch.float32)
        random = np.random.default_rng(0)
        sampled = np.arange(LENGTH) >= LENGTH // 2
        samples = [
            TrainingSample(
                token_ids=random.integers(0, 768, LENGTH).astype(np.int32),
                loss_mask=sampled,
                generator_logprobs=np.where(sampled, -8, 0).astype(np.float32),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, random.normal(), 0).astype(np.float32),
                task_name="random",
                rollout_id=str(index),
            )
            for index in range(SAMPLES)
        ]
        plan = Batcher.Config(row_length=512).build().plan(samples, 1)
        for version in range(1, 1000):
            started = time.perf_counter()
            learner.forward_backward(plan.microbatches[0], version)
            learner.optim_step()
            stepped = time.perf_counter()
            publisher.write(version, learner.hub_tensors)
            written = time.perf_counter()
            yield {
                "step, s": stepped - started,
                "publish, s": written - stepped,
                "MiB of a version": version_bytes / 2**20,
                "peak memory, MiB": (kibibytes("VmHWM") - before) / 2**10,
            }


def kibibytes(name: str) -> int:
    """Of this process. What getrusage says counts its parent too."""
    return next(
        int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(f"{name}:")
    )


def engine(model: str, rank: int) -> Iterator[dict[str, float]]:
    config = VLLMEngineConfig(max_model_len=256, cpu_kv_cache_gib=0.5, enable_prefix_caching=False)
    made = config.build(model_path=model, device="cpu", adapters={"": rank} if rank else {})
    if rank:
        made.load(random_adapter(model, rank), recompute=False)
    random = np.random.default_rng(0)
    while True:
        started = time.perf_counter()
        for number in range(REQUESTS):
            prompt = random.integers(0, 768, PROMPT).astype(np.int32)
            sampling = SamplingConfig(max_tokens=SAMPLED)
            request = GenerateRequest(
                request_id=number,
                prompt_token_ids=prompt,
                sampling=sampling,
                seed=number,
                stop_token_ids=[],
            )
            assert made.add(request) is None
        while made.busy:
            made.step()
        yield {"tokens/s": REQUESTS * SAMPLED / (time.perf_counter() - started)}


KEPT = []


def random_adapter(model: str, rank: int) -> Manifest:
    """A version of random values."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in load_file(f"{model}/model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            shapes |= {
                f"{module}.lora_A.weight": (rank, weight.shape[1]),
                f"{module}.lora_B.weight": (len(weight), rank),
            }
    shards = {name: whole(shape) for name, shape in shapes.items()}
    buffer = SharedBuffer.create(buffer_bytes(shards, torch.float32))
    KEPT.append(buffer)
    digests = named(
        (name, int(digest(view.normal_(0, 0.01))))
        for name, view in views(buffer.bytes, shards, torch.float32).items()
    )
    parts = (RankParts("here", buffer.path, shards),)
    return Manifest(
        version=1,
        shapes=shapes,
        dtype=torch.float32,
        parts=parts,
        publication="random",
        digests=digests,
    )


def side(role: str, model: str, rank: int) -> None:
    """A turn for each line that is read."""
    torch.set_num_threads(1)
    set_up_process()
    turns = {"trainer": trainer, "engine": engine}[role](model, rank)
    next(turns)  # what is made in the first step or version
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(next(turns)), flush=True)
    os._exit(0)  # vLLM's exit handlers take seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "125M"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        role, model, rank = args.side
        return side(role, model, int(rank))
    with tempfile.TemporaryDirectory() as folder:
        folders = {"demo": TINY_MODEL, "125M": folder}
        if "125M" in args.models:
            make_model(folder, 16)
        for name in args.models:
            for role in ("trainer", "engine"):
                compare(name, role, folders[name], args.rank, args.turns)


def compare(name: str, role: str, model: str, rank: int, turns: int) -> None:
    command = [sys.executable, __file__, "--side", role, model]
    pipes = dict(
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    sides = [subprocess.Popen([*command, str(own)], **pipes) for own in (0, rank)]
    found: list[list[dict[str, float]]] = [[], []]
    for process in sides:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None, "a side ended"
    for _ in range(turns):
        for process, own in zip(sides, found, strict=True):
            process.stdin.write("\n")
            process.stdin.flush()
            own.append(json.loads(process.stdout.readline()))
    for process in sides:
        process.stdin.close()
        process.wait()
    for figure in found[0][0]:
        whole, adapter = (statistics.median(turn[figure] for turn in own) for own in found)
        ratio = statistics.median(
            right[figure] / left[figure] for left, right in zip(*found, strict=True)
        )
        print(
            f"{name:<5} {role:<8} {figure:<18} whole model {whole:>10.4g}   rank {rank} {adapter:>10.4g}   {ratio:.3f}",
            flush=True,
        )
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
