"""Parts of the library by a short name: ``max_rl`` for MaxRL, ``ppo_clip`` for PPOClip.

A name is a class's in snake case; capitals, hyphens and underscores make no difference.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torchtitan.experiments.rl.data.difficulty_pool
import torchtitan.experiments.rl.data.replay
import torchtitan.experiments.rl.rollouts.token_filters  # noqa: F401 - each defines parts that no config may have named yet
from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.losses import Correction, CrossEntropy, RefKL, RLLoss
from torchtitan.experiments.rl.rollouts.filters import Filter

KINDS: tuple[type[Any], ...] = (Algorithm, SampleStrategy, TaskMix, RLLoss, CrossEntropy, RefKL, Correction, Filter)
"""Bases of the parts that have names."""
BASES_ONLY = ("Algorithm", "GroupRewards")
"""Are for subclasses, and give no credit."""
PACKAGE = "torchtitan.experiments.rl."


def parts_that_fit(config_class: type) -> dict[str, type[Configurable.Config]]:
    """Config classes of the library's parts that fit a field of this config class, by name. Empty where parts have no names."""
    base = next((kind for kind in KINDS if issubclass(config_class, kind.Config)), None)
    if base is None:
        return {}
    found = [kind for kind in _with_subclasses(base) if kind.__module__.startswith(PACKAGE) and kind.__name__ not in BASES_ONLY]
    found = [kind for kind in found if not inspect.isabstract(kind) and issubclass(kind.Config, config_class)]
    return {snake_case(kind.__name__): kind.Config for kind in sorted(found, key=lambda kind: snake_case(kind.__name__))}


def part_named(name: str, parts: dict[str, type[Configurable.Config]]) -> type[Configurable.Config] | None:
    return next((part for known, part in parts.items() if _plain(known) == _plain(name)), None)


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _plain(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from _with_subclasses(kind)
