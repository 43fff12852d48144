"""A dataset whose examples are rows, and the ways to get the rows.

    RowDataset.Config ──▶ load_rows ──▶ rows in memory     a list of dicts, or a table
                                   ──▶ files               `row_files.py`, by name or pattern
                                   ──▶ a saved dataset     of ``datasets``, by ``save_to_disk``
                                   ──▶ a dataset of the hub

`row_datasets` makes such configs of what the author of a task gives.
"""

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.digest import digest_of
from torchtitan.experiments.rl.data.row_files import (
    FILE_FORMATS,
    GZIP,
    Row,
    Unreadable,
    format_of,
    read_file,
    with_all_columns,
)
from torchtitan.experiments.rl.errors import ConfigError, MissingError, cause_of
from torchtitan.experiments.rl.printable import perhaps_meant
from torchtitan.experiments.rl.rollouts.types import DataSample

SAVED_FILES = ("dataset_dict.json", "state.json")
"""Files that ``save_to_disk`` of ``datasets`` writes into a folder: one of them, for several splits
or for one."""
WANTED_FILE = f"want a file of one of the kinds {', '.join(FILE_FORMATS)}, or of text and {GZIP}"
WANTED_TABLE = (
    "a list of dicts, a frame of pandas or polars, a datasets.Dataset or a table of pyarrow"
)
ADVICE_ON_COLUMNS = ": pandas.DataFrame(data) makes rows of columns"
ADVICE_ON_STREAM = (
    ": it is read as it is needed and has no length; list(data.take(10_000)) are its first rows"
)
SHARE = re.compile(r"(0?\.\d+)(:?)")
"""Pattern of a split that is a share of the rows: "0.9", or "0.9:" for the rows after it."""


# ---- rows


def is_missing(value: object) -> bool:
    """Return True if a value stands for none: None, NaN, and NaT and NA of pandas."""
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


class Rows(list[Row]):
    """Rows of a table, each with a location that a person finds it by.

    A missing value is None in them, so that NaN is never asked or compared as "nan".
    """

    def __init__(self, rows: Iterable[Row], locations: Sequence[str] | None = None):
        """Copy the rows that have a missing value, and keep the others.

        Args:
            locations: location of each row in its file, such as "line 3". None if errors should
                name a row by its number.
        """
        super().__init__(map(_with_none, rows))
        self._locations = locations

    def location(self, index: int) -> str:
        """Return the location of a row, for an error."""
        return f"row {index}" if self._locations is None else self._locations[index]

    def part(self, start: int, end: int) -> "Rows":
        """Return the rows from ``start`` to before ``end``."""
        locations = None if self._locations is None else self._locations[start:end]
        return Rows(self[start:end], locations)


def _with_none(row: Row) -> Row:
    """Return a row with None for each value that stands for none."""
    if any(value is not None and is_missing(value) for value in row.values()):
        return {column: None if is_missing(value) else value for column, value in row.items()}
    return row


class MemoryRows:
    """Rows that a config holds itself.

    They have a class of their own so that a saved config says how many there are, and not what is
    in them.
    """

    def __init__(self, rows: object):
        """Copy the rows.

        Args:
            rows: list of dicts, or a table of pandas, polars, ``datasets`` or pyarrow.

        Raises:
            ConfigError: these are no rows, or a row is no dict whose columns have names.
        """
        records = _records(rows)
        if records is None:
            cure = f"want {WANTED_TABLE}{_advice(rows)}"
            raise ConfigError("dataset.rows", _type_name(rows), cure)
        for index, row in enumerate(records):
            self._check_row(index, row)
        self.records: list[Row] = [dict(row) for row in records]

    @staticmethod
    def _check_row(index: int, row: object) -> None:
        if not isinstance(row, Mapping):
            cure = f"row {index} is a {type(row).__name__}, want a dict"
            raise ConfigError("dataset.rows", row, cure)
        for column in row:
            if not isinstance(column, str):
                cure = (
                    f"row {index} has a column that is named by no text: rename it, such as "
                    "df.columns = [...]"
                )
                raise ConfigError("dataset.rows", column, cure)

    def __repr__(self) -> str:
        return f"<{len(self.records)} rows>"


def _records(rows: object) -> list | tuple | None:
    """Return the rows of a table in memory, whichever library made it; None if it is no table."""
    if isinstance(rows, list | tuple):
        return rows
    has_columns = hasattr(rows, "columns") or hasattr(rows, "column_names")
    if not has_columns or not hasattr(rows, "__len__") or isinstance(rows, type | Mapping):
        return None
    for method in ("to_dicts", "to_pylist", "to_list"):  # of polars, pyarrow and datasets
        if hasattr(rows, method):
            return getattr(rows, method)()
    if hasattr(rows, "to_dict"):  # of pandas
        return rows.to_dict("records")
    return None


def _type_name(value: object) -> str:
    """Return the name of a value's type with its library: a table's own text takes many lines."""
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    library = kind.__module__.partition(".")[0]
    return f"{library}.{kind.__qualname__}"


