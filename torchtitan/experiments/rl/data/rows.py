"""A dataset of rows: a file, a dataset of the hub, a pandas frame or a list of dicts."""

import functools
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.user_code.calls import cause_of

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


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
        self.records: list[dict[str, Any]] = [dict(row) for row in records]

    def __repr__(self) -> str:
        return f"<{len(self.records)} rows>"


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
        """A split, or a slice of one, such as "train[:95%]" and "train[95%:]"; a file is all one split, whatever its name."""

        @property
        def file(self) -> Path | None:
            """The local file, if ``path`` names one."""
            return Path(self.path).expanduser() if self.path and Path(self.path).suffix in FILE_FORMATS else None

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
                self.check_rows(field=field)

        def check_rows(self, *, field: str) -> None:
            """Refuse rows that can't be used. Reads all of them. Raises as ``load_rows`` does."""
            load_rows(self, field=field)

    config: Config

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        return load_rows(self.config, field="dataset")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> DataSample:
        return DataSample(sample_id=str(index), env_input=self.rows[index])


def load_rows(config: RowDataset.Config, *, field: str) -> list[dict[str, Any]]:
    """The rows, in their order. A column that a row of a file lacks is None there.

    Raises:
        MissingError: no such file.
        ConfigError: it can't be read, or is empty.
    """
    if config.rows is not None:
        if not config.rows.records:
            raise ConfigError(f"{field}.rows", config.rows, "has no rows")
        return config.rows.records
    if config.path is None:
        raise ConfigError(f"{field}.path", None, "names no data")
    return _load_table(config, field=field).to_list()


def _load_table(config: RowDataset.Config, *, field: str) -> Any:
    """The file or hub dataset that ``config.path`` names, as a ``datasets.Dataset``. Raises as ``load_rows`` does."""
    import datasets  # takes a second: only runs that need it wait for it

    assert config.path is not None
    file = config.file
    if file is not None:
        try:
            is_file = stat.S_ISREG(file.stat().st_mode)
        except FileNotFoundError:
            raise MissingError(f"{field}.path", config.path, "no such file") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}.path", config.path, f"can't be read: {error}") from None
        if not is_file:
            raise ConfigError(f"{field}.path", config.path, "is no file")
    fault = hub_fault() if file is None else None
    try:
        if file is None and fault is None:
            return datasets.load_dataset(config.path, config.name, split=config.split)
        if file is None:
            with without_hub():
                return datasets.load_dataset(config.path, config.name, split=config.split)
        with _no_progress_bars(datasets):
            files = {config.split.partition("[")[0]: str(file)}
            return datasets.load_dataset(FILE_FORMATS[file.suffix], data_files=files, split=config.split)
    except Exception as error:  # the hub, the network, the parsers and the library itself each raise types of their own
        cause = f"can't be loaded: {cause_of(error.__cause__ or error)}"
        if fault is not None:
            cause = f"is no file, and was never downloaded from the hub ({fault}): name a .jsonl, .json, .csv or .parquet file"
        raise ConfigError(f"{field}.path", config.path, cause) from error


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
