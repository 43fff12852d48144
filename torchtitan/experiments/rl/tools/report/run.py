"""A run folder as the pages see it: its state, its config without secrets, and an index of its files, in SQLite.

Pages query the index, so that nothing is read whole for a page. ``refresh`` reads what was appended since the last time. It
remembers, for each file, how far it has read and the bytes before that place: a run that is resumed cuts its files back and
writes others in their place, and then all is read again. No link is read.
"""

import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from torchtitan.experiments.rl.checkpointing.folder import MANIFEST_FILE
from torchtitan.experiments.rl.config.run_folder import (
    CONFIG_FILE,
    LOCK_FILE,
    read_command,
    read_config,
)
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.record_file import (
    LEDGER_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    next_group,
    read_group,
)

logger = logging.getLogger(__name__)

TAIL = 64
"""Bytes before the place that was read to, by which a file is known again: the end of a line, or of a compressed group."""
BATCH_BYTES = 2**20
"""Of a file in one ``refresh``, for which queries wait: some 100 ms."""
TABLES = """
CREATE TABLE metrics (name TEXT, step INTEGER, value REAL, PRIMARY KEY (name, step)) WITHOUT ROWID;
CREATE TABLE ledger (rollout_id TEXT, task TEXT, dispatched INTEGER, column_ TEXT, ended INTEGER);
CREATE INDEX ledger_ends ON ledger (task, column_, ended);
CREATE TABLE rollouts (
    place INTEGER, line INTEGER, rollout_id TEXT, group_id TEXT, task TEXT, status TEXT, outcome TEXT, step INTEGER,
    reward REAL, turns INTEGER, tokens INTEGER, error TEXT, sample_id TEXT, evaluation TEXT, PRIMARY KEY (place, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_groups ON rollouts (group_id);
CREATE INDEX rollouts_chosen ON rollouts (task, outcome, step, reward);
CREATE INDEX rollouts_evaluated ON rollouts (evaluation, task) WHERE evaluation IS NOT NULL;
CREATE VIEW points AS
    SELECT m.name, coalesce(CAST(v.value AS INTEGER), m.step) AS step, m.step AS reported, m.value
    FROM metrics m LEFT JOIN metrics v ON m.name LIKE 'validation/%' AND v.name = 'validation/step' AND v.step = m.step;
"""
"""``points``: metrics as they are drawn. A validation is reported with a later step than that of the policy it measured."""


Json = dict[str, Any]
"""An object of JSON."""
Rows = Sequence[tuple]


REFRESH_EVERY_S = 1.0
STALLED_AFTER_S = 120.0
"""At least; slower runs have ten times their usual step."""
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(api_?key|secret|token|password|credential)s?$", re.IGNORECASE)
"""Names of fields whose text is not shown. A field that names an environment variable (..._env) is no secret."""


