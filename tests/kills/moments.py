"""Which process is killed or stopped and when, and how that moment is found from outside: files and logs of the run, no guess.

build           the process is there; then up to BUILD_S
validation      the generators have loaded a version that is evaluated
training        a step was reported
weight update   a generator logs that it loads a version, which takes some 20 ms
checkpoint      its folder lies there, unfinished
shutdown        the last step was reported
rebuild         the trainer was killed after a step, and the process is there again; then up to BUILD_S
"""

import os
import random
import signal
import time
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tests.kills.command import Command, steps_recorded

Moment = Literal[
    "build", "validation", "training", "weight update", "checkpoint", "shutdown", "rebuild"
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

BUILD_S = 15.0
LATEST_S: dict[Moment, float] = {
    "build": BUILD_S,
    "validation": 0.3,
    "training": 0.5,
    "weight update": 0.03,
    "checkpoint": 0.15,
    "shutdown": 0.4,
    "rebuild": BUILD_S,
}
"""How long after its first sign each moment lasts, at the most."""
LOADING, HOLDS = "loading version", "holds version"
"""A generator logs the first when it begins to load a version, and the second when it has."""
TRAINER = "trainer-0"
READY = "trainer and generators agree on version"


@dataclass(frozen=True, kw_only=True)
class Kill:
    part: str
    """Name of its log, such as "generator-0"."""
    number: signal.Signals
    moment: Moment
    step: int
    """From which on the moment is looked for."""
    delay_s: float
    """After the moment's first sign."""

    def __str__(self) -> str:
        return f"{self.number.name:<7} {self.part:<16} {self.moment:<13}"

    def at_once(self) -> "Kill":
        return replace(self, delay_s=0.0)


def draw(
    random_: random.Random, part: str, moment: Moment, *, steps: int, interval: int, every: int
) -> Kill:
    """``interval`` of the checkpoints, ``every`` of the evaluations, in steps."""
    step = random_.randrange(1, steps - 2)
    if moment == "validation":
        step = step // every * every
    if moment == "checkpoint":
        step = max(1, step // interval * interval)
    if moment == "shutdown":
        step = steps
    number = random_.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    return Kill(
        part=part,
        number=number,
        moment=moment,
        step=step,
        delay_s=random_.uniform(0, LATEST_S[moment]),
    )


def wait_for_moment(kill: Kill, command: Command, limit_s: float) -> int | None:
    """Return the process to kill when the moment has come. None: the run ended first, or the time."""
    deadline = command.began + limit_s
    if kill.moment == "rebuild":
        return wait_for_rebuild(kill, command, limit_s)
    generator = kill.part if kill.part.startswith("generator-") else "generator-0"
    loads, controller = LogTail(command, generator), LogTail(command, "controller")
    pid, ready, reached = None, False, False
    while command.lives and time.monotonic() < deadline:
        if pid is None:  # looked up before the moment: it takes as long as some moments last
            pid = command.pid_of(kill.part)
            if pid is None or kill.moment == "build":
                if pid is not None:
                    return pid if waited(kill, command) else None
                time.sleep(0.05)
                continue
        ready = ready or controller.count(READY) > 0
        if not ready or steps_recorded(command.folder) < kill.step - (kill.moment == "validation"):
            came = False  # before the run is built, its metrics are those of an earlier command
        elif kill.moment == "validation" and kill.step == 0:
            came = True
        elif kill.moment in ("weight update", "validation"):
            new = loads.count(LOADING)
            came, reached = (
                reached and new > 0,
                True,
            )  # a load that began before the step does not count
        else:
            came = kill.moment != "checkpoint" or any(
                command.folder.glob("checkpoints/.step-*.partial")
            )
        if came:
            return pid if waited(kill, command) else None
        time.sleep(0.002)
    return None


def wait_for_rebuild(kill: Kill, command: Command, limit_s: float) -> int | None:
    """Kill the trainer after a step, and return the process that is then made as ``kill.part``. The command's own stays."""
    made = TRAINER if kill.part == "controller" else kill.part
    trainer = wait_for_moment(
        replace(kill, part=TRAINER, moment="training", delay_s=0.0), command, limit_s
    )
    before = command.pid_of(made)
    if trainer is None or before is None:
        return None
    os.kill(trainer, signal.SIGKILL)
    while command.lives and time.monotonic() < command.began + limit_s:
        if (pid := command.pid_of(made)) not in (None, before):
            return (
                (command.process.pid if kill.part == "controller" else pid)
                if waited(kill, command)
                else None
            )
        time.sleep(0.05)
    return None


def waited(kill: Kill, command: Command) -> bool:
    """Wait for the kill's delay, while the moment lasts. Returns whether the run lives then."""
    until = time.monotonic() + kill.delay_s
    while (rest := until - time.monotonic()) > 0 and command.lives:
        if kill.moment == "build" and steps_recorded(command.folder) >= 0:
            break  # quickly built
        time.sleep(min(0.05, rest))
    return command.lives


class LogTail:
    """What a command appends to a log of the run."""

    def __init__(self, command: Command, log: str):
        self._path = command.folder / "logs" / f"{log}.jsonl"
        self._offset = command.logs_before.get(self._path.name, 0)

    def count(self, text: str) -> int:
        """In how many whole lines that are new since the last call ``text`` is."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return 0
        lines = [line for line in new.splitlines(keepends=True) if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        return sum(text.encode() in line for line in lines)


def in_update(command: Command, part: str) -> bool:
    """Whether the log of a killed generator ends in the middle of a load."""
    text = command.logged(part)
    return text.count(LOADING) > text.count(HOLDS)
