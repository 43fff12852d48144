"""Weights & Biases: online, offline, and the same W&B run again where a run is resumed."""

import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.trackers.tracker import Table, TrackedRun, Tracker

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb-run-id"
"""In the run folder: a resumed run goes on with the same W&B run."""

WandbMode = Literal["offline", "online", "disabled"]


class WandbTracker(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        project: NonEmptyStr = "torchtitan-rl"
        mode: WandbMode = "offline"
        """`offline` needs no network and can be uploaded later; `online` needs WANDB_API_KEY."""

        def validate(self, *, field: str) -> None:
            if self.mode == "online" and not os.environ.get("WANDB_API_KEY"):
                raise ConfigError(f"{field}.mode", "online", "WANDB_API_KEY is not set: set it, or use offline")

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
                self.wandb_run = wandb.init(resume_from=f"{run_id}?_step={run.resume_step}", **arguments)
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
        shown = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self.wandb_run.log({table.name: shown}, step=step)

    def close(self) -> None:
        self.wandb_run.finish()

    def _id(self) -> str:
        path = self.run.folder / WANDB_ID_FILE
        if self.run.resume_step is None or not path.exists():
            path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
