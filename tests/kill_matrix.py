"""Kills or stops processes of small runs at random moments, and checks that no run is lost.

    python tests/kill_matrix.py --kills 40 --seed 0 [--folder FOLDER]
    python tests/kill_matrix.py --only 17 --seed 0              the same kill again
    python tests/kill_matrix.py --kills 0 --undisturbed 8       the reward of undisturbed runs, and what it varies by

1. Each kill has a run of its own: one that generates with two replicas and a rollout worker, or one of two trainer ranks that
   distils from a model which it hosts (``RUNS``).
2. Kill number k of a seed is always of the same process, signal, moment and delay, as far as a moment can be hit again.
3. The run must end in "the run went on" or in "resumed by one command". "begun again" counts only where the run was killed
   before it had a step to save (``may_begin_again``).
4. Then the ledger balances, files are well-formed, no process, shared memory or temporary file is left, and the final reward is
   within noise of an undisturbed run's.

Prints a line for each kill and "N of N"; exits 1 if one is missing. A kill takes about a minute on two quiet cores.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.kills.after import left_behind  # noqa: E402
from tests.kills.command import Command, has_checkpoint, steps_recorded  # noqa: E402
from tests.kills.judge import final_reward, torn_files, unbalanced  # noqa: E402
from tests.kills.moments import MOMENTS, Kill, draw, in_update, wait_for_moment  # noqa: E402
from torchtitan.experiments.rl.process.temporary import shared_memory_of  # noqa: E402

STEPS, ROLLOUTS, INTERVAL, EVERY, MAX_AGE = 24, 32, 4, 6, 1
SMALL = f"""--rollouts-per-step {ROLLOUTS} --validation.examples 256 --validation.every {EVERY} --steps {STEPS}
    --checkpoint.interval {INTERVAL} --max-offpolicy-steps {MAX_AGE} --supervision.stall-s 20
    --post-batch-filters none""".split()
NOISE = 4.0
"""Standard errors that a final reward may be from the mean, which is 0.1: a policy that lost what it had learned is further."""
SUSPENDED_S = 30.0
"""A stopped command is continued after this time, as a suspended terminal: nobody is left to notice it."""
LOOK_S = 5.0
ATTEMPTS = 3
"""A run may be over before its moment comes: the kill is tried again, at once where the moment begins."""


@dataclass(frozen=True, kw_only=True)
class RunKind:
    name: str
    words: list[str]
    parts: tuple[str, ...]
    reward: float
    """Mean final reward of runs that nothing disturbed, ..."""
    reward_sd: float
    """... and its standard error: the binomial one of 256 examples. Three runs of one seed were 0.004 apart. What runs of other
    seeds differ by, ``--kills 0 --undisturbed 8`` measures."""


RUNS = (
    RunKind(
        name="grpo",
        words=[
            "--config",
            "rl_grpo_qwen3_debug",
            *SMALL,
            "--generator.replicas",
            "2",
            "--rollout-workers",
            "1",
        ],
        parts=("generator-0", "generator-1", "rollout_worker-0", "trainer-0", "controller"),
        reward=0.84,
        reward_sd=0.023,
    ),
    RunKind(
        name="opd",
        words=["--config", "rl_opd_qwen3_debug", *SMALL, "--trainer.ranks", "2"],
        parts=("generator-0", "hosted_0-0", "trainer-0", "trainer-1", "controller"),
        reward=0.736,
        reward_sd=0.028,
    ),
)


def kills(seed: int) -> Iterator[tuple[RunKind, Kill]]:
    """Every part at every moment once, in an order drawn by the seed; then all again, with other steps and delays."""
    random_ = random.Random(seed)
    while True:
        cases = [
            (kind, part, moment)
            for kind in RUNS
            for part, moment in itertools.product(kind.parts, MOMENTS)
        ]
        random_.shuffle(cases)
        for kind, part, moment in cases:
            yield kind, draw(random_, part, moment, steps=STEPS, interval=INTERVAL, every=EVERY)


def may_begin_again(step: int) -> bool:
    """Whether a run that was killed when step ``step`` was its last may have nothing to resume: the checkpoint of the first
    ``INTERVAL`` steps may have been under way."""
    return step <= INTERVAL


@dataclass
class Outcome:
    how: str = "never killed"
    """"the run went on", "resumed by one command", "begun again", or what became of it."""
    said: str = ""
    """More about the kill, for people."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        return (
            self.how in ("the run went on", "resumed by one command", "begun again")
            and not self.faults
        )

    def __str__(self) -> str:
        faults = "".join(f"; {fault}" for fault in self.faults)
        return f"{self.said}{self.how} in {self.seconds:.0f} s{faults}"


