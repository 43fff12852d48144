"""Takes many small steps, and shows whether any process of the run grows: memory, file descriptors, threads, files.

    python tests/soak.py --steps 1000 [--warm-up 400] [--folder FOLDER]

1. Every ``--every`` steps each process is looked at from outside: anonymous memory (what it does not share with files),
   descriptors, threads; and the size of each file of the run. Mappings of 128 MB and more are not counted: a generator's KV
   cache is allocated once, and its pages become resident as they are first used, up to generator.engine.cpu_kv_cache_gib.
   `tests/memory_probe` tells from inside how the memory divides.
2. After the warm-up a line is fitted to each. Prints its slope per 100 steps with the standard error, for each process. The
   error is that of the means of ``BLOCKS`` blocks: neighbouring samples are alike.
3. Monarch keeps ``KEPT_KB`` of each call that a process answers, and some of its own polls of the processes
   (`tests/monarch_memory.py` shows both with bare actors). The calls and the seconds are counted, and what they explain is
   taken off: the rest is this library's.
4. Exits 1 if the rest grows by more than ``--bound`` MB per 100 steps and two standard errors, if descriptors or threads grow,
   or if the run fails.

1,000 steps take some 6 minutes on two quiet cores. docs/operations.md says what is known to grow, and why.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.kills.command import Command, steps_recorded  # noqa: E402

WORDS = """--config rl_grpo_qwen3_debug --rollouts-per-step 8 --tasks.sum-digits.group-size 4 --validation.examples 8
    --validation.every 50 --trainer.no-save-final-model --rollout-workers 1 --max-drops-in-a-row 1000000
    --post-batch-filters none""".split()
BLOCKS = 10
LARGE_KB = 128 * 1024
STALL_S = 300.0
"""Without a step for so long, the run hangs."""
KEPT_KB = 0.5
"""Of each call answered: Monarch's actors number what they send by the port it goes to, and each answer goes to a new port."""
POLLED_KB_S, POLLING_KB_S = 0.7, 1.0
"""What Monarch keeps each second of its polls: in each process, and in the controller for each of the others."""
PROBE = Path(__file__).parent / "memory_probe"


@dataclass(frozen=True, kw_only=True)
class Sample:
    step: int
    memory_mb: float
    descriptors: int
    threads: int
    live_mb: float
    """Handed out by malloc, the KV cache too."""
    free_mb: float
    """Given back to malloc, which keeps it."""
    python_blocks: int
    answers: int
    """To calls of other actors, since the start."""
    seconds: float
    """Since the start."""
    polls: int = 0
    """Processes that this one polls."""

    @property
    def explained_mb(self) -> float:
        polls_kb_s = self.polls * POLLING_KB_S or POLLED_KB_S
        return (self.answers * KEPT_KB + self.seconds * polls_kb_s) / 1024


@dataclass(frozen=True, kw_only=True)
class Line:
    slope: float
    """Per 100 steps."""
    error: float
    """Standard error of ``slope``."""

    def __str__(self) -> str:
        return f"{self.slope:+.3f} ± {self.error:.3f}"