class ReportedRun:
    """One run folder. Safe to use from several threads; ``start`` follows the files until ``close``."""

    def __init__(self, folder: Path):
        """
        Raises:
            RunError: there is no run in the folder.
        """
        self.folder = folder.resolve()
        if not any(
            (self.folder / name).is_file() for name in (METRICS_FILE, ROLLOUTS_FILE, "config.json")
        ):
            raise RunError(
                f"{folder}: no run: it has no {METRICS_FILE}, {ROLLOUTS_FILE} or config.json"
            )
        if (self.folder / MANIFEST_FILE).is_file() or any(self.folder.glob("*.safetensors")):
            raise RunError(
                f"{folder}: no run, but a checkpoint or a model: name the folder of its run, which has {METRICS_FILE}"
            )
        self.name = self.folder.name
        self._lock = threading.RLock()
        # A database without a name is this connection's; what outgrows its memory is in a file that goes with it.
        self._connection = sqlite3.connect("", check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript(TABLES)
        self._read: dict[str, tuple[int, bytes]] = {}
        """Of each file: how far it was read, and the bytes before."""
        self._problem: str | None = None
        """Why the files can't be read at the moment."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"index-{self.name}", daemon=True)

    def start(self) -> None:
        """Index in a thread, from now on. What is not indexed yet is missing from the pages, which say so."""
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
                read_all, self._problem = self.refresh(), None
            except Exception as error:  # a disk that fails, a file that someone changes: it may be over the next time
                self._problem, read_all = f"{type(error).__name__}: {error}", True
            if read_all:
                self._closed.wait(REFRESH_EVERY_S)

    def config(self) -> Json:
        """The resolved config, by dotted path of each field; what may be a secret is hidden."""
        whole = _flat(self._read_config(), "")
        return {
            name: HIDDEN if _is_secret(name, value) else value
            for name, value in sorted(whole.items())
        }

    def _read_config(self) -> Json:
        return {} if (self.folder / CONFIG_FILE).is_symlink() else read_config(self.folder) or {}

    def without_secrets(self, text: str) -> str:
        """The text with what the config hides taken out."""
        for name, value in _flat(self._read_config(), "").items():
            text = text.replace(value, HIDDEN) if _is_secret(name, value) else text
        return text

    def tasks(self) -> list[str]:
        """By name."""
        rows = self.rows("SELECT task FROM ledger UNION SELECT task FROM rollouts ORDER BY task")
        config = self._read_config().get("tasks")
        return list(
            dict.fromkeys(
                [*(config if isinstance(config, dict) else ()), *(row[0] for row in rows)]
            )
        )

    def state(self) -> Json:
        """What the run is doing, as far as its files say.

        Returns:
            ``state``: "running", "stalled", "done", "stopped" or "starting". ``step``, ``steps``: taken, and to take.
            ``silent_s``: since its metrics were written.
        """
        config = self._read_config()
        step = self.rows("SELECT MAX(step) FROM metrics")[0][0]
        usual = self.rows("SELECT AVG(value) FROM metrics WHERE name = 'time/step_s'")[0][0]
        steps = config["steps"] if isinstance(config.get("steps"), int) else None
        silent = _age_s(self.folder / METRICS_FILE)
        if steps is not None and step is not None and step >= steps:
            state = "done"
        elif is_locked(self.folder / LOCK_FILE):
            late = silent is not None and silent > max(STALLED_AFTER_S, 10 * (usual or 0))
            state = "stalled" if late else "running" if step is not None else "starting"
        else:
            state = "stopped"
        command = read_command(self.folder)
        return {
            "state": state,
            "step": step,
            "steps": steps,
            "silent_s": silent,
            "config_name": command.config_name if command else None,
            "started": command.started
            if command and isinstance(command.started, int | float)
            else None,
            "unread_bytes": self.unread_bytes(),
            "problem": self._problem,
        }

    def refresh(self) -> bool:
        """Read on in each file, for at most ``BATCH_BYTES`` and a record.

        Returns:
            Whether all was read.
        """
        files: Json = {
            METRICS_FILE: partial(_lines, metrics_rows),
            LEDGER_FILE: partial(_lines, ledger_rows),
            ROLLOUTS_FILE: _groups,
        }
        return False not in [self._read_on(name, records) for name, records in files.items()]

    def rows(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Of a SELECT, with ``values`` for its marks."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def unread_bytes(self) -> int:
        """Of the rollouts' file."""
        try:
            size = (self.folder / ROLLOUTS_FILE).stat().st_size
        except OSError:
            return 0
        return max(0, size - self._read.get(ROLLOUTS_FILE, (0, b""))[0])

    def record(self, place: int, line: int) -> bytes:
        """The line of a rollout.

        Raises:
            LookupError: there is none in that place any more.
        """
        lines = self.records(place)
        if not 0 <= line < len(lines):
            raise LookupError(f"the group at {place} has {len(lines)} rollouts")
        return lines[line]

    def records(self, place: int) -> list[bytes]:
        """The lines of the group at ``place``.

        Raises:
            LookupError: as ``record``.
        """
        try:
            with self._opened(ROLLOUTS_FILE) as file:
                return read_group(file, place)[0].splitlines()
        except (OSError, ValueError, OverflowError) as error:
            raise LookupError(f"no group at {place}") from error

    def _opened(self, name: str) -> BinaryIO:
        path = self.folder / name
        if path.is_symlink():
            raise OSError(f"{name} is a link")
        return path.open("rb")

    def _read_on(
        self, name: str, records: Callable[[BinaryIO, int], Iterator[tuple[int, Rows]]]
    ) -> bool:
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
            begun, added = place, list[Sequence[Any]]()
            for place, rows in records(file, begun):
                added += rows
                if place - begun >= BATCH_BYTES:
                    break
            if added:
                marks = ", ".join("?" * len(added[0]))
                self._connection.executemany(
                    f"INSERT OR REPLACE INTO {table} VALUES ({marks})", map(_stored, added)
                )
            file.seek(max(0, place - TAIL))
            self._read[name] = place, file.read(min(TAIL, place))
        return place - begun < BATCH_BYTES


def _lines(
    rows_of: Callable[[bytes], Rows], file: BinaryIO, place: int
) -> Iterator[tuple[int, Rows]]:
    """Of each whole line from ``place`` on: where it ends, and its rows. One that is being written is read the next time."""
    file.seek(place)
    for line in file:
        if line.endswith(b"\n"):
            place += len(line)
            yield place, rows_of(line)


def _groups(file: BinaryIO, place: int) -> Iterator[tuple[int, Rows]]:
    """The same of each whole group of rollouts."""
    size = file.seek(0, 2)
    while place < size and (group := next_group(file, place)) is not None:
        offset, lines, place = group
        yield (
            place,
            [
                row
                for n, line in enumerate(lines.splitlines())
                for row in rollout_rows(offset, n, line)
            ],
        )


Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What SQLite holds."""


class _End(msgspec.Struct):
    """Of a rollout: a line of the ledger."""

    rollout_id: str
    task: str
    dispatched_version: Int64
    column: str
    ended_version: Int64


class _Rewarded(msgspec.Struct):
    group_id: str
    task_name: str
    status: str
    reward: float | None = None
    error: str | None = None


class _Example(msgspec.Struct):
    sample_id: Any


class _Line(msgspec.Struct):
    """What the index has of a rollout's record; the decoder passes over the rest."""

    rollout_id: str
    outcome: str | None
    admitted_version: Int64
    turn_count: Int64
    completion_tokens: Int64
    rollout: _Rewarded
    data_sample: _Example | None = None
    kind: str = "training"


_DECODE = msgspec.json.Decoder(_Line).decode


def metrics_rows(line: bytes) -> Rows:
    """Of the table metrics: name, step, value."""
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
    """Of the table ledger."""
    try:
        return [msgspec.structs.astuple(msgspec.convert(_parsed(line), _End))]
    except msgspec.MsgspecError as error:
        logger.info("%s: %s", LEDGER_FILE, error)
        return []


def rollout_rows(place: int, number: int, line: bytes) -> Rows:
    """Of the table rollouts: line ``number`` of the group at ``place``."""
    try:
        try:
            record = _DECODE(line)
        except msgspec.MsgspecError:  # half a character, which msgspec refuses
            record = msgspec.convert(_parsed(line), _Line)
    except msgspec.MsgspecError as error:
        logger.info("%s at %d, line %d: %s", ROLLOUTS_FILE, place, number, error)
        return []
    own, example = record.rollout, record.data_sample
    ids = (
        place,
        number,
        record.rollout_id,
        own.group_id,
        own.task_name,
        own.status,
        record.outcome,
        record.admitted_version,
    )
    evaluation = own.group_id.rpartition("@")[2] if record.kind == "validation" else None
    sample_id = str(example.sample_id) if example else None
    return [
        (
            *ids,
            own.reward,
            record.turn_count,
            record.completion_tokens,
            own.error,
            sample_id,
            evaluation,
        )
    ]


def _parsed(line: bytes) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _stored(row: Sequence[Any]) -> list[Any]:
    """SQLite takes no halves of characters."""
    return [
        value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for value in row
    ]


def is_locked(path: Path) -> bool:
    """Whether a process of this host holds the lock of a run folder. Looked up, and not tried: a run may want to take it."""
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


def _flat(value: Any, path: str) -> Json:
    if not isinstance(value, dict):
        return {path: json.dumps(value) if isinstance(value, list) else value}
    below = [_flat(entry, f"{path}.{name}" if path else name) for name, entry in value.items()]
    return {name: found for entries in below for name, found in entries.items()} or (
        {path: "{}"} if path else {}
    )


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value and _SECRET.search(name))
