"""An index of a run's files, in SQLite, beside them. Pages query it, so that nothing is read whole for a page.

``refresh`` reads what was appended since the last time. It remembers, for each file, how far it has read, and by what to know
it again: a run that is resumed cuts its files back and writes others in their place, and then all is read anew. A link is not
read.
"""

import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE, next_group, read_group

logger = logging.getLogger(__name__)

TAIL = 64
"""Bytes before the place that was read to, by which a file is known again while it is followed. They are the end of a
compressed group, which no other has. Lines of other rollouts may end alike: when an index is opened, the digest of all lines is
compared."""
BATCH_BYTES = 2**20
"""Read in one transaction, for which queries wait: some 100 ms."""


class RunIndex:
    """Of one run folder. Safe to use from several threads, and beside other processes that use the same file."""

    def __init__(self, folder: Path):
        """In memory where the folder can't be written."""
        self.folder = folder
        self._lock = threading.RLock()
        self._digests: dict[str, Any] = {}
        """Of what was read of each file of lines, since it was opened."""
        self._connection = self._open()

    def refresh(self, *, most_bytes: int | None = None) -> bool:
        """Read what was appended since the last time.

        Args:
            most_bytes: of the rollouts' file; None: all.

        Returns:
            Whether all was read.
        """
        self._read_lines(METRICS_FILE, metrics_rows)
        self._read_lines(LEDGER_FILE, ledger_rows)
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
            with self._opened(ROLLOUTS_FILE) as file:
                return read_group(file, place)[0].splitlines()
        except (OSError, ValueError, OverflowError) as error:
            raise LookupError(f"no group at {place}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        own = self.folder / INDEX_FILE
        for path in (str(own), ":memory:"):
            try:
                if own.is_symlink() and path != ":memory:":
                    raise sqlite3.Error("a link: what it leads to is no index of ours")
                return connected(path)
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
        digest = self._digests[name].digest() if name in self._digests else None
        values = (name, place, file.read(min(TAIL, place)), digest)
        self._connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", values)

    def _opened(self, name: str) -> BinaryIO:
        path = self.folder / name
        if path.is_symlink():
            raise OSError(f"{name} is a link")
        return path.open("rb")

    def _know_again(self, file: BinaryIO, name: str, table: str) -> None:
        """Forget what was read of a file of lines that begins with others now."""
        place, _ = self._read_to(name)
        rows = self.rows("SELECT digest FROM files WHERE name = ?", (name,))
        file.seek(0)
        read = self._digests[name] = hashlib.blake2b(file.read(place))
        if rows and rows[0][0] != read.digest():
            self._connection.execute(f"DELETE FROM {table}")
            self._connection.execute("DELETE FROM files WHERE name = ?", (name,))
            self._digests[name] = hashlib.blake2b()

    def _add(self, table: str, rows: Sequence[tuple]) -> None:
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def _read_lines(self, name: str, rows_of: Callable[[bytes], Iterator[tuple]]) -> None:
        table = name.partition(".")[0]
        more = True
        while more:
            try:
                file = self._opened(name)
            except OSError:
                return
            with file, self._transaction():
                if name not in self._digests:
                    self._know_again(file, name, table)
                place = self._place_in(file, name, [table])
                if place == 0:
                    self._digests[name] = hashlib.blake2b()
                file.seek(place)
                data = file.read(BATCH_BYTES) + file.readline()
                more = len(data) >= BATCH_BYTES
                whole = data.rfind(b"\n") + 1  # a line that is being written is read the next time
                self._add(table, [row for line in data[:whole].split(b"\n")[:-1] for row in rows_of(line)])
                self._digests[name].update(data[:whole])
                self._have_read(file, name, place + whole)
                if not whole:
                    return

    def _read_rollouts(self, most_bytes: int | None) -> bool:
        try:
            file = self._opened(ROLLOUTS_FILE)
        except OSError:
            return True
        with file:
            size, read = file.seek(0, 2), 0
            while most_bytes is None or read < most_bytes:
                with self._transaction():
                    begin = place = self._place_in(file, ROLLOUTS_FILE, ["rollouts"])
                    while place < min(size, begin + BATCH_BYTES) and (group := next_group(file, place)) is not None:
                        offset, lines, place = group
                        rows = [row for n, line in enumerate(lines.splitlines()) for row in rollout_rows(offset, n, line)]
                        self._add("rollouts", rows)
                    self._have_read(file, ROLLOUTS_FILE, place)
                read += place - begin
                if place == begin:
                    return True  # what follows, if anything, is being written
            return place >= size


INDEX_FILE = ".report-index.sqlite"
FORMAT = 3
"""Of the tables below; an index of another format is made anew."""
TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, read_to INTEGER, tail BLOB, digest BLOB);
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


def connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = OFF")  # it can be made again
        connection.execute("PRAGMA journal_mode = MEMORY")  # and no other file is written
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("BEGIN IMMEDIATE")
        statements = [statement.strip() for statement in TABLES.split(";") if statement.strip()]
        found = [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
        if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT or found != statements:
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                connection.execute(f'DROP TABLE "{table}"')
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


logger = logging.getLogger(__name__)

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


def metrics_rows(line: bytes) -> Iterator[tuple]:
    """Of the table metrics: name, step, value."""
    record = _parsed(line)
    step = record.pop("step", None) if isinstance(record, dict) else None
    if not isinstance(step, int) or abs(step) >= 2**63:
        logger.info("%s: no metrics of a step: %r", METRICS_FILE, line[:80])
        return
    for name, value in record.items():
        if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
            yield _stored(name), step, None if value is None else float(value)


def ledger_rows(line: bytes) -> Iterator[tuple]:
    """Of the table ledger."""
    try:
        end = msgspec.convert(_parsed(line), _End)
    except msgspec.MsgspecError as error:
        logger.info("%s: %s", LEDGER_FILE, error)
        return
    yield _stored(end.rollout_id), _stored(end.task), end.dispatched_version, _stored(end.column), end.ended_version


def rollout_rows(place: int, number: int, line: bytes) -> Iterator[tuple]:
    """Of the table rollouts: line ``number`` of the group at ``place``."""
    try:
        try:
            record = _DECODE(line)
        except msgspec.MsgspecError:  # half a character, which msgspec refuses
            record = msgspec.convert(_parsed(line), _Line)
    except msgspec.MsgspecError as error:
        logger.info("%s at %d, line %d: %s", ROLLOUTS_FILE, place, number, error)
        return
    own = record.rollout
    yield (
        place,
        number,
        _stored(record.rollout_id),
        _stored(own.group_id),
        _stored(own.task_name),
        _stored(own.status),
        None if record.outcome is None else _stored(record.outcome),
        record.admitted_version,
        own.reward,
        record.turn_count,
        record.completion_tokens,
        None if own.error is None else _stored(own.error),
        None if record.data_sample is None else _stored(str(record.data_sample.sample_id)),
        _stored(own.group_id.rpartition("@")[2]) if record.kind == "validation" else None,
    )


def _parsed(line: bytes) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _stored(text: str) -> str:
    """SQLite takes no halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()