def fitted(steps: Sequence[float], values: Sequence[float]) -> Line:
    """Least squares through the means of BLOCKS blocks of samples, or through the samples where they are fewer."""
    count = min(BLOCKS, len(steps))
    if count < 3:
        return Line(slope=0.0, error=float("inf"))
    edges = [round(i * len(steps) / count) for i in range(count + 1)]
    x, y = (
        [statistics.mean(of[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
        for of in (steps, values)
    )
    middle_x, middle_y = statistics.mean(x), statistics.mean(y)
    spread = sum((value - middle_x) ** 2 for value in x)
    slope = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - middle_y - slope * (a - middle_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Line(slope=100 * slope, error=100 * (residual / (count - 2) / spread) ** 0.5)


def grows(counts: Sequence[int]) -> bool:
    """Whether the least of the last quarter is above the most of the first: of something that comes and goes."""
    quarter = max(1, len(counts) // 4)
    return min(counts[-quarter:]) > max(counts[:quarter])


def looked_at(pid: int, step: int, probes: Path, *, seconds: float, polls: int) -> Sample | None:
    """None: the process has ended, or its probe has not begun."""
    try:
        memory = anonymous_kb(Path(f"/proc/{pid}/smaps").read_text())
        descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        inside = json.loads((probes / str(pid)).read_text())
    except OSError:
        return None
    if not memory:
        return None
    return Sample(
        step=step,
        memory_mb=memory / 1024,
        descriptors=descriptors,
        threads=threads,
        live_mb=inside["live_kb"] / 1024,
        free_mb=inside["free_kb"] / 1024,
        python_blocks=inside["python_blocks"],
        answers=inside["answers"],
        seconds=seconds,
        polls=polls,
    )


def anonymous_kb(smaps: str) -> int:
    """Anonymous memory of all mappings below LARGE_KB."""
    total = size = 0
    for line in smaps.splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1])
        elif line.startswith("Anonymous:") and size < LARGE_KB:
            total += int(line.split()[1])
    return total


def file_sizes(run: Path) -> dict[str, int]:
    """Bytes of the run's files; the checkpoints, of which the last few stay, as one."""
    sizes: dict[str, int] = defaultdict(int)
    for path in run.rglob("*"):
        try:
            if path.is_file():
                name = path.relative_to(run)
                sizes[
                    name.parts[0] if name.parts[0] in ("checkpoints", "tensorboard") else str(name)
                ] += path.stat().st_size
        except OSError:  # a checkpoint that was just deleted
            pass
    return sizes


def watch(
    command: Command, probes: Path, steps: int, every: int
) -> tuple[dict[str, list[Sample]], list[tuple[int, dict[str, int]]]]:
    """Sample until the last step, or the end of the run."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    files: list[tuple[int, dict[str, int]]] = []
    due, last = 1, time.monotonic()
    while command.lives and due <= steps:
        step = steps_recorded(command.folder)
        if step < due:
            if time.monotonic() - last > STALL_S and files:
                break
            time.sleep(0.05)
            continue
        seconds = time.monotonic() - command.began
        for name, pid in (command.parts() | {"controller": command.process.pid}).items():
            polls = len(command.alive()) - 1 if name == "controller" else 0
            if (sample := looked_at(pid, step, probes, seconds=seconds, polls=polls)) is not None:
                samples[name].append(sample)
        files.append((step, file_sizes(command.folder)))
        due, last = step + every, time.monotonic()
    return samples, files


def report(
    samples: dict[str, list[Sample]],
    files: list[tuple[int, dict[str, int]]],
    *,
    warm_up: int,
    bound: float,
) -> list[str]:
    """Print the tables. Returns what is wrong, a line each."""
    faults = []
    print(
        f"{'process':<18} {'MB first':>9} {'warm':>8} {'last':>8} {'MB per 100 steps':>20}  descriptors  threads"
    )
    for name, of in sorted(samples.items()):
        after = [sample for sample in of if sample.step >= warm_up]
        if not after:
            faults.append(f"{name}: no sample after the warm-up")
            continue
        line = fitted([sample.step for sample in after], [sample.memory_mb for sample in after])
        counts = {
            "descriptors": [sample.descriptors for sample in after],
            "threads": [sample.threads for sample in after],
        }
        print(
            f"{name:<18} {of[0].memory_mb:>9.1f} {after[0].memory_mb:>8.1f} {of[-1].memory_mb:>8.1f} {str(line):>20}  "
            + "  ".join(f"{min(values)} to {max(values)}" for values in counts.values())
        )
        faults += [
            f"{name}: {what} grow from {min(v)} to {max(v)}"
            for what, v in counts.items()
            if grows(v)
        ]
    faults += divided(samples, warm_up=warm_up, bound=bound)
    after_warm_up = [(step, sizes) for step, sizes in files if step >= warm_up]
    if after_warm_up:
        print(f"{'file':<28} {'kB last':>9} {'kB per 100 steps':>20}")
    for name in sorted(after_warm_up[-1][1] if after_warm_up else []):
        line = fitted(
            [step for step, _ in after_warm_up],
            [sizes.get(name, 0) / 1024 for _, sizes in after_warm_up],
        )
        print(f"{name:<28} {after_warm_up[-1][1][name] / 1024:>9.1f} {str(line):>20}")
    return faults


def divided(samples: dict[str, list[Sample]], *, warm_up: int, bound: float) -> list[str]:
    """Print whose the growth is, and what it is made of. Returns what is wrong, a line each."""
    columns = "".join(f"{what:>17}" for what in ("the rest", "malloc live", "malloc free", "other"))
    print(f"{'MB per 100 steps':<18} {'Monarch':>8}{columns}  objects a step")
    faults = []
    for name, of in sorted(samples.items()):
        after = [sample for sample in of if sample.step >= warm_up]
        if not after:
            continue
        steps = [sample.step for sample in after]
        monarch, live, free, objects = (
            fitted(steps, values)
            for values in (
                [sample.explained_mb for sample in after],
                [sample.live_mb for sample in after],
                [sample.free_mb for sample in after],
                [sample.python_blocks for sample in after],
            )
        )
        rest = fitted(steps, [sample.memory_mb - sample.explained_mb for sample in after])
        other = fitted(
            steps, [sample.memory_mb - sample.live_mb - sample.free_mb for sample in after]
        )
        print(
            f"{name:<18} {monarch.slope:>+8.3f}{''.join(f'{str(line):>17}' for line in (rest, live, free, other))}"
            f"  {objects.slope / 100:>+14.2f}"
        )
        if rest.slope - 2 * rest.error > bound:
            faults.append(
                f"{name}: memory grows by {rest} MB per 100 steps, beside what Monarch keeps of its calls"
            )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=400, help="steps")
    parser.add_argument("--every", type=int, default=5, help="steps between two samples")
    parser.add_argument("--bound", type=float, default=0.3, help="MB per 100 steps")
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where the run is kept; a temporary folder otherwise",
    )
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        base.mkdir(parents=True, exist_ok=True)
        run, probes = base / "run", base / "probes"
        probes.mkdir(exist_ok=True)
        os.environ |= {
            "MEMORY_PROBE": str(probes.resolve()),
            "PYTHONPATH": str(PROBE),
        }  # for the processes of the run
        own = [*WORDS, "--steps", str(arguments.steps), "--run-dir", str(run), *words]
        command = Command(run, own, output=base / "output", temporary=base / "tmp")
        try:
            samples, files = watch(command, probes, arguments.steps, arguments.every)
            code = command.wait(STALL_S)
        finally:
            command.kill_session()
        seconds = time.monotonic() - command.began
        faults = report(samples, files, warm_up=arguments.warm_up, bound=arguments.bound)
        if code != 0:
            faults.append(
                f"the run ended with {code}: {(base / 'output').read_text().splitlines()[-1:]}"
            )
    for fault in faults:
        print(f"fault: {fault}")
    print(f"{arguments.steps} steps in {seconds:.0f} s, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
