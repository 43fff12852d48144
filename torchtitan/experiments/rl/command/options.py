"""The options of a config: one for each field, read from words and listed by ``--help``.

    --trainer.optimizer.lr 1e-5                 a field, by its path
    --tasks.sum-digits.group-size 16            an entry of a dict, by its key
    --tasks.agent.variables.LEVEL 3             a new entry of a dict of plain values
    --post-batch-filters.0.mode enforce         an entry of a list, by its place
    --trainer.optimizer.betas 0.9 0.95          several values are several words; [] is none
    --metrics.wandb, --metrics.no-jsonl         True and False, also written as words
    --rollouts-per-step None                    a field that may be None

pydantic reads the words as the type that the field declares. Bounds are checked with the whole
config (``bounds.check_fields``). What no word can say, such as a function, is listed as fixed: it
is set in a config function.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter

from torchtitan.experiments.rl.bounds import (
    Entry,
    bounds_said,
    declared,
    entries,
    has_fixed_length,
    is_union,
    type_in_words,
)
from torchtitan.experiments.rl.command.overrides import (
    EMPTY,
    Override,
    option_name,
    options_of_absent_part,
    replaced,
    split,
    take_named_parts,
    value_at,
)
from torchtitan.experiments.rl.command.part_names import names_of_parts
from torchtitan.experiments.rl.compat.torchtitan import built_class
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
GONE = {
    "generator.adapter": "is --trainer.lora.serve now",
    "groups-per-step": "is gone: set rollouts_per_step to groups * group_size",
    "trainer.async-tensor-parallel": "is --trainer.compile.async-tensor-parallel now",
    "trainer.float8": "is --trainer.compile.float8 now",
    "trainer.no-compile": "is --trainer.compile None now",
}
"""Cures for options and fields that are gone, by name. Each is the end of an error line."""
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
        """True if the option alone means True, and False is said with ``no-``."""
        kinds = _kinds(self.annotation)
        return bool in kinds and set(kinds) <= {bool, types.NoneType}

    @property
    def is_fixed(self) -> bool:
        """True if no word can say a value of the field's type."""
        return metavar(self.annotation) is None

    @property
    def gains_keys(self) -> bool:
        """True if the value is a dict to which the command line may add entries."""
        return isinstance(self.value, dict) and not self.is_fixed

    def entry(self, key: str) -> "Option":
        """Return the option of a new entry of this dict.

        Raises:
            ConfigError: the dict takes no such key.
        """
        annotation = next(kind for kind in _kinds(self.annotation) if get_origin(kind) is dict)
        key_type, value_type = get_args(annotation)
        try:
            new_key = _adapter(key_type).validate_python([key])
        except ValueError:
            cure = f"must be {type_in_words(key_type)}"
            raise ConfigError(f"--{self.name}", key, cure) from None
        return Option(f"{self.name}.{key}", (*self.keys, new_key), value_type, None, dict)

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that words say.

        Raises:
            ConfigError: they say none of the field's type.
        """
        said = " ".join(words)
        option = f"--{self.name}"
        if self.is_fixed:
            held = text_of_value(self.value)
            cure = f"is fixed to {held}: no word can say its value; set it in a config function"
            raise ConfigError(option, said, cure)
        if self.is_flag and not words:
            return True
        several = _takes_several(self.annotation)
        if not words and not several:
            raise ConfigError(option, "", "it wants a value")
        try:
            empty = several and list(words) == [EMPTY]
            return _adapter(self.annotation).validate_python([] if empty else list(words))
        except ValueError:
            cure = f"must be {type_in_words(self.annotation)}"
        if len(words) > 1 and _takes_one(self.annotation):
            cure = f"takes one word, and {words[1]!r} follows"
            if str in _kinds(self.annotation):
                cure += ": a text with spaces stands in quotes"
        raise ConfigError(option, said, cure)


def override(config: Any, words: Sequence[str]) -> Any:
    """Return a copy of the config with what the words of a command line say.

    ``--help`` among the words lists the options and exits.

    Raises:
        ConfigError: a word belongs to no option, or says no value of its type.
    """
    help_wanted = {"-h", "--help"} & set(words)
    overrides = split([word for word in words if word not in ("-h", "--help")])
    config, others = take_named_parts(config, overrides)
    if help_wanted:
        write_line(sys.stdout, help_of(config))  # whose reader may have seen enough
        sys.exit(0)
    options = options_of(config)
    unknown: list[Override] = []
    for other in others:
        option, values = _option_for(other, options)
        is_absent_part = bool(options_of_absent_part(config, other.name))
        if option is not None and not (option.is_fixed and is_absent_part):
            config = replaced(config, option.keys, option.read(values))
            continue
        _refuse_known(other, config, options)
        unknown.append(other)
    if unknown:
        names = _names_and_parts(options)
        for path, absent_part in options.items():
            if absent_part.value is None:
                absent = options_of_absent_part(config, path)
                names += [word.removeprefix("--") for word in absent]
        near = [f"--{name}" for other in unknown if (name := _nearest(other.name, names))]
        cure = f"perhaps you meant {', '.join(near)}" if near else ""
        if near and any(_last_word(other.name) in _WORDS_OF_OTHERS for other in unknown):
            cure += "; docs/coming_from.md has TRL's words"
        raise UnknownOption(", ".join(other.option for other in unknown), " ".join(words), cure)
    return config


def _option_for(
    override: Override, options: Mapping[str, Option]
) -> tuple[Option | None, tuple[str, ...]]:
    """Return the option that an override means, and the words of its value.

    ``--metrics.no-jsonl`` is ``--metrics.jsonl False``. An option that is fixed and has options of
    its parts is not meant.
    """
    option = options.get(override.name)
    if option is not None:
        is_meant = not option.is_fixed or not _options_under(override.name, options)
        return (option if is_meant else None), override.values
    flag = options.get(_without_no(override.name))
    if flag is not None and flag.is_flag:
        return flag, ("False", *override.values)
    # A key is taken as it was typed: whether it has - or _ is the dict's own matter.
    holder_name, _, key = override.option.removeprefix("--").rpartition(".")
    holder = options.get(holder_name.replace("_", "-"))
    if holder is not None and holder.gains_keys and _KEY.fullmatch(key):
        return holder.entry(key), override.values
    return None, override.values


def _refuse_known(override: Override, config: Any, options: Mapping[str, Option]) -> None:
    """Refuse an override whose name means something and is no option.

    Raises:
        ConfigError: it names a part that is set by its fields, or an option that is gone.
    """
    absent = options_of_absent_part(config, override.name)
    fields = _options_under(override.name, options) or absent
    if fields:
        cure = f"it is set by its fields: {', '.join(fields)}"
        if not override.values:
            cure = f"it wants a value, or {cure.removeprefix('it ')}"
        if absent:
            cure += f"; {override.option} alone takes their defaults"
        raise ConfigError(override.option, override.value, cure)
    if override.name in GONE:
        raise ConfigError(override.option, override.value, GONE[override.name])


def options_of(config: Any) -> dict[str, Option]:
    """Return the options of a tree of configs, by name, in the order of their fields.

    Raises:
        ConfigError: two keys of a dict differ by - and _ alone, and so share an option.
    """
    found: dict[str, Option] = {}

    def add(value: Any, annotation: Any, keys: tuple[Any, ...], owner: type) -> None:
        inner = _entries_with_options(value, annotation)
        option = Option(option_name(keys), keys, _known_type(annotation, value), value, owner)
        if keys and (not inner or option.gains_keys):
            if option.name in found:
                cure = "two keys share this option, because - and _ are the same there: rename one"
                raise ConfigError(f"--{option.name}", keys[-1], cure)
            found[option.name] = option
        for entry in inner:
            add(entry.value, entry.annotation, (*keys, entry.key), type(value))

    add(config, Any, (), object)
    return found


def _entries_with_options(value: Any, annotation: Any = Any) -> list[Entry]:
    """Return the entries of a config, a dict or a list that have options of their own."""
    inner = entries(value, annotation)
    if dataclasses.is_dataclass(value):
        given = {entry.name for entry in dataclasses.fields(value) if entry.init}
        return [entry for entry in inner if entry.key in given]
    if isinstance(value, Mapping):
        return [entry for entry in inner if _KEY.fullmatch(str(entry.key))]
    if isinstance(value, list | tuple):
        return inner if any(_entries_with_options(entry.value) for entry in inner) else []
    return []


def _options_under(name: str, options: Iterable[str]) -> list[str]:
    """Return the options of the fields of a part; empty where the name is none of a part."""
    return [f"--{option}" for option in options if option.startswith(f"{name}.")]


def _without_no(name: str) -> str:
    """Return ``metrics.jsonl`` of ``metrics.no-jsonl``."""
    holder, dot, last = name.rpartition(".")
    return f"{holder}{dot}{last.removeprefix('no-')}"


def _names_and_parts(options: Iterable[str]) -> list[str]:
    """Return the names of options and of the parts that they lie in, each once."""
    found: dict[str, None] = {}
    for name in options:
        found |= dict.fromkeys(itertools.accumulate(name.split("."), "{}.{}".format))
    return list(found)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that an unknown one probably means, by its path or its last word."""
    name = _WORDS_OF_OTHERS.get(_last_word(name), name)
    by_end = {known.rpartition(".")[2]: known for known in reversed(names)}
    for wanted, known in ((name, {path: path for path in names}), (_last_word(name), by_end)):
        for near in difflib.get_close_matches(wanted, known, n=1, cutoff=0.8):
            return known[near]
    return None


