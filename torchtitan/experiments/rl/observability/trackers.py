"""Places that metrics and sample conversations go to: Weights & Biases, trackio, or a class of your own.

Subclass ``Tracker`` in your own module and name its Config in ``config.metrics.trackers``. TensorBoard is not one of them, but
a file of the run (`metrics.py`): a checkpoint waits until it is on the disk.
"""

import contextlib
import importlib.util
import io
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError, MissingError

logger = logging.getLogger(__name__)

LAST_STEP_FILE = "trackio-last-step"
"""In the run folder. trackio can't cut a run back, and shows a step that is logged twice as two points."""
WANDB_ID_FILE = "wandb-run-id"
"""In the run folder: a resumed run goes on with the same W&B run."""
WandbMode = Literal["offline", "online", "disabled"]


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


class TrackioTracker(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        project: NonEmptyStr = "torchtitan-rl"

        def validate(self, *, field: str) -> None:
            if importlib.util.find_spec("trackio") is None:
                raise MissingError(
                    f"{field}.project",
                    self.project,
                    "trackio is not installed: pip install trackio",
                )

    def __init__(self, config: Config, *, run: TrackedRun):
        super().__init__(config, run=run)
        import trackio

        self._trackio, self._last = trackio, -1
        self._last_path = run.folder / LAST_STEP_FILE
        if run.resume_step is not None and self._last_path.exists():
            self._last = int(self._last_path.read_text(encoding="utf-8"))
        with _printed_to_the_log():
            self._run = trackio.init(
                project=config.project,
                name=run.folder.name,
                config=dict(run.config),
                resume="never" if run.resume_step is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last:
            self._run.log(dict(metrics), step=step)
            self._last_path.write_text(f"{step}\n", encoding="utf-8")

    def log_table(self, step: int, table: Table) -> None:
        if step > self._last:
            shown = self._trackio.Table(
                columns=list(table.columns), data=[list(row) for row in table.rows]
            )
            self._run.log({table.name: shown}, step=step)

    def close(self) -> None:
        with _printed_to_the_log():
            self._run.finish()


@contextlib.contextmanager
def _printed_to_the_log() -> Iterator[None]:
    """trackio prints how to show the dashboard, and no option prevents that. The console keeps the stream that it has."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    logger.info("trackio: %s", printed.getvalue())


class WandbTracker(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        project: NonEmptyStr = "torchtitan-rl"
        mode: WandbMode = "offline"
        """`offline` needs no network and can be uploaded later; `online` needs WANDB_API_KEY."""

        def validate(self, *, field: str) -> None:
            if self.mode == "online" and not os.environ.get("WANDB_API_KEY"):
                raise ConfigError(
                    f"{field}.mode", "online", "WANDB_API_KEY is not set: set it, or use offline"
                )

    def __init__(self, config: Config, *, run: TrackedRun):
        super().__init__(config, run=run)
        import wandb

        self._wandb = wandb
        run_id = self._id()
        arguments: dict[str, Any] = dict(
            project=config.project,
            name=run.folder.name,
            dir=str(run.folder),
            mode=config.mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours
        )
        if run.resume_step is not None and config.mode == "online":
            try:
                self.wandb_run = wandb.init(
                    resume_from=f"{run_id}?_step={run.resume_step}", **arguments
                )
                return
            except wandb.errors.Error as error:  # not every server can; it needs the step too
                logger.warning(
                    "W&B can't cut its run %s back to step %d (%s): it keeps what it has of later steps",
                    run_id,
                    run.resume_step,
                    error,
                )
        self.wandb_run = wandb.init(id=run_id, resume="allow", **arguments)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.wandb_run.log(dict(metrics), step=step)

    def log_table(self, step: int, table: Table) -> None:
        shown = self._wandb.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows]
        )
        self.wandb_run.log({table.name: shown}, step=step)

    def close(self) -> None:
        self.wandb_run.finish()

    def _id(self) -> str:
        path = self.run.folder / WANDB_ID_FILE
        if self.run.resume_step is None or not path.exists():
            path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
