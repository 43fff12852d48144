"""One optimizer step with shared prefixes, against the same step without, with transformers' modules, and by a bare loop.

    python benchmarks/trainer_step.py [--repeats 9] [--recorded RUN_FOLDER]

1. Loads: the demo's groups, recorded by a short run of it (256 rollouts in groups of 8: 25 tokens of prompt, 2 to 3 of
   completion), or those of --recorded; 4 groups of 8 with prompts of 512 random tokens and completions of 128; and such lengths
   where prompts have nothing in common. The model is the demo's.
2. A step is everything from samples to new weights: packing, forward, loss, backward, clipping, AdamW. Ours is the Learner with
   all its metrics: once with torchtitan's modules, and once with transformers' (``model.trained_by``), as a model has them that
   torchtitan does not define. The bare loop is transformers' model alone: it pads a batch, takes full logits and log_softmax, and computes the same loss and nothing else.
3. One core, and the sides take turns; a figure is the median of a side. CPU time is given too: where others use the machine, it
   is what holds. Losses are compared, so the sides do the same work.
4. Peak memory is what a step adds to the process at most.
"""

import argparse
import ctypes
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.batching.batcher import Batcher  # noqa: E402
from torchtitan.experiments.rl.batching.packing import Row, fill  # noqa: E402
from torchtitan.experiments.rl.config_registry import TINY_MODEL  # noqa: E402
from torchtitan.experiments.rl.losses import LossConfig, compute_loss, count_denominators  # noqa: E402
from torchtitan.experiments.rl.models.policy import ModelConfig  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts  # noqa: E402
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig  # noqa: E402
from torchtitan.experiments.rl.training.learner import Learner  # noqa: E402
from torchtitan.experiments.rl.training.trainer import init_process_group  # noqa: E402
from torchtitan.experiments.rl.types import LossDenominators, TrainingSample  # noqa: E402

VOCABULARY = 768
ROLLOUTS = 256
LEARNING_RATE = 1e-12
"""The weights stay, so that every step has the same loss."""


@dataclass(kw_only=True)
class Load:
    name: str
    samples: list[TrainingSample]
    row_length: int
    rows_per_microbatch: int
    padded_rows: int
    """Of the bare loop's microbatches."""


# ---- samples