_WORDS_OF_OTHERS = {
    "learning-rate": "trainer.optimizer.lr",
    "num-generations": "group-size",
    "max-completion-length": "sampling.max-tokens",
    "max-grad-norm": "trainer.optimizer.max-norm",
    "max-steps": "steps",
    "save-steps": "checkpoint.interval",
    "save-total-limit": "checkpoint.keep",
    "eval-steps": "validation.every",
    "beta": "trainer.reference.kl-coef",
}
"""Options of ours by their names in TRL, whose letters are not alike."""


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _known_type(annotation: Any, value: Any) -> Any:
    """Return the annotation; where no word can say its type, that of the word which it holds."""
    if value is not None and metavar(annotation) is None and type(value) in _METAVARS:
        return type(value)
    return annotation


# ---- words


def _kinds(annotation: Any) -> list[Any]:
    """Return the plain types that a field may have: those of a union, or its one."""
    plain = declared(annotation).type
    return [declared(kind).type for kind in get_args(plain)] if is_union(plain) else [plain]


def metavar(annotation: Any) -> str | None:
    """Return what stands for the value in the help, such as ``FLOAT`` or ``{a,b}``.

    Return None if no word can say a value of this type.
    """
    kinds = _kinds(annotation)
    if len(kinds) > 1:
        said = [text for kind in kinds if (text := metavar(kind)) is not None]
        return "|".join(said) if set(said) - {"None"} else None
    (plain,) = kinds
    origin = get_origin(plain)
    arguments = get_args(plain)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin in (*_SEVERAL, dict):
        return _metavar_of_several(origin, arguments)
    return _METAVARS.get(plain)


