"""trackio: a local database with a dashboard (``trackio show``), without an account or a network."""

import contextlib
import importlib.util
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.observability.trackers.tracker import Table, TrackedRun, Tracker

logger = logging.getLogger(__name__)

LAST_STEP_FILE = "trackio-last-step"
"""In the run folder. trackio can't cut a run back, and shows a step that is logged twice as two points."""


class TrackioTracker(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        project: NonEmptyStr = "torchtitan-rl"

        def validate(self, *, field: str) -> None:
            if importlib.util.find_spec("trackio") is None:
                raise MissingError(f"{field}.project", self.project, "trackio is not installed: pip install trackio")

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
            shown = self._trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
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
