"""Reads the rows of one file: JSON lines, JSON, Parquet, CSV or TSV; text also compressed.

A fault names the line or the row, what is wrong there, and the cure. It is raised as Unreadable,
and the caller adds which file it is.
"""

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.experiments.rl.printable import shown

GZIP = ".gz"

Row = dict[str, Any]
"""Values of a row, by column."""


class FileRows(NamedTuple):
    """Rows of a file, and where they stand in it."""

    rows: list[Row]
    locations: Sequence[str] | None = None
    """Place of each row, such as "line 3"; None if a row is known by its number alone."""


class Unreadable(Exception):
    """A file whose rows can't be read. The message is what is wrong, and the cure."""


def format_of(file: Path) -> str | None:
    """Return the kind of a file by its name: ".jsonl" of "a.jsonl" and of "a.JSONL.gz".

    None stands for a file of no kind in `FILE_FORMATS`.
    """
    suffix = Path(file.name.lower().removesuffix(GZIP)).suffix
    return suffix if suffix in FILE_FORMATS else None


def read_file(file: Path, kind: str) -> FileRows:
    """Return the rows of a file.

    Args:
        kind: one of `FILE_FORMATS`.

    Raises:
        Unreadable: the file is not of its kind, or a row of it can't be used.
        OSError: the disk, or the rights on the file, keep it from being read.
    """
    if kind == ".parquet":
        return _read_parquet(file)
    return TEXT_READERS[kind](_read_text(file))


def with_all_columns(rows: list[Row]) -> list[Row]:
    """Return rows that all have the same columns: None where a row lacks one."""
    empty = dict.fromkeys(column for row in rows for column in row)
    return [row if len(row) == len(empty) else empty | row for row in rows]


def _read_text(file: Path) -> str:
    """Return the text of a file, decompressed and without a byte order mark."""
    data = file.read_bytes()
    if file.name.lower().endswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"is no whole {GZIP} file ({error}): compress it again") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:1000]:
        raise Unreadable(
            f"is UTF-16 or no text: `iconv -f UTF-16 -t UTF-8 {file.name}` makes UTF-8 of UTF-16"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise Unreadable(
            f"line {line} is no UTF-8 (byte 0x{byte:02x}): save the file as UTF-8"
        ) from None


# ---- JSON


def _read_json_lines(text: str) -> FileRows:
    """Return the objects of the lines that are not empty."""
    rows: list[Row] = []
    locations: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped:
            location = f"line {number}"
            rows.append(_json_line(stripped, location))
            locations.append(location)
    return FileRows(with_all_columns(rows), locations)


def _json_line(line: str, location: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        fault = str(error)
        if isinstance(error, json.JSONDecodeError):
            fault = f"{error.msg} at character {error.colno}"
        cure = 'write a whole {"column": value, ...} in each line, or remove it'
        raise Unreadable(f"{location} is no JSON ({fault}): {line[:60]!r}; {cure}") from None
    return _checked_object(value, location)


def _read_json(text: str) -> FileRows:
    """Return the objects of a list. A file without a list is read as JSON lines."""
    if not text.lstrip().startswith("["):
        return _read_json_lines(text)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is no JSON: {error}; want a list of objects") from None
    rows = [_checked_object(value, f"row {index}") for index, value in enumerate(values)]
    return FileRows(with_all_columns(rows))


def _checked_object(value: object, location: str) -> Row:
    """Return a value that is an object of JSON, whose texts have an encoding.

    Raises:
        Unreadable: the value is something else.
    """
    if not isinstance(value, dict):
        hint = "; a file that is one list is named .json" if isinstance(value, list) else ""
        raise Unreadable(
            f'{location} is {shown(value)}, want an object: {{"column": value, ...}}{hint}'
        )
    try:
        "".join(entry for entry in value.values() if isinstance(entry, str)).encode()
    except UnicodeEncodeError:
        raise Unreadable(
            f"{location} has half of a character (a lone surrogate), which no tokenizer takes: "
            "remove it"
        ) from None
    return value


# ---- tables


def _read_csv(text: str, separator: str = ",") -> FileRows:
    """Return the rows under a header.

    Every value is the file's text, and None where that is empty. A guess that a column holds
    numbers would depend on all its rows, and ``"42" == 42`` is False in a reward function.
    """
    limit = csv.field_size_limit(sys.maxsize)
    try:
        columns, lines = _csv_lines(text, separator)
    finally:
        csv.field_size_limit(limit)
    if len(set(columns)) < len(columns):
        raise Unreadable(
            f"its first line names a column twice ({', '.join(columns)}): "
            "it must be a header of different names"
        )
    rows = [
        dict(zip(columns, (value or None for value in values), strict=True))
        for values in lines.values()
    ]
    return FileRows(rows, [f"line {number}" for number in lines])


def _csv_lines(text: str, separator: str) -> tuple[list[str], dict[int, list[str]]]:
    """Return the header, and the values of each row by the line that the row begins in."""
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        strict=True,
        skipinitialspace=separator == ",",
    )
    columns: list[str] = []
    lines: dict[int, list[str]] = {}
    line = 1
    try:
        for values in reader:
            if not columns:
                columns = [column.strip() for column in values]
                _check_separator(columns, separator)
            elif values:
                _check_count(values, columns, line, separator)
                lines[line] = values
            line = reader.line_num + 1  # a quoted value may have several lines
    except csv.Error as error:
        raise Unreadable(f"line {line} is no CSV ({error}): see to its quotes") from None
    return columns, lines


def _check_separator(columns: list[str], wanted: str) -> None:
    """Refuse a header that is one column with the separators of another kind of file in it."""
    for separator, name in ((",", "commas"), (";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and separator != wanted and separator in columns[0]:
            cure = f"name the file {'.csv' if separator == ',' else '.tsv'}"
            if separator == ";":
                cure = (
                    "pandas.read_csv(path, sep=';', dtype=str).to_csv('rows.csv', index=False) "
                    "writes commas"
                )
            raise Unreadable(f"its columns are separated by {name} ({columns[0]!r}): {cure}")


def _check_count(values: list[str], columns: list[str], line: int, separator: str) -> None:
    """Refuse a row that has more or fewer values than the header has columns."""
    if len(values) != len(columns):
        name = "comma" if separator == "," else "tab"
        raise Unreadable(
            f"line {line} has {len(values)} values, and the header {len(columns)} columns "
            f"({', '.join(columns)}): quote a value that has a {name}"
        )


def _read_tsv(text: str) -> FileRows:
    return _read_csv(text, "\t")


def _read_parquet(file: Path) -> FileRows:
    import pyarrow.parquet  # only runs that need it wait for it

    try:
        return FileRows(pyarrow.parquet.read_table(file).to_pylist())
    except pyarrow.ArrowException as error:
        cause = " ".join(str(error).split())
        raise Unreadable(f"is no Parquet file that can be read: {cause}") from None


TEXT_READERS: dict[str, Callable[[str], FileRows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}
"""Function that reads a file's text, by the kind of the file."""
FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""Kinds of files of rows, by the ends of their names."""
