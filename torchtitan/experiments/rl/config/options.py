"""The options of a config: one for each field, read from words and listed by ``--help``.

    --trainer.optimizer.lr 1e-5                 a field, by its path
    --tasks.sum-digits.group-size 16            an entry of a dict, by its key
    --post-batch-filters.0.mode enforce         an entry of a list, by its place
    --trainer.optimizer.betas 0.9 0.95          several values are several words
    --metrics.wandb, --metrics.no-jsonl         True and False, also written as words
    --rollouts-per-step None                    a field that may be None

pydantic reads each word as the type that the field declares. Bounds are checked with the whole
config (``bounds.check_fields``). What no word can say, such as a function, is listed as fixed: it
is set in a config function.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter

from torchtitan.experiments.rl.bounds import (
    bounds_said,
    declared,
    field_annotations,
    is_union,
    type_in_words,
    walk,
)
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.overrides import names_of_parts, options_inside
from torchtitan.experiments.rl.errors import ConfigError, UnknownOption
from torchtitan.experiments.rl.observability.console import typed_command, write_line

_METAVARS: dict[Any, str] = {
    int: "INT",
    float: "FLOAT",
    str: "TEXT",
    bool: "{True,False}",
    types.NoneType: "None",
    None: "None",
}
_SEVERAL = (list, tuple, set, frozenset)
_KEY = re.compile(r"\w[\w.-]*")
"""Keys of a dict that can stand in an option."""
_MOVED = {
    "generator.adapter": "trainer.lora.serve",
    "trainer.async-tensor-parallel": "trainer.compile.async-tensor-parallel",
    "trainer.float8": "trainer.compile.float8",
    "trainer.no-compile": "trainer.compile None",
}
"""Options that have another name now, by the name that they had."""
REMOVED_FIELDS = {"groups_per_step": "set rollouts_per_step to groups * group_size"}
"""Fields of RunConfig that are gone, and what to do instead."""
_WIDTH = 118
"""Columns of the help."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option: where in the config its value stands, and what it may be."""

    name: str
    """Path of the field as the command line writes it, such as ``post-batch-filters.0.mode``."""
    keys: tuple[Any, ...]
    """Names of fields, keys of dicts and places in lists that lead to the value."""
    annotation: Any
    value: Any
    """Value that the config has."""
    owner: type
    """Class of the config, dict or list that holds the value."""

    @property
    def text(self) -> str:
        """Return the text under the field in its class; empty where there is none."""
        return field_texts(self.owner).get(self.keys[-1], "")

    @property
    def is_flag(self) -> bool:
        return declared(self.annotation).type is bool

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that words say.

        Raises:
            ConfigError: they say none of the field's type.
        """
        said = " ".join(words)
        if metavar(self.annotation) is None:
            held = text_of_value(self.value)
            cure = f"is fixed to {held}: no word can say its value; set it in a config function"
            raise ConfigError(f"--{self.name}", said, cure)
        if self.is_flag and not words:
            return True
        if not words and not _takes_several(self.annotation):
            raise ConfigError(f"--{self.name}", "", "it wants a value")
        try:
            return _read(list(words), self.annotation)
        except ValueError:
            cure = f"must be {type_in_words(self.annotation)}"
            raise ConfigError(f"--{self.name}", said, cure) from None


def override(config: Any, words: Sequence[str]) -> Any:
    """Return the config with the values that words of a command line give to its options.

    ``--help`` among the words lists the options and exits.

    Raises:
        ConfigError: a word belongs to no option, or says no value of its type.
    """
    if {"-h", "--help"} & set(words):
        write_line(sys.stdout, help_of(config))  # whose reader may have seen enough
        sys.exit(0)
    options = options_of(config)
    unknown: list[str] = []
    for word, values in _split(words):
        name = word.removeprefix("--").replace("_", "-")
        option, positive = options.get(name), _without_no(name)
        if option is None and positive in options and options[positive].is_flag:
            option, values = options[positive], ["False", *values]
        inside = _inside(config, options, name)
        if option is not None and (metavar(option.annotation) is not None or not inside):
            config = replaced(config, option.keys, option.read(values))
        elif inside:
            cure = f"it is set by its fields: {', '.join(inside)}"
            if not values:
                cure = f"it wants a value, or {cure.removeprefix('it ')}"
            if options_inside(config, name):
                cure += f"; {word} alone takes their defaults"
            raise ConfigError(word, " ".join(values), cure)
        elif name in _MOVED:
            raise ConfigError(word, " ".join(values), f"is --{_MOVED[name]} now")
        elif name.replace("-", "_") in REMOVED_FIELDS:
            raise UnknownOption(word, " ".join(values), REMOVED_FIELDS[name.replace("-", "_")])
        else:
            unknown.append(word)
    if unknown:
        near = [f"--{path}" for word in unknown if (path := _nearest(config, word))]
        cure = f"perhaps you meant {', '.join(near)}" if near else ""
        raise UnknownOption(", ".join(unknown), " ".join(words), cure)
    return config


def options_of(config: Any) -> dict[str, Option]:
    """Return the options of a tree of configs, by name, in the order of their fields."""
    found: dict[str, Option] = {}

    def add(value: Any, annotation: Any, keys: tuple[Any, ...], owner: type) -> None:
        entries = list(_entries(value, annotation))
        for key, entry, entry_annotation in entries:
            add(entry, entry_annotation, (*keys, key), type(value))
        if not entries and keys:
            name = option_name(keys)
            found[name] = Option(name, keys, _known_type(annotation, value), value, owner)

    add(config, Any, (), object)
    return found


def option_paths(config: Any) -> list[str]:
    """Return the path of every field and part as the command line writes it, lists left out."""
    return [path.replace("_", "-") for path, *_ in walk(config) if path and "[" not in path]


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words of its value.

    Raises:
        ConfigError: a word stands behind no option.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError("overrides", word, "belongs to no option: write --field value")
        option, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        yield option, values


def _without_no(name: str) -> str:
    """Return ``metrics.jsonl`` of ``metrics.no-jsonl``."""
    holder, dot, last = name.rpartition(".")
    return f"{holder}{dot}{last.removeprefix('no-')}"


def _inside(config: Any, options: Mapping[str, Option], name: str) -> list[str]:
    """Return the options of the fields of a part that ``name`` names; empty where it names none."""
    held = [f"--{option}" for option in options if option.startswith(f"{name}.")]
    return held or options_inside(config, name)


def _nearest(config: Any, word: str) -> str | None:
    """Return the field that an unknown option probably means, by its path or its last name."""
    name = word.removeprefix("--").replace("_", "-")
    paths = {path: path for path in option_paths(config)}
    ends = {path.rpartition(".")[2]: path for path in reversed(paths)}
    for wanted, known in ((name, paths), (name.rpartition(".")[2], ends)):
        for near in difflib.get_close_matches(wanted, known, n=1, cutoff=0.8):
            return known[near]
    return None


def option_name(keys: Sequence[Any]) -> str:
    return ".".join(str(key) for key in keys).replace("_", "-")


def replaced(config: Any, keys: Sequence[Any], value: Any) -> Any:
    """Return a copy of the config in which ``keys`` lead to ``value``.

    Parts that the keys do not pass are shared with the original.
    """
    if not keys:
        return value
    key, *inner = keys
    if isinstance(config, Mapping):
        return {**config, key: replaced(config[key], inner, value)}
    if isinstance(config, list | tuple):
        entries = list(config)
        entries[key] = replaced(entries[key], inner, value)
        return type(config)(entries)
    return dataclasses.replace(config, **{key: replaced(getattr(config, key), inner, value)})


def _entries(value: Any, annotation: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield key, value and annotation of each entry of a value with options inside."""
    arguments = _arguments_for(value, annotation)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        annotations = field_annotations(type(value))
        for entry in dataclasses.fields(value):
            if entry.init:
                yield entry.name, getattr(value, entry.name), annotations.get(entry.name, Any)
    elif isinstance(value, dict) and value:
        if all(isinstance(key, str) and _KEY.fullmatch(key) for key in value):
            kind = arguments[1] if len(arguments) == 2 else Any
            for key, entry in value.items():
                yield key, entry, kind
    elif isinstance(value, list | tuple) and any(map(_has_options, value)):
        for index, entry in enumerate(value):
            yield index, entry, arguments[0] if arguments else Any


