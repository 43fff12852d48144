"""Optimizer steps until greedy validation reaches 0.9: the plain cursor's over the difficulty pool's, seed by seed.

1. Both sides are the command itself, on rl_shuffled_cursor_qwen3_debug and rl_difficulty_pool_qwen3_debug: the same model,
   examples, rollouts a step, learning rate, seed. Only the sampler differs.
2. Nine in ten of the lists of digits (6 to 41) are longer than any the model has seen: of 400 replies at each of ten such
   lengths it starts with none right. The validation set has lists of the lengths it knows, 2 to 5.
3. Runs are synchronous, so a seed gives the same steps on any run of one machine. Validation is every 5 steps on 256 examples;
   a side's figure is the first step whose reward is at least ``--target``. The run is then stopped: it has answered.
4. A cursor that does not get there within the config's steps counts with all of them, and the ratio as "at least". The learning
   rate falls to 0 over these steps, on both sides alike: it might get there on a longer schedule.

    python benchmarks/difficulty_pool.py [--seeds 0 1 2] [--target 0.9]
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.config_registry import rl_difficulty_pool_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import METRICS_FILE, read_metrics  # noqa: E402

STEPS = rl_difficulty_pool_qwen3_debug().steps


@dataclass(kw_only=True, slots=True)
class Side:
    steps: int
    """Until the target, or all of the run's."""
    reached: bool
    best: float
    """Highest validation reward seen."""

    def __str__(self) -> str:
        return (
            f"{self.steps:3d} steps"
            if self.reached
            else f"not in {self.steps} steps (best {self.best:.3f})"
        )


def run(config: str, *, seed: int, target: float, folder: Path) -> Side:
    words = (
        f"--config {config} --seed {seed} --run-dir {folder} --trainer.no-save-final-model".split()
    )
    output = folder.with_suffix(".log")
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan.experiments.rl.train", *words],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    while True:
        ended = process.poll() is not None
        rewards = validation_rewards(folder)
        first = next((step for step, reward in rewards.items() if step and reward >= target), None)
        if first is not None or ended:
            break
        time.sleep(1)
    if not ended:
        process.send_signal(signal.SIGINT)
        process.wait()
    elif process.returncode:
        sys.exit(f"{config} with seed {seed} failed:\n{output.read_text()}")
    return Side(steps=first or STEPS, reached=first is not None, best=max(rewards.values()))


def validation_rewards(folder: Path) -> dict[int, float]:
    """By step, as far as the run has come."""
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    return {
        record["step"]: record["validation/reward"]
        for record in records
        if "validation/reward" in record
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.9)
    args = parser.parse_args()

    ratios, least = [], ""
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            pool, plain = (
                run(
                    f"rl_{sampler}_qwen3_debug",
                    seed=seed,
                    target=args.target,
                    folder=Path(scratch) / f"{sampler}-{seed}",
                )
                for sampler in ("difficulty_pool", "shuffled_cursor")
            )
            if not pool.reached:
                sys.exit(f"seed {seed}: the difficulty pool did not reach {args.target:g}: {pool}")
            ratios.append(plain.steps / pool.steps)
            least = least or ("" if plain.reached else "at least ")
            print(f"seed {seed}: difficulty pool {pool}, plain cursor {plain}", flush=True)
    print(
        f"plain cursor / difficulty pool, steps to {args.target:g}: median {least}{statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
