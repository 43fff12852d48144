"""Puzzles made by generators of the reasoning_gym package: one generator, or a mixture."""

import difflib
import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

from annotated_types import MinLen

from torchtitan.experiments.rl.bounds import Cure, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.user_code.calls import cause_of


@dataclass(kw_only=True, slots=True)
class PuzzleGenerator:
    """A generator of a mixture, and its share."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the generator's own config, such as {"min_terms": 2} for chain_sum; seed and size are the dataset's."""
    weight: PositiveFloat = 1.0
    """Share of the puzzles, relative to the other generators'."""


@dataclass(kw_only=True, slots=True)
class Puzzle:
    generator: str
    config: dict[str, Any]
    """With which the generator is built again to score an answer."""
    entry: dict[str, Any]
    """What the generator made: question, answer, metadata."""


class ReasoningGymDataset(Dataset):
    """Puzzle i of a generator is made from seed + i (by 102 of the 105): two datasets share puzzles where their [seed, seed +
    count) overlap. list_functions alone makes other puzzles in every process.

    A puzzle is made when it is asked for, on the event loop. That takes 0.1 ms for most generators; 0.1 to 1 s for countdown,
    futoshiki, intermediate_integration, knight_swap, polynomial_multiplication, puzzle24, sokoban and zebra_puzzles.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        generators: Annotated[dict[str, PuzzleGenerator], MinLen(1), Cure("name at least one generator")]
        """By the name reasoning_gym knows them by, such as {"chain_sum": PuzzleGenerator()}."""
        count: PositiveInt = 10_000
        seed: int = 0

        def validate(self, *, field: str) -> None:
            """Checks the generators' names and configs if reasoning_gym is installed."""
            for name, generator in self.generators.items():
                for owned in ("seed", "size"):
                    if owned in generator.config:
                        cure = f"leave {owned!r} out: it is the dataset's {'seed' if owned == 'seed' else 'count'}"
                        raise ConfigError(f"{field}.generators.{name}.config", generator.config, cure)
            if find_spec("reasoning_gym") is not None:
                for name, generator in self.generators.items():
                    _check_generator(name, generator.config, field=f"{field}.generators")

        def check_present(self, *, field: str) -> None:
            if find_spec("reasoning_gym") is None:
                names = ", ".join(self.generators)
                raise MissingError(f"{field}.generators", names, "need reasoning-gym: pip install reasoning-gym")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        import reasoning_gym  # takes a second: only runs that need it wait for it

        self._names = list(config.generators)
        self._weights = [generator.weight for generator in config.generators.values()]
        self._configs = {
            name: {**generator.config, "seed": config.seed, "size": config.count}
            for name, generator in config.generators.items()
        }
        self._made = {name: reasoning_gym.create_dataset(name, **own) for name, own in self._configs.items()}

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> DataSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # The generator of puzzle i depends on the seed and i only, so that a resumed run gets the same puzzles.
        (name,) = random.Random(f"{self.config.seed}/{index}").choices(self._names, self._weights)
        entry = self._made[name][index]
        info = {"generator": name}
        if isinstance(entry["answer"], str):  # a puzzle with many solutions may give none
            info["demonstration"] = entry["answer"]
        return DataSample(
            sample_id=f"{name}/{index}",
            env_input=Puzzle(generator=name, config=self._configs[name], entry=entry),
            info=info,
        )


def _check_generator(name: str, config: dict[str, Any], *, field: str) -> None:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"there are {len(DATASETS)}, {', '.join(sorted(DATASETS)[:5])} ..."
        )
        raise ConfigError(field, name, f"reasoning_gym has no such generator; {hint}")
    try:
        DATASETS[name][1](**config).validate()
    except Exception as error:
        raise ConfigError(f"{field}.{name}.config", config, f"refused by the generator: {cause_of(error)}") from None
