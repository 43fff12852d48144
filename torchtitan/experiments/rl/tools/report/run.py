"""A run folder as the pages see it: its state, its config without secrets, an index of its files.

Pages query the index, which is in SQLite, so that no file is read whole for a page. ``refresh``
reads what was appended to the files since the last time. For each file it remembers how far it has
read, and the bytes before that place. A run that is resumed cuts its files back and writes other
bytes there: then the whole file is read again.

No symbolic link is read.
"""

import json
import logging
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from torchtitan.experiments.rl.checkpointing.folder import MANIFEST_FILE, checkpoints, step_of
from torchtitan.experiments.rl.command.history import History, read_history
from torchtitan.experiments.rl.command.run_folder import (
    AGAINST_FOLDER,
    CONFIG_FILE,
    EVALUATION_FILE,
    LOCK_FILE,
    has_no_checkpoint_yet,
    read_command,
    read_config,
)
from torchtitan.experiments.rl.errors import RunError, kind_of
from torchtitan.experiments.rl.rollouts.record_file import (
    LEDGER_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    next_group,
    read_group,
)

logger = logging.getLogger(__name__)

TAIL = 64
"""Number of bytes before the place that was read to, by which a file is known again.

They are the end of a line, or of a compressed group.
"""
BATCH_BYTES = 2**20
"""Bytes of a file that one ``refresh`` reads, in some 100 ms, for which queries wait."""
TABLES = """
CREATE TABLE metrics (
    name TEXT, step INTEGER, value REAL, PRIMARY KEY (name, step)
) WITHOUT ROWID;
CREATE TABLE ledger (
    rollout_id TEXT, task TEXT, dispatched INTEGER, column_ TEXT, ended INTEGER
);
CREATE INDEX ledger_ends ON ledger (task, column_, ended);
CREATE TABLE rollouts (
    place INTEGER, line INTEGER, rollout_id TEXT, group_id TEXT, task TEXT, status TEXT,
    outcome TEXT, version INTEGER, step INTEGER, reward REAL, turns INTEGER, tokens INTEGER,
    error TEXT, sample_id TEXT, evaluation TEXT, kind TEXT, PRIMARY KEY (place, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_groups ON rollouts (group_id);
CREATE INDEX rollouts_chosen ON rollouts (task, outcome, step, reward);
CREATE INDEX rollouts_evaluated ON rollouts (evaluation, task) WHERE evaluation IS NOT NULL;
CREATE INDEX rollouts_failed ON rollouts (task, kind) WHERE kind IS NOT NULL;
CREATE VIEW points AS
    SELECT
        m.name, coalesce(CAST(v.value AS INTEGER), m.step) AS step, m.step AS reported, m.value
    FROM metrics m
    LEFT JOIN metrics v
    ON m.name LIKE 'validation/%' AND v.name = 'validation/step' AND v.step = m.step;
"""
"""Tables of the index, which are named like the files.

``points`` has the metrics as they are drawn. A validation is reported with a later step than that
of the policy that it measured.
"""

Json = dict[str, Any]
"""An object of JSON."""
Rows = Sequence[tuple]
"""Rows of a table of the index."""
REFRESH_EVERY_S = 1.0
"""Seconds between two looks at the files, once all of them was read."""
STALLED_AFTER_S = 120.0
"""Seconds without new metrics after which a run is stalled.

A run whose steps are slow has ten times as long as its mean step takes.
"""
HIDDEN = "(hidden)"
"""Text that stands in the place of a secret."""
_SECRET = re.compile(r"(api_?key|secret|token|password|credential)s?$", re.IGNORECASE)
"""Ends of the names of fields whose text is hidden.

A field that names an environment variable (..._env) holds no secret.
"""