def _metavar_of_several(origin: Any, arguments: Sequence[Any]) -> str | None:
    kinds = [kind for kind in arguments if kind is not Ellipsis]
    inner = [metavar(kind) for kind in kinds if _takes_one(kind)]
    if not kinds or len(inner) < len(kinds) or None in inner:
        return None
    together = " ".join(map(str, inner))
    fixed = origin is tuple and has_fixed_length(tuple(arguments))
    return together if fixed else f"[{together} ...]"


def _takes_one(annotation: Any) -> bool:
    """Return True if every value is said by one word."""
    return not any(get_origin(kind) in (*_SEVERAL, dict) for kind in _kinds(annotation))


def _takes_several(annotation: Any) -> bool:
    """Return True if any number of words says a value, none too: an empty list."""
    return any(
        get_origin(kind) in (*_SEVERAL, dict)
        and not (get_origin(kind) is tuple and has_fixed_length(get_args(kind)))
        for kind in _kinds(annotation)
    )


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """Return what reads a list of words as a field's type."""
    return TypeAdapter(_of_words(annotation))


def _of_words(annotation: Any) -> Any:
    """Return the type that pydantic reads from a list of words as the field's type.

    None is tried before other types, so that the word None is no text.
    """
    annotated: Any = Annotated  # types made at run time, which no type checker can follow
    kinds = [kind for kind in _kinds(annotation) if metavar(kind) is not None]
    if len(kinds) > 1:
        kinds.sort(key=lambda kind: kind is not types.NoneType)
        union: Any = Union
        read = union[tuple(map(_of_words, kinds))]
        return annotated[read, Field(union_mode="left_to_right")]
    (plain,) = kinds
    origin = get_origin(plain)
    arguments = get_args(plain)
    if origin is Literal:
        return annotated[plain, BeforeValidator(_choice_of(arguments))]
    if origin is dict:
        return annotated[origin[tuple(map(_of_words, arguments))], BeforeValidator(_pairs)]
    if origin in _SEVERAL:
        inner = tuple(kind if kind is Ellipsis else _of_words(kind) for kind in arguments)
        return origin[inner]
    return annotated[plain, BeforeValidator(_FROM_WORD[plain])]


