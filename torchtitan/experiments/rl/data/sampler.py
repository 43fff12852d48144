"""Decides which example of a task's dataset is next.

SampleStrategy    base class
ShuffledCursor    every example once per epoch, in random order: the default
InOrder           every example once per epoch, in the dataset's order
DifficultyPool    by how hard examples are (`data/difficulty_pool.py`)
ExampleReplay     again those that were informative (`data/replay.py`)
"""

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
    """Return the seed of a task's sampler: 63 bits, the same in every process.

    It depends on the task's name, so that two tasks with datasets of one length don't walk them in
    the same order.
    """
    key = f"{run_seed}/{task_name}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SampleStrategy(UserConfigurable, abc.ABC):
    """Strategy that hands out the examples of one dataset, without end.

    It is deterministic: the same seed and the same observations give the same examples.

    Example::

        import numpy as np
        from torchtitan.experiments.rl.data.sampler import SampleStrategy

        class WithReplacement(SampleStrategy):
            drawn = 0

            def next(self):
                random = np.random.default_rng([self.seed, self.drawn])
                example = self.example(int(random.integers(len(self.dataset))))
                self.drawn += 1
                return example

            def state_dict(self):
                return self.origin() | {"drawn": self.drawn}

            def load_state_dict(self, state):
                self.check_origin(state)
                self.drawn = state["drawn"]
    """

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
        """Return the next example."""

    def example(self, index: int) -> DataSample:
        """Return example ``index`` of the dataset.

        Raises:
            UserCodeError: the dataset failed; names the dataset and the index.
        """
        return read_example(self.dataset, index)

    def observe(self, group: RolloutGroup) -> None:
        """Take note of a group that has ended, for strategies that pick by its rewards.

        ``group.rewards`` is empty if no rollout was scored.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values from which a resumed run goes on with the same next example."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """

    def origin(self) -> dict[str, Any]:
        """Return what a state belongs to.

        Strategies put it into their state_dict, where ``check_origin`` finds it.
        """
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "examples": count_examples(self.dataset),
        }

    def check_origin(self, state: dict[str, Any]) -> None:
        """Refuse a state of another strategy, dataset or seed.

        Raises:
            ConfigError: naming what differs, its value and the cure.
        """
        for name, value in self.origin().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"sampler.{name}",
                    value,
                    f"the checkpoint has {state.get(name)}: resume with that",
                )


class ShuffledCursor(SampleStrategy):
    """Strategy that hands out every example once per epoch.

    The order of an epoch follows from the seed and the epoch.
    """

    def __init__(self, config: SampleStrategy.Config, *, dataset: Examples, seed: int):
        super().__init__(config, dataset=dataset, seed=seed)
        self._start(epoch=0, cursor=0)

    def next(self) -> DataSample:
        if self._cursor == len(self._order):
            self._start(epoch=self._epoch + 1, cursor=0)
        example = self.example(int(self._order[self._cursor]))
        self._cursor += 1  # after the read: a resumed run asks again for what could not be read
        return example

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_origin(state)
        self._start(epoch=state["epoch"], cursor=state["cursor"])

    def _start(self, *, epoch: int, cursor: int) -> None:
        """Go to an epoch, of which ``cursor`` examples were handed out."""
        self._epoch = epoch
        self._cursor = cursor
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> "np.ndarray | ComputedOrder | range":
        """Return the indices of the examples in the order of an epoch."""
        return random_order(count_examples(self.dataset), [self.seed, epoch])


class InOrder(ShuffledCursor):
    """Strategy that hands out the examples in the order of the dataset, epoch after epoch.

    It is for rows that are sorted, such as from easy to hard: ``--tasks.NAME.sampler in_order``.
    """

    def _order_of(self, epoch: int) -> range:
        return range(count_examples(self.dataset))


LARGEST_TABLE = 2**24
"""Maximum number of examples whose order is held in memory, at 8 bytes each."""

_ROUNDS = 6
_ODD = 0x9E3779B97F4A7C15
"""Odd factor: multiplying by one permutes the numbers of any number of bits."""


def random_order(size: int, seed: int | Sequence[int]) -> "np.ndarray | ComputedOrder":
    """Return the numbers from 0 to ``size`` - 1 in an order that follows from the seed alone.

    An order of more than ``LARGEST_TABLE`` numbers is computed place by place, without memory.
    """
    random = np.random.default_rng(seed)
    if size > LARGEST_TABLE:
        return ComputedOrder(size, [int(key) for key in random.integers(0, 2**63, _ROUNDS)])
    return random.permutation(size)


class ComputedOrder:
    """Order of the numbers below ``size`` that computes each of its places.

    A place goes through rounds: in each, a key is added, the sum is multiplied by an odd number,
    and the upper half of the bits is mixed into the lower one. Each step can be undone, so the
    rounds permute the numbers of as many bits. A result that is not below ``size`` goes through the
    rounds again, until it is (cycle walking: Black and Rogaway, 2002). So every number has one
    place.
    """

    def __init__(self, size: int, keys: Sequence[int]):
        """Initialize the order.

        Args:
            size: number of places.
            keys: key of each round. The keys choose the order.
        """
        self._size = size
        self._keys = keys
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
        """Return what the rounds make of a number of ``_bits`` bits."""
        for key in self._keys:
            number = (number + key) * _ODD % 2**self._bits
            number ^= number >> self._bits // 2
        return number
