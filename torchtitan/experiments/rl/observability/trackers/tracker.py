"""What a tracker is: subclass ``Tracker`` in your own module and name its Config in ``config.metrics.trackers``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.configurable import UserConfigurable


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    folder: Path
    """Its name is the name of the run."""
    config: Mapping[str, Any]
    """The whole config as plain JSON. It holds no keys: these are in the environment only."""
    resume_step: int | None = None
    """The run goes on after this step: what was logged of later ones is logged again. None: it is new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    """Texts have no character that acts on a terminal, and an end."""


class Tracker(UserConfigurable):
    """Each call comes in a thread of the tracker's own, one at a time, so it may wait for a network. What raises, or is so far
    behind that its queue is full, gets nothing more; the run goes on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(UserConfigurable.Config):
        def validate(self, *, field: str) -> None:
            """Raises ConfigError, or MissingError where this machine lacks something. ``field``: where this config sits in the
            whole one."""

    def __init__(self, config: Config, *, run: TrackedRun):
        self.config, self.run = config, run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, all finite. Steps rise."""
        raise NotImplementedError(f"{type(self).__name__}.log")

    def log_table(self, step: int, table: Table) -> None:
        """A table of the step, after its metrics. A tracker that shows no tables does nothing."""

    def close(self) -> None:
        """Nothing follows. The run waits for it, for some time."""