def _has_options(value: Any) -> bool:
    return next(_entries(value, Any), None) is not None


def _arguments_for(value: Any, annotation: Any) -> tuple[Any, ...]:
    """Return [str, int] of ``dict[str, int] | None`` for a value that is a dict."""
    plain = declared(annotation).type
    options = get_args(plain) if is_union(plain) else (plain,)
    for option in options:
        if get_origin(declared(option).type) is type(value):
            return get_args(declared(option).type)
    return ()


def _known_type(annotation: Any, value: Any) -> Any:
    """Return the annotation; where no word can say its type, that of the word which it holds."""
    if value is not None and metavar(annotation) is None and type(value) in _METAVARS:
        return type(value)
    return annotation


# ---- words


def metavar(annotation: Any) -> str | None:
    """Return what stands for the value in the help, such as ``FLOAT`` or ``{a,b}``.

    None: no word can say a value of this type.
    """
    plain = declared(annotation).type
    origin, arguments = get_origin(plain), get_args(plain)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if is_union(plain):
        said = [text for option in arguments if (text := metavar(option)) is not None]
        return "|".join(said) if set(said) - {"None"} else None
    if origin in (*_SEVERAL, dict):
        return _metavar_of_several(origin, arguments)
    return _METAVARS.get(plain)


def _metavar_of_several(origin: Any, arguments: Sequence[Any]) -> str | None:
    inner = [metavar(entry) for entry in arguments if entry is not Ellipsis]
    if not inner or None in inner:
        return None
    together = " ".join(map(str, inner))
    fixed = origin is tuple and Ellipsis not in arguments
    return together if fixed else f"[{together} ...]"


