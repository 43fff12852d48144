"""Parts of a config that the command line names.

By a short name, where the library has it: ``--tasks.sums.algorithm max_rl``, ``--trainer.loss.rl ppo_clip``,
``--provision.job slurm``; a list with commas between, or empty: ``--pre-batch-filters zero_advantage,repetition``, or ``[]``.
By its place, where it is yours: ``--tasks.sums.rubric my_rewards.py:exact``. The place is a file or a module, a colon, and a
name in it: a class with a Config that fits the field, or, for a rubric, reward functions, several of them with commas between;
for any other field that takes a function, one. Data is named by its file: ``--tasks.sums.validation held_out.jsonl``.

Options that set fields of the part follow as for any other, and make a part that the config leaves out. tyro, which reads
these, knows only what the config already holds.
"""

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union, get_args, get_origin

from tyro.conf import Fixed, arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

import torchtitan.experiments.rl.data.difficulty_pool
import torchtitan.experiments.rl.data.replay
import torchtitan.experiments.rl.rollouts.filters  # noqa: F401 - each defines parts that no config may have named yet
from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.bounds import bounds_said, declared, field_annotations, is_union
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import ConfigError, user_code
from torchtitan.experiments.rl.hosts.jobs import JobConfig
from torchtitan.experiments.rl.losses import Correction, CrossEntropy, RefKL, RLLoss
from torchtitan.experiments.rl.process.setup import add_import_folder
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.task import Task


def take_named_parts(config: Any, overrides: list[str]) -> list[str]:
    """Put the parts that ``overrides`` name into ``config``; return the other overrides.

    Raises:
        ConfigError: there is no such file, module or name, or what is there does not fit the field.
    """
    left, words = [], list(overrides)
    while words:
        option, equals, value = (word := words.pop(0)).partition("=")
        field, following = option.removeprefix("--"), [value] if equals else words[:1]
        place = _find(config, field.split(".")) if option.startswith("--") else None
        if place is None or not following or following[0].startswith("-") or not _choose(place, following[0], field=field):
            left.append(word)
        elif not equals:
            words.pop(0)
    return left


