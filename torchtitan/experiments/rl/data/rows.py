"""A dataset of rows: files, a dataset of the hub or of ``save_to_disk``, a table in memory or a list of dicts."""

import codecs
import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError, cause_of
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.rollouts.types import DataSample

FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
GZIP = ".gz"
_KINDS = f"of one of the kinds {', '.join(FILE_FORMATS)}, or of text and {GZIP}"
SAVED_SPLITS, SAVED_ROWS = "dataset_dict.json", "state.json"
"""Files that ``datasets`` writes into a folder by ``save_to_disk``: of several splits, and of one."""
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
            rows: a list of dicts; a frame of pandas or polars, a ``datasets.Dataset`` or a table of pyarrow.

        Raises:
            ConfigError: it is none of these, or has a row that is no dict.
        """
        records = _records(rows)
        if records is None:
            raise ConfigError("dataset.rows", _kind(rows), f"want {_IN_MEMORY}{_way_out(rows)}")
        for index, row in enumerate(records):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    "dataset.rows", row, f"row {index} is a {type(row).__name__}, want a dict"
                )
            if unnamed := [column for column in row if not isinstance(column, str)]:
                cure = f"row {index} has a column that is named by no text: rename it, such as df.columns = [...]"
                raise ConfigError("dataset.rows", unnamed[0], cure)
        self.records: list[Row] = [dict(row) for row in records]

    def __repr__(self) -> str:
        return f"<{len(self.records)} rows>"


_IN_MEMORY = (
    "a list of dicts, a frame of pandas or polars, a datasets.Dataset or a table of pyarrow"
)


def _records(rows: Any) -> list | tuple | None:
    """Return the rows of a table in memory, whichever library made it; None where it is no such table."""
    if isinstance(rows, list | tuple):
        return rows
    named = hasattr(rows, "columns") or hasattr(rows, "column_names")
    if not named or not hasattr(rows, "__len__") or isinstance(rows, type | Mapping):
        return None
    for method in ("to_dicts", "to_pylist", "to_list"):  # of polars, pyarrow, and datasets
        if hasattr(rows, method):
            return getattr(rows, method)()
    return rows.to_dict("records") if hasattr(rows, "to_dict") else None


def _kind(value: Any) -> str:
    """Return the type of a value, by its module: a table's own text takes many lines."""
    kind = value if isinstance(value, type) else type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    )


def _way_out(value: Any) -> str:
    """Return how to make rows of what is nearly some, to follow an error; empty where it is nothing of the kind."""
    if (
        isinstance(value, Mapping)
        and value
        and all(_records(part) is not None for part in value.values())
    ):
        first, *others = map(repr, value)
        if all(hasattr(part, "column_names") for part in value.values()):
            return f": name a split, such as data[{first}]" + (
                f", and validation=data[{others[0]}]" if others else ""
            )
        return ": pandas.DataFrame(data) makes rows of columns"
    if hasattr(value, "column_names") and hasattr(value, "take"):
        return ": it is read as it is needed and has no length; list(data.take(10_000)) are its first rows"
    return ""


class Rows(list[Row]):
    """Rows of a table, each with a place that a person finds it by."""

    def __init__(self, rows: Iterable[Row], places: Sequence[str] | None = None):
        """
        Args:
            places: for each row where it stands in its file, such as "line 3". None: errors name a row by its number.
        """
        super().__init__(map(_without_missing, rows))
        self._places = places

    def place(self, index: int) -> str:
        return f"row {index}" if self._places is None else self._places[index]

    def part(self, start: int, end: int) -> "Rows":
        return Rows(self[start:end], None if self._places is None else self._places[start:end])


