"""An index of a run's files, in SQLite, beside them. Pages query it, so that nothing is read whole for a page.

``refresh`` reads what was appended since the last time. It remembers, for each file, how far it has read, and the bytes before
that place: a run that is resumed cuts its files back, and where those bytes are not what they were, all is read again.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE, next_group, read_group

logger = logging.getLogger(__name__)

INDEX_FILE = ".report-index.sqlite"
FORMAT = 2
"""Of the tables below; an index of another format is made anew."""
TAIL = 64
"""Bytes before the place that was read to, by which a file is known again."""
BATCH_BYTES = 2**20
"""Read in one transaction, for which queries wait: some 100 ms."""
TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, read_to INTEGER, tail BLOB);
CREATE TABLE metrics (name TEXT, step INTEGER, value REAL, PRIMARY KEY (name, step)) WITHOUT ROWID;
CREATE TABLE ledger (rollout_id TEXT, task TEXT, dispatched INTEGER, column_ TEXT, ended INTEGER);
CREATE INDEX ledger_ends ON ledger (task, column_, ended);
CREATE TABLE rollouts (
    place INTEGER, line INTEGER, rollout_id TEXT, group_id TEXT, task TEXT, status TEXT, outcome TEXT, step INTEGER,
    reward REAL, turns INTEGER, tokens INTEGER, error TEXT, sample_id TEXT, evaluation TEXT, PRIMARY KEY (place, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_ids ON rollouts (rollout_id);
CREATE INDEX rollouts_groups ON rollouts (group_id);
CREATE INDEX rollouts_chosen ON rollouts (task, outcome, step, reward);
CREATE INDEX rollouts_evaluated ON rollouts (evaluation, task) WHERE evaluation IS NOT NULL;
"""


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
    admitted_version: int
    turn_count: int
    completion_tokens: int
    rollout: _Rewarded
    data_sample: _Example | None = None
    kind: str = "training"


_DECODE = msgspec.json.Decoder(_Line).decode


class RunIndex:
    """Of one run folder. Safe to use from several threads, and beside other processes that use the same file."""

    def __init__(self, folder: Path):
        """In memory where the folder can't be written."""
        self.folder = folder
        self._lock = threading.RLock()
        self._connection = self._open()

    def refresh(self, *, most_bytes: int | None = None) -> bool:
        """Read what was appended since the last time.

        Args:
            most_bytes: of the rollouts' file; None: all.

        Returns:
            Whether all was read.
        """
        self._read_lines(METRICS_FILE, self._add_metrics)
        self._read_lines(LEDGER_FILE, self._add_ledger)
        return self._read_rollouts(most_bytes)

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Of a SELECT; ``values`` take the places of its question marks."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def unread_bytes(self) -> int:
        """Of the rollouts' file."""
        try:
            size = (self.folder / ROLLOUTS_FILE).stat().st_size
        except OSError:
            return 0
        return max(0, size - self._read_to(ROLLOUTS_FILE)[0])

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
            with (self.folder / ROLLOUTS_FILE).open("rb") as file:
                return read_group(file, place)[0].splitlines()
        except (OSError, ValueError, OverflowError) as error:
            raise LookupError(f"no group at {place}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        for path in (str(self.folder / INDEX_FILE), ":memory:"):
            try:
                return _connected(path)
            except sqlite3.Error as error:
                logger.info("no index in %s: %s", path, error)
        raise AssertionError("an index in memory can always be made")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.rollback()
                raise
            self._connection.commit()

    def _read_to(self, name: str) -> tuple[int, bytes]:
        rows = self.rows("SELECT read_to, tail FROM files WHERE name = ?", (name,))
        return (rows[0][0], rows[0][1]) if rows else (0, b"")

    def _place_in(self, file: BinaryIO, name: str, tables: Sequence[str]) -> int:
        """Where to read on; the start, with nothing of the file in the index, where it is not the file that was read."""
        place, tail = self._read_to(name)
        file.seek(max(0, place - len(tail)))
        if file.read(len(tail)) == tail:
            return place
        for table in tables:
            self._connection.execute(f"DELETE FROM {table}")
        return 0

    def _have_read(self, file: BinaryIO, name: str, place: int) -> None:
        file.seek(max(0, place - TAIL))
        values = (name, place, file.read(min(TAIL, place)))
        self._connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", values)

    def _read_lines(self, name: str, add: Any) -> None:
        table = name.partition(".")[0]
        more = True
        while more:
            try:
                file = (self.folder / name).open("rb")
            except OSError:
                return
            with file, self._transaction():
                place = self._place_in(file, name, [table])
                file.seek(place)
                data = file.read(BATCH_BYTES)
                more = len(data) == BATCH_BYTES
                whole = data.rfind(b"\n") + 1  # a line that is being written is read the next time
                add(data[:whole].splitlines())
                self._have_read(file, name, place + whole)
                if not whole:
                    return

    def _add_metrics(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            record = json.loads(line)
            step = record.pop("step")
            entries = [(name, step, value) for name, value in record.items()]
            self._connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", entries)

    def _add_ledger(self, lines: Sequence[bytes]) -> None:
        records = map(json.loads, lines)
        entries = [(r["rollout_id"], r["task"], r["dispatched_version"], r["column"], r["ended_version"]) for r in records]
        self._connection.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?, ?)", entries)

    def _read_rollouts(self, most_bytes: int | None) -> bool:
        try:
            file = (self.folder / ROLLOUTS_FILE).open("rb")
        except OSError:
            return True
        with file:
            size, read = file.seek(0, 2), 0
            while most_bytes is None or read < most_bytes:
                with self._transaction():
                    begin = place = self._place_in(file, ROLLOUTS_FILE, ["rollouts"])
                    while place < min(size, begin + BATCH_BYTES) and (group := next_group(file, place)) is not None:
                        offset, lines, place = group
                        self._add_rollouts(offset, lines.splitlines())
                    self._have_read(file, ROLLOUTS_FILE, place)
                read += place - begin
                if place == begin:
                    return True  # what follows, if anything, is being written
            return place >= size

    def _add_rollouts(self, place: int, lines: Sequence[bytes]) -> None:
        entries = []
        for number, line in enumerate(lines):
            try:
                record = _DECODE(line)
            except msgspec.MsgspecError:
                try:  # half a character, which msgspec refuses
                    record = msgspec.convert(json.loads(line), _Line)
                except (ValueError, msgspec.MsgspecError) as error:
                    logger.info("%s at %d, line %d: %s", ROLLOUTS_FILE, place, number, error)
                    continue
            own = record.rollout
            entries.append(
                (
                    place,
                    number,
                    _stored(record.rollout_id),
                    _stored(own.group_id),
                    _stored(own.task_name),
                    own.status,
                    record.outcome,
                    record.admitted_version,
                    own.reward,
                    record.turn_count,
                    record.completion_tokens,
                    None if own.error is None else _stored(own.error),
                    None if record.data_sample is None else _stored(str(record.data_sample.sample_id)),
                    own.group_id.rpartition("@")[2] if record.kind == "validation" else None,
                )
            )
        self._connection.executemany(f"INSERT OR REPLACE INTO rollouts VALUES ({', '.join('?' * 14)})", entries)


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = OFF")  # it can be made again
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                connection.execute(f'DROP TABLE "{table}"')
            for statement in filter(str.strip, TABLES.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _stored(text: str) -> str:
    """SQLite takes no halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()
