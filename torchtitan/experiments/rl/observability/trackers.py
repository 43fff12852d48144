"""Sends metrics and sample conversations to Weights & Biases, trackio, or a class of your own.

Subclass ``Tracker`` in your own module and name its Config in ``config.metrics.trackers``.
TensorBoard is no tracker, but a file of the run (`metrics.py`): a checkpoint waits until it is on
the disk.
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
"""File in the run folder with the last step that trackio got. trackio can't cut a run back, and
shows a step that is logged twice as two points."""
WANDB_ID_FILE = "wandb-run-id"
"""File in the run folder with the id of the W&B run, which a resumed run goes on with."""
WandbMode = Literal["offline", "online", "disabled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run that a tracker shows."""

    folder: Path
    """Folder of the run. Its name is the name of the run."""
    config: Mapping[str, Any]
    """Whole config as plain JSON. It holds no secrets: these are in the environment only."""
    resume_step: int | None = None
    """Step of the checkpoint that the run goes on from; None if it is new. Later steps are logged
    again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Sample conversations of a step."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    """Cells of each row. Texts are of limited length, and no character in them acts on a
    terminal."""


class Tracker(UserConfigurable):
    """Place that metrics are sent to. Override `log`, and the other methods if you need them.

    A thread of the tracker's own makes each call, one at a time, so a call may wait for a network.
    A tracker that raises, or whose queue is full, gets nothing more; the run goes on.

    Example::

        import json
        from torchtitan.experiments.rl.observability.trackers import Tracker

        class JSONLines(Tracker):
            def log(self, step, metrics):
                with (self.run.folder / "tracked.jsonl").open("a") as file:
                    print(json.dumps({"step": step, **metrics}), file=file)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(UserConfigurable.Config):
        """Settings of a tracker."""

        def validate(self, *, field: str) -> None:
            """Check the settings before anything is started.

            Args:
                field: place of this config in the whole config.

            Raises:
                ConfigError: a setting is wrong.
                MissingError: this machine lacks something.
            """

    def __init__(self, config: Config, *, run: TrackedRun):
        """Begin to track a run, or go on with it."""
        self.config = config
        self.run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step, which are all finite. Steps rise."""
        raise NotImplementedError(f"{type(self).__name__}.log")

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step, after its metrics. A tracker without tables does nothing."""

    def close(self) -> None:
        """Send what is left. The run waits for the return, for some time; no call follows."""


class TrackioTracker(Tracker):
    """Logs to trackio, a local database with a dashboard."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        """Settings of trackio."""

        project: NonEmptyStr = "torchtitan-rl"

        def validate(self, *, field: str) -> None:
            """Check that trackio is installed."""
            if importlib.util.find_spec("trackio") is None:
                raise MissingError(
                    f"{field}.project",
                    self.project,
                    "trackio is not installed: pip install trackio",
                )

    def __init__(self, config: Config, *, run: TrackedRun):
        """Begin a run of trackio, or go on with it."""
        super().__init__(config, run=run)
        import trackio

        self._trackio = trackio
        self._last = -1
        """Last step that an earlier command of this run has logged."""
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
        """Log the metrics of a step, unless an earlier command has."""
        if step > self._last:
            self._run.log(dict(metrics), step=step)
            self._last_path.write_text(f"{step}\n", encoding="utf-8")

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step, unless an earlier command has."""
        if step > self._last:
            shown = self._trackio.Table(
                columns=list(table.columns), data=[list(row) for row in table.rows]
            )
            self._run.log({table.name: shown}, step=step)

    def close(self) -> None:
        """End the run of trackio."""
        with _printed_to_the_log():
            self._run.finish()


@contextlib.contextmanager
def _printed_to_the_log() -> Iterator[None]:
    """Log what the block prints on stdout.

    trackio prints how to show the dashboard, and no option prevents that. The console keeps the
    stream that it has.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    logger.info("trackio: %s", printed.getvalue())


class WandbTracker(Tracker):
    """Logs to Weights & Biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        """Settings of Weights & Biases."""

        project: NonEmptyStr = "torchtitan-rl"
        mode: WandbMode = "offline"
        """Mode of wandb: `offline` needs no network, and its files can be uploaded later; `online`
        needs WANDB_API_KEY."""

        def validate(self, *, field: str) -> None:
            """Check that there is a key if one is needed."""
            if self.mode == "online" and not os.environ.get("WANDB_API_KEY"):
                raise ConfigError(
                    f"{field}.mode", "online", "WANDB_API_KEY is not set: set it, or use offline"
                )

    def __init__(self, config: Config, *, run: TrackedRun):
        """Begin a W&B run, or go on with it after the step of the checkpoint."""
        super().__init__(config, run=run)
        import wandb

        self._wandb = wandb
        # The console is ours. Settings of a run alone leave out what `init` says of other products.
        quiet = wandb.Settings(console="off", silent=True)
        wandb.setup(quiet)
        run_id = self._run_id()
        arguments: dict[str, Any] = dict(
            project=config.project,
            name=run.folder.name,
            dir=str(run.folder),
            mode=config.mode,
            config=dict(run.config),
            settings=quiet,
        )
        if run.resume_step is not None and config.mode == "online":
            try:
                self.wandb_run = wandb.init(
                    resume_from=f"{run_id}?_step={run.resume_step}", **arguments
                )
                return
            except wandb.errors.Error as error:  # not every server can; it needs the step too
                logger.warning(
                    "W&B can't cut its run %s back to step %d (%s): it keeps what it has of "
                    "later steps",
                    run_id,
                    run.resume_step,
                    error,
                )
        self.wandb_run = wandb.init(id=run_id, resume="allow", **arguments)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self.wandb_run.log(dict(metrics), step=step)

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step."""
        shown = self._wandb.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows]
        )
        self.wandb_run.log({table.name: shown}, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self.wandb_run.finish()

    def _run_id(self) -> str:
        path = self.run.folder / WANDB_ID_FILE
        if self.run.resume_step is None or not path.exists():
            path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