def _advice(value: object) -> str:
    """Return how to make rows of a value that nearly has some, as the end of an error's text.

    The text is empty for a value that has none.
    """
    if isinstance(value, Mapping) and value:
        parts = list(value.values())
        if all(_records(part) is not None for part in parts):
            has_splits = all(hasattr(part, "column_names") for part in parts)
            return _advice_on_splits(*value) if has_splits else ADVICE_ON_COLUMNS
    if hasattr(value, "column_names") and hasattr(value, "take"):
        return ADVICE_ON_STREAM
    return ""


def _advice_on_splits(first: object, *others: object) -> str:
    validation = f", and validation=data[{others[0]!r}]" if others else ""
    return f": name a split, such as data[{first!r}]{validation}"


# ---- the dataset


class RowDataset(Dataset):
    """Dataset of rows. The ``env_input`` of an example is its row, a dict of its columns."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        path: NonEmptyStr | None = None
        """Local file (.jsonl, .json, .csv, .tsv or .parquet; text also as .gz), several by a
        pattern such as "shards/*.parquet", a folder of ``save_to_disk``, or a dataset of the
        hub."""
        rows: MemoryRows | None = None
        """Rows in place of a path: ``MemoryRows(a list of dicts or a table, such as a pandas
        frame)``."""
        name: str | None = None
        """Configuration of the hub's dataset, if it has several."""
        split: NonEmptyStr = "train"
        """Split, or a slice of one, such as "train[:95%]" and "train[95%:]". A file is all one
        split, whatever its name. A share, such as "0.9", stands for the first nine tenths of the
        split "train"; the command's tasks validate on the rest."""
        demonstration_column: NonEmptyStr = "demonstration"
        """Column with the text that OPSD shows the policy (``DataSample.info["demonstration"]``),
        if a row has it."""

        @property
        def is_local(self) -> bool:
            """True if ``path`` names files, by kind or pattern, or a folder of ``save_to_disk``."""
            if self.path is None:
                return False
            path = Path(self.path).expanduser()
            return glob.has_magic(self.path) or format_of(path) is not None or _is_saved(path)

        def rest(self) -> "RowDataset.Config | None":
            """Return the config of the rows that a share leaves; None if ``split`` is no share."""
            share = SHARE.fullmatch(self.split)
            if share is None or share[2]:
                return None
            return replace(self, split=f"{self.split}:")

        @property
        def sliced(self) -> str:
            """Split in the words of ``datasets``: a share is a slice of the split "train"."""
            share = SHARE.fullmatch(self.split)
            if share is None:
                return self.split
            percent = f"{100 * float(share[1]):.12g}%"
            return f"train[{percent}:]" if share[2] else f"train[:{percent}]"

        def validate(self, *, field: str) -> None:
            if self.is_local and self.name is not None:
                cure = "only datasets of the hub have one: leave it out for a file"
                raise ConfigError(f"{field}.name", self.name, cure)
            if self.path is not None and self.rows is not None:
                cure = "the dataset has rows of its own too: name one of the two"
                raise ConfigError(f"{field}.path", self.path, cure)

        def check_present(self, *, field: str) -> None:
            """Refuse data that is missing here, and read a file row by row.

            A dataset of the hub is downloaded later, when the command builds the task.

            Raises:
                MissingError: no data is named, or the file is not here.
                ConfigError: the file can't be read, or is empty.
            """
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

    def digest(self) -> str | None:
        return digest_of(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> DataSample:
        row = self.rows[index]
        text = row.get(self.config.demonstration_column)
        info = {} if text is None else {"demonstration": str(text)}
        return DataSample(sample_id=str(index), env_input=row, info=info)


def row_datasets(
    data: object, validation: object, split: float | None
) -> tuple[Dataset.Config, Dataset.Config | None]:
    """Return the configs of the data that is trained on, and of the data that is validated on.

    Args:
        data: path, rows in memory or a dataset's config, as `question_task` takes it.
        validation: the same; None for the rows that ``split`` leaves.
        split: share of the rows that is trained on; None for all.

    Raises:
        ConfigError: the data is something else, or the split is no share.
    """
    dataset = _dataset_of(data, "dataset")
    if split is not None:
        if not isinstance(dataset, RowDataset.Config) or not 0 < split < 1:
            raise ConfigError("split", split, "must be a share of rows, above 0 and below 1")
        dataset = replace(dataset, split=str(split))
    if validation is None:
        return dataset, dataset.rest()
    return dataset, _dataset_of(validation, "validation")


def _dataset_of(data: object, field: str) -> Dataset.Config:
    if isinstance(data, Dataset.Config):
        return data
    if isinstance(data, str | Path):
        return RowDataset.Config(path=str(data))
    if _records(data) is None:
        cure = (
            f"want a file, a dataset of the hub, {WANTED_TABLE}, or a dataset's config"
            f"{_advice(data)}"
        )
        raise ConfigError(field, _type_name(data), cure)
    return RowDataset.Config(rows=MemoryRows(data))


# ---- loading


def load_rows(config: RowDataset.Config, *, field: str) -> Rows:
    """Return the rows of a dataset, in their order.

    A column that a row lacks is None there, and so is a missing value.

    Args:
        field: path of the dataset's config, such as "tasks.math.dataset", for errors.

    Raises:
        MissingError: there is no such file.
        ConfigError: the data can't be read, or is empty; names the line or the row at fault.
    """
    if config.rows is not None:
        if not config.rows.records:
            raise ConfigError(f"{field}.rows", config.rows, "has no rows")
        return _slice(Rows(with_all_columns(config.rows.records)), config, field=field)
    if config.path is None:
        raise ConfigError(f"{field}.path", None, "names no data")
    if config.is_local:
        rows = _load_local(config.path, config, field=field)
        if not rows:
            raise ConfigError(f"{field}.path", config.path, "is empty: want at least one row")
        return _slice(rows, config, field=field)
    if Path(config.path).expanduser().is_file():
        raise ConfigError(f"{field}.path", config.path, WANTED_FILE)
    return _load_from_hub(config.path, config, field=field)


def _load_local(named: str, config: RowDataset.Config, *, field: str) -> Rows:
    """Return the rows of a file, of the files of a pattern, or of a saved dataset."""
    path = Path(named).expanduser()
    if glob.has_magic(named) and not os.path.exists(path):
        return _load_pattern(named, field=f"{field}.path")
    if _is_saved(path):
        return _load_saved(path, config, field=field)
    return _load_file(path, named, field=f"{field}.path")


def _load_file(file: Path, named: str, *, field: str) -> Rows:
    """Return the rows of one file.

    Args:
        named: path of the file as errors show it.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise Unreadable("is no file")
        kind = format_of(file)
        if kind is None:
            raise Unreadable(WANTED_FILE)
        rows, locations = read_file(file, kind)
    except FileNotFoundError:
        raise MissingError(field, named, f"no such file{perhaps_meant(file)}") from None
    except Unreadable as error:
        raise ConfigError(field, named, str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(field, named, f"can't be read: {cause_of(error)}") from None
    return Rows(rows, locations)


def _load_pattern(pattern: str, *, field: str) -> Rows:
    """Return the rows of the files that a pattern names, in the order of their names."""
    files = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    if not files:
        raise MissingError(field, pattern, "no file fits this pattern")
    rows: list[Row] = []
    locations: list[str] = []
    for file in files:
        rows_of_file = _load_file(Path(file), file, field=field)
        rows += rows_of_file
        name = Path(file).name
        locations += [
            f"{name}, {rows_of_file.location(index)}" for index in range(len(rows_of_file))
        ]
    return Rows(with_all_columns(rows), locations)


def _is_saved(folder: Path) -> bool:
    """Return True if ``save_to_disk`` wrote the folder."""
    return any(os.path.isfile(folder / name) for name in SAVED_FILES)


def _load_saved(folder: Path, config: RowDataset.Config, *, field: str) -> Rows:
    """Return the rows of a saved dataset: of the split that the config names, if it has several."""
    import datasets  # takes a second: only runs that need it wait for it

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # noqa: BLE001 - the library and its parsers raise different types
        cause = f"can't be read: {cause_of(error)}"
        raise ConfigError(f"{field}.path", config.path, cause) from error
    if isinstance(saved, Mapping):
        name = config.sliced.partition("[")[0]
        if name not in saved:
            cure = f"{config.path} has the splits {', '.join(saved)}: name one"
            raise ConfigError(f"{field}.split", config.split, cure)
        saved = saved[name]
    return Rows(saved.to_list())


def _slice(rows: Rows, config: RowDataset.Config, *, field: str) -> Rows:
    """Return the part of local rows that ``config.split`` names."""
    name, bracket, _ = config.sliced.partition("[")
    if not bracket:
        return rows
    import datasets  # takes a second: only runs that need it wait for it

    try:
        (part,) = datasets.ReadInstruction.from_spec(config.sliced).to_absolute({name: len(rows)})
    except Exception as error:  # noqa: BLE001 - the library's own types
        cause = f'names no part, such as "train[:95%]": {cause_of(error)}'
        raise ConfigError(f"{field}.split", config.split, cause) from error
    sliced = rows.part(part.from_, part.to)
    if not sliced:
        raise ConfigError(f"{field}.split", config.split, f"is empty: there are {len(rows)} rows")
    return sliced


def _load_from_hub(path: str, config: RowDataset.Config, *, field: str) -> Rows:
    """Return the rows of a dataset of the hub, or of its downloaded copy if there is no hub."""
    import datasets  # takes a second: only runs that need it wait for it

    fault = hub_fault()
    try:
        with without_hub() if fault else contextlib.nullcontext():
            dataset = datasets.load_dataset(path, config.name, split=config.sliced)
    except Exception as error:  # noqa: BLE001 - of the hub, the network, parsers and the library
        cause = f"can't be loaded: {cause_of(error.__cause__ or error)}"
        if fault is not None and not os.path.isdir(Path(path).expanduser()):
            cause = (
                f"is no file, and was never downloaded from the hub ({fault}): name a .jsonl, "
                ".json, .csv or .parquet file"
            )
        raise ConfigError(f"{field}.path", path, cause) from error
    return Rows(dataset.to_list())
