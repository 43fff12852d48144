"""Runs a benchmark of this checkout and of another in turn, on one core, and prints the medians of its figures and their ratio.

    git worktree add /tmp/before c19aa3e            # the commit before the checks of user code
    python benchmarks/against.py /tmp/before rollout_path [--repeats 5] [options of the benchmark]
    python benchmarks/against.py /tmp/before packing --samples 20000

Each checkout runs its own copy of the benchmark, in a process of its own, with this interpreter.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

FIGURES = {
    "rollout_path": r"path +([\d.]+) ms",
    "packing": r"time: ([\d.]+) ms to plan",
}
"""What is compared, by benchmark; a figure may be printed several times in a run."""
HERE = Path(__file__).resolve().parents[1]


def measured(checkout: Path, benchmark: str, options: list[str]) -> list[float]:
    """The figures of one run, in milliseconds."""
    command = [sys.executable, f"benchmarks/{benchmark}.py", *options]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    figures = [float(text) for text in re.findall(FIGURES[benchmark], run.stdout)]
    if run.returncode or not figures:
        sys.exit(f"{checkout}: {' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="another checkout of this repository")
    parser.add_argument("benchmark", choices=sorted(FIGURES))
    parser.add_argument("--repeats", type=int, default=5)
    args, options = parser.parse_known_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    runs: dict[Path, list[list[float]]] = {args.before: [], HERE: []}
    for number in range(args.repeats):
        for checkout in runs if number % 2 == 0 else reversed(runs):
            runs[checkout].append(measured(checkout, args.benchmark, options))
    for before, now in zip(
        zip(*runs[args.before], strict=True), zip(*runs[HERE], strict=True), strict=True
    ):
        medians = statistics.median(before), statistics.median(now)
        print(f"before {medians[0]:.3f} ms ({min(before):.3f} to {max(before):.3f})", end=", ")
        print(f"now {medians[1]:.3f} ms ({min(now):.3f} to {max(now):.3f})", end=", ")
        print(f"ratio {medians[1] / medians[0]:.3f}, difference {medians[1] - medians[0]:+.3f} ms")


if __name__ == "__main__":
    main()