class ReportedRun:
    """Run folder with the index of its files. Any thread may use it."""

    def __init__(self, folder: Path):
        """Make an empty index of the files in ``folder``.

        Raises:
            RunError: there is no run in the folder.
        """
        self.folder = folder.resolve()
        files = (METRICS_FILE, ROLLOUTS_FILE, CONFIG_FILE)
        if not any((self.folder / name).is_file() for name in files):
            raise RunError(
                f"{folder}: no run: it has no {METRICS_FILE}, {ROLLOUTS_FILE} or {CONFIG_FILE}"
            )
        if (self.folder / MANIFEST_FILE).is_file() or any(self.folder.glob("*.safetensors")):
            raise RunError(
                f"{folder}: no run, but a checkpoint or a model: "
                f"name the folder of its run, which has {METRICS_FILE}"
            )
        self._is_compared = self.folder.name == AGAINST_FOLDER
        """True for the records of the second model of an evaluation."""
        self.name = "/".join(self.folder.parts[-2 if self._is_compared else -1 :])
        self._lock = threading.RLock()
        # A database without a name belongs to this connection. SQLite keeps what outgrows its
        # memory in a file that goes with the connection.
        self._connection = sqlite3.connect("", check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript(TABLES)
        self._read: dict[str, tuple[int, bytes]] = {}
        """Place that each file was read to, and the bytes before that place."""
        self._problem: str | None = None
        """Error that keeps the files from being read at the moment."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"index-{self.name}", daemon=True)

    def start(self) -> None:
        """Index the files in a thread until ``close``.

        Records that are not indexed yet are missing from the pages, which say so.
        """
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._connection.close()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                is_all_read = self.refresh()
                self._problem = None
            except Exception as error:  # noqa: BLE001 - of the disk, of SQLite or of a record
                self._problem = f"{type(error).__name__}: {error}"
                is_all_read = True  # the next try, a second later, may succeed
            if is_all_read:
                self._closed.wait(REFRESH_EVERY_S)

    def config(self) -> Json:
        """Return the resolved config by the dotted path of each field, with secrets hidden."""
        values = _flat(self._read_config(), "")
        return {
            name: HIDDEN if _is_secret(name, value) else value
            for name, value in sorted(values.items())
        }

    def _read_config(self) -> Json:
        return {} if (self.folder / CONFIG_FILE).is_symlink() else read_config(self.folder) or {}

    def without_secrets(self, text: str) -> str:
        """Return ``text`` with the config's secrets hidden."""
        for name, value in _flat(self._read_config(), "").items():
            if _is_secret(name, value):
                text = text.replace(value, HIDDEN)
        return text

    def tasks(self) -> list[str]:
        """Return the names of the tasks: the config's, and others that the records name."""
        rows = self.rows("SELECT task FROM ledger UNION SELECT task FROM rollouts ORDER BY task")
        tasks = self._read_config().get("tasks")
        configured = tasks if isinstance(tasks, dict) else {}
        return list(dict.fromkeys([*configured, *(row[0] for row in rows)]))

    def state(self) -> Json:
        """Return what the run does, as far as its files say.

        Returns:
            ``state``: "starting", "running", "stalled", "done", "stopped" by a signal, "failed" by
            an error, or "killed", where nothing says how it ended; "records" of an evaluation or
            a play, which trained nothing. ``why``: the error, or what stopped the run; "" if
            neither is known. ``step`` and ``steps``: number of steps taken,
            and to take. ``checkpoint``: step that a resume goes on from; None if it can't.
            ``begins_again``: True if it begins again, for there was no checkpoint yet.
            ``silent_s``: seconds since metrics were written. ``resumes``: time and step of each.
        """
        config = self._read_config()
        history = read_history(self.folder)
        step = self.rows("SELECT MAX(step) FROM metrics")[0][0]
        steps = config["steps"] if isinstance(config.get("steps"), int) else None
        silent_s = _age_s(self.folder / METRICS_FILE)
        command = read_command(self.folder)
        is_run = silent_s is not None or command is not None or bool(history.starts)
        started = history.starts[0].time if history.starts else command and command.started
        saved = checkpoints(self.folder)
        return {
            "state": self._state_name(history, step, steps, silent_s) if is_run else "records",
            "why": self.without_secrets(history.end.why or "") if history.end else "",
            "checkpoint": step_of(saved[-1]) if saved else None,
            "begins_again": has_no_checkpoint_yet(self.folder),
            "step": step,
            "steps": steps,
            "silent_s": silent_s,
            "config_name": command.config_name if command else None,
            "started": started if isinstance(started, int | float) else None,
            "resumes": [{"time": start.time, "step": start.step} for start in history.resumes],
            "unread_bytes": self.unread_bytes(),
            "problem": self._problem,
        }

    def _state_name(
        self, history: History, step: int | None, steps: int | None, silent_s: float | None
    ) -> str:
        if history.end is not None:
            return history.end.how
        locked = is_locked(self.folder / LOCK_FILE)
        took_all_steps = steps is not None and step is not None and step >= steps
        if took_all_steps and (locked or not history.starts):
            return "done"
        if not locked and not history.starts:
            return "stopped"
        # The lock of a command on another host is not seen here.
        if not locked and history.starts[-1].host == socket.gethostname():
            return "killed"
        mean_s = self.rows("SELECT AVG(value) FROM metrics WHERE name = 'time/step_s'")[0][0]
        if silent_s is not None and silent_s > max(STALLED_AFTER_S, 10 * (mean_s or 0)):
            return "stalled"
        return "starting" if step is None else "running"

    def refresh(self) -> bool:
        """Read on in each file, for at most ``BATCH_BYTES`` and a record.

        Returns:
            True if all of the files was read.
        """
        readers: dict[str, Reader] = {
            METRICS_FILE: partial(_lines, metrics_rows),
            LEDGER_FILE: partial(_lines, ledger_rows),
            ROLLOUTS_FILE: _groups,
        }
        self._read_evaluation()
        are_read = [self._read_on(name, reader) for name, reader in readers.items()]
        return all(are_read)

    def rows(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Return the rows of a SELECT, with ``values`` in the place of its marks."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def unread_bytes(self) -> int:
        """Return the bytes of the rollouts' file that are not indexed yet."""
        try:
            size = (self.folder / ROLLOUTS_FILE).stat().st_size
        except OSError:
            return 0
        return max(0, size - self._read.get(ROLLOUTS_FILE, (0, b""))[0])

    def record(self, place: int, line: int) -> bytes:
        """Return the line of a rollout: line ``line`` of the group at ``place``.

        Raises:
            LookupError: there is no rollout there any more.
        """
        lines = self.records(place)
        if not 0 <= line < len(lines):
            raise LookupError(f"the group at {place} has {len(lines)} rollouts")
        return lines[line]

    def records(self, place: int) -> list[bytes]:
        """Return the lines of the group at ``place``.

        Raises:
            LookupError: there is no group there any more.
        """
        try:
            with self._opened(ROLLOUTS_FILE) as file:
                return read_group(file, place)[0].splitlines()
        except (OSError, ValueError, OverflowError) as error:
            raise LookupError(f"no group at {place}") from error

    def _read_evaluation(self) -> None:
        """Index the result of an evaluation, once it is there, as metrics of version 0."""
        path = (self.folder.parent if self._is_compared else self.folder) / EVALUATION_FILE
        is_run = (self.folder / METRICS_FILE).exists()
        if is_run or EVALUATION_FILE in self._read or path.is_symlink():
            return
        try:
            models = msgspec.convert(_parsed(path.read_bytes()), _EvaluationFile).models
        except (OSError, msgspec.MsgspecError):
            return  # there is none, or it is being written
        measured = models[int(self._is_compared) :][:1]
        rows = [(name, 0, value) for model in measured for name, value in model.metrics.items()]
        with self._lock, self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
        self._read[EVALUATION_FILE] = 0, b""

    def _opened(self, name: str) -> BinaryIO:
        path = self.folder / name
        if path.is_symlink():
            raise OSError(f"{name} is a link")
        return path.open("rb")

    def _read_on(self, name: str, reader: "Reader") -> bool:
        """Index what was appended to a file, and return True if all of it was read."""
        try:
            file = self._opened(name)
        except OSError:
            return True
        table = name.partition(".")[0]
        with file, self._lock, self._connection:
            place, tail = self._read.get(name, (0, b""))
            file.seek(place - len(tail))
            if file.read(len(tail)) != tail:
                self._connection.execute(f"DELETE FROM {table}")
                place = 0
            start = place
            added: list[tuple] = []
            for place, rows in reader(file, start):
                added += rows
                if place - start >= BATCH_BYTES:
                    break
            if added:
                marks = ", ".join("?" * len(added[0]))
                self._connection.executemany(
                    f"INSERT OR REPLACE INTO {table} VALUES ({marks})", map(_stored, added)
                )
            file.seek(max(0, place - TAIL))
            self._read[name] = place, file.read(min(TAIL, place))
        return place - start < BATCH_BYTES


Reader = Callable[[BinaryIO, int], Iterator[tuple[int, Rows]]]
"""Function that reads a file on from a place.

For each whole record it yields the place of the record's end and the record's rows.
"""


def _lines(
    rows_of: Callable[[bytes], Rows], file: BinaryIO, place: int
) -> Iterator[tuple[int, Rows]]:
    """Read whole lines (a Reader). A line that is being written is read the next time."""
    file.seek(place)
    for line in file:
        if line.endswith(b"\n"):
            place += len(line)
            yield place, rows_of(line)


def _groups(file: BinaryIO, place: int) -> Iterator[tuple[int, Rows]]:
    """Read whole groups of rollouts (a Reader)."""
    size = file.seek(0, 2)
    while place < size and (group := next_group(file, place)) is not None:
        offset, lines, place = group
        rows: list[tuple] = []
        for number, line in enumerate(lines.splitlines()):
            rows += rollout_rows(offset, number, line)
        yield place, rows


Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integer that SQLite holds."""


class _End(msgspec.Struct):
    """Line of the ledger: the end of a rollout."""

    rollout_id: str
    task: str
    dispatched_version: Int64
    column: str
    ended_version: Int64


class _Measured(msgspec.Struct):
    metrics: dict[str, float | None]


class _EvaluationFile(msgspec.Struct):
    """Result of ``rl-evaluate``: a model, and the one that it was compared with."""

    models: list[_Measured]


class _Rewarded(msgspec.Struct):
    group_id: str
    task_name: str
    status: str
    reward: float | None = None
    error: str | None = None


class _RecordedExample(msgspec.Struct):
    sample_id: Any


class _RecordLine(msgspec.Struct):
    """Fields of a rollout's record that are indexed; the decoder passes over the others."""

    rollout_id: str
    outcome: str | None
    admitted_version: Int64
    turn_count: Int64
    completion_tokens: Int64
    rollout: _Rewarded
    trained_step: Int64 | None = None
    data_sample: _RecordedExample | None = None
    kind: str = "training"


_DECODE = msgspec.json.Decoder(_RecordLine).decode


def metrics_rows(line: bytes) -> Rows:
    """Return the rows of the table ``metrics`` that a line of the metrics makes."""
    record = _parsed(line)
    step = record.pop("step", None) if isinstance(record, dict) else None
    if not isinstance(step, int) or abs(step) >= 2**63:
        logger.info("%s: no metrics of a step: %r", METRICS_FILE, line[:80])
        return []
    return [
        (name, step, None if value is None else float(value))
        for name, value in record.items()
        if value is None
        or isinstance(value, float)
        or (isinstance(value, int) and abs(value) < 2**1000)
    ]


def ledger_rows(line: bytes) -> Rows:
    """Return the row of the table ``ledger`` that a line of the ledger makes."""
    try:
        return [msgspec.structs.astuple(msgspec.convert(_parsed(line), _End))]
    except msgspec.MsgspecError as error:
        logger.info("%s: %s", LEDGER_FILE, error)
        return []


def rollout_rows(place: int, number: int, line: bytes) -> Rows:
    """Return the row of the table ``rollouts`` for line ``number`` of the group at ``place``."""
    try:
        try:
            record = _DECODE(line)
        except msgspec.MsgspecError:  # msgspec refuses halves of characters
            record = msgspec.convert(_parsed(line), _RecordLine)
    except msgspec.MsgspecError as error:
        logger.info("%s at %d, line %d: %s", ROLLOUTS_FILE, place, number, error)
        return []
    rollout = record.rollout
    is_validation = record.kind == "validation"
    return [
        (
            place,
            number,
            record.rollout_id,
            rollout.group_id,
            rollout.task_name,
            rollout.status,
            record.outcome,
            record.admitted_version,
            record.trained_step,
            rollout.reward,
            record.turn_count,
            record.completion_tokens,
            rollout.error,
            str(record.data_sample.sample_id) if record.data_sample else None,
            rollout.group_id.rpartition("@")[2] if is_validation else None,
            kind_of(rollout.error) if rollout.error and rollout.reward is None else None,
        )
    ]


def _parsed(line: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a line; None if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _stored(row: Sequence[Any]) -> list[Any]:
    """Return a row as SQLite takes it: with halves of characters escaped."""
    return [
        value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for value in row
    ]


def is_locked(path: Path) -> bool:
    """Return True if a process of this host holds the lock of a run folder.

    The lock is looked up and not tried, because a run may want to take it at this moment.
    """
    try:
        entry = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    place = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
    return any(place in line.split() for line in lines)


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _flat(value: object, path: str) -> Json:
    """Return the values in nested dicts by their dotted path."""
    if not isinstance(value, dict):
        return {path: json.dumps(value) if isinstance(value, list) else value}
    values: Json = {}
    for name, entry in value.items():
        values |= _flat(entry, f"{path}.{name}" if path else name)
    if not values and path:
        return {path: "{}"}
    return values


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and bool(value and _SECRET.search(name))