def _one(words: Any) -> str:
    """Return the word of a value that takes one: a list of one, or an entry of a longer list.

    Raises:
        ValueError: there are more, or none.
    """
    if isinstance(words, str):
        return words
    (word,) = words
    return word


def _choice_of(choices: Sequence[Any]) -> Callable[[Any], Any]:
    """Return what reads a word as one of several values, each written as Python prints it."""
    by_word = {str(choice): choice for choice in choices}

    def read(words: Any) -> Any:
        word = _one(words)
        if word not in by_word:
            raise ValueError(word)
        return by_word[word]

    return read


def _truth(words: Any) -> bool:
    """Return the bool that a word says; pydantic would take "yes" and "1" too."""
    truths = {"true": True, "false": False}
    word = _one(words).lower()
    if word not in truths:
        raise ValueError(word)
    return truths[word]


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


_FROM_WORD: dict[Any, Callable[[Any], Any]] = {
    int: lambda words: int(_one(words)),  # pydantic would take "5.0" too
    float: _one,
    str: _one,
    bool: _truth,
    types.NoneType: _choice_of([None]),
    None: _choice_of([None]),
}


def text_of_value(value: Any) -> str:
    """Return a value as the help shows it: of what no word can say, its class or its name."""
    if isinstance(value, str | int | float | None):
        return repr(value) if value == "" else str(value)
    if isinstance(value, dict):
        pairs = [f"{text_of_value(key)} {text_of_value(entry)}" for key, entry in value.items()]
        return " ".join(pairs) or "nothing"
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(map(text_of_value, value)) or "nothing"
    return getattr(value, "__qualname__", type(value).__qualname__)


# ---- help


def help_of(config: Any) -> str:
    """Return the list of a config's options, with descriptions, bounds and present values."""
    lines = [f"usage: {typed_command('train')} --config NAME [--option value ...]"]
    heading: tuple[Any, ...] | None = None
    for option in options_of(config).values():
        if option.keys[:-1] != heading:
            heading = option.keys[:-1]
            lines += ["", _heading(config, heading)]
        names = names_of_parts(option.annotation)
        of_part = options_of_absent_part(config, option.name) if option.value is None else []
        said = metavar(option.annotation)
        if said is None:
            holds_part = "[None]" if of_part else "NAME"
            said = holds_part if of_part or names else "{fixed}"
        lines.append(f"  --{option.name} {said}")
        lines += _wrapped(_described(option, of_part, names))
    return "\n".join(lines)


def _heading(config: Any, keys: Sequence[Any]) -> str:
    """Return the path of a part, and the class that the part's config builds."""
    part = value_at(config, keys)
    if not dataclasses.is_dataclass(part):
        return option_name(keys)
    return f"{option_name(keys)}: {built_class(part).__name__}." if keys else ""


def _wrapped(text: str) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _described(option: Option, of_part: Sequence[str], names: Sequence[str]) -> str:
    """Return the paragraph under an option.

    Args:
        of_part: options of the part that its field may hold and the config leaves out.
        names: names of the library's parts that its field may hold.
    """
    # torchtitan's own help names an option of its trainer.
    parts = [" ".join(option.text.split()).replace("training.steps", "steps")]
    if of_part:
        parts.append(f"(is made by this option alone, or by {', '.join(of_part)})")
    elif names:
        parts.append(f"({', '.join(names)}, or a class of yours as my_module:MyClass)")
    elif option.is_fixed:
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
