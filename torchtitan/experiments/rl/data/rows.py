"""A dataset of rows: a file, a dataset of the hub, a pandas frame or a list of dicts."""

import codecs
import contextlib
import csv
import io
import json
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.user_code.calls import cause_of

FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_SHARE = re.compile(r"(0?\.\d+)")


Row = dict[str, Any]
"""Values by column."""


def is_missing(value: Any) -> bool:
    """Return whether a value stands for none: None, NaN, and NaT and NA of pandas."""
    if value is None:
        return True
    if isinstance(value, str | bool | int | list | dict | tuple):
        return False
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    try:
        return bool(value != value)  # only NaN differs from itself
    except (TypeError, ValueError):  # an array
        return False


def _without_missing(row: Row) -> Row:
    """Return the row with None for each value that stands for none, so that NaN is never asked or compared as "nan"."""
    if any(value is not None and is_missing(value) for value in row.values()):
        return {column: None if is_missing(value) else value for column, value in row.items()}
    return row


class MemoryRows:
    """Rows that a config holds itself. Its own class, so that a saved config says how many there are and not what they are."""

    def __init__(self, rows: Any):
        """
        Args:
            rows: a list of dicts, or a pandas frame.

        Raises:
            ConfigError: it is neither, or has a row that is no dict.
        """
        records = rows.to_dict("records") if hasattr(rows, "to_dict") and hasattr(rows, "columns") else rows
        if not isinstance(records, list | tuple):
            raise ConfigError("dataset.rows", rows, "want a list of dicts or a pandas frame")
        for index, row in enumerate(records):
            if not isinstance(row, Mapping):
                raise ConfigError("dataset.rows", row, f"row {index} is a {type(row).__name__}, want a dict")
            if unnamed := [column for column in row if not isinstance(column, str)]:
                cure = f"row {index} has a column that is named by no text: rename it, such as df.columns = [...]"
                raise ConfigError("dataset.rows", unnamed[0], cure)
        self.records: list[Row] = [dict(row) for row in records]

    def __repr__(self) -> str:
        return f"<{len(self.records)} rows>"


class Rows(list[Row]):
    """Rows of a table, each with a place that a person finds it by."""

    def __init__(self, rows: Iterable[Row], lines: Sequence[int] | None = None):
        """``lines``: of the rows in their file, from 1; None: they have none."""
        super().__init__(map(_without_missing, rows))
        self._lines = lines

    def place(self, index: int) -> str:
        return f"row {index}" if self._lines is None else f"line {self._lines[index]}"

    def part(self, start: int, end: int) -> "Rows":
        return Rows(self[start:end], None if self._lines is None else self._lines[start:end])


class RowDataset(Dataset):
    """Each row is an example: its ``env_input`` is the row, a dict of its columns."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        path: NonEmptyStr | None = None
        """A local file (.jsonl, .json, .csv or .parquet), or a dataset of the hub."""
        rows: MemoryRows | None = None
        """Instead of a path: ``MemoryRows(a list of dicts or a pandas frame)``."""
        name: str | None = None
        """The hub dataset's configuration, where it has several."""
        split: NonEmptyStr = "train"
        """A split, or a slice of one, such as "train[:95%]" and "train[95%:]"; a file is all one split, whatever its name.
        A share, such as "0.9": the first nine tenths of the split "train"; the command's tasks validate on the rest."""
        demonstration_column: NonEmptyStr = "demonstration"
        """Where a row has one: the text that OPSD shows the policy (``DataSample.info["demonstration"]``)."""

        @property
        def file(self) -> Path | None:
            """The local file, if ``path`` names one."""
            return Path(self.path).expanduser() if self.path and Path(self.path).suffix in FILE_FORMATS else None

        def rest(self) -> "RowDataset.Config | None":
            """What a share leaves of the rows; None where ``split`` is none."""
            return replace(self, split=_SHARE.sub(r"\g<0>:", self.split)) if _SHARE.fullmatch(self.split) else None

        @property
        def sliced(self) -> str:
            """The split, with a share as a slice of it."""
            found = re.fullmatch(f"({_SHARE.pattern})(:?)", self.split)
            if found is None:
                return self.split
            percent = f"{100 * float(found[1]):.12g}%"
            return f"train[{percent}:]" if found[3] else f"train[:{percent}]"

        def validate(self, *, field: str) -> None:
            if self.file is not None and self.name is not None:
                raise ConfigError(f"{field}.name", self.name, "only datasets of the hub have one: leave it out for a file")
            if self.path is not None and self.rows is not None:
                raise ConfigError(f"{field}.path", self.path, "the dataset has rows of its own too: name one of the two")

        def check_present(self, *, field: str) -> None:
            """Reads a file, row by row. A dataset of the hub is downloaded when the command builds the task."""
            if self.path is None and self.rows is None:
                cure = (
                    f"names no data: give a .jsonl, .json, .csv or .parquet file: --{field.replace('_', '-')}.path mine.jsonl"
                )
                raise MissingError(f"{field}.path", None, cure)
            if self.file is not None or self.rows is not None:
                load_rows(self, field=field)

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.rows = load_rows(config, field="dataset")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> DataSample:
        row = self.rows[index]
        text = row.get(self.config.demonstration_column)
        return DataSample(sample_id=str(index), env_input=row, info={} if text is None else {"demonstration": str(text)})


