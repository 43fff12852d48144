"""Parts of a config that the command line names.

    --tasks.sums.algorithm max_rl                      a part of the library, by its short name
    --provision.job slurm
    --pre-batch-filters zero_advantage,repetition      a list of parts, with commas between; or []
    --tasks.sums.sampler my_samplers:Hardest           a class of yours that has a fitting Config
    --tasks.sums.rubric my_rewards.py:exact,short      reward functions of yours
    --tasks.sums.rubric a.py:exact,b.py:short          the same, from two files
    --tasks.sums.rubric right_answer                   the library's reward function
    --tasks.sums.validation held_out.jsonl             data, by its file or its name on the hub
    --trainer.lora                                     a part with its defaults
    --trainer.lora None                                no part, where the config may do without

What is yours is named by its *location*: a module or a file, a colon, and names in it with commas
between. A location also gives a function to a field that takes one.

Options that set fields of the part follow as for any other, and make a part that the config leaves
out. ``command/options.py`` reads these: it knows what the config holds by then. The config that is
given never changes: each function returns a copy, which shares the parts that no option touched.
"""

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import declared, field_annotations
from torchtitan.experiments.rl.command.part_names import part_named, parts_that_fit
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.hosts.jobs import JobConfig
from torchtitan.experiments.rl.process.setup import add_import_folder
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.answers import right_answer
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


def last_of_each(words: Sequence[str]) -> list[str]:
    """Return the words of overrides less those whose option is set again later.

    A command that has been resumed with other values has them all, one behind the other.
    """
    found = split(words)
    last = {override.name: override for override in found}
    kept = [override for override in found if last[override.name] is override]
    return [word for override in kept for word in (override.option, *override.values)]


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
        target = _target_of(config, override)
        changed = None if target is None else _with_named_part(target)
        if target is None or changed is None:
            others.append(override)
            continue
        config = changed
        if value_at(config, target.keys) is None:
            others = [other for other in others if not other.sets_inside(override)]
    return config, others


@dataclass(frozen=True, slots=True)
class _Target:
    """Field or dict entry of a config that may hold a part, and the override that names it."""

    config: Any
    """Whole config, to whose copies the part is given."""
    keys: tuple[str, ...]
    """Names of fields and keys of dicts that lead to the value."""
    override: Override

    @property
    def holder(self) -> Any:
        """Config or dict that holds the value."""
        return value_at(self.config, self.keys[:-1])

    @property
    def value(self) -> Any:
        """Value that the config has."""
        return value_at(self.config, self.keys)

    @property
    def path(self) -> str:
        """Path of the field, as it was typed."""
        return self.override.option.removeprefix("--")

    @property
    def word(self) -> str:
        """First word behind the option; empty where the option stands alone."""
        return next(iter(self.override.values), "")

    @property
    def declared_type(self) -> Any:
        """Type that the field declares; None for an entry of a dict."""
        return _declared_type(self.holder, self.keys[-1])

    @property
    def may_be_none(self) -> bool:
        return types.NoneType in get_args(self.declared_type)

    @property
    def optional_class(self) -> Any:
        """Class of the part that the field holds or leaves out; None for any other field."""
        if not self.may_be_none or self.is_data:
            return None
        return _only_config_class(self.declared_type)

    @property
    def is_data(self) -> bool:
        """True for a task's dataset and its validation set."""
        return isinstance(self.holder, Task.Config) and self.keys[-1] in ("dataset", "validation")

    @property
    def rubric(self) -> Rubric.Config | None:
        """Rubric that the field holds, or an empty one if it may hold one; else None."""
        if isinstance(self.value, Rubric.Config):
            return self.value
        return Rubric.Config() if self.optional_class is Rubric.Config else None

    @property
    def takes_function(self) -> bool:
        kinds = (self.declared_type, *get_args(self.declared_type))
        return any(get_origin(kind) is Callable for kind in kinds)

    @property
    def takes_location(self) -> bool:
        """True if a class or function of the user's may stand here.

        False for a plain dataclass that the field may leave out, such as ``trainer.lora``.
        """
        optional = self.optional_class
        return optional in (None, Rubric.Config) or isinstance(self.value, Configurable.Config)

    def with_part(self, part: Any) -> Any:
        """Return a copy of the config that has the part here."""
        return replaced(self.config, self.keys, part)

    def with_default_part(self) -> Any | None:
        """Return the config with a part here, which has its defaults if it was left out.

        Return None if the field is none that may leave a part out.
        """
        if self.optional_class is None:
            return None
        return self.config if self.value is not None else self.with_part(self.optional_class())

    def refusal(self, cure: str) -> ConfigError:
        return ConfigError(self.path, self.word, cure)