class RowDataset(Dataset):
    """Each row is an example: its ``env_input`` is the row, a dict of its columns."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        path: NonEmptyStr | None = None
        """A local file (.jsonl, .json, .csv, .tsv or .parquet; text also as .gz), several by a pattern such as
        "shards/*.parquet", a folder of ``save_to_disk``, or a dataset of the hub."""
        rows: MemoryRows | None = None
        """Instead of a path: ``MemoryRows(a list of dicts or a table, such as a pandas frame)``."""
        name: str | None = None
        """The hub dataset's configuration, where it has several."""
        split: NonEmptyStr = "train"
        """A split, or a slice of one, such as "train[:95%]" and "train[95%:]"; a file is all one split, whatever its name.
        A share, such as "0.9": the first nine tenths of the split "train"; the command's tasks validate on the rest."""
        demonstration_column: NonEmptyStr = "demonstration"
        """Where a row has one: the text that OPSD shows the policy (``DataSample.info["demonstration"]``)."""

        @property
        def is_local(self) -> bool:
            """True if ``path`` names files, by their kind or by a pattern, or a folder of ``save_to_disk``."""
            if self.path is None:
                return False
            path = Path(self.path).expanduser()
            return glob.has_magic(self.path) or format_of(path) is not None or _is_saved(path)

        def rest(self) -> "RowDataset.Config | None":
            """What a share leaves of the rows; None where ``split`` is none."""
            return (
                replace(self, split=_SHARE.sub(r"\g<0>:", self.split))
                if _SHARE.fullmatch(self.split)
                else None
            )

        @property
        def sliced(self) -> str:
            """The split, with a share as a slice of it."""
            found = re.fullmatch(f"({_SHARE.pattern})(:?)", self.split)
            if found is None:
                return self.split
            percent = f"{100 * float(found[1]):.12g}%"
            return f"train[{percent}:]" if found[3] else f"train[:{percent}]"

        def validate(self, *, field: str) -> None:
            if self.is_local and self.name is not None:
                raise ConfigError(
                    f"{field}.name",
                    self.name,
                    "only datasets of the hub have one: leave it out for a file",
                )
            if self.path is not None and self.rows is not None:
                raise ConfigError(
                    f"{field}.path",
                    self.path,
                    "the dataset has rows of its own too: name one of the two",
                )

        def check_present(self, *, field: str) -> None:
            """Reads a file, row by row. A dataset of the hub is downloaded when the command builds the task."""
            if self.path is None and self.rows is None:
                option = f"--{field.replace('_', '-')}.path mine.jsonl"
                cure = f"names no data: give a .jsonl, .json, .csv or .parquet file: {option}"
                raise MissingError(f"{field}.path", None, cure)
            if self.is_local or self.rows is not None:
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
        return DataSample(
            sample_id=str(index),
            env_input=row,
            info={} if text is None else {"demonstration": str(text)},
        )


def load_rows(config: RowDataset.Config, *, field: str) -> Rows:
    """The rows, in their order. A column that a row lacks is None there, and so is NaN, and pandas' NaT and NA.

    Raises:
        MissingError: no such file.
        ConfigError: it can't be read, or is empty; names the line or the row at fault.
    """
    if config.rows is not None:
        if not config.rows.records:
            raise ConfigError(f"{field}.rows", config.rows, "has no rows")
        return _slice(Rows(_with_all_columns(config.rows.records)), config, field=field)
    if config.path is None:
        raise ConfigError(f"{field}.path", None, "names no data")
    path = Path(config.path).expanduser()
    if not config.is_local:
        if path.is_file():
            raise ConfigError(f"{field}.path", config.path, f"want a file {_KINDS}")
        return Rows(_load_from_hub(config, field=field).to_list())
    if glob.has_magic(config.path) and not os.path.exists(path):
        rows = _rows_of_all(config.path, field=f"{field}.path")
    elif _is_saved(path):
        rows = _saved_rows(path, config, field=field)
    else:
        rows = _rows_of(path, config.path, field=f"{field}.path")
    if not rows:
        raise ConfigError(f"{field}.path", config.path, "is empty: want at least one row")
    return _slice(rows, config, field=field)


def format_of(file: Path) -> str | None:
    """Return the kind of a file by its name: ".jsonl" of "a.jsonl" and of "a.JSONL.gz"; None where it is none of rows."""
    suffix = Path(file.name.lower().removesuffix(GZIP)).suffix
    return suffix if suffix in FILE_FORMATS else None


