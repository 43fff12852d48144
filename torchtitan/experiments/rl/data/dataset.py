"""Datasets: the examples of a task."""

import abc
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import UserCodeError, cause_of
from torchtitan.experiments.rl.rollouts.types import DataSample


class Dataset(UserConfigurable, abc.ABC):
    """The examples of a task, by index. A subclass loads or makes them from its Config.

    The order must not change between runs: a resumed run counts on index i being the same example.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str) -> None:
            """Refuse what can't work, before any process starts. Raises ConfigError."""

        @property
        def turns_needed(self) -> int:
            """That an example may take: a task of fewer (``env.max_turns``) is refused."""
            return 1

        def rest(self) -> "Dataset.Config | None":
            """The examples that this one leaves of the same data, for validation; None: there are none."""
            return None

        def check_present(self, *, field: str) -> None:
            """Refuse what this machine lacks, a file or a package.

            Raises:
                MissingError: it is not here. ``--dry-run`` prints it and goes on; a run ends.
                ConfigError: it is here and can't be used.
            """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> DataSample: ...

    def __iter__(self) -> Iterator[DataSample]:
        return (self[index] for index in range(len(self)))


Examples = Dataset | Sequence[DataSample]
"""What a sampler draws from."""


def count_examples(dataset: Examples) -> int:
    """``len(dataset)``.

    Raises:
        UserCodeError: the dataset raised anything; names the dataset.
    """
    try:
        return len(dataset)
    except BaseException as error:
        raise UserCodeError(
            f"dataset {type(dataset).__name__}: its length: {cause_of(error)}"
        ) from error


def read_example(dataset: Examples, index: int) -> DataSample:
    """``dataset[index]``.

    Raises:
        UserCodeError: the dataset raised anything, or the item is no DataSample; names the dataset and the index.
    """
    try:
        item = dataset[index]
    except BaseException as error:
        raise UserCodeError(
            f"dataset {type(dataset).__name__}: item {index}: {cause_of(error)}"
        ) from error
    if not isinstance(item, DataSample):
        raise UserCodeError(
            f"dataset {type(dataset).__name__}: item {index} is a {type(item).__name__}, want a DataSample"
        )
    if fault := fault_of_example(item):
        raise UserCodeError(f"dataset {type(dataset).__name__}: item {index}: its {fault}")
    return item


def find_examples(dataset: Examples, sample_ids: Collection[str]) -> dict[str, DataSample]:
    """The examples with these ids, by id; one that the dataset lacks is left out.

    Many datasets number their examples, so an id that is a number is looked for there first. For other ids the dataset is read
    from its start to the last of them.

    Raises:
        UserCodeError: as ``read_example`` does.
    """
    missing, found = set(sample_ids), {}
    count = count_examples(dataset) if missing else 0
    numbered = [
        int(sample_id) for sample_id in missing if sample_id.isdecimal() and len(sample_id) < 19
    ]
    for index in itertools.chain((number for number in numbered if number < count), range(count)):
        if not missing:
            break
        sample = read_example(dataset, index)
        if sample.sample_id in missing:
            missing.remove(sample.sample_id)
            found[sample.sample_id] = sample
    return found


def fault_of_example(example: DataSample) -> str | None:
    """Which of its fields is of a wrong type, and which is wanted; None: none."""
    if not isinstance(example.sample_id, str):
        return f"sample_id is a {type(example.sample_id).__name__}, want a text"
    if not isinstance(example.info, dict):
        return f"info is a {type(example.info).__name__}, want a dict"
    return None


Split = Literal["train", "validation"]
VALIDATION_ONE_IN = 8
"""One question in this many, on average, is kept for validation."""
MADE_AT_ONCE = Cure(
    "all examples are made when the run starts; for more, write a Dataset that makes each when it is asked for"
)


def split_of_text(text: str) -> Split:
    """The split of an example, by a checksum of its question: about one in eight is for validation. So no question is in both
    splits, whatever the seed. Python's ``hash`` would not do: it differs between processes."""
    return "validation" if zlib.crc32(text.encode()) % VALIDATION_ONE_IN == 0 else "train"


class MadeDataset(Dataset):
    """Makes all its examples when it is built, from its Config alone: the same Config gives the same examples.

    A subclass adds fields to the Config and defines ``make``, which gets every field by name:

        class SumDigitsDataset(MadeDataset):
            @dataclass(kw_only=True, slots=True)
            class Config(MadeDataset.Config):
                max_digits: int = 5

            make = staticmethod(make_examples)  # make_examples(split=, count=, seed=, max_digits=) -> list
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        split: Split = "train"
        """No example of one split is ever in the other, whatever the seed."""
        count: Annotated[int, Ge(1), Le(10_000_000), MADE_AT_ONCE] = 10_000
        """Examples to make."""
        seed: int = 0

    def __init__(self, config: Config):
        super().__init__(config)
        self.examples = self.make(
            **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        )

    make: Callable[..., Sequence[Any]]
    """A function: gets each field of the Config by name, and returns the examples. Each is the ``env_input`` of a data
    sample."""

    def info(self, example: Any) -> dict[str, Any]:
        """``DataSample.info`` of an example."""
        return {}

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> DataSample:
        example = self.examples[index]
        return DataSample(sample_id=str(index), env_input=example, info=self.info(example))
