"""A step's metrics, to every place the config names: a JSON-lines file, TensorBoard, and trackers (`trackers.py`).

The JSON-lines file is the record of the run: one line per step, ``step`` first, the other keys sorted, and one more of
the final evaluation where a run ends early. So two runs with the same seed give the same file once `without_timing` has taken out what depends on the clock.
"""

import json
import logging
import math
import os
import queue
import re
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.configurable import Configurable
from torchtitan.experiments.rl.bounds import NonEmptyStr, NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.rollouts import shown_message, spoken
from torchtitan.experiments.rl.observability.trackers import (
    Table,
    TrackedRun,
    Tracker,
    TrackioTracker,
    WandbMode,
    WandbTracker,
)
from torchtitan.experiments.rl.printable import one_sentence, printable
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE, RecordFile
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"
TIMING_PREFIXES = ("time/", "perf/")
"""Whatever depends on the clock (seconds, tokens per second) has its key under one of these; nothing else does."""
QUEUED = 1000
"""Calls that may wait: some hundred steps. A network that is gone for minutes costs nothing."""
CLOSE_LIMIT_S = 60.0
"""How long the end of a run waits for what is queued."""
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
MOST_CHARACTERS = 8000
"""Of a conversation: of a longer one the beginning and the end are shown."""
COLUMNS = ("rollout", "task", "reward", "status", "conversation")


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
        trackio: bool = False
        """Log to trackio, a local database with a dashboard: `pip install trackio`, then `trackio show`."""
        trackio_project: NonEmptyStr = "torchtitan-rl"
        trackers: list[Tracker.Config] = field(default_factory=list)
        """Trackers of your own: configs of subclasses of `observability.trackers.Tracker`."""
        samples: NonNegativeInt = 4
        """Conversations in the table that TensorBoard and the trackers get, each of at most 8,000 characters; 0: no table."""
        samples_every: PositiveInt = 10
        """Steps from one table to the next."""

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where this config can't log; `field` is where it sits in the whole config."""
            for name, tracker in self.all_trackers().items():
                own = f"{field}.{name}"
                try:
                    tracker.validate(field=own)
                except ConfigError as error:
                    if name.startswith("trackers["):
                        raise
                    # The field that people set: wandb_mode, and not wandb.mode.
                    raise type(error)(
                        error.field.replace(f"{own}.", f"{own}_"), error.value, error.cure
                    ) from None

        def destinations(self) -> list[str]:
            """Return where the metrics go, in the words of a plan."""
            mode = f"wandb ({self.wandb_mode})"
            files = {METRICS_FILE: self.jsonl, TENSORBOARD_FOLDER: self.tensorboard}
            hosted = {mode: self.wandb, "trackio": self.trackio}
            own = [built_class(tracker).__name__ for tracker in self.trackers]
            return [*(name for name, on in (files | hosted).items() if on), *own]

        def all_trackers(self) -> dict[str, Tracker.Config]:
            """By the field that names each."""
            found: dict[str, Tracker.Config] = {}
            if self.wandb:
                found["wandb"] = WandbTracker.Config(
                    project=self.wandb_project, mode=self.wandb_mode
                )
            if self.trackio:
                found["trackio"] = TrackioTracker.Config(project=self.trackio_project)
            return found | {
                f"trackers[{index}]": tracker for index, tracker in enumerate(self.trackers)
            }

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
            resume_step: Step of the checkpoint this run goes on from; its files were cut back to it. None starts a new record.
            run_config: Shown beside the metrics where the backend has a place for it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config, self._last_step = config, resume_step
        self._file: RecordFile | None = None
        self._tensorboard: Any = None
        if config.jsonl:
            path = run_dir / METRICS_FILE
            if resume_step is None:
                path.unlink(missing_ok=True)
            self._file = RecordFile(path)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes over a second to import

            purge_step = None if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(
                str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step
            )
        run = TrackedRun(folder=run_dir, config=dict(run_config or {}), resume_step=resume_step)
        self._trackers = [
            BackgroundTracker(own, run, name=f"metrics.{name}")
            for name, own in config.all_trackers().items()
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step.

        A value that is not finite becomes null in the file (JSON has no NaN) and is left out elsewhere; a warning names it.

        Raises:
            ValueError: a step that is not after the last one, or a metric called `step`.
            OSError: the metrics file can't be written. It ends with a whole line. TensorBoard and trackers, which hold copies,
                end with a warning.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: each step is logged once, in order"
            )
        self._log(step, metrics)
        self._last_step = step

    def log_more(self, metrics: Mapping[str, float]) -> None:
        """Record further metrics of the last step, in a line of their own.

        They are those of evaluations that end after it, where no later step has them in its line.

        Raises:
            ValueError: no step was logged, or a metric is called `step`.
            OSError: as `log` raises it.
        """
        if self._last_step is None:
            raise ValueError("no step was logged that these metrics could be added to")
        self._log(self._last_step, metrics)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:
            raise ValueError("a metric may not be called step: that key holds the step itself")
        values = {key: _plain_number(metrics[key]) for key in sorted(metrics)}
        if lost := [key for key, value in values.items() if value is None]:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(lost))
        finite = {key: value for key, value in values.items() if value is not None}
        if self._file is not None:
            self._file.append(
                (json.dumps({"step": step, **values}, allow_nan=False) + "\n").encode()
            )
        self._to_tensorboard(lambda writer: _add_scalars(writer, finite, step))
        for tracker in self._trackers:
            tracker.put(lambda own: own.log(step, finite))

    def log_samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Show some conversations of a step that was logged, where the turn of a table has come."""
        if (
            not self.config.samples
            or step % self.config.samples_every
            or (self._tensorboard is None and not self._trackers)
        ):
            return
        table = samples_table(groups, self.config.samples)
        self._to_tensorboard(lambda writer: writer.add_text(table.name, _markdown(table), step))
        for tracker in self._trackers:
            tracker.put(lambda own: own.log_table(step, table))

    def flush(self) -> None:
        """Have everything logged so far in the files."""
        self._to_tensorboard(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and close every backend. A second call does nothing."""
        if self._file is not None:
            self._file.close()
        self._to_tensorboard(lambda writer: writer.close())
        for tracker in self._trackers:
            tracker.close()
        self._file, self._tensorboard, self._trackers = None, None, []

    def _to_tensorboard(self, call: Callable[[Any], object]) -> None:
        """Nothing more goes there when the call fails: a copy of the metrics is not worth the run."""
        try:
            if self._tensorboard is not None:
                call(self._tensorboard)
        except Exception as error:
            logger.warning(
                "no further metrics are sent to %s: %s", type(self._tensorboard).__name__, error
            )
            self._tensorboard = None


