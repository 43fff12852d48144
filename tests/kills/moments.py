"""Which process is killed or stopped and when, and how that moment is found from outside: files and logs of the run, no guess.

build           the process is there; then up to BUILD_S
validation      the generators have loaded a version that is evaluated
training        a step was reported
weight update   a generator logs that it reloads its weights: the load takes some 20 ms
checkpoint      its folder lies there, unfinished
shutdown        the last step was reported
"""

import random
import signal
import time
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tests.kills.command import Command, steps_recorded

Moment = Literal["build", "validation", "training", "weight update", "checkpoint", "shutdown"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

BUILD_S = 15.0
LATEST_S: dict[Moment, float] = {
    "build": BUILD_S,
    "validation": 0.3,
    "training": 0.5,
    "weight update": 0.03,
    "checkpoint": 0.15,
    "shutdown": 2.0,
}
"""How long after its first sign each moment lasts, at the most."""
RELOADS = "Reloading weights inplace"
"""vLLM logs this when it begins to load a version, ..."""
RELOADED = "Reloading and processing weights took"
"""... and this when it holds it."""
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


def draw(random_: random.Random, part: str, moment: Moment, *, steps: int, interval: int, every: int) -> Kill:
    """``interval`` of the checkpoints, ``every`` of the evaluations, in steps."""
    step = random_.randrange(1, steps - 2)
    if moment == "validation":
        step = step // every * every
    if moment == "checkpoint":
        step = max(1, step // interval * interval)
    if moment == "shutdown":
        step = steps
    number = random_.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    return Kill(part=part, number=number, moment=moment, step=step, delay_s=random_.uniform(0, LATEST_S[moment]))


def wait_for_moment(kill: Kill, command: Command, limit_s: float) -> bool:
    """Return when the moment has come. False: the run ended first, or the time."""
    deadline = command.began + limit_s
    reloads: int | None = None
    while command.lives and time.monotonic() < deadline:
        came = False
        if kill.moment == "build":
            came = command.pid_of(kill.part) is not None
        elif kill.moment == "validation" and kill.step == 0:
            came = READY in command.logged("controller")
        elif steps_recorded(command.folder) >= kill.step - (kill.moment == "validation"):
            if kill.moment in ("weight update", "validation"):
                seen = count_of(command, RELOADS, kill)
                reloads = seen if reloads is None else reloads
                came = seen > reloads
            elif kill.moment == "checkpoint":
                came = any(command.folder.glob("checkpoints/.step-*.partial"))
            else:
                came = True
        if came:
            time.sleep(kill.delay_s)
            return command.lives
        time.sleep(0.002)
    return False


def count_of(command: Command, text: str, kill: Kill) -> int:
    """How often generators logged ``text``: the one that is killed, or else any."""
    logs = [path.stem for path in (command.folder / "logs").glob("generator-*.jsonl")]
    own = [log for log in logs if log == kill.part]
    return sum(command.logged(log).count(text) for log in own or logs)


def in_update(command: Command, part: str) -> bool:
    """Whether the log of a killed generator ends in the middle of a load."""
    text = command.logged(part)
    return text.count(RELOADS) > text.count(RELOADED)
