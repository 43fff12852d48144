"""Which example of a task's dataset is next."""

import abc
import hashlib
from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.data.dataset import Examples, count_examples, read_example
from torchtitan.experiments.rl.data.permutation import random_order
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup


def sampler_seed(run_seed: int, task_name: str) -> int:
    """Seed of a task's sampler: 63 bits, the same in every process (``hash`` of a string is not).

    Two tasks with datasets of one length would otherwise walk them in the same order.
    """
    digest = hashlib.blake2b(f"{run_seed}/{task_name}".encode(errors="surrogatepass"), digest_size=8).digest()
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
            raise ConfigError("dataset", type(dataset).__name__, "has no examples to sample from: its __len__ gives 0")
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
        return {"strategy": type(self).__name__, "seed": self.seed, "examples": count_examples(self.dataset)}

    def check_origin(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """
        for name, value in self.origin().items():
            if state.get(name) != value:
                raise ConfigError(f"sampler.{name}", value, f"the checkpoint has {state.get(name)}: resume with that")


class ShuffledCursor(SampleStrategy):
    """Every example once per epoch, in an order drawn anew for each epoch from the seed."""

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