def _add_scalars(writer: Any, values: Mapping[str, float], step: int) -> None:
    """In one event: ``add_scalar`` writes one for each value. 150 values took 11 to 16 ms so, and 0.2 to 0.4 in one."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer.file_writer.add_summary(
        Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]), step
    )


def _markdown(table: Table) -> str:
    """Rows one after the other, as blocks of code: nothing in them is formatted."""
    rows = [
        "\n".join(f"{name}: {value}" for name, value in zip(table.columns, row, strict=True))
        for row in table.rows
    ]
    return "\n\n---\n\n".join(textwrap.indent(row, "    ", lambda line: True) for row in rows)


def _plain_number(value: Any) -> int | float | None:
    """A Python number for any scalar (numpy, a tensor), None where it is not finite."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return int(number)  # a bool is an int, and would be `true` in the file
    return float(number) if math.isfinite(number) else None


class BackgroundTracker:
    def __init__(self, config: Tracker.Config, run: TrackedRun, *, name: str):
        """``name``: what warnings call it."""
        self._config, self._run, self._name = config, run, name
        self._queue: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(QUEUED)
        self._off, self._turning_off = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], object]) -> None:
        """Have ``call`` called with the tracker. Returns at once, whatever the tracker does."""
        if not self._off:
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._turn_off(f"it has taken nothing of the last {QUEUED} entries")

    def close(self) -> None:
        """Wait until what is queued is logged. Blocks for at most CLOSE_LIMIT_S; a second call does nothing."""
        if not self._off:
            deadline = time.monotonic() + CLOSE_LIMIT_S
            try:
                self._queue.put(None, timeout=CLOSE_LIMIT_S)
                self._thread.join(max(0.0, deadline - time.monotonic()))
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._turn_off(f"it took more than {CLOSE_LIMIT_S:g} s to end")
        self._off = True

    def _work(self) -> None:
        try:
            tracker = self._config.build(run=self._run)
            while (call := self._queue.get()) is not None:
                if self._off:
                    return
                call(tracker)
            tracker.close()
        except BaseException as error:  # a user's class may exit, too
            self._turn_off(f"{type(error).__name__}: {error}")

    def _turn_off(self, why: str) -> None:
        with self._turning_off:  # a close in between waits for the warning
            if self._off:
                return
            logger.warning(
                "nothing more is sent to %s: %s", self._name, one_sentence(without_secrets(why))
            )
            self._off = True


def without_secrets(text: str) -> str:
    """``text`` without the values of environment variables that hold keys: a server may repeat them."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"({name})")
    return text


def samples_table(groups: Sequence[RolloutGroup], most: int) -> Table:
    """One rollout each of at most ``most`` groups; of each further group another place in the group."""
    chosen = [
        group.rollouts[number % len(group.rollouts)]
        for number, group in enumerate(groups[:most])
        if group.rollouts
    ]
    rows = [
        (
            *map(printable, (rollout.rollout_id, rollout.task_name)),
            rollout.reward,
            rollout.status.value,
            conversation(rollout),
        )
        for rollout in chosen
    ]
    return Table(name="samples", columns=COLUMNS, rows=rows)


def conversation(rollout: Rollout) -> str:
    """Its messages as text, safe to print, of at most MOST_CHARACTERS."""
    if not rollout.turns:
        return printable(rollout.error or "")[:MOST_CHARACTERS]
    last = rollout.turns[-1]
    messages = [
        shown_message(message, 0)
        for message in (*last.prompt_messages, last.assistant_message, *last.env_messages)
    ]
    text = printable("\n\n".join(f"{message.role}: {spoken(message)}" for message in messages))
    if len(text) <= MOST_CHARACTERS:
        return text
    left_out = f"\n... cut from {len(text):,} characters ...\n"
    half = (MOST_CHARACTERS - len(left_out)) // 2
    return text[:half] + left_out + text[-half:]