def _rows_of(file: Path, named: str, *, field: str) -> Rows:
    """Return the rows of one file; ``named``: its path as errors show it. Raises as ``load_rows`` does."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(field, named, "is no file")
        kind = format_of(file)
        if kind is None:
            raise ConfigError(field, named, f"want a file {_KINDS}")
        return _parquet(file) if kind == ".parquet" else READERS[kind](_text_of(file))
    except FileNotFoundError:
        raise MissingError(field, named, "no such file") from None
    except _Unreadable as error:
        raise ConfigError(field, named, str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(field, named, f"can't be read: {cause_of(error)}") from None


def _rows_of_all(pattern: str, *, field: str) -> Rows:
    """Return the rows of the files that a pattern names, in the order of their names. Raises as ``load_rows`` does."""
    files = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    if not files:
        raise MissingError(field, pattern, "no file fits this pattern")
    rows: list[Row] = []
    places: list[str] = []
    for file in files:
        part = _rows_of(Path(file), file, field=field)
        rows += part
        places += [f"{Path(file).name}, {part.place(index)}" for index in range(len(part))]
    return Rows(_with_all_columns(rows), places)


def _is_saved(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in (SAVED_SPLITS, SAVED_ROWS))


def _saved_rows(folder: Path, config: RowDataset.Config, *, field: str) -> Rows:
    """Return the rows of a folder that ``save_to_disk`` wrote; ``config.split`` names a split where it has several."""
    import datasets  # takes a second: only runs that need it wait for it

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library and its parsers raise different types
        raise ConfigError(
            f"{field}.path", config.path, f"can't be read: {cause_of(error)}"
        ) from error
    if isinstance(saved, Mapping):
        name = config.sliced.partition("[")[0]
        if name not in saved:
            raise ConfigError(
                f"{field}.split",
                config.split,
                f"{config.path} has the splits {', '.join(saved)}: name one",
            )
        saved = saved[name]
    return Rows(saved.to_list())


def _slice(rows: Rows, config: RowDataset.Config, *, field: str) -> Rows:
    """The part of a file that ``config.split`` names."""
    name, bracket, _ = config.sliced.partition("[")
    if not bracket:
        return rows
    import datasets  # takes a second: only runs that need it wait for it

    try:
        (part,) = datasets.ReadInstruction.from_spec(config.sliced).to_absolute({name: len(rows)})
    except Exception as error:  # the library's own types
        raise ConfigError(
            f"{field}.split",
            config.split,
            f'names no part, such as "train[:95%]": {cause_of(error)}',
        ) from error
    found = rows.part(part.from_, part.to)
    if not found:
        raise ConfigError(f"{field}.split", config.split, f"is empty: there are {len(rows)} rows")
    return found


def row_datasets(
    data: Any, validation: Any, split: float | None
) -> tuple[Dataset.Config, Dataset.Config | None]:
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
    if _records(data) is None:
        cure = f"want a file, a dataset of the hub, {_IN_MEMORY}, or a dataset's config{_way_out(data)}"
        raise ConfigError(field, _kind(data), cure)
    return RowDataset.Config(rows=MemoryRows(data))


# ---- files


class _Unreadable(Exception):
    """What is wrong with a file, and what to do."""


def _text_of(file: Path) -> str:
    """A byte order mark is left out."""
    data = file.read_bytes()
    if file.name.lower().endswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise _Unreadable(f"is no whole {GZIP} file ({error}): compress it again") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:1000]:
        raise _Unreadable(
            f"is UTF-16 or no text: `iconv -f UTF-16 -t UTF-8 {file.name}` makes UTF-8 of UTF-16"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Unreadable(
            f"line {line} is no UTF-8 (byte 0x{data[error.start]:02x}): save the file as UTF-8"
        ) from None


def _json_lines(text: str) -> Rows:
    rows: dict[int, Row] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                fault = (
                    f"{error.msg} at character {error.colno}"
                    if isinstance(error, json.JSONDecodeError)
                    else str(error)
                )
                cure = 'write a whole {"column": value, ...} in each line, or remove it'
                raise _Unreadable(
                    f"line {number} is no JSON ({fault}): {repr(line[:60])}; {cure}"
                ) from None
            rows[number] = _object(row, f"line {number}")
    return Rows(_with_all_columns([*rows.values()]), [f"line {number}" for number in rows])


def _json(text: str) -> Rows:
    """A list of objects, or JSON lines."""
    if not text.lstrip().startswith("["):
        return _json_lines(text)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is no JSON: {error}; want a list of objects") from None
    return Rows(_with_all_columns([_object(row, f"row {index}") for index, row in enumerate(rows)]))


def _csv(text: str, separator: str = ",") -> Rows:
    """Return the rows of a file of columns. Every value is the file's text, and None where that is empty.

    A guess that a column holds numbers would depend on all its rows, and ``"42" == 42`` is False in a reward function.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        strict=True,
        skipinitialspace=separator == ",",
    )
    limit = csv.field_size_limit(sys.maxsize)
    columns: list[str] = []
    lines: dict[int, list[str]] = {}
    line = 1
    try:
        for row in reader:
            if not columns:
                columns = [column.strip() for column in row]
                _check_separator(columns, separator)
            elif row and len(row) != len(columns):
                counts = f"line {line} has {len(row)} values, and the header {len(columns)} columns ({', '.join(columns)})"
                raise _Unreadable(
                    f"{counts}: quote a value that has a {'comma' if separator == ',' else 'tab'}"
                )
            elif row:
                lines[line] = row
            line = reader.line_num + 1
    except csv.Error as error:
        raise _Unreadable(f"line {line} is no CSV ({error}): see to its quotes") from None
    finally:
        csv.field_size_limit(limit)
    if len(set(columns)) < len(columns):
        raise _Unreadable(
            f"its first line names a column twice ({', '.join(columns)}): it must be a header of different names"
        )
    rows = (
        dict(zip(columns, (value or None for value in row), strict=True)) for row in lines.values()
    )
    return Rows(rows, [f"line {number}" for number in lines])


