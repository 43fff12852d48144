"""Time to resume a run, and what its checkpoints cost.

    python benchmarks/resume.py [--repeats 5] [--steps 60] [fields of the config]

1. Time to resume: from the start of the command with ``--resume`` until its first new step is in the metrics. Beside it, from
   the start of a new run until its first step. The run is the demo's, without evaluations.
2. Cost: the same run with a checkpoint every 20 steps, the default, and with none, in turns. Its time is that of the steps
   after ``WARM_UP``, with what they waited for a checkpoint and what its writing beside them slowed them. And the wait alone,
   which other work on the machine disturbs less.

Every figure is a median; the spread is that of the repeats.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402

COMMAND = [sys.executable, "-m", "torchtitan.experiments.rl.train"]
DEMO = "--config rl_grpo_qwen3_debug --validation.every 0 --trainer.no-save-final-model".split()
INTERVAL = 20
WARM_UP = 20
"""Steps; the first ones compile and allocate. A multiple of INTERVAL: a step reports what was waited after the step before."""


def started(words: list[str], output: Path) -> subprocess.Popen:
    with output.open("a") as file:
        return subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def finished(process: subprocess.Popen, output: Path) -> None:
    if process.wait() != 0:
        sys.exit(f"a run failed:\n{output.read_text()[-2000:]}")


def seconds_to_step(step: int, words: list[str], run: Path, output: Path) -> float:
    """From the start of the command until the metrics have that step; then the run goes on to its end."""
    began = time.perf_counter()
    process = started(words, output)
    while process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and (records := read_metrics(path)) and records[-1]["step"] >= step:
            break
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    finished(process, output)
    return seconds


def step_seconds(run: Path) -> tuple[float, float]:
    """Seconds of a step with the wait for a checkpoint before it, and that wait."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] > WARM_UP]
    waited = sum(record.get("time/checkpoint_s", 0.0) for record in records)
    taken = sum(record["time/step_s"] for record in records)  # without the wait
    return (taken + waited) / len(records), waited / len(records)


def said(values: list[float], unit: str = "s") -> str:
    return f"{statistics.median(values):.2f} {unit} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=60, help="of a run whose checkpoints are measured"
    )
    arguments, overrides = parser.parse_known_args()
    if arguments.steps <= WARM_UP or arguments.steps % INTERVAL:
        parser.error(f"--steps {arguments.steps}: give a multiple of {INTERVAL} above {WARM_UP}")
    demo = [*DEMO, *overrides]
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        output = base / "output"
        new, resumed = [], []
        for i in range(arguments.repeats):
            run = base / f"resumed-{i}"
            new.append(
                seconds_to_step(1, [*demo, "--steps", "2", "--run-dir", str(run)], run, output)
            )
            resumed.append(seconds_to_step(3, ["--resume", str(run), "--steps", "3"], run, output))
            print(
                f"to the first step: new {new[-1]:.2f} s, resumed {resumed[-1]:.2f} s", flush=True
            )
        with_them, without, waits = [], [], []
        for i in range(arguments.repeats):
            for interval, times in ((INTERVAL, with_them), (0, without)):
                run = base / f"interval-{interval}-{i}"
                words = [
                    *demo,
                    "--steps",
                    str(arguments.steps),
                    "--checkpoint.interval",
                    str(interval),
                    "--run-dir",
                    str(run),
                ]
                finished(started(words, output), output)
                taken, waited = step_seconds(run)
                times.append(taken)
                waits += [waited / taken] if interval else []
            print(
                f"a step: {with_them[-1]:.4f} s with checkpoints, {without[-1]:.4f} s without",
                flush=True,
            )
    shares = [100 * (a / b - 1) for a, b in zip(with_them, without, strict=True)]
    print(f"command to first step: new {said(new)}, resumed {said(resumed)}")
    print(
        f"checkpoints every {INTERVAL} steps add {said(shares, '%')} to a step of {said(without)}"
    )
    print(f"a step waits for them {said([100 * wait for wait in waits], '%')} of its time")


if __name__ == "__main__":
    main()
