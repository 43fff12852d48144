"""Parts of a config that the command line names.

By a short name, where the library has it: ``--tasks.sums.algorithm max_rl``, ``--trainer.loss.rl
ppo_clip``, ``--provision.job slurm``; a list with commas between, or empty: ``--pre-batch-filters
zero_advantage,repetition``, or ``[]``. By its place, where it is yours: ``--tasks.sums.rubric
my_rewards.py:exact``. The place is a file or a module, a colon, and a name in it: a class with a
Config that fits the field, or, for a rubric, reward functions, several of them with commas between;
for any other field that takes a function, one. Data is named by its file: ``--tasks.sums.validation
held_out.jsonl``. ``None`` takes a part out where the config may do without it.

Options that set fields of the part follow as for any other, and make a part that the config leaves
out. ``command/options.py`` reads these: it knows what the config holds by then. The config that is
given never changes: each function returns a copy, which shares the parts that no option touched.
"""

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import torchtitan.experiments.rl.data.difficulty_pool
import torchtitan.experiments.rl.data.replay
import torchtitan.experiments.rl.rollouts.filters  # noqa: F401 - each defines parts that no config may have named yet
from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.bounds import declared, field_annotations
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.hosts.jobs import JobConfig
from torchtitan.experiments.rl.losses import Correction, CrossEntropy, RefKL, RLLoss
from torchtitan.experiments.rl.process.setup import add_import_folder
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.task import Task

NONE = ("None", "none")
"""Words that stand for no part."""
EMPTY = "[]"
"""Word that stands for an empty list."""


# ---- overrides


@dataclass(frozen=True, slots=True)
class Override:
    """Option of a command line, with the words behind it that say its value."""

    option: str
    """Option as it was typed, such as ``--tasks.sum_digits.algorithm``."""
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """Path of a field as the help writes it, such as ``tasks.sum-digits.algorithm``."""
        return option_name([self.option.removeprefix("--")])

    @property
    def value(self) -> str:
        return " ".join(self.values)

    def sets_inside(self, part: "Override") -> bool:
        """Return True if this sets a field of the part that another override names."""
        return self.name.startswith(f"{part.name}.")


def option_name(keys: Sequence[Any]) -> str:
    """Return the path of a value as options write it, by the keys that lead to the value."""
    return ".".join(map(str, keys)).replace("_", "-")


def split(words: Sequence[str]) -> list[Override]:
    """Return the overrides that the words of a command line say.

    Raises:
        ConfigError: a word stands behind no option.
    """
    found: list[Override] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError("overrides", word, "belongs to no option: write --field value")
        option, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        found.append(Override(option, tuple(values)))
    return found


def value_at(config: Any, keys: Sequence[Any]) -> Any:
    """Return the value to which names of fields, keys of dicts and places in lists lead."""
    for key in keys:
        indexed = isinstance(config, Mapping | list | tuple)
        config = config[key] if indexed else getattr(config, key)
    return config


def replaced(config: Any, keys: Sequence[Any], value: Any) -> Any:
    """Return a copy of the config in which ``keys`` lead to ``value``.

    Parts that the keys do not pass are shared with the original. The last key may be new to a dict.
    """
    if not keys:
        return value
    key, *inner = keys
    if isinstance(config, Mapping):
        return {**config, key: replaced(config.get(key), inner, value)}
    if isinstance(config, list | tuple):
        items = list(config)
        items[key] = replaced(items[key], inner, value)
        return type(config)(items)
    return dataclasses.replace(config, **{key: replaced(getattr(config, key), inner, value)})


# ---- named parts


def take_named_parts(config: Any, overrides: Sequence[Override]) -> tuple[Any, list[Override]]:
    """Return a copy of the config with the parts that overrides name, and the other overrides.

    Raises:
        ConfigError: there is no such file, module or name, or what is there does not fit the field.
    """
    others: list[Override] = []
    for override in overrides:
        config = _with_parts_on_the_way(config, override)
        place = _find(config, override)
        changed = None if place is None else _choose(place) if override.values else place.made()
        if place is None or changed is None:
            others.append(override)
            continue
        if len(override.values) > 1:
            raise place.refusal(
                f"takes one word, and {override.values[1]!r} follows: several names have commas "
                "between"
            )
        config = changed
        if value_at(config, place.keys) is None:
            others = [other for other in others if not other.sets_inside(override)]
    return config, others