def _target_of(config: Any, override: Override) -> _Target | None:
    """Return what an override names; None if that can hold no part."""
    keys = _keys(config, override.name)
    if keys is None:
        return None
    target = _Target(config, keys, override)
    holds_part = isinstance(target.value, Configurable.Config | JobConfig | list)
    takes_part = target.takes_function or target.is_data or target.optional_class is not None
    return target if holds_part or takes_part else None


def _declared_type(holder: Any, name: str) -> Any:
    """Return the type of a field of a config; None for an entry of a dict."""
    if isinstance(holder, Mapping):
        return None
    config_class: Any = type(holder)
    return declared(field_annotations(config_class).get(name)).type


def _only_config_class(annotation: Any) -> Any:
    """Return the only config class in a union; None if there are none or several."""
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


def _names(holder: Any) -> Collection[str]:
    """Return the names of a config's fields or the keys of a dict."""
    if dataclasses.is_dataclass(holder):
        return [entry.name for entry in dataclasses.fields(holder)]
    return holder if isinstance(holder, dict) else ()


def _like(word: str, names: Collection[str]) -> str | None:
    """Return the name that a word means, where "-" and "_" are the same."""
    return next(
        (name for name in names if str(name).replace("-", "_") == word.replace("-", "_")), None
    )


def _with_parts_on_the_way(config: Any, override: Override) -> Any:
    """Return a copy of the config with the parts that it leaves out and an override sets fields of.

    Such as ``trainer.lora`` for ``--trainer.lora.rank 16``.
    """
    words = override.name.split(".")
    for length in range(1, len(words)):
        keys = _keys(config, ".".join(words[:length]))
        if keys is None:
            return config
        kind = _only_config_class(_declared_type(value_at(config, keys[:-1]), keys[-1]))
        left_out = value_at(config, keys) is None and kind is not None
        if left_out and _like(words[length], _names(kind)):
            config = replaced(config, keys, kind())
    return config


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


def _with_named_part(target: _Target) -> Any | None:
    """Return the config with the part that the override names; None if it sets a plain value.

    Raises:
        ConfigError: the words name no part that fits the field.
    """
    words = target.override.values
    if not words:
        return target.with_default_part()
    changed = _with_part_of_word(target)
    if changed is not None and len(words) > 1:
        raise target.refusal(
            f"takes one word, and {words[1]!r} follows: several names have commas between"
        )
    return changed


def _with_part_of_word(target: _Target) -> Any | None:
    """Return the config with the part that the word names; None if the word is a plain value.

    Raises:
        ConfigError: the word names no part that fits the field.
    """
    if target.word in NONE and target.may_be_none:
        return target.with_part(None)
    if isinstance(target.value, list):
        return _with_parts_of_list(target)
    if ":" in target.word and target.takes_location:
        return target.with_part(_part_at(target))
    if target.is_data:
        return _with_data(target)
    if target.rubric is not None:
        if target.word == right_answer.__name__:
            return target.with_part(_rubric_of(target.rubric, [right_answer]))
        raise target.refusal(
            "a rubric is reward functions and their place: a file or a module, a colon, names: "
            f"my_rewards.py:{target.word}; each is fn(completion, example). right_answer, which "
            "compares the answer with the row's, needs no place"
        )
    return _with_part_of_name(target)


def _with_parts_of_list(target: _Target) -> Any | None:
    """Return the config with a list of parts; None if the field is a list of plain values."""
    kinds = [kind for kind in get_args(target.declared_type) if inspect.isclass(kind)]
    if len(kinds) != 1 or not parts_that_fit(kinds[0]):
        return None
    names = [] if target.word in ("", EMPTY, *NONE) else target.word.split(",")
    return target.with_part([_config_named(target, name, kinds[0]) for name in names])


def _with_data(target: _Target) -> Any | None:
    """Return the config with a file or a dataset of the hub, read as the task's dataset is.

    Return None if the task's dataset is none of rows.
    """
    rows = target.value or target.holder.dataset
    if not isinstance(rows, RowDataset.Config):
        return None
    if target.word in NONE:
        raise target.refusal("a task can't do without it: name a file, or a dataset of the hub")
    split_name = "train" if target.value is None else rows.split
    return target.with_part(
        dataclasses.replace(rows, path=target.word, rows=None, split=split_name)
    )