class Trial:
    """One run of a kind in a folder of its own, with a kill or without."""

    def __init__(self, kind: RunKind, folder: Path, limit_s: float):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.kind, self.folder, self.limit_s = kind, folder, limit_s
        self.run, self.output, self.temporary = folder / "run", folder / "output", folder / "tmp"
        self.mapped: set[str] = set()
        """Shared memory that processes of the run had mapped."""
        self.orphans: list[str] = []

    def start(self, *words: str) -> Command:
        return Command(self.run, list(words), output=self.output, temporary=self.temporary)

    def begin(self, *words: str) -> Command:
        return self.start(*self.kind.words, "--run-dir", str(self.run), *words)

    def end(self, command: Command) -> int | None:
        """The exit code; None if it does not end in time. Notes what does not end with it."""
        code = None
        while code is None and time.monotonic() < command.began + self.limit_s:
            self.mapped |= shared_memory_of(command.alive())
            code = command.wait(LOOK_S)
        if code is None:
            command.kill_session()
        else:
            self.orphans += command.orphans()
        return code

    def undisturbed(self, seed: int) -> Outcome:
        began = time.monotonic()
        code = self.end(self.begin("--seed", str(seed)))
        how = "the run went on" if code == 0 else f"exit code {code}"
        faults = self.faults(judge_reward=False) if code == 0 else [self.last_line()]
        return Outcome(how, faults=faults, seconds=time.monotonic() - began)

    def disturbed(self, kill: Kill) -> Outcome:
        began = time.monotonic()
        command = self.begin()
        outcome = Outcome()
        try:
            pid = wait_for_moment(kill, command, self.limit_s)
            if pid is not None and kill.moment not in (
                "weight update",
                "checkpoint",
            ):  # which last less than the look
                self.mapped |= shared_memory_of(command.alive())
            if pid is None or not killed(pid, kill.number):
                outcome.faults = [] if self.end(command) == 0 else [self.last_line()]
                return outcome
            step = steps_recorded(self.run)
            outcome.said = (
                f"at step {step}{' in a load' if in_update(command, kill.part) else ''}, "
            )
            if kill.part == "controller" and kill.number == signal.SIGSTOP:
                time.sleep(SUSPENDED_S)
                os.kill(pid, signal.SIGCONT)
            outcome.how = self._how_it_ended(self.end(command), step)
            outcome.faults = self.faults() if outcome.kept else [self.last_line()]
            return outcome
        finally:
            command.kill_session()
            outcome.seconds = time.monotonic() - began

    def _how_it_ended(self, code: int | None, step: int) -> str:
        if code == 0:
            return "the run went on"
        first = "did not end" if code is None else f"exit code {code}"
        self.note(f"---- {first}: {self.last_line()}")
        if code is None:
            return first
        resumable = has_checkpoint(self.run)
        if resumable:
            again = self.start("--resume", str(self.run))
        else:
            shutil.rmtree(self.run, ignore_errors=True)  # on a busy machine it may not be there yet
            again = self.begin()
        code = self.end(again)
        if code != 0:
            return f"{first}, then {'no end' if code is None else f'exit code {code}'}"
        if resumable:
            return "resumed by one command"
        return (
            "begun again"
            if may_begin_again(step)
            else f"{first}, and no checkpoint after step {step}"
        )

    def faults(self, *, judge_reward: bool = True) -> list[str]:
        """What is wrong with a run that has ended well. ``judge_reward``: only of the seed that ``RUNS`` has the reward of."""
        reward = final_reward(self.run)
        distance = (reward - self.kind.reward) / self.kind.reward_sd if reward is not None else 0.0
        unusual = judge_reward and abs(distance) > NOISE
        return [
            *(f"left alive: {name}" for name in self.orphans),
            *left_behind(self.temporary, self.mapped),
            *torn_files(self.run),
            *unbalanced(self.run, steps=STEPS, rollouts_per_step=ROLLOUTS, max_age=MAX_AGE),
            *(
                [f"final reward {reward:.3f}, {distance:+.1f} sd from undisturbed runs'"]
                if unusual
                else []
            ),
        ]

    def note(self, line: str) -> None:
        with self.output.open("a") as file:
            file.write(f"{line}\n")

    def last_line(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return next(
            (line for line in reversed(lines) if line.startswith("error:")),
            lines[-1] if lines else "no output",
        )


def measure(runs: int, base: Path, limit_s: float) -> None:
    for kind in RUNS:
        rewards = []
        for seed in range(runs):
            trial = Trial(kind, base / f"undisturbed-{kind.name}-{seed}", limit_s)
            outcome = trial.undisturbed(seed)
            reward = final_reward(trial.run)
            rewards += [reward] if reward is not None else []
            print(f"undisturbed {kind.name}, seed {seed}: reward {reward}, {outcome}", flush=True)
        if len(rewards) > 1:
            print(
                f"{kind.name}: reward {statistics.mean(rewards):.3f}, sd {statistics.stdev(rewards):.3f}",
                flush=True,
            )


def killed(pid: int, number: int) -> bool:
    """Whether there was still such a process: one may end by itself as its moment comes."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill")
    parser.add_argument("--only", type=int, nargs="+", help="these numbers alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--undisturbed", type=int, default=0, help="first so many runs of each kind without a kill"
    )
    parser.add_argument(
        "--limit-s", type=float, default=400.0, help="for each start of the command"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where the runs are kept; a temporary folder otherwise",
    )
    arguments = parser.parse_args()
    numbers = arguments.only or range(arguments.first, arguments.first + arguments.kills)
    kept = 0
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        measure(arguments.undisturbed, base, arguments.limit_s)
        drawn = list(itertools.islice(kills(arguments.seed), max(numbers, default=-1) + 1))
        for number in numbers:
            kind, kill = drawn[number]
            for attempt in range(ATTEMPTS):
                outcome = Trial(kind, base / str(number), arguments.limit_s).disturbed(
                    kill if not attempt else kill.at_once()
                )
                if outcome.how != "never killed" or outcome.faults:
                    break
            kept += outcome.kept
            print(
                f"{number:>3} {'ok  ' if outcome.kept else 'LOST'} {kind.name:<4} {kill} {outcome}",
                flush=True,
            )
    print(f"{kept} of {len(numbers)}")
    return 0 if kept == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
