"""Writes a step's metrics to every place that the config names.

    MetricsLogger.log ──▶ metrics.jsonl     the record of the run
                      ──▶ TensorBoard       files in the run folder
                      ──▶ trackers          W&B, trackio or the user's own (`trackers.py`), each in
                                            a thread of its own

The record has one line for each step, with ``step`` first and the other keys sorted. A run that
ends early has one more, of its final evaluation. Two runs with the same seed write the same record
but for what depends on the clock, which `without_timing` leaves out.
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
"""Prefixes of the keys whose values depend on the clock: seconds, tokens per second. No other key's
value does."""

QUEUED = 1000
"""Maximum number of calls that wait for a tracker: some hundred steps. A network that is gone for
minutes costs nothing."""

CLOSE_LIMIT_S = 60.0
"""Seconds that the end of a run waits for what is queued for a tracker."""

MOST_CHARACTERS = 8000
"""Maximum length of a conversation in a table. The middle of a longer one is cut out."""

COLUMNS = ("rollout", "task", "reward", "status", "conversation")

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
"""End of the name of an environment variable that holds a secret."""


class MetricsLogger(Configurable):
    """Logs the metrics of a run, one step after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Places that metrics and sample conversations go to."""

        jsonl: bool = True
        """Write `metrics.jsonl` in the run folder."""
        tensorboard: bool = True
        """Write TensorBoard events to `tensorboard/` in the run folder."""
        wandb: bool = False
        """Log to Weights & Biases; its files lie in `wandb/` in the run folder."""
        wandb_project: NonEmptyStr = "torchtitan-rl"
        wandb_mode: WandbMode = "offline"
        """Mode of wandb: `offline` needs no network, and its files can be uploaded later; `online`
        needs WANDB_API_KEY."""
        trackio: bool = False
        """Log to trackio, a local database with a dashboard: `pip install trackio`, then `trackio
        show`."""
        trackio_project: NonEmptyStr = "torchtitan-rl"
        trackers: list[Tracker.Config] = field(default_factory=list)
        """Trackers of your own: configs of subclasses of `observability.trackers.Tracker`."""
        samples: NonNegativeInt = 4
        """Number of conversations in the table that TensorBoard and the trackers get, each of at
        most 8,000 characters; 0 for no table."""
        samples_every: PositiveInt = 10
        """Number of steps from one table to the next."""

        def validate(self, *, field: str) -> None:
            """Check the config of each tracker before anything is started.

            Args:
                field: place of this config in the whole config.

            Raises:
                ConfigError: a tracker's setting is wrong, or this machine lacks something.
            """
            for name, tracker in self.all_trackers().items():
                place = f"{field}.{name}"
                try:
                    tracker.validate(field=place)
                except ConfigError as error:
                    if name.startswith("trackers["):
                        raise
                    # People set metrics.wandb_mode, and not metrics.wandb.mode.
                    set_by = error.field.replace(f"{place}.", f"{place}_")
                    raise type(error)(set_by, error.value, error.cure) from None

        def destinations(self) -> list[str]:
            """Return where the metrics go, in the words of a plan."""
            destinations = []
            if self.jsonl:
                destinations.append(METRICS_FILE)
            if self.tensorboard:
                destinations.append(TENSORBOARD_FOLDER)
            if self.wandb:
                destinations.append(f"wandb ({self.wandb_mode})")
            if self.trackio:
                destinations.append("trackio")
            return destinations + [built_class(tracker).__name__ for tracker in self.trackers]

        def all_trackers(self) -> dict[str, Tracker.Config]:
            """Return the config of every tracker, by the field that names it."""
            trackers: dict[str, Tracker.Config] = {}
            if self.wandb:
                trackers["wandb"] = WandbTracker.Config(
                    project=self.wandb_project, mode=self.wandb_mode
                )
            if self.trackio:
                trackers["trackio"] = TrackioTracker.Config(project=self.trackio_project)
            for index, tracker in enumerate(self.trackers):
                trackers[f"trackers[{index}]"] = tracker
            return trackers

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        resume_step: int | None = None,
        run_config: Mapping[str, Any] | None = None,
    ):
        """Open every destination.

        Args:
            run_dir: folder of this run; its name is the name of the run.
            resume_step: step of the checkpoint that this run goes on from; its files were cut back
                to it. None to begin a new record.
            run_config: config that is shown beside the metrics, where a tracker has a place for it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config = config
        self._last_step = resume_step
        self._file = _open_record(run_dir, resume_step) if config.jsonl else None
        self._tensorboard = _open_tensorboard(run_dir, resume_step) if config.tensorboard else None
        run = TrackedRun(folder=run_dir, config=dict(run_config or {}), resume_step=resume_step)
        self._trackers = [
            BackgroundTracker(tracker, run, name=f"metrics.{name}")
            for name, tracker in config.all_trackers().items()
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step.

        A value that is not finite becomes null in the record, because JSON has no NaN, and is left
        out elsewhere. A warning names it.

        Raises:
            ValueError: the step is not after the last one, or a metric is called `step`.
            OSError: the record can't be written. It ends with a whole line. TensorBoard and
                trackers have copies: if they fail, there is a warning.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: each step is logged once, in order"
            )
        self._write(step, metrics)
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
        self._write(self._last_step, metrics)

    def log_samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Show some conversations of a step that was logged, if it is time for a table."""
        if not self.config.samples or step % self.config.samples_every:
            return
        if self._tensorboard is None and not self._trackers:
            return
        table = samples_table(groups, self.config.samples)
        self._send_to_tensorboard(
            lambda writer: writer.add_text(table.name, _markdown(table), step)
        )
        for tracker in self._trackers:
            tracker.put(lambda tracker: tracker.log_table(step, table))

    def flush(self) -> None:
        """Write everything that was logged so far to the files."""
        self._send_to_tensorboard(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and close every destination. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._send_to_tensorboard(lambda writer: writer.close())
        self._tensorboard = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if "step" in metrics:
            raise ValueError("a metric may not be called step: that key holds the step itself")
        values = {key: _plain_number(metrics[key]) for key in sorted(metrics)}
        finite = {key: value for key, value in values.items() if value is not None}
        if len(finite) < len(values):
            lost = ", ".join(key for key in values if key not in finite)
            logger.warning("step %d: not finite, written as null: %s", step, lost)
        if self._file is not None:
            line = json.dumps({"step": step, **values}, allow_nan=False)
            self._file.append(f"{line}\n".encode())
        self._send_to_tensorboard(lambda writer: _add_scalars(writer, finite, step))
        for tracker in self._trackers:
            tracker.put(lambda tracker: tracker.log(step, finite))

    def _send_to_tensorboard(self, call: Callable[[Any], object]) -> None:
        """Call ``call`` with TensorBoard's writer, and stop writing there if it fails.

        A copy of the metrics is not worth the run.
        """
        if self._tensorboard is None:
            return
        try:
            call(self._tensorboard)
        except Exception as error:  # noqa: BLE001 - whatever fails in a library that draws curves
            name = type(self._tensorboard).__name__
            logger.warning("no further metrics are sent to %s: %s", name, error)
            self._tensorboard = None


def _open_record(run_dir: Path, resume_step: int | None) -> RecordFile:
    """Open the record of a run: an empty one, or that of the run which goes on."""
    path = run_dir / METRICS_FILE
    if resume_step is None:
        path.unlink(missing_ok=True)
    return RecordFile(path)


def _open_tensorboard(run_dir: Path, resume_step: int | None) -> Any:  # noqa: ANN401 - SummaryWriter
    """Open TensorBoard's files. The events of a resumed run replace those after its checkpoint."""
    from torch.utils.tensorboard import SummaryWriter  # takes over a second to import

    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)


