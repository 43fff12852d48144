"""A step's metrics, to every place the config names: a JSON-lines file, TensorBoard, Weights & Biases.

The JSON-lines file is the record of the run: one line per step, ``step`` first, the other keys sorted, so that two runs with
the same seed give the same file once `without_timing` has taken out what depends on the clock.
"""

import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.config.configurable import Configurable
from torchtitan.experiments.rl.bounds import NonEmptyStr, check_config
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE, RecordFile

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb-run-id"
"""In the run folder: a resumed run goes on with the same W&B run."""
TIMING_PREFIXES = ("time/", "perf/")
"""Whatever depends on the clock (seconds, tokens per second) has its key under one of these; nothing else does."""

WandbMode = Literal["offline", "online", "disabled"]


def without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a second run with the same seed repeats."""
    return {key: value for key, value in record.items() if not key.startswith(TIMING_PREFIXES)}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without the torn line that a process killed in mid-write leaves at its end."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class MetricsLogger(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        jsonl: bool = True
        """Write `metrics.jsonl` in the run folder."""
        tensorboard: bool = True
        """Write TensorBoard events to `tensorboard/` in the run folder."""
        wandb: bool = False
        """Log to Weights & Biases; its files lie in `wandb/` in the run folder."""
        wandb_project: NonEmptyStr = "torchtitan-rl"
        wandb_mode: WandbMode = "offline"
        """`offline` needs no network and can be uploaded later; `online` needs WANDB_API_KEY."""

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where this config can't log; `field` is where it sits in the whole config."""
            if self.wandb and self.wandb_mode == "online" and not os.environ.get("WANDB_API_KEY"):
                raise ConfigError(f"{field}.wandb_mode", "online", "WANDB_API_KEY is not set: set it, or use offline")

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        resume_step: int | None = None,
        run_config: Mapping[str, Any] | None = None,
    ):
        """
        Args:
            run_dir: Folder of this run; its name is the name of the run.
            resume_step: Step of the checkpoint this run goes on from. Records of later steps, which an interrupted run left
                and which will be taken again, are dropped. None starts a new record.
            run_config: Shown beside the metrics where the backend has a place for it.
        """
        check_config(config, field="metrics")
        run_dir.mkdir(parents=True, exist_ok=True)
        self._last_step = resume_step
        self._file = self._tensorboard = self._wandb = None
        if config.jsonl:
            self._file = _open_record(run_dir / METRICS_FILE, resume_step)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes over a second to import

            purge_step = None if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)
        if config.wandb:
            self._wandb = _wandb_run(config, run_dir=run_dir, resume_step=resume_step, run_config=dict(run_config or {}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step.

        A value that is not finite becomes null in the file (JSON has no NaN) and is left out elsewhere; a warning names it.

        Raises:
            ValueError: a step that is not after the last one, or a metric called `step`.
            OSError: the metrics file can't be written. It ends with a whole line. TensorBoard and W&B, which hold copies, end
                with a warning.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: each step is logged once, in order")
        if "step" in metrics:
            raise ValueError("a metric may not be called step: that key holds the step itself")
        values = {key: _plain_number(metrics[key]) for key in sorted(metrics)}
        if lost := [key for key, value in values.items() if value is None]:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(lost))
        finite = {key: value for key, value in values.items() if value is not None}
        if self._file is not None:
            self._file.append((json.dumps({"step": step, **values}, allow_nan=False) + "\n").encode())
        if (tensorboard := self._tensorboard) is not None:

            def add_scalars() -> None:
                for key, value in finite.items():
                    tensorboard.add_scalar(key, value, step)

            self._tensorboard = self._surviving(tensorboard, add_scalars)
        if (wandb := self._wandb) is not None:
            self._wandb = self._surviving(wandb, lambda: wandb.log(finite, step=step))
        self._last_step = step

    def flush(self) -> None:
        """Have everything logged so far in the files."""
        if self._tensorboard is not None:
            self._tensorboard = self._surviving(self._tensorboard, self._tensorboard.flush)

    def close(self) -> None:
        """Flush and close every backend. A second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._surviving(self._tensorboard, self._tensorboard.close)
        if self._wandb is not None:
            self._surviving(self._wandb, self._wandb.finish)
        self._file = self._tensorboard = self._wandb = None

    def _surviving(self, backend: Any, call: Callable[[], object]) -> Any:
        """``backend``, or None if the call fails: a copy of the metrics is not worth the run."""
        try:
            call()
        except Exception as error:
            logger.warning("no further metrics are sent to %s: %s", type(backend).__name__, error)
            return None
        return backend


def _wandb_run(config: MetricsLogger.Config, *, run_dir: Path, resume_step: int | None, run_config: dict[str, Any]) -> Any:
    """The W&B run of this run; a resumed one is cut back to ``resume_step`` where W&B can do that."""
    import wandb

    run_id = _wandb_id(run_dir, new=resume_step is None)
    arguments: dict[str, Any] = dict(
        project=config.wandb_project,
        name=run_dir.name,
        dir=str(run_dir),
        mode=config.wandb_mode,
        config=run_config,
        settings=wandb.Settings(console="off", silent=True),  # the console is ours
    )
    if resume_step is not None and config.wandb_mode == "online":
        try:
            return wandb.init(resume_from=f"{run_id}?_step={resume_step}", **arguments)
        except wandb.errors.Error as error:  # not every server can; it needs the step too
            logger.warning(
                "W&B can't cut its run %s back to step %d (%s): it keeps what it has of later steps",
                run_id,
                resume_step,
                error,
            )
    return wandb.init(id=run_id, resume="allow", **arguments)


def _wandb_id(run_dir: Path, *, new: bool) -> str:
    path = run_dir / WANDB_ID_FILE
    if new or not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _open_record(path: Path, resume_step: int | None) -> RecordFile:
    kept = []
    if resume_step is not None and path.exists():
        kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
    # Written beside and moved over: being killed here must not cost the record of the steps before.
    scratch = path.with_suffix(".jsonl.tmp")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    scratch.replace(path)
    return RecordFile(path)


def _plain_number(value: Any) -> int | float | None:
    """A Python number for any scalar (numpy, a tensor), None where it is not finite."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return int(number)  # a bool is an int, and would be `true` in the file
    return float(number) if math.isfinite(number) else None
