"""Parts of a config that the command line names.

By a short name, where the library has it: ``--tasks.sums.algorithm max_rl``, ``--trainer.loss.rl
ppo_clip``, ``--provision.job slurm``; a list with commas between, or empty: ``--pre-batch-filters
zero_advantage,repetition``, or ``[]``. By its place, where it is yours: ``--tasks.sums.rubric
my_rewards.py:exact``. The place is a file or a module, a colon, and a name in it: a class with a
Config that fits the field, or, for a rubric, reward functions, several of them with commas between;
for any other field that takes a function, one. Data is named by its file: ``--tasks.sums.validation
held_out.jsonl``.

Options that set fields of the part follow as for any other, and make a part that the config leaves
out. ``config/options.py`` reads these: it knows what the config holds by then.
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


def take_named_parts(config: Any, overrides: list[str]) -> list[str]:
    """Put the parts that ``overrides`` name into ``config``; return the other overrides.

    Raises:
        ConfigError: there is no such file, module or name, or what is there does not fit the field.
    """
    left: list[str] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        given = value if equals else next(iter(words), "-")
        valued = not given.startswith("-")
        place = _find(config, option.removeprefix("--"), given) if option.startswith("--") else None
        if place is None or not (_choose(place) if valued else place.make()):
            left.append(word)
            continue
        if valued and not equals:
            words.pop(0)
            if words and not words[0].startswith("-"):
                raise place.refusal(
                    f"takes one word, and {words[0]!r} follows: several names have commas between"
                )
        if place.value is None:
            left = _outside(place.field, left)
    return left


def _outside(field: str, words: list[str]) -> list[str]:
    """Return the words less those that set fields of a part which a later word takes out."""
    kept: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word.replace("_", "-").startswith(f"--{field.replace('_', '-')}.")
        if not inside:
            kept.append(word)
    return kept


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a part: a field or an entry of a dict, and what an option puts there."""

    holder: Any
    key: str
    field: str
    """Path of the field, as the option has it."""
    given: str
    """Value of the option."""

    @property
    def value(self) -> Any:
        return (
            self.holder[self.key]
            if isinstance(self.holder, dict)
            else getattr(self.holder, self.key)
        )

    def put(self, part: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = part
        else:
            setattr(self.holder, self.key, part)

    def refusal(self, cure: str) -> ConfigError:
        return ConfigError(self.field, self.given, cure)

    @property
    def type(self) -> Any:
        """Type that the field declares; None for an entry of a dict."""
        holder: Any = type(self.holder)
        return None if holder is dict else declared(field_annotations(holder).get(self.key)).type

    @property
    def optional_kind(self) -> Any:
        """Class of the part that the field may hold or leave out; None for any other field."""
        kinds = [kind for kind in get_args(self.type) if dataclasses.is_dataclass(kind)]
        may_be_left_out = types.NoneType in get_args(self.type)
        return kinds[0] if len(kinds) == 1 and may_be_left_out and not self.is_data else None

    def make(self) -> bool:
        """Put in the part with its defaults, for an option without a value.

        Returns:
            False if the field holds no part that may be left out.
        """
        kind = self.optional_kind
        if kind is not None and self.value is None:
            self.put(kind())
        return kind is not None

    @property
    def is_data(self) -> bool:
        return isinstance(self.holder, Task.Config) and self.key in ("dataset", "validation")

    @property
    def takes_function(self) -> bool:
        return any(get_origin(option) is Callable for option in (self.type, *get_args(self.type)))


def _find(config: Any, field: str, given: str) -> _Place | None:
    """Return the place of a part by its option; None where there is no part.

    A part that the config leaves out is made where an option sets a field of it, such as
    ``--trainer.lora.rank 16``.
    """
    holder, place, path = config, None, field.split(".")
    for number, word in enumerate(path, start=1):
        key = _like(word, _names(holder))
        if key is None:
            return None
        place = _Place(holder, key, field, given)
        kinds: list[Any] = [kind for kind in get_args(place.type) if dataclasses.is_dataclass(kind)]
        if (
            place.value is None
            and len(kinds) == 1
            and number < len(path)
            and _like(path[number], _names(kinds[0]))
        ):
            place.put(kinds[0]())
        holder = place.value
    if place is None:
        return None
    has_part = isinstance(holder, Configurable.Config | JobConfig | list)
    takes_part = has_part or place.takes_function or place.is_data
    return place if takes_part or place.optional_kind is not None else None


def options_inside(config: Any, option: str) -> list[str]:
    """Return the options of the fields of a part that the config leaves out, by its option."""
    holder, place = config, None
    for word in option.split("."):
        if (key := _like(word, _names(holder))) is None:
            return []
        place = _Place(holder, key, option, "")
        holder = place.value
    kinds: list[Any] = [] if place is None else [*get_args(place.type)]
    return [
        f"--{option}.{name.replace('_', '-')}"
        for kind in kinds
        if dataclasses.is_dataclass(kind)
        for name in _names(kind)
    ]


def _names(holder: Any) -> Collection[str]:
    if dataclasses.is_dataclass(holder):
        return [entry.name for entry in dataclasses.fields(holder)]
    return holder if isinstance(holder, dict) else ()


def _like(word: str, names: Collection[str]) -> str | None:
    return next(
        (name for name in names if str(name).replace("-", "_") == word.replace("-", "_")), None
    )


def _choose(place: _Place) -> bool:
    """Put the part that is given in its place; return False if it is a field's plain value."""
    kind, held, given = place.type, place.value, place.given
    if place.optional_kind is not None and not isinstance(held, Configurable.Config):
        if given == "None":
            place.put(None)
        return given == "None"
    if isinstance(held, list):
        kinds = [kind for kind in get_args(kind) if inspect.isclass(kind)]
        if len(kinds) != 1 or not parts_that_fit(kinds[0]):
            return False
        names = [] if given in ("", "[]", "none", "None") else given.split(",")
        place.put([_config_named(place, name, kinds[0]) for name in names])
    elif ":" in given:
        place.put(_at_place(place))
    elif place.is_data:
        # A file, or a dataset of the hub, that is read as the task's dataset is.
        rows = held or place.holder.dataset
        if not isinstance(rows, RowDataset.Config):
            return False
        split = "train" if held is None else rows.split
        place.put(
            None
            if given in ("none", "None")
            else dataclasses.replace(rows, path=given, rows=None, split=split)
        )
    elif isinstance(held, Rubric.Config):
        cure = (
            "a rubric is reward functions and their place: a file or a module, a colon, names: "
            f"my_rewards.py:{given}"
        )
        raise place.refusal(f"{cure}; each is fn(completion, example)")
    elif inspect.isclass(kind) and parts_that_fit(kind):
        part = _config_named(place, given, kind)
        if type(held) is not type(part):  # of the same kind, it keeps what the config says of it
            place.put(part)
    else:
        return False
    return True


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