def _add_scalars(
    writer: Any,  # noqa: ANN401 - SummaryWriter
    values: Mapping[str, float],
    step: int,
) -> None:
    """Write values in one event.

    ``add_scalar`` writes an event for each value: 150 values took 11 to 16 ms, and take 0.2 to 0.4
    in one.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    )
    writer.file_writer.add_summary(summary, step)


def _plain_number(value: Any) -> int | float | None:  # noqa: ANN401 - of Python, numpy or torch
    """Return a scalar as a Python number; None if it is not finite."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return int(number)  # a bool is an int, and would be `true` in the file
    return float(number) if math.isfinite(number) else None


class BackgroundTracker:
    """Calls a tracker in a thread of its own, so that no network holds up a step.

    A tracker that fails, or takes nothing for long, gets nothing more; one warning says so.

    The thread is a daemon, and no executor's: Python would wait at its exit for an executor's
    threads, and a tracker may hang.
    """

    def __init__(self, config: Tracker.Config, run: TrackedRun, *, name: str):
        """Start the thread, which builds the tracker.

        Args:
            name: name of the tracker in warnings.
        """
        self._config = config
        self._run = run
        self._name = name
        self._queue: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(QUEUED)
        """Calls to make, in order; None is the last."""
        self._off = False
        """True if no call is made any more."""
        self._turning_off = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], object]) -> None:
        """Have ``call`` called with the tracker. Return at once, whatever the tracker does."""
        if self._off:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._turn_off(f"it has taken nothing of the last {QUEUED} entries")

    def close(self) -> None:
        """Wait until what is queued is logged, for at most CLOSE_LIMIT_S.

        A second call does nothing.
        """
        if self._off:
            return
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
        except BaseException as error:  # noqa: BLE001 - a user's class may exit, too
            self._turn_off(f"{type(error).__name__}: {error}")

    def _turn_off(self, why: str) -> None:
        """Make no further call, and warn once.

        Several threads may find a fault. The lock makes all of them wait for the warning.
        """
        with self._turning_off:
            if self._off:
                return
            cause = one_sentence(without_secrets(why))
            logger.warning("nothing more is sent to %s: %s", self._name, cause)
            self._off = True


