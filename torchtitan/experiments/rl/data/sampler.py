"""Which example of a task's dataset is next."""

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.data.dataset import Examples, count_examples, read_example
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup


def sampler_seed(run_seed: int, task_name: str) -> int:
    """Seed of a task's sampler: 63 bits, the same in every process (``hash`` of a string is not).

    Two tasks with datasets of one length would otherwise walk them in the same order.
    """
    digest = hashlib.blake2b(
        f"{run_seed}/{task_name}".encode(errors="surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 1


class SampleStrategy(UserConfigurable, abc.ABC):
    """Hands out the examples of one dataset, without end. Deterministic: the same seed and observations, the same examples."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str) -> None:
            """Refuse what can't work, before any process starts.

            Args:
                field: path of this config, such as "tasks.sum_digits.sampler".

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """

    def __init__(self, config: Config, *, dataset: Examples, seed: int):
        if count_examples(dataset) == 0:
            raise ConfigError(
                "dataset",
                type(dataset).__name__,
                "has no examples to sample from: its __len__ gives 0",
            )
        self.config = config
        self.dataset = dataset
        self.seed = seed

    @abc.abstractmethod
    def next(self) -> DataSample:
        """The next example."""

    def example(self, index: int) -> DataSample:
        """Example ``index`` of the dataset.

        Raises:
            UserCodeError: the dataset failed; names it and the index.
        """
        return read_example(self.dataset, index)

    def observe(self, group: RolloutGroup) -> None:
        """Take note of a scored group; strategies that pick by difficulty use its rewards."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the example that would have been next: plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict.

        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """

    def origin(self) -> dict[str, Any]:
        """What a state belongs to: strategies put it into their state_dict, for ``check_origin`` to find."""
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "examples": count_examples(self.dataset),
        }

    def check_origin(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """
        for name, value in self.origin().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"sampler.{name}",
                    value,
                    f"the checkpoint has {state.get(name)}: resume with that",
                )


class ShuffledCursor(SampleStrategy):
    """Every example once per epoch, in an order that follows from the seed and the epoch."""

    def __init__(self, config: SampleStrategy.Config, *, dataset: Examples, seed: int):
        super().__init__(config, dataset=dataset, seed=seed)
        self._start(epoch=0, cursor=0)

    def next(self) -> DataSample:
        if self._cursor == len(self._order):
            self._start(epoch=self._epoch + 1, cursor=0)
        index = self._order[self._cursor]
        self._cursor += 1
        return self.example(int(index))

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_origin(state)
        self._start(epoch=state["epoch"], cursor=state["cursor"])

    def _start(self, *, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = random_order(count_examples(self.dataset), [self.seed, epoch])


LARGEST_TABLE = 2**24
"""Examples up to which an order is held in memory, at 8 bytes each."""

_ROUNDS = 6
_ODD = 0x9E3779B97F4A7C15
"""To multiply by an odd number is a permutation of the numbers of so many bits."""


def random_order(size: int, seed: int | Sequence[int]) -> "np.ndarray | ComputedOrder":
    """Each number from 0 to ``size`` - 1 once, in an order that follows from the seed alone. Above ``LARGEST_TABLE`` it takes
    no memory."""
    random = np.random.default_rng(seed)
    if size > LARGEST_TABLE:
        return ComputedOrder(size, [int(key) for key in random.integers(0, 2**63, _ROUNDS)])
    return random.permutation(size)


class ComputedOrder:
    """An order that computes each of its places.

    In each round a number of so many bits gets a key, is multiplied, and its upper bits go into the lower ones. Each step can
    be undone, so all are a permutation. A result that is no example goes through it again, until it is one (cycle walking:
    Black and Rogaway, 2002). So every example has one place.
    """

    def __init__(self, size: int, keys: Sequence[int]):
        """
        Args:
            keys: of the rounds; they choose the order.
        """
        self._size, self._keys = size, keys
        self._bits = max(2, (size - 1).bit_length())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int, /) -> int:
        if not 0 <= place < self._size:
            raise IndexError(place)
        number = self._permuted(place)
        while number >= self._size:
            number = self._permuted(number)
        return number

    def _permuted(self, number: int) -> int:
        for key in self._keys:
            number = (number + key) * _ODD % 2**self._bits
            number ^= number >> self._bits // 2
        return number