def recorded_samples(folder: str | None) -> list[TrainingSample]:
    """The samples of one step of the demo, as a run recorded them."""
    if folder is not None:
        rollouts = (
            record.rollout for record in read_rollouts(folder) if record.outcome == "trained"
        )
        return [sample for rollout in islice(rollouts, ROLLOUTS) for sample in rollout.samples]
    with tempfile.TemporaryDirectory() as parent:
        command = [
            sys.executable,
            "-m",
            "torchtitan.experiments.rl.train",
            "--config",
            "rl_grpo_qwen3_debug",
        ]
        options = ["--run-dir", f"{parent}/run", "--steps", "2", "--validation.examples", "8"]
        subprocess.run([*command, *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return recorded_samples(f"{parent}/run")


def made_samples(
    groups: int, prompt: int, completion: int, *, apart: bool = False, size: int = 8
) -> list[TrainingSample]:
    """Groups of ``size`` samples of random tokens. ``apart``: each has a prompt of its own, with a first token of its own."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(groups * size):
        if apart or index % size == 0:
            prompt_ids = np.append(index % VOCABULARY, rng.integers(0, VOCABULARY, prompt - 1))
        sampled = np.arange(prompt + completion) >= prompt
        samples.append(
            TrainingSample(
                token_ids=np.append(prompt_ids, rng.integers(0, VOCABULARY, completion)).astype(
                    np.int32
                ),
                loss_mask=sampled,
                generator_logprobs=np.where(sampled, -10, 0).astype(np.float32),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, rng.normal(), 0).astype(np.float32),
                task_name="made",
                rollout_id=str(index),
            )
        )
    return samples


# ---- sides: each takes a step, and returns its loss


def ours(learner: Learner, load: Load, *, share: bool) -> Callable[[], float]:
    batcher = Batcher.Config(
        row_length=load.row_length,
        rows_per_microbatch=load.rows_per_microbatch,
        share_prefixes=share,
    ).build()

    def step() -> float:
        (microbatches,) = batcher.plan(load.samples, 1).microbatches
        loss = learner.forward_backward(microbatches, 0).compute()["loss/total"]
        learner.optim_step()
        return loss

    return step


def bare_loop(load: Load) -> Callable[[], float]:
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        longest = max(map(len, load.samples))
        names = tuple({sample.task_name for sample in load.samples})
        parts = [
            load.samples[at : at + load.padded_rows]
            for at in range(0, len(load.samples), load.padded_rows)
        ]
        batches = [
            fill([Row(samples=[sample], shared=[0]) for sample in part], names, longest)
            for part in parts
        ]
        rl, ce, ref_kl = (
            sum(count_denominators(batch, ["members"] * 3) for batch in batches)
            .clamp(min=1)
            .tolist()
        )
        total = 0.0
        for batch in batches:
            tokens = batch.token_ids.long()
            logits = model(
                input_ids=tokens, attention_mask=(batch.task_ids >= 0).long(), use_cache=False
            ).logits[:, :-1]
            logprobs = (
                (logits / batch.temperatures[:, 1:, None])
                .log_softmax(-1)
                .gather(2, tokens[:, 1:, None])
                .squeeze(2)
            )
            aligned = torch.nn.functional.pad(logprobs, (1, 0))
            loss, _ = compute_loss(
                aligned, batch, LossDenominators(rl=rl, ce=ce, ref_kl=ref_kl), LossConfig()
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


# ---- measuring


def peak_mib(step: Callable[[], float]) -> float:
    """What ``step`` adds to the resident memory of this process at most."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(
    sides: dict[str, Callable[[], float]], repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Seconds, CPU seconds and MiB of each side's step: medians."""
    losses = {name: step() for name, step in sides.items()}  # also warms up
    first = next(iter(losses.values()))
    assert all(abs(loss - first) < 1e-4 * max(1, abs(first)) for loss in losses.values()), losses
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, step in sides.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            step()
            taken[name].append((time.perf_counter() - began, time.process_time() - cpu_began))
    peaks = {
        name: statistics.median(peak_mib(step) for _ in range(3)) for name, step in sides.items()
    }
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    return {name: (seconds, cpu, peaks[name]) for name, (seconds, cpu) in medians.items()}


def report(load: Load, results: dict[str, tuple[float, float, float]]) -> None:
    plan = (
        Batcher.Config(row_length=load.row_length, rows_per_microbatch=load.rows_per_microbatch)
        .build()
        .plan(load.samples, 1)
    )
    print(
        f"{load.name}: {len(load.samples)} samples, {plan.tokens:,} tokens, {plan.shared_fraction:.1%} of them shared"
    )
    base = results["shared"]
    for name, (seconds, cpu, peak) in results.items():
        print(f"  {name:12} {seconds:7.3f} s {cpu:7.3f} s of CPU {peak:6.0f} MiB", end="")
        ratios = [value / own for value, own in zip((seconds, cpu, peak), base, strict=True)]
        print(
            ""
            if name == "shared"
            else "   / shared: {:.2f}, CPU {:.2f}, memory {:.2f}".format(*ratios)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--recorded", help="folder of a run of the demo; without, one is made")
    args = parser.parse_args()
    demo = recorded_samples(args.recorded)

    set_up_process()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_process_group(device="cpu", rank=0, world_size=1, url=f"tcp://127.0.0.1:{port}")
    config = TrainerConfig(optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0))
    short = dict(row_length=512, rows_per_microbatch=8, padded_rows=64)  # rows as in the demo
    long = dict(row_length=2048, rows_per_microbatch=2, padded_rows=8)
    loads = [
        Load(name="the demo's groups", samples=demo, **short),
        Load(name="prompts of 512, completions of 128", samples=made_samples(4, 512, 128), **long),
        Load(
            name="nothing shared, as short as the demo's",
            samples=made_samples(32, 25, 2, apart=True),
            **short,
        ),
        Load(
            name="nothing shared, prompts of 512, completions of 128",
            samples=made_samples(4, 512, 128, apart=True),
            **long,
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        learner, fallback = (
            Learner(
                config,
                model=ModelConfig(hf_assets_path=TINY_MODEL, trained_by=library),
                device="cpu",
                max_seq_len=2048,
                total_steps=1_000_000,
                run_dir=f"{folder}/{library}",
            )
            for library in ("torchtitan", "transformers")
        )
        for load in loads:
            sides = {
                "shared": ours(learner, load, share=True),
                "apart": ours(learner, load, share=False),
                "its modules": ours(fallback, load, share=True),
            }
            if "nothing" not in load.name:
                sides["bare loop"] = bare_loop(load)
            report(load, measure(sides, args.repeats))
        learner.close()
        fallback.close()


if __name__ == "__main__":
    main()