def without_secrets(text: str) -> str:
    """Return ``text`` without the values of environment variables that hold secrets.

    A server may repeat the key that it was sent.
    """
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"({name})")
    return text


def samples_table(groups: Sequence[RolloutGroup], most: int) -> Table:
    """Return a table of at most ``most`` rollouts, one of each group.

    The first group shows its first rollout, the second group its second, and so on.
    """
    chosen = [
        group.rollouts[number % len(group.rollouts)]
        for number, group in enumerate(groups[:most])
        if group.rollouts
    ]
    rows = [
        (
            printable(rollout.rollout_id),
            printable(rollout.task_name),
            rollout.reward,
            rollout.status.value,
            conversation(rollout),
        )
        for rollout in chosen
    ]
    return Table(name="samples", columns=COLUMNS, rows=rows)


def conversation(rollout: Rollout) -> str:
    """Return a rollout's messages as text that is safe to print, or its error if it has no turn.

    It has at most MOST_CHARACTERS: of a longer one the beginning and the end.
    """
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


def _markdown(table: Table) -> str:
    """Return a table's rows one after the other, as blocks of code that no character formats."""
    rows = [
        "\n".join(f"{name}: {value}" for name, value in zip(table.columns, row, strict=True))
        for row in table.rows
    ]
    return "\n\n---\n\n".join(textwrap.indent(row, "    ", lambda line: True) for row in rows)


def without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record that a second run with the same seed repeats."""
    return {key: value for key, value in record.items() if not key.startswith(TIMING_PREFIXES)}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file.

    The torn line that a process killed in mid-write leaves at its end is left out.
    """
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
