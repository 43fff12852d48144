"""Short names of the parts of the library, such as ``max_rl``, by the field that they fit."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import torchtitan.experiments.rl.data.difficulty_pool
import torchtitan.experiments.rl.data.replay  # noqa: F401 - each defines parts that no config may have named yet
from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.bounds import declared
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.hosts.jobs import JobConfig
from torchtitan.experiments.rl.losses import Correction, CrossEntropy, RefKL, RLLoss
from torchtitan.experiments.rl.rollouts.filters import Filter

KINDS: tuple[type[Any], ...] = (
    Algorithm,
    SampleStrategy,
    TaskMix,
    RLLoss,
    CrossEntropy,
    RefKL,
    Correction,
    Filter,
)
"""Bases of the parts that have names."""
BASES_ONLY = ("Algorithm", "GroupRewards")
"""Classes that give no credit themselves, and so have no names."""
PACKAGE = "torchtitan.experiments.rl."


def parts_that_fit(config_class: type[Any]) -> dict[str, type[Any]]:
    """Return the config classes of the library that fit a field of this class, by name.

    Empty where the parts of such a field have no names.
    """
    if issubclass(config_class, JobConfig):
        return JobConfig.by_name
    base = next((kind for kind in KINDS if issubclass(config_class, kind.Config)), None)
    if base is None:
        return {}
    named = {
        snake_case(kind.__name__): kind.Config
        for kind in _with_subclasses(base)
        if _has_name(kind) and issubclass(kind.Config, config_class)
    }
    return dict(sorted(named.items()))


def _has_name(kind: type[Any]) -> bool:
    """Return True if a class is the library's, and can be built."""
    is_librarys = kind.__module__.startswith(PACKAGE)
    return is_librarys and kind.__name__ not in BASES_ONLY and not inspect.isabstract(kind)


def names_of_parts(annotation: Any) -> list[str]:
    """Return the names of the library's parts that a field may hold, one or a list of them."""
    kind = declared(annotation).type
    kinds = get_args(kind) if get_origin(kind) is list else (kind,)
    if len(kinds) != 1 or not inspect.isclass(kinds[0]):
        return []
    return list(parts_that_fit(kinds[0]))


def part_named(name: str, parts: dict[str, type[Any]]) -> type[Any] | None:
    """Return the config class of a name, in whatever case and with or without "-" and "_"."""
    return next((part for known, part in parts.items() if _plain(known) == _plain(name)), None)


def snake_case(name: str) -> str:
    """Return the name of a class as options write it: ``PPOClip`` is ``ppo_clip``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _plain(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from _with_subclasses(kind)
