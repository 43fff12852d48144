"""Steps per second of asynchronous over synchronous training, real actors, the same work on the same cores.

1. Both sides are the command itself, in turn, as often as asked: with --max-offpolicy-steps 0, where generating and training
   take turns, and with 1, where they overlap. Generator and trainer have a core of their own in both; the controller floats.
2. A step's time is what metrics.jsonl says, without the first steps (warm-up) and without the last, which validates.
3. The gain depends on how alike generation and training times are: the synchronous run's are printed. Twice is the most.
4. The reward on held-out examples at the end must not be worse for it.

    python benchmarks/async_speedup.py
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402

WARM_UP = 4


@dataclass(kw_only=True, slots=True)
class Side:
    step_s: float
    generation_s: float
    train_s: float
    reward: float


def run(config: str, bound: int, *, steps: int, folder: Path) -> Side:
    words = f"--config {config} --steps {steps} --max-offpolicy-steps {bound} --validation.every {steps}".split()
    words += ["--run-dir", str(folder), "--trainer.no-save-final-model"]
    subprocess.run(
        [sys.executable, "-m", "torchtitan.experiments.rl.train", *words],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    records = read_metrics(folder / "metrics.jsonl")
    measured = [record for record in records if WARM_UP < record["step"] < steps]

    def mean(key: str) -> float:
        return float(np.mean([record[key] for record in measured]))

    return Side(
        step_s=mean("time/step_s"),
        generation_s=mean("time/wait_s"),
        train_s=mean("time/train_s"),
        reward=records[-1]["validation/reward"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config",
        default="rl_guess_number_qwen3_debug",
        help="default: %(default)s, where both times are alike",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=2)
    args = parser.parse_args()

    pairs: list[tuple[Side, Side]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(args.pairs):
            sides = [
                run(args.config, bound, steps=args.steps, folder=Path(scratch) / f"{pair}-{bound}")
                for bound in (0, 1)
            ]
            pairs.append((sides[0], sides[1]))
            synchronous, asynchronous = sides
            longer, shorter = sorted((synchronous.generation_s, synchronous.train_s), reverse=True)
            print(
                f"synchronous: generation {synchronous.generation_s:.2f} s, training {synchronous.train_s:.2f} s "
                f"({longer / shorter:.2f} apart), a step {synchronous.step_s:.2f} s; asynchronous: a step "
                f"{asynchronous.step_s:.2f} s; {synchronous.step_s / asynchronous.step_s:.2f} times the steps per second; "
                f"final validation reward {synchronous.reward:.3f} and {asynchronous.reward:.3f}",
                flush=True,
            )
    speedup = np.mean([side[0].step_s for side in pairs]) / np.mean(
        [side[1].step_s for side in pairs]
    )
    rewards = np.mean([[side.reward for side in pair] for pair in pairs], axis=0)
    print(
        f"asynchronous / synchronous: {speedup:.2f} times the steps per second, reward {rewards[1] - rewards[0]:+.3f}"
    )


if __name__ == "__main__":
    main()