def _takes_several(annotation: Any) -> bool:
    """Return whether no word at all says a value: an empty list."""
    plain = declared(annotation).type
    if is_union(plain):
        return any(map(_takes_several, get_args(plain)))
    fixed = get_origin(plain) is tuple and Ellipsis not in get_args(plain)
    return get_origin(plain) in (*_SEVERAL, dict) and not fixed


def _read(words: list[str], annotation: Any) -> Any:
    """Return what words say as a type.

    Raises:
        ValueError: nothing of this type.
    """
    plain = declared(annotation).type
    origin, arguments = get_origin(plain), get_args(plain)
    if is_union(plain):
        return _read_union(words, arguments)
    if origin in (*_SEVERAL, dict):
        return _read_several(words, origin, arguments)
    (word,) = words
    return _read_word(word, plain)


def _read_several(words: list[str], origin: Any, arguments: Sequence[Any]) -> Any:
    if origin is dict:
        key_type, value_type = arguments
        pairs = zip(words[::2], words[1::2], strict=True)
        return {_read([key], key_type): _read([value], value_type) for key, value in pairs}
    kinds = arguments
    if origin is not tuple or Ellipsis in arguments:
        kinds = [arguments[0]] * len(words)
    return origin(_read([word], kind) for word, kind in zip(words, kinds, strict=True))


def _read_word(word: str, plain: Any) -> Any:
    if get_origin(plain) is Literal:
        return _choice(word, get_args(plain))
    if plain in (None, types.NoneType):
        return _choice(word, [None])
    if plain is bool and word.lower() not in ("true", "false"):
        raise ValueError(word)  # pydantic would take "yes" and "1" too
    return _adapter(plain).validate_strings(word)


def _read_union(words: list[str], options: Sequence[Any]) -> Any:
    """Return what words say as the first type that they fit; None before a text."""
    for option in sorted(options, key=lambda option: declared(option).type is not types.NoneType):
        if metavar(option) is None:
            continue
        try:
            return _read(words, option)
        except ValueError:
            continue
    raise ValueError(words)


def _choice(word: str, choices: Sequence[Any]) -> Any:
    for choice in choices:
        if str(choice) == word:
            return choice
    raise ValueError(word)


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def text_of_value(value: Any) -> str:
    """Return a value as the help shows it: of what no word can say, its class or its name."""
    if isinstance(value, str | int | float | None):
        return repr(value) if value == "" else str(value)
    if isinstance(value, list | tuple | dict | set | frozenset):
        return " ".join(map(text_of_value, value)) or "nothing"
    return getattr(value, "__qualname__", type(value).__qualname__)


# ---- help


def help_of(config: Any) -> str:
    """Return the list of a config's options, with descriptions, bounds and present values."""
    lines = [f"usage: {typed_command('grpo')} --config NAME [--option value ...]"]
    heading: tuple[Any, ...] | None = None
    for option in options_of(config).values():
        if option.keys[:-1] != heading:
            heading = option.keys[:-1]
            lines += ["", _heading(config, heading)]
        names = names_of_parts(option.annotation)
        inside = options_inside(config, option.name) if option.value is None else []
        said = metavar(option.annotation)
        if said is None:
            holds_part = "[None]" if inside else "NAME"
            said = holds_part if inside or names else "{fixed}"
        lines.append(f"  --{option.name} {said}")
        lines += _wrapped(_described(option, inside, names))
    return "\n".join(lines)


def _heading(config: Any, keys: Sequence[Any]) -> str:
    """Return the path of a part, and the class that the part's config builds."""
    part = config
    for key in keys:
        part = part[key] if isinstance(part, dict | list | tuple) else getattr(part, key)
    if not dataclasses.is_dataclass(part):
        return option_name(keys)
    return f"{option_name(keys)}: {built_class(part).__name__}." if keys else ""


def _wrapped(text: str) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _described(option: Option, inside: Sequence[str], names: Sequence[str]) -> str:
    """Return the paragraph under an option.

    Args:
        inside: options of the part that its field may hold.
        names: of the library's parts that its field may hold.
    """
    # torchtitan's own help names an option of its trainer.
    parts = [" ".join(option.text.split()).replace("training.steps", "steps")]
    if inside:
        parts.append(f"(is made by this option alone, or by {', '.join(inside)})")
    elif names:
        parts.append(f"({', '.join(names)}, or a class of yours as my_module:MyClass)")
    elif metavar(option.annotation) is None:
        parts.append("(is set in a config function)")
    elif bounds := bounds_said(option.annotation):
        parts.append(f"({bounds})")
    if option.is_flag:
        holder, dot, name = option.name.rpartition(".")
        parts.append(f"(False: --{holder}{dot}no-{name})")
    parts.append(f"(default: {text_of_value(option.value)})")
    return " ".join(filter(None, parts))


@functools.cache
def field_texts(config_class: type) -> Mapping[str, str]:
    """Return the texts under the fields of a dataclass and of its bases, by field name."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # made at run time, or built in
            continue
        assert isinstance(definition, ast.ClassDef)
        for entry, after in zip(definition.body, definition.body[1:], strict=False):
            if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
                continue
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[entry.target.id] = text.value
    return found
