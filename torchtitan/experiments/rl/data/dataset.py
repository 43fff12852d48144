"""Holds the examples of a task.

    Dataset          base class: examples by index
    MadeDataset      makes its examples when it is built
    RowDataset       reads rows of data as examples (`data/rows.py`)

A dataset is the user's code: the library reads it by `count_examples` and `read_example`, which
name it in their errors.
"""

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
from torchtitan.experiments.rl.data.digest import digest_of
from torchtitan.experiments.rl.errors import UserCodeError, cause_of
from torchtitan.experiments.rl.rollouts.types import DataSample


class Dataset(UserConfigurable, abc.ABC):
    """Examples of a task by index. A subclass loads or makes them from its Config.

    The order must not change between runs: a resumed run relies on index i being the same example.

    Example::

        from dataclasses import dataclass
        from torchtitan.experiments.rl.tasks import *

        class Squares(Dataset):
            @dataclass(kw_only=True, slots=True)
            class Config(Dataset.Config):
                count: int = 100

            def __len__(self):
                return self.config.count

            def __getitem__(self, index):
                row = {"question": f"What is {index} * {index}?", "answer": str(index**2)}
                return DataSample(sample_id=str(index), env_input=row)

        task = question_task(Squares.Config(count=10), right_answer)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str) -> None:
            """Refuse what can't work, before any process starts.

            Args:
                field: path of this config, such as "tasks.sum_digits.dataset".

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """

        @property
        def turns_needed(self) -> int:
            """Maximum number of turns that an example may take.

            A task whose ``env.max_turns`` is lower is refused.
            """
            return 1

        def rest(self) -> "Dataset.Config | None":
            """Return the config of the examples that this one leaves of the same data.

            The task validates on them. None if there are none.
            """
            return None

        def check_present(self, *, field: str) -> None:
            """Refuse what this machine lacks, a file or a package.

            Raises:
                MissingError: something is not here. ``--dry-run`` prints this and goes on; a run
                    ends.
                ConfigError: something is here and can't be used.
            """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> DataSample: ...

    def digest(self) -> str | None:
        """Return a text that changes with the examples, such as `digest_of` returns.

        A run keeps it, and one that is resumed with other examples is refused. The result is None,
        and nothing is compared, unless a subclass overrides this: to read all examples of a dataset
        that makes each when it is asked for may take too long.
        """
        return None

    def __iter__(self) -> Iterator[DataSample]:
        return (self[index] for index in range(len(self)))


Examples = Dataset | Sequence[DataSample]
"""Examples that a sampler draws from."""


def count_examples(dataset: Examples) -> int:
    """Return ``len(dataset)``.

    Raises:
        UserCodeError: the dataset raised anything; names the dataset.
    """
    try:
        return len(dataset)
    except BaseException as error:  # noqa: BLE001 - user code may exit
        raise UserCodeError(
            f"dataset {type(dataset).__name__}: its length: {cause_of(error)}"
        ) from error


def read_example(dataset: Examples, index: int) -> DataSample:
    """Return ``dataset[index]``.

    Raises:
        UserCodeError: the dataset raised anything, or the item is no DataSample; names the dataset
            and the index.
    """
    place = f"dataset {type(dataset).__name__}: item {index}"
    try:
        item = dataset[index]
    except BaseException as error:  # noqa: BLE001 - user code may exit
        raise UserCodeError(f"{place}: {cause_of(error)}") from error
    if not isinstance(item, DataSample):
        raise UserCodeError(f"{place} is a {type(item).__name__}, want a DataSample")
    fault = fault_of_example(item)
    if fault:
        raise UserCodeError(f"{place}: its {fault}")
    return item


def find_examples(dataset: Examples, sample_ids: Collection[str]) -> dict[str, DataSample]:
    """Return the examples with these ids, by id. An id that the dataset lacks is left out.

    Many datasets number their examples, so an id that is a number is looked for at that index
    first. For other ids the dataset is read from its start to the last of them.

    Raises:
        UserCodeError: as ``read_example`` does.
    """
    missing = set(sample_ids)
    found: dict[str, DataSample] = {}
    count = count_examples(dataset) if missing else 0
    numbers = [
        int(sample_id) for sample_id in missing if sample_id.isdecimal() and len(sample_id) < 19
    ]
    likely = [number for number in numbers if number < count]
    for index in itertools.chain(likely, range(count)):
        if not missing:
            break
        sample = read_example(dataset, index)
        if sample.sample_id in missing:
            missing.remove(sample.sample_id)
            found[sample.sample_id] = sample
    return found


def fault_of_example(example: DataSample) -> str | None:
    """Return which field of an example has a wrong type, and the right one; None if none has."""
    if not isinstance(example.sample_id, str):
        return f"sample_id is a {type(example.sample_id).__name__}, want a text"
    if not isinstance(example.info, dict):
        return f"info is a {type(example.info).__name__}, want a dict"
    return None


Split = Literal["train", "validation"]
VALIDATION_ONE_IN = 8
"""Average number of questions of which one is kept for validation."""
MADE_AT_ONCE = Cure(
    "all examples are made when the run starts; for more, write a Dataset that makes each when it "
    "is asked for"
)


def split_of_text(text: str) -> Split:
    """Return the split of an example by a checksum of its question.

    So no question is in both splits, whatever the seed. About one in eight is for validation.
    """
    # Python's ``hash`` of a text differs between processes.
    return "validation" if zlib.crc32(text.encode()) % VALIDATION_ONE_IN == 0 else "train"


class MadeDataset(Dataset):
    """Dataset that makes all its examples when it is built, from its Config alone.

    The same Config gives the same examples. A subclass adds fields to the Config and defines
    ``make``, which gets every field by name.

    Example::

        from dataclasses import dataclass
        from itertools import count as count_from, islice
        from torchtitan.experiments.rl.data.dataset import split_of_text
        from torchtitan.experiments.rl.tasks import MadeDataset, question_task, right_answer

        def squares(*, split, count, seed, first):
            numbers = (n for n in count_from(first) if split_of_text(str(n)) == split)
            return [
                {"question": f"{n} * {n}?", "answer": str(n * n)} for n in islice(numbers, count)
            ]

        class Squares(MadeDataset):
            @dataclass(kw_only=True, slots=True)
            class Config(MadeDataset.Config):
                first: int = 0

            make = staticmethod(squares)

        task = question_task(Squares.Config(first=12), right_answer)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        split: Split = "train"
        """Split of the examples. No example of one is ever in the other, whatever the seed."""
        count: Annotated[int, Ge(1), Le(10_000_000), MADE_AT_ONCE] = 10_000
        """Number of examples to make."""
        seed: int = 0

    def __init__(self, config: Config):
        super().__init__(config)
        arguments = {
            field.name: getattr(config, field.name) for field in dataclasses.fields(config)
        }
        self.examples = self.make(**arguments)

    make: Callable[..., Sequence[Any]]
    """Function that gets each field of the Config by name, and returns the examples. Each is the
    ``env_input`` of a data sample."""

    def info(self, example: Any) -> dict[str, Any]:  # noqa: ANN401 - the user's
        """Return the ``DataSample.info`` of an example. Nothing unless overridden."""
        return {}

    def digest(self) -> str | None:
        return digest_of(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> DataSample:
        example = self.examples[index]
        return DataSample(sample_id=str(index), env_input=example, info=self.info(example))
