"""Parts of a config that the command line names.

By a short name, where the library has it: ``--tasks.sums.algorithm max_rl``, ``--trainer.loss.rl ppo_clip``,
``--provision.job slurm``; a list with commas between, or none: ``--pre-batch-filters zero_advantage,repetition``. By its place,
where it is yours: ``--tasks.sums.rubric my_rewards.py:exact``. The place is a file or a module, a colon, and a name in it: a
class with a Config that fits the field, or, for a rubric, reward functions, several of them with commas between. Data is named
by its file: ``--tasks.sums.validation held_out.jsonl``.

Options that set fields of the part follow as for any other. tyro, which reads these, knows only what the config already holds.
"""

import dataclasses
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import declared, field_annotations
from torchtitan.experiments.rl.config.part_names import part_named, parts_that_fit
from torchtitan.experiments.rl.config.user_faults import user_code
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.jobs import JobConfig
from torchtitan.experiments.rl.process.setup import add_import_folder
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
        if not equals:
            value = words[0] if words else ""
        field = option.removeprefix("--")
        place = _find(config, field.split(".")) if option.startswith("--") else None
        if place is None or not (equals or words) or not _choose(place, value, field=field):
            left.append(word)
        elif not equals:
            words.pop(0)
    return left


def _choose(place: "_Place", value: str, *, field: str) -> bool:
    """Put the part that ``value`` names in its place. False: it is for tyro to read."""
    if isinstance(place.value, JobConfig):
        _choose_job(place, value, field=field)
    elif isinstance(place.value, list):
        return _choose_list(place, value, field=field)
    elif ":" in value:
        place.put(_part(place, value, field=field))
    elif isinstance(place.holder, Task.Config) and place.key in ("dataset", "validation"):
        return _choose_data(place, value)
    elif isinstance(place.value, Rubric.Config) and not value.startswith("-"):
        cure = f"a rubric is reward functions and their place: a file or a module, a colon, names: my_rewards.py:{value}"
        raise ConfigError(field, value, f"{cure}; each is fn(completion, example)")
    else:
        parts = parts_that_fit(place.wanted)
        if not parts or value.startswith("-"):
            return False
        wanted = _named(value, parts, field=field, value=value)
        if type(place.value) is not wanted:  # of the same kind, it keeps what the config says of it
            place.put(_made(wanted, field=field, value=value))
    return True


def _choose_data(place: "_Place", value: str) -> bool:
    """A file, or a dataset of the hub, that is read as the task's dataset is."""
    rows = place.value or place.holder.dataset
    if value.startswith("-") or not isinstance(rows, RowDataset.Config):
        return False
    split = rows.split if place.value is not None else "train"
    place.put(None if value in ("none", "None") else dataclasses.replace(rows, path=value, rows=None, split=split))
    return True


def _choose_list(place: "_Place", value: str, *, field: str) -> bool:
    parts = parts_that_fit(place.wanted_entry)
    if not parts or value.startswith("-"):
        return False
    entries = []
    for name in value.split(",") if value not in ("", "none", "None") else []:
        if ":" in name:
            entries.append(_part(_Place({field: None}, field, entry=place.wanted_entry), name, field=field))
        else:
            entries.append(_made(_named(name, parts, field=field, value=value), field=field, value=value))
    place.put(entries)
    return True


def _named(name: str, parts: dict[str, type[Configurable.Config]], *, field: str, value: str) -> type[Configurable.Config]:
    found = part_named(name, parts)
    if found is None:
        raise ConfigError(field, value, f"name one of {', '.join(parts)}, or a class of yours as my_module:MyClass")
    return found


def _made(wanted: type[Any], *, field: str, value: str) -> Configurable.Config:
    with user_code(field, value, "its Config can't be made without arguments"):
        return wanted()


def _choose_job(place: "_Place", name: str, *, field: str) -> None:
    """Of the same kind as the config's, the job keeps what the config says of it."""
    wanted = JobConfig.by_name.get(name.replace("-", "_"))
    if wanted is None:
        raise ConfigError(field, name, f"name one of {', '.join(JobConfig.by_name)}")
    if type(place.value) is not wanted:
        place.put(wanted())


@dataclass(frozen=True, slots=True)
class _Place:
    """A field, or an entry of a dict, that holds the config of a part."""

    holder: Any
    key: str
    entry: type | None = None
    """Class of the configs that fit, where the holder does not say it."""

    @property
    def value(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, dict) else getattr(self.holder, self.key)

    def put(self, part: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = part
        else:
            setattr(self.holder, self.key, part)

    @property
    def wanted(self) -> type:
        """Class of the configs that fit: the field's declared one, or, for an entry of a dict, Configurable.Config."""
        plain = self.entry or declared(self._annotation).type
        return plain if inspect.isclass(plain) else Configurable.Config

    @property
    def wanted_entry(self) -> type:
        """The same of the entries of a list."""
        arguments = get_args(declared(self._annotation).type)
        return arguments[0] if len(arguments) == 1 and inspect.isclass(arguments[0]) else Configurable.Config

    @property
    def _annotation(self) -> Any:
        return None if isinstance(self.holder, dict) else field_annotations(type(self.holder), {}).get(self.key)


def _find(config: Any, path: list[str]) -> _Place | None:
    """The place of a part by the words of its option; None where there is no part."""
    holder, place = config, None
    for word in path:
        names = {entry.name for entry in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else holder
        if not isinstance(names, set | dict):
            return None
        key = next((name for name in names if str(name).replace("-", "_") == word.replace("-", "_")), None)
        if key is None:
            return None
        place = _Place(holder, key)
        holder = place.value
    data = place is not None and isinstance(place.holder, Task.Config) and place.key == "validation"
    return place if data or isinstance(holder, Configurable.Config | JobConfig | list) else None


def _part(place: _Place, value: str, *, field: str) -> Any:
    path, _, names = value.rpartition(":")
    module = _module(path, value, field=field)
    found = {}
    for name in names.split(","):
        if not hasattr(module, name):
            own = [key for key, entry in vars(module).items() if getattr(entry, "__module__", None) == module.__name__]
            raise ConfigError(field, value, f"{path} has no {name!r}; it defines {', '.join(own) or 'nothing'}")
        found[name] = getattr(module, name)
    first, *others = found.values()
    if inspect.isclass(first) and not others:
        config = getattr(first, "Config", None)
        if not inspect.isclass(config) or not issubclass(config, place.wanted):
            raise ConfigError(field, value, f"{names} is no {place.wanted.__qualname__.removesuffix('.Config')}")
        return _made(config, field=field, value=value)
    if not isinstance(place.value, Rubric.Config):
        raise ConfigError(field, value, f"{names} is no class with a Config")
    for name, entry in found.items():
        if not callable(entry) or inspect.isclass(entry):
            raise ConfigError(field, value, f"{name} is no function: want reward functions fn(completion, example)")
    return dataclasses.replace(place.value, reward_fns=list(found.values()))


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