def _with_part_of_name(target: _Target) -> Any | None:
    """Return the config with a part of the library; None if parts of the field have no names.

    A part of the class that the field holds already keeps what the config says of it.
    """
    wanted = target.declared_type
    if not inspect.isclass(wanted) or not parts_that_fit(wanted):
        return None
    part = _config_named(target, target.word, wanted)
    return target.config if type(target.value) is type(part) else target.with_part(part)


def _config_named(target: _Target, name: str, wanted: type[Any]) -> Any:
    """Return the config of a part of the library by its name, or of a class by its location.

    Args:
        wanted: config class that the field holds.
    """
    if ":" in name:
        return _config_of_class(target, _objects_at(target, name), wanted)
    parts = parts_that_fit(wanted)
    config_class = part_named(name, parts)
    if config_class is None:
        raise target.refusal(
            f"name one of {', '.join(parts)}, or a class of yours as my_module:MyClass"
        )
    return _made(target, config_class)


def _part_at(target: _Target) -> Any:
    """Return the function, the config of a class, or the rubric of functions at a location."""
    found = _objects_at(target, target.word)
    first, *others = found.values()
    if target.takes_function and callable(first) and not others:
        return first
    rubric = target.rubric
    if inspect.isclass(first) or rubric is None:
        declares_class = inspect.isclass(target.declared_type)
        wanted = target.declared_type if declares_class else Configurable.Config
        return _config_of_class(target, found, wanted)
    for name, entry in found.items():
        if not callable(entry) or inspect.isclass(entry):
            raise target.refusal(
                f"{name} is no function: want reward functions fn(completion, example)"
            )
    return _rubric_of(rubric, list(found.values()))


def _rubric_of(rubric: Rubric.Config, functions: list[Callable[..., Any]]) -> Rubric.Config:
    """Return a rubric of these functions, with the limits of another.

    A class that registers functions of its own would leave these out, so it is not kept.
    """
    kind: Any = built_class(rubric)
    if kind.register_funcs is Rubric.register_funcs:
        return dataclasses.replace(rubric, reward_fns=list(functions))
    limits = {
        entry.name: getattr(rubric, entry.name) for entry in dataclasses.fields(Rubric.Config)
    }
    return Rubric.Config(**limits | {"reward_fns": functions})


def _config_of_class(target: _Target, found: dict[str, Any], wanted: type[Any]) -> Any:
    """Return the config of the one class that was found.

    Raises:
        ConfigError: it is no class, there are several, or its Config does not fit the field.
    """
    (name, first), *others = found.items()
    if others or not inspect.isclass(first):
        names = target.word.rpartition(":")[2]
        raise target.refusal(f"{names} is no class with a Config")
    config_class = getattr(first, "Config", first)
    if not (inspect.isclass(config_class) and issubclass(config_class, wanted)):
        raise target.refusal(f"{name} is no {wanted.__qualname__.removesuffix('.Config')}")
    return _made(target, config_class)


def _made(target: _Target, config_class: type[Any]) -> Any:
    """Return a config with its defaults."""
    with user_code(target.path, target.word, "its Config can't be made without arguments"):
        return config_class()


def _objects_at(target: _Target, location: str) -> dict[str, Any]:
    """Return what modules or files have by the names behind the colons.

    Args:
        location: names with commas between, each behind its module or file or that of the name
            before it: "a.py:f,g" and "a.py:f,b.py:h".

    Raises:
        ConfigError: there is no such module or file, it can't be imported, or it lacks a name; or a
            name stands twice.
    """
    found: dict[str, Any] = {}
    path = ""
    for entry in location.split(","):
        own_path, _, name = entry.rpartition(":")
        path = own_path or path
        if name in found:
            raise target.refusal(f"{name!r} stands twice: give one of them another name")
        found[name] = _object_in(target, path, name)
    return found


def _object_in(target: _Target, path: str, name: str) -> Any:
    module = _import_module(target, path)
    if hasattr(module, name):
        return getattr(module, name)
    defined = [
        key
        for key, entry in vars(module).items()
        if getattr(entry, "__module__", None) == module.__name__
    ]
    raise target.refusal(f"{path} has no {name!r}; it defines {', '.join(defined) or 'nothing'}")


def _import_module(target: _Target, path: str) -> ModuleType:
    """Import a module by its name, or a .py file under its stem.

    Raises:
        ConfigError: there is none, it can't be imported, or another module has the file's name.
    """
    name = path
    if path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        name = file.stem
        if not file.is_file():
            raise MissingError(target.path, target.word, f"no such file: {path}")
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file):
            raise target.refusal(f"a module is named {name!r} already: rename the file")
        add_import_folder(file.parent)
    with user_code(target.path, target.word, f"{path} can't be imported"):
        return importlib.import_module(name)
