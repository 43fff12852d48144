"""Where the time goes from the command to the first optimizer step, and from the summary to the command's end.

    python benchmarks/starting.py [--repeats 3] [fields of the config]

Runs the demo for two steps, with its evaluation before the first one, and notes when its lines are printed; what happens in the
other processes is read from their logs. Trainer and generator start side by side. Every figure is a median. The first run
is not counted: it may read from a cold disk.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [
    sys.executable,
    "-m",
    "torchtitan.experiments.rl.train",
    "--config",
    "rl_grpo_qwen3_debug",
    "--steps",
    "2",
]
PRINTED = {
    "command: imports, checks": "run  ",
    "evaluation of version 0": "validation before the first step",
    "first step": "1/2 ",
    "second step, final evaluation, checkpoint": "steps  ",
}
"""What ends with the first line that has this text."""
LOGGED = {
    "trainer: process, imports": ("trainer-0", "building the model"),
    "trainer: model": ("trainer-0", "the model is built"),
    "generator: process, imports": ("generator-0", "building the engine"),
    "generator: import of vLLM": ("generator-0", "vLLM is imported"),
    "generator: engine": ("generator-0", "the engine is built"),
    "canary": ("controller", "trainer and generators agree on version 0"),
}
"""What ends with the first record of this process that has this message."""
ORDER = {
    "command: imports, checks": None,
    "trainer: process, imports": "command: imports, checks",
    "trainer: model": "trainer: process, imports",
    "generator: process, imports": "command: imports, checks",
    "generator: import of vLLM": "generator: process, imports",
    "generator: engine": "generator: import of vLLM",
    "canary": "generator: engine",
    "evaluation of version 0": "canary",
    "first step": "evaluation of version 0",
    "second step, final evaluation, checkpoint": "first step",
    "end of the processes and the command": "second step, final evaluation, checkpoint",
}
"""What each begins after; None: the command."""


def ends(run: Path, words: list[str]) -> dict[str, float]:
    """When each part of a run ended, in seconds since the command."""
    began, found, shown = time.time(), {}, ""
    process = subprocess.Popen(
        [*COMMAND, "--run-dir", str(run), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        shown += line
        for name, text in PRINTED.items():
            if name not in found and text in line:
                found[name] = time.time() - began
    if process.wait() != 0:
        sys.exit(f"a run failed:\n{shown[-2000:]}")
    found["end of the processes and the command"] = time.time() - began
    for name, (log, message) in LOGGED.items():
        records = map(json.loads, (run / "logs" / f"{log}.jsonl").read_text().splitlines())
        at = next(record["time"] for record in records if record["message"] == message)
        found[name] = datetime.fromisoformat(at).timestamp() - began
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    options, words = parser.parse_known_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        for number in range(options.repeats + 1):
            runs.append(ends(Path(folder) / str(number), words))
    runs = runs[1:]
    print(f"{'':<44}{'takes s':>9}{'ends at s':>11}")
    for name, before in ORDER.items():
        took = statistics.median(
            run[name] - (run[before] if before is not None else 0.0) for run in runs
        )
        print(f"{name:<44}{took:>9.2f}{statistics.median(run[name] for run in runs):>11.2f}")


if __name__ == "__main__":
    main()