@dataclass(frozen=True, slots=True)
class _Place:
    """Field or dict entry that an override names, in the config that holds it."""

    config: Any
    keys: tuple[str, ...]
    """Names of fields and keys of dicts that lead to the value."""
    override: Override

    @property
    def holder(self) -> Any:
        return value_at(self.config, self.keys[:-1])

    @property
    def value(self) -> Any:
        return value_at(self.config, self.keys)

    @property
    def given(self) -> str:
        """Word that names the part; empty where the option stands alone."""
        return next(iter(self.override.values), "")

    @property
    def field(self) -> str:
        """Path of the field, as it was typed."""
        return self.override.option.removeprefix("--")

    @property
    def type(self) -> Any:
        """Type that the field declares; None for an entry of a dict."""
        return _declared_type(self.holder, self.keys[-1])

    @property
    def may_be_none(self) -> bool:
        return types.NoneType in get_args(self.type)

    @property
    def optional_kind(self) -> Any:
        """Class of the part that the field may hold or leave out; None for any other field."""
        kind = _only_kind(self.type)
        return kind if self.may_be_none and not self.is_data else None

    @property
    def is_data(self) -> bool:
        return isinstance(self.holder, Task.Config) and self.keys[-1] in ("dataset", "validation")

    @property
    def takes_function(self) -> bool:
        return any(get_origin(option) is Callable for option in (self.type, *get_args(self.type)))

    def put(self, part: Any) -> Any:
        """Return a copy of the config with a part in this place."""
        return replaced(self.config, self.keys, part)

    def made(self) -> Any | None:
        """Return the config with the part that an option without a value asks for.

        The part has its defaults if the config leaves it out. None: the field holds no part that
        may be left out.
        """
        if self.optional_kind is None:
            return None
        return self.put(self.optional_kind()) if self.value is None else self.config

    def refusal(self, cure: str) -> ConfigError:
        return ConfigError(self.field, self.given, cure)


def _declared_type(holder: Any, name: str) -> Any:
    """Return the type of a field of a config; None for an entry of a dict."""
    if isinstance(holder, Mapping):
        return None
    config_class: Any = type(holder)
    return declared(field_annotations(config_class).get(name)).type


def _only_kind(annotation: Any) -> Any:
    """Return the class of the configs that a field may hold; None if it is no union with one."""
    kinds = [kind for kind in get_args(annotation) if dataclasses.is_dataclass(kind)]
    return kinds[0] if len(kinds) == 1 else None


def _keys(config: Any, name: str) -> tuple[str, ...] | None:
    """Return the names of fields and keys of dicts that a path leads by; None if there are none."""
    keys: list[str] = []
    for word in name.split("."):
        key = _like(word, _names(value_at(config, keys)))
        if key is None:
            return None
        keys.append(key)
    return tuple(keys)


def _with_parts_on_the_way(config: Any, override: Override) -> Any:
    """Return a copy of the config with the parts that it leaves out and an override sets fields of.

    Such as ``trainer.lora`` for ``--trainer.lora.rank 16``.
    """
    words = override.name.split(".")
    for length in range(1, len(words)):
        keys = _keys(config, ".".join(words[:length]))
        if keys is None:
            return config
        kind = _only_kind(_declared_type(value_at(config, keys[:-1]), keys[-1]))
        left_out = value_at(config, keys) is None and kind is not None
        if left_out and _like(words[length], _names(kind)):
            config = replaced(config, keys, kind())
    return config


def _find(config: Any, override: Override) -> _Place | None:
    """Return the place that an override names; None where there is no part."""
    keys = _keys(config, override.name)
    if keys is None:
        return None
    place = _Place(config, keys, override)
    has_part = isinstance(place.value, Configurable.Config | JobConfig | list)
    takes_part = has_part or place.takes_function or place.is_data
    return place if takes_part or place.optional_kind is not None else None


def options_of_absent_part(config: Any, name: str) -> list[str]:
    """Return the options of the fields of a part that the config leaves out, by its own option."""
    keys = _keys(config, name)
    if keys is None:
        return []
    annotation = _declared_type(value_at(config, keys[:-1]), keys[-1])
    return [
        f"--{name}.{field.replace('_', '-')}"
        for kind in get_args(annotation)
        if dataclasses.is_dataclass(kind)
        for field in _names(kind)
    ]


def _names(holder: Any) -> Collection[str]:
    if dataclasses.is_dataclass(holder):
        return [entry.name for entry in dataclasses.fields(holder)]
    return holder if isinstance(holder, dict) else ()


def _like(word: str, names: Collection[str]) -> str | None:
    return next(
        (name for name in names if str(name).replace("-", "_") == word.replace("-", "_")), None
    )


def _choose(place: _Place) -> Any | None:
    """Return the config with the part that is named in its place; None for a field's plain value.

    Raises:
        ConfigError: the name is none of a part that fits the field.
    """
    kind, held, given = place.type, place.value, place.given
    if given in NONE and place.may_be_none:
        return place.put(None)
    if isinstance(held, list):
        return _choose_several(place)
    is_plain = place.optional_kind is not None and not isinstance(held, Configurable.Config)
    if ":" in given and not is_plain:
        return place.put(_at_place(place))
    if place.is_data:
        return _choose_data(place)
    if isinstance(held, Rubric.Config):
        cure = (
            "a rubric is reward functions and their place: a file or a module, a colon, names: "
            f"my_rewards.py:{given}"
        )
        raise place.refusal(f"{cure}; each is fn(completion, example)")
    if inspect.isclass(kind) and parts_that_fit(kind):  # so it is no union, and never left out
        part = _config_named(place, given, kind)
        # A part of the same kind keeps what the config says of it.
        return place.config if type(held) is type(part) else place.put(part)
    return None