def load_rows(config: RowDataset.Config, *, field: str) -> Rows:
    """The rows, in their order. A column that a row of a file lacks is None there, and so is NaN, and pandas' NaT and NA.

    Raises:
        MissingError: no such file.
        ConfigError: it can't be read, or is empty; names the line or the row at fault.
    """
    if config.rows is not None:
        if not config.rows.records:
            raise ConfigError(f"{field}.rows", config.rows, "has no rows")
        return _slice(Rows(config.rows.records), config, field=field)
    if config.path is None:
        raise ConfigError(f"{field}.path", None, "names no data")
    file = config.file
    if file is None:
        if Path(config.path).expanduser().is_file():
            raise ConfigError(f"{field}.path", config.path, f"want a file of one of the kinds {', '.join(FILE_FORMATS)}")
        return Rows(_load_from_hub(config, field=field).to_list())
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(f"{field}.path", config.path, "is no file")
        rows = _parquet(file) if file.suffix == ".parquet" else READERS[file.suffix](_text_of(file))
    except FileNotFoundError:
        raise MissingError(f"{field}.path", config.path, "no such file") from None
    except _Unreadable as error:
        raise ConfigError(f"{field}.path", config.path, str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.path", config.path, f"can't be read: {cause_of(error)}") from None
    if not rows:
        raise ConfigError(f"{field}.path", config.path, "is empty: want at least one row")
    return _slice(rows, config, field=field)


def _slice(rows: Rows, config: RowDataset.Config, *, field: str) -> Rows:
    """The part of a file that ``config.split`` names."""
    name, bracket, _ = config.sliced.partition("[")
    if not bracket:
        return rows
    import datasets  # takes a second: only runs that need it wait for it

    try:
        (part,) = datasets.ReadInstruction.from_spec(config.sliced).to_absolute({name: len(rows)})
    except Exception as error:  # the library's own types
        raise ConfigError(f"{field}.split", config.split, f'names no part, such as "train[:95%]": {cause_of(error)}') from error
    found = rows.part(part.from_, part.to)
    if not found:
        raise ConfigError(f"{field}.split", config.split, f"is empty: there are {len(rows)} rows")
    return found


def row_datasets(data: Any, validation: Any, split: float | None) -> tuple[Dataset.Config, Dataset.Config | None]:
    """The configs of what is trained on and of what is validated on; ``question_task`` says what the arguments may be.

    Raises:
        ConfigError: the data is none of these, or the split no share.
    """
    dataset = _dataset(data, "dataset")
    if split is not None:
        if not isinstance(dataset, RowDataset.Config) or not 0 < split < 1:
            raise ConfigError("split", split, "must be a share of rows, above 0 and below 1")
        dataset = replace(dataset, split=str(split))
    return dataset, dataset.rest() if validation is None else _dataset(validation, "validation")


def _dataset(data: Any, field: str) -> Dataset.Config:
    if isinstance(data, Dataset.Config):
        return data
    if isinstance(data, str | Path):
        return RowDataset.Config(path=str(data))
    if isinstance(data, type) or not (isinstance(data, list | tuple) or hasattr(data, "columns")):
        cure = "want a file, a dataset of the hub, a list of dicts, a pandas frame, or a dataset's config"
        raise ConfigError(field, data, cure)
    return RowDataset.Config(rows=MemoryRows(data))


# ---- files


class _Unreadable(Exception):
    """What is wrong with a file, and what to do."""


def _text_of(file: Path) -> str:
    """A byte order mark is left out."""
    data = file.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:1000]:
        raise _Unreadable(f"is UTF-16 or no text: `iconv -f UTF-16 -t UTF-8 {file.name}` makes UTF-8 of UTF-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"line {line} is no UTF-8 (byte 0x{data[error.start]:02x}): save the file as UTF-8") from None


def _json_lines(text: str) -> Rows:
    rows: dict[int, Row] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                fault = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                cure = 'write a whole {"column": value, ...} in each line, or remove it'
                raise _Unreadable(f"line {number} is no JSON ({fault}): {repr(line[:60])}; {cure}") from None
            rows[number] = _object(row, f"line {number}")
    return Rows(_with_all_columns([*rows.values()]), [*rows])


def _json(text: str) -> Rows:
    """A list of objects, or JSON lines."""
    if not text.lstrip().startswith("["):
        return _json_lines(text)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is no JSON: {error}; want a list of objects") from None
    return Rows(_with_all_columns([_object(row, f"row {index}") for index, row in enumerate(rows)]))


def _csv(text: str) -> Rows:
    """Return the rows of a CSV file. Every value is the file's text, and None where that is empty.

    A guess that a column holds numbers would depend on all its rows, and ``"42" == 42`` is False in a reward function.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    limit = csv.field_size_limit(sys.maxsize)
    columns: list[str] = []
    lines: dict[int, list[str]] = {}
    line = 1
    try:
        for row in reader:
            if not columns:
                columns = [column.strip() for column in row]
                _check_separator(columns)
            elif row and len(row) != len(columns):
                counts = f"line {line} has {len(row)} values, and the header {len(columns)} columns ({', '.join(columns)})"
                raise _Unreadable(f"{counts}: quote a value that has a comma")
            elif row:
                lines[line] = row
            line = reader.line_num + 1
    except csv.Error as error:
        raise _Unreadable(f"line {line} is no CSV ({error}): see to its quotes") from None
    finally:
        csv.field_size_limit(limit)
    if len(set(columns)) < len(columns):
        raise _Unreadable(f"its first line names a column twice ({', '.join(columns)}): it must be a header of different names")
    rows = (dict(zip(columns, (value or None for value in row), strict=True)) for row in lines.values())
    return Rows(rows, [*lines])


def _check_separator(columns: list[str]) -> None:
    """Refuse a header that is one column with the separators of another kind of file in it."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and separator in columns[0]:
            raise _Unreadable(
                f"its columns are separated by {name} ({columns[0]!r}), want commas: "
                f"pandas.read_csv(path, sep={separator!r}).to_csv(path, index=False) writes them"
            )


def _parquet(file: Path) -> Rows:
    import pyarrow.parquet  # only runs that need it wait for it

    try:
        return Rows(pyarrow.parquet.read_table(file).to_pylist())
    except pyarrow.ArrowException as error:
        raise _Unreadable(f"is no Parquet file that can be read: {' '.join(str(error).split())}") from None


READERS: dict[str, Callable[[str], Rows]] = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        hint = "; a file that is one list is named .json" if isinstance(row, list) else ""
        raise _Unreadable(f'{place} is {shown(row)}, want an object: {{"column": value, ...}}{hint}')
    try:
        "".join(value for value in row.values() if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        raise _Unreadable(f"{place} has half of a character (a lone surrogate), which no tokenizer takes: remove it") from None
    return row


def _with_all_columns(rows: list[Row]) -> list[Row]:
    empty = dict.fromkeys(column for row in rows for column in row)
    return [row if len(row) == len(empty) else empty | row for row in rows]


# ---- the hub


def _load_from_hub(config: RowDataset.Config, *, field: str) -> Any:
    """The dataset that ``config.path`` names, as a ``datasets.Dataset``. Raises as ``load_rows`` does."""
    import datasets  # takes a second: only runs that need it wait for it

    assert config.path is not None
    fault = hub_fault()
    try:
        with without_hub() if fault else contextlib.nullcontext():
            return datasets.load_dataset(config.path, config.name, split=config.sliced)
    except Exception as error:  # the hub, the network, the parsers and the library itself raise different types
        cause = f"can't be loaded: {cause_of(error.__cause__ or error)}"
        if fault is not None:
            cause = f"is no file, and was never downloaded from the hub ({fault}): name a .jsonl, .json, .csv or .parquet file"
        raise ConfigError(f"{field}.path", config.path, cause) from error
