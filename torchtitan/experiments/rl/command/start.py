"""Outcomes of the gate: a run to start here, a script to submit, or nothing to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.experiments.rl.plan.plan import RunPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A run that this process may start: every check has passed, and its folder is locked."""

    plan: RunPlan
    """Sizes and placement of the run, worked out once: nothing works them out again."""
    run_dir: str
    lock: BinaryIO
    """File whose lock keeps other commands out of the run folder for as long as it is open."""
    resume_from: Path | None = None
    """Verified checkpoint of the run in ``run_dir`` that the run goes on from."""
    init_from: Path | None = None
    """Verified checkpoint of another run, whose weights this one begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToSubmit:
    """A run that a scheduler starts: its script runs the same command on the run's hosts."""

    plan: RunPlan
    run_dir: str
    script: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingToStart:
    """A command that starts no process: its run has taken its steps, or it is a dry run."""


Start = Ready | ToSubmit | NothingToStart