def _choose_several(place: _Place) -> Any | None:
    """Return the config with a list of parts that are named with commas between."""
    kinds = [kind for kind in get_args(place.type) if inspect.isclass(kind)]
    if len(kinds) != 1 or not parts_that_fit(kinds[0]):
        return None
    names = [] if place.given in ("", EMPTY, *NONE) else place.given.split(",")
    return place.put([_config_named(place, name, kinds[0]) for name in names])


def _choose_data(place: _Place) -> Any | None:
    """Return the config with a file or a dataset of the hub, read as the task's dataset is."""
    rows = place.value or place.holder.dataset
    if not isinstance(rows, RowDataset.Config):
        return None
    if place.given in NONE:
        raise place.refusal("a task can't do without it: name a file, or a dataset of the hub")
    split_name = "train" if place.value is None else rows.split
    return place.put(dataclasses.replace(rows, path=place.given, rows=None, split=split_name))


def _config_named(place: _Place, name: str, wanted: type[Any]) -> Any:
    """Return the config of a part by its name, or of a class of the user's by its place."""
    if ":" in name:
        return _config_of(place, _objects(place, name), wanted)
    parts = parts_that_fit(wanted)
    if (found := part_named(name, parts)) is None:
        raise place.refusal(
            f"name one of {', '.join(parts)}, or a class of yours as my_module:MyClass"
        )
    return _made(place, found)


def _at_place(place: _Place) -> Any:
    """Return the config of a class, a function, or a rubric of functions, by their place."""
    found = _objects(place, place.given)
    first, *others = found.values()
    if place.takes_function and callable(first) and not others:
        return first
    if inspect.isclass(first) or not isinstance(place.value, Rubric.Config):
        return _config_of(
            place, found, place.type if inspect.isclass(place.type) else Configurable.Config
        )
    for name, entry in found.items():
        if not callable(entry) or inspect.isclass(entry):
            raise place.refusal(
                f"{name} is no function: want reward functions fn(completion, example)"
            )
    return dataclasses.replace(place.value, reward_fns=list(found.values()))


def _config_of(place: _Place, found: dict[str, Any], wanted: type[Any]) -> Any:
    (name, first), *others = found.items()
    if others or not inspect.isclass(first):
        raise place.refusal(f"{place.given.rpartition(':')[2]} is no class with a Config")
    config = getattr(first, "Config", first)
    if not (inspect.isclass(config) and issubclass(config, wanted)):
        raise place.refusal(f"{name} is no {wanted.__qualname__.removesuffix('.Config')}")
    return _made(place, config)


def _made(place: _Place, wanted: type[Any]) -> Any:
    with user_code(place.field, place.given, "its Config can't be made without arguments"):
        return wanted()


def _objects(place: _Place, words: str) -> dict[str, Any]:
    """Return what a module or file has by the names behind the colon."""
    path, _, names = words.rpartition(":")
    module = _module(place, path)
    for name in names.split(","):
        if not hasattr(module, name):
            own = [
                key
                for key, entry in vars(module).items()
                if getattr(entry, "__module__", None) == module.__name__
            ]
            raise place.refusal(f"{path} has no {name!r}; it defines {', '.join(own) or 'nothing'}")
    return {name: getattr(module, name) for name in names.split(",")}


def _module(place: _Place, path: str) -> ModuleType:
    """Import a module by its name, or a .py file under its stem."""
    name = path
    if path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        name = file.stem
        if not file.is_file():
            raise MissingError(place.field, place.given, f"no such file: {path}")
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file):
            raise place.refusal(f"a module is named {name!r} already: rename the file")
        add_import_folder(file.parent)
    with user_code(place.field, place.given, f"{path} can't be imported"):
        return importlib.import_module(name)


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
    found = [
        kind
        for kind in _with_subclasses(base)
        if kind.__module__.startswith(PACKAGE) and kind.__name__ not in BASES_ONLY
    ]
    found = [
        kind
        for kind in found
        if not inspect.isabstract(kind) and issubclass(kind.Config, config_class)
    ]
    return {
        snake_case(kind.__name__): kind.Config
        for kind in sorted(found, key=lambda kind: snake_case(kind.__name__))
    }


def names_of_parts(annotation: Any) -> list[str]:
    """Return the names of the library's parts that a field may hold, one or a list of them."""
    kind = declared(annotation).type
    kinds = get_args(kind) if get_origin(kind) is list else (kind,)
    if len(kinds) != 1 or not inspect.isclass(kinds[0]):
        return []
    return list(parts_that_fit(kinds[0]))


def part_named(name: str, parts: dict[str, type[Any]]) -> type[Any] | None:
    return next((part for known, part in parts.items() if _plain(known) == _plain(name)), None)


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _plain(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from _with_subclasses(kind)