@dataclass(frozen=True, slots=True)
class _Place:
    """A field, or an entry of a dict, that holds the config of a part."""

    holder: Any
    key: str

    @property
    def value(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, dict) else getattr(self.holder, self.key)

    def put(self, part: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = part
        else:
            setattr(self.holder, self.key, part)

    @property
    def type(self) -> Any:
        """What the field declares; None for an entry of a dict."""
        holder: Any = type(self.holder)
        return None if holder is dict else declared(field_annotations(holder).get(self.key)).type

    @property
    def is_data(self) -> bool:
        return isinstance(self.holder, Task.Config) and self.key in ("dataset", "validation")

    @property
    def takes_function(self) -> bool:
        return any(get_origin(option) is Callable for option in (self.type, *get_args(self.type)))


def _find(config: Any, path: list[str]) -> _Place | None:
    """The place of a part by the words of its option; None where there is no part. A part that the config leaves out gets its
    defaults where an option sets a field of it: ``--trainer.lora.rank 16``."""
    holder, place = config, None
    for number, word in enumerate(path, start=1):
        key = _like(word, _names(holder))
        if key is None:
            return None
        place = _Place(holder, key)
        kinds: list[Any] = [kind for kind in get_args(place.type) if dataclasses.is_dataclass(kind)]
        if place.value is None and len(kinds) == 1 and number < len(path) and _like(path[number], _names(kinds[0])):
            place.put(kinds[0]())
        holder = place.value
    if place is not None and (isinstance(holder, Configurable.Config | JobConfig | list) or place.takes_function):
        return place
    return place if place is not None and place.is_data and place.key == "validation" else None


def _names(holder: Any) -> Collection[str]:
    if dataclasses.is_dataclass(holder):
        return [entry.name for entry in dataclasses.fields(holder)]
    return holder if isinstance(holder, dict) else ()


def _like(word: str, names: Collection[str]) -> str | None:
    return next((name for name in names if str(name).replace("-", "_") == word.replace("-", "_")), None)


def _choose(place: _Place, value: str, *, field: str) -> bool:
    """Put the part that ``value`` names in its place. False: it is for tyro to read."""
    kind, held = place.type, place.value
    if isinstance(held, list):
        kinds = [kind for kind in get_args(kind) if inspect.isclass(kind)]
        if len(kinds) != 1 or not parts_that_fit(kinds[0]):
            return False
        names = [] if value in ("", "[]", "none", "None") else value.split(",")
        place.put([_config_named(name, kinds[0], field=field, value=value) for name in names])
    elif ":" in value:
        place.put(_at_place(place, value, field=field))
    elif place.is_data:
        # A file, or a dataset of the hub, that is read as the task's dataset is.
        rows = held or place.holder.dataset
        if not isinstance(rows, RowDataset.Config):
            return False
        split = "train" if held is None else rows.split
        place.put(None if value in ("none", "None") else dataclasses.replace(rows, path=value, rows=None, split=split))
    elif isinstance(held, Rubric.Config):
        cure = f"a rubric is reward functions and their place: a file or a module, a colon, names: my_rewards.py:{value}"
        raise ConfigError(field, value, f"{cure}; each is fn(completion, example)")
    elif isinstance(held, JobConfig) or (inspect.isclass(kind) and parts_that_fit(kind)):
        part = _config_named(value, kind, field=field, value=value)
        if type(held) is not type(part):  # of the same kind, it keeps what the config says of it
            place.put(part)
    else:
        return False
    return True


def _config_named(name: str, wanted: type[Any], *, field: str, value: str) -> Any:
    """The config of a part of the library by its name, or of a class of the user's by its place."""
    if ":" in name:
        return _config_of(_objects(name, field=field, value=value), wanted, field=field, value=value)
    parts: dict[str, type[Any]] = JobConfig.by_name if issubclass(wanted, JobConfig) else parts_that_fit(wanted)
    if (found := part_named(name, parts)) is None:
        raise ConfigError(field, value, f"name one of {', '.join(parts)}, or a class of yours as my_module:MyClass")
    return _made(found, field=field, value=value)


def _at_place(place: _Place, value: str, *, field: str) -> Any:
    """The config of a class, a function, or a rubric of functions, by their place."""
    found = _objects(value, field=field, value=value)
    first, *others = found.values()
    if place.takes_function and callable(first) and not others:
        return first
    if inspect.isclass(first) or not isinstance(place.value, Rubric.Config):
        wanted = place.type if inspect.isclass(place.type) else Configurable.Config
        return _config_of(found, wanted, field=field, value=value)
    for name, entry in found.items():
        if not callable(entry) or inspect.isclass(entry):
            raise ConfigError(field, value, f"{name} is no function: want reward functions fn(completion, example)")
    return dataclasses.replace(place.value, reward_fns=list(found.values()))


def _config_of(found: dict[str, Any], wanted: type[Any], *, field: str, value: str) -> Any:
    (name, first), *others = found.items()
    if others or not inspect.isclass(first):
        raise ConfigError(field, value, f"{value.rpartition(':')[2]} is no class with a Config")
    config = getattr(first, "Config", first)
    if not (inspect.isclass(config) and issubclass(config, wanted)):
        raise ConfigError(field, value, f"{name} is no {wanted.__qualname__.removesuffix('.Config')}")
    return _made(config, field=field, value=value)


def _made(wanted: type[Any], *, field: str, value: str) -> Any:
    with user_code(field, value, "its Config can't be made without arguments"):
        return wanted()


def _objects(place: str, *, field: str, value: str) -> dict[str, Any]:
    """What a module or file has by the names behind the colon."""
    path, _, names = place.rpartition(":")
    module = _module(path, value, field=field)
    for name in names.split(","):
        if not hasattr(module, name):
            own = [key for key, entry in vars(module).items() if getattr(entry, "__module__", None) == module.__name__]
            raise ConfigError(field, value, f"{path} has no {name!r}; it defines {', '.join(own) or 'nothing'}")
    return {name: getattr(module, name) for name in names.split(",")}


def _module(path: str, place: str, *, field: str) -> ModuleType:
    """The module of a name, or of a .py file, which is imported under its stem."""
    if not path.endswith(".py"):
        with user_code(field, place, f"{path} can't be imported"):
            return importlib.import_module(path)
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(field, place, f"no such file: {path}")
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) != str(file):
        raise ConfigError(field, place, f"a module is named {file.stem!r} already: rename the file")
    add_import_folder(file.parent)
    with user_code(field, place, f"{path} can't be imported"):
        return importlib.import_module(file.stem)


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


