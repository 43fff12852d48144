"""Datasets: what a task has examples of."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.rollouts.types import DataSample


class Dataset(UserConfigurable, Sequence[DataSample]):
    """A sequence of data samples. A subclass loads or makes them from its Config and says how many there are.

    The order must not change between runs: a resumed run counts on index i being the same example.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str) -> None:
            """Refuse what can't work, before any process starts. Raises ConfigError."""

        def check_present(self, *, field: str) -> None:
            """Refuse what this machine lacks, a file or a package: asked before a run, not before a plan of one. Raises
            ConfigError."""

    def __init__(self, config: Config):
        self.config = config

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> DataSample: ...