def _tsv(text: str) -> Rows:
    return _csv(text, "\t")


def _check_separator(columns: list[str], wanted: str) -> None:
    """Refuse a header that is one column with the separators of another kind of file in it."""
    for separator, name in ((",", "commas"), (";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and separator != wanted and separator in columns[0]:
            cure = f"pandas.read_csv(path, sep={separator!r}, dtype=str).to_csv('rows.csv', index=False) writes commas"
            if separator != ";":
                cure = f"name the file {'.csv' if separator == ',' else '.tsv'}"
            raise _Unreadable(f"its columns are separated by {name} ({columns[0]!r}): {cure}")


def _parquet(file: Path) -> Rows:
    import pyarrow.parquet  # only runs that need it wait for it

    try:
        return Rows(pyarrow.parquet.read_table(file).to_pylist())
    except pyarrow.ArrowException as error:
        raise _Unreadable(
            f"is no Parquet file that can be read: {' '.join(str(error).split())}"
        ) from None


READERS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        hint = "; a file that is one list is named .json" if isinstance(row, list) else ""
        raise _Unreadable(
            f'{place} is {shown(row)}, want an object: {{"column": value, ...}}{hint}'
        )
    try:
        "".join(value for value in row.values() if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        raise _Unreadable(
            f"{place} has half of a character (a lone surrogate), which no tokenizer takes: remove it"
        ) from None
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
    except (
        Exception
    ) as error:  # the hub, the network, the parsers and the library itself raise different types
        cause = f"can't be loaded: {cause_of(error.__cause__ or error)}"
        if fault is not None and not os.path.isdir(Path(config.path).expanduser()):
            cause = f"is no file, and was never downloaded from the hub ({fault}): name a .jsonl, .json, .csv or .parquet file"
        raise ConfigError(f"{field}.path", config.path, cause) from error