_KEY = re.compile(r"\w[\w.-]*")
"""Keys of a dict that can stand in an option."""
_LEFT_OUT = (
    Fixed,
    arg(help_behavior_hint="(is set in a config function)"),
    # tyro reads no constructor of the value's class, for options, beside a rule of its own.
    PrimitiveConstructorSpec(
        nargs=1, metavar="", instance_from_str=str, is_instance=lambda _: True, str_from_instance=lambda value: [str(value)]
    ),
)


def registry_with_bounds() -> ConstructorRegistry:
    """tyro's rules, and one that adds bounds to an option's help and leaves out what no words can say. How a word becomes a
    value stays the same."""
    registry = ConstructorRegistry()
    asking = False

    @registry.struct_rule
    def options_with_bounds(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal asking
        if asking:
            return None
        asking = True  # the rule steps aside, so that tyro's own answers
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        annotations = field_annotations(info.type) if dataclasses.is_dataclass(info.type) else {}
        fields = []
        for entry in spec.fields:
            annotation = annotations.get(entry.name, entry.type)
            said = _in_our_words(entry.helptext, bounds_said(annotation))
            fields.append(dataclasses.replace(entry, type=_option_type(annotation, entry), helptext=said))
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


def _option_type(annotation: Any, entry: StructFieldSpec) -> Any:
    """The annotation as tyro reads it, less what no words can say."""
    if _has_options(entry.default) or _read_from_words(annotation) is not None:
        return annotation
    plain = declared(annotation).type
    said = [option for option in get_args(plain) if option is not types.NoneType and _read_from_words(option) is not None]
    annotated: Any = Annotated  # a type made at run time, which no type checker can follow
    spec = _read_from_words(Union[tuple(said)]) if is_union(plain) and said else None  # noqa: UP007 - of a list of types
    if spec is None:
        return annotated[(Any, *_LEFT_OUT)]
    # What the field holds may be of a type that can't be said.
    return annotated[Any, dataclasses.replace(spec, is_instance=lambda _: True, str_from_instance=lambda value: [_text(value)])]


def _in_our_words(text: str | Callable[[], str | None] | None, bounds: str) -> Callable[[], str | None]:
    """A field's help, and its bounds. torchtitan's own help names an option of its trainer."""

    def read() -> str | None:
        found = (text() if callable(text) else text) or ""
        said = [found.replace("training.steps", "steps"), bounds and f"({bounds})"]
        return " ".join(filter(None, said)) or None

    return read


def _has_options(value: Any) -> bool:
    """Whether tyro looks inside the value for options."""
    if isinstance(value, dict):
        return bool(value) and all(isinstance(key, str) and _KEY.fullmatch(key) for key in value)
    if isinstance(value, list | tuple):
        return any(map(_has_options, value))
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _read_from_words(annotation: Any) -> PrimitiveConstructorSpec | None:
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    return spec if isinstance(spec, PrimitiveConstructorSpec) else None
