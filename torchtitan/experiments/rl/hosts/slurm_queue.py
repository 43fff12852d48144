"""What Slurm says of a job that was submitted: its state, and why it waits."""

import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

POLL_S = 10.0
WAITING = ("PENDING", "CONFIGURING")
"""States of a job that has not started."""


class JobState(NamedTuple):
    """In Slurm's words, such as "PENDING" and "Resources"."""

    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state


def job_states(job: str, *, wait: bool) -> Iterator[JobState]:
    """The state of a job; with ``wait`` each time it changes, until the job has started or is gone.

    Ends where squeue is not there, fails, or does not know the job any more.
    """
    last = None
    while (current := _job_state(job)) is not None:
        if current != last:
            yield current
        if not wait or current.state not in WAITING:
            return
        last = current
        time.sleep(POLL_S)
    if last is not None:
        yield JobState("UNKNOWN", "squeue does not know the job any more")


def _job_state(job: str) -> JobState | None:
    words = ["squeue", "--job", job, "--noheader", "--format=%T %r"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    state, _, reason = answer.stdout.strip().partition("\n")[0].partition(" ")
    return JobState(state, reason.strip()) if state and not answer.returncode else None
