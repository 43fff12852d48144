"""Bounds of config fields: declared in annotations, checked in a whole tree, said in words.

    count: PositiveInt = 10_000
    row_length: Annotated[int, Ge(2)] = 2048
    alpha: dict[str, PositiveFloat]

`check_fields` walks a tree of dataclasses, dicts, lists and tuples, and refuses the first value
that has not its declared type, is not finite or is out of its bounds. pydantic gives the verdict on
each number, text, bool and choice; the walk around it is ours, because a field that is declared as
a base class holds the config of a subclass, with fields of its own.

For other bounds than those below, use Ge, Gt, Le, Lt, Interval, MinLen, MaxLen and Len of
`annotated_types`. Other metadata is ignored. A field whose type can't be checked (Any, a type
variable, a name that can't be resolved) may hold anything.
"""

import dataclasses
import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MaxLen, MinLen
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from torchtitan.experiments.rl.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cure:
    """Metadata of a field: advice on a wrong value, which the error shows after the bound."""

    text: str


@dataclass(frozen=True, slots=True)
class Matches:
    """Bound of a text: a regular expression that fits the whole of it."""

    pattern: str
    said: str
    """End of the sentence "must be ..." in the error."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._match, handler(source))

    def _match(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError(self.said)
        return value


@dataclass(frozen=True, slots=True)
class AtMost:
    """Metadata of a field whose value is at most that of ``field``, another of the same config.

    A value of None, on either side, is no limit.
    """

    field: str


@dataclass(frozen=True, slots=True)
class _MayChange:
    """Metadata of a field that may have another value in a run that is resumed."""


Changeable = Annotated[T, _MayChange()]
"""Type of a field that a resumed run may change, with all that is inside: how far, how fast and
where the run goes. Other fields decide which data a run sees and what it learns from it."""
PositiveInt = Annotated[int, Ge(1)]
ProcessCount = Annotated[int, Ge(1), Le(1024), Cure("a run has at most 1024 processes of a role")]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
NonEmptyStr = Annotated[str, MinLen(1)]

OF_OTHERS: dict[type, Mapping[str, Any]] = {}
"""Annotations by field name for config classes of other packages, which declare no bounds, and for
their subclasses."""

_SCALARS = (int, float, str, bool)


def check_config(config: Any, *, field: str, **context: Any) -> None:
    """Check the fields of a config, then what relates them, by ``config.validate``.

    Args:
        field: path of this config, such as "tasks.sum_digits".
        context: further arguments of this config's ``validate``.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check_fields(config, field=field)
    config.validate(field=field, **context)


def check_fields(config: Any, *, field: str = "") -> None:
    """Check every value in a tree of configs against what its field declares.

    Args:
        field: path of the config itself, such as "tasks.sum_digits"; empty for a whole run.

    Raises:
        ConfigError: the first wrong value, by the path of its field, such as
            ``pre_batch_filters[0].margin``.
    """
    _check(config, Any, field)


class Declared(NamedTuple):
    """An annotation taken apart."""

    type: Any
    bounds: tuple[Any, ...]
    cure: str
    """Advice of the field's ``Cure``; empty where it has none."""
    may_change: bool = False
    """True if a resumed run may have another value."""
    at_most: str = ""
    """Name of the field that is the limit of this one; empty where none is."""


def declared(annotation: Any) -> Declared:
    """Return the plain type of an annotation, its bounds and its other metadata."""
    if get_origin(annotation) is not Annotated:
        return Declared(annotation, (), "")
    plain, *metadata = get_args(annotation)
    flat: list[Any] = []
    for entry in metadata:
        flat += entry if isinstance(entry, GroupedMetadata) else [entry]
    return Declared(
        plain,
        bounds=tuple(entry for entry in flat if type(entry) in _BOUND_TEXTS),
        cure="; ".join(entry.text for entry in flat if isinstance(entry, Cure)),
        may_change=any(isinstance(entry, _MayChange) for entry in flat),
        at_most="".join(entry.field for entry in flat if isinstance(entry, AtMost)),
    )


@functools.cache
def field_annotations(config_class: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields, by name.

    An annotation that can't be resolved is left out, and so is a type variable. A subclass that
    declares a field again, for another default, and repeats only its type keeps the bounds.
    """
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        hints, plain_hints = _type_hints(base)
        for name in vars(base).get("__annotations__", {}):
            repeated = name in found and hints[name] == plain_hints[name] == plain[name]
            if not repeated:
                found[name] = hints[name]
                plain[name] = plain_hints[name]
        found |= OF_OTHERS.get(base, {})
    return {name: hint for name, hint in found.items() if not isinstance(hint, str | TypeVar)}


def _type_hints(base: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the annotations of one class with their metadata, and without."""
    try:
        return typing.get_type_hints(base, include_extras=True), typing.get_type_hints(base)
    except Exception:  # noqa: BLE001 - evaluates annotations of a user's class, which may be any text
        hints = vars(base).get("__annotations__", {})
        return hints, hints


# ---- the walk


class Entry(NamedTuple):
    """Value that a config, a dict or a list holds, and where it stands there."""

    key: Any
    """Name of a field, key of a dict, or place in a list."""
    value: Any
    annotation: Any
    path: str
    """Path of the value, such as ``pre_batch_filters[0].margin``."""


def entries(value: Any, annotation: Any = Any, field: str = "") -> list[Entry]:
    """Return what a config, a dict, a list, a tuple or a set holds; nothing of any other value.

    Args:
        annotation: declared type of ``value``, which may say the types of its entries.
        field: path of ``value``.
    """
    arguments = _arguments_for(value, annotation)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = field_annotations(type(value))
        names = [entry.name for entry in dataclasses.fields(value)]
        prefix = f"{field}." if field else ""
        return [
            Entry(name, getattr(value, name), hints.get(name, Any), prefix + name) for name in names
        ]
    if isinstance(value, Mapping):
        kind = arguments[1] if len(arguments) == 2 else Any
        return [Entry(key, entry, kind, f"{field}.{key}") for key, entry in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        kinds = [(arguments or (Any,))[0]] * len(value)
        if (
            isinstance(value, tuple)
            and len(arguments) == len(value)
            and has_fixed_length(arguments)
        ):
            kinds = list(arguments)
        return [
            Entry(index, entry, kind, f"{field}[{index}]")
            for index, (entry, kind) in enumerate(zip(value, kinds, strict=True))
        ]
    return []


def walk(
    config: Any, field: str = "", annotation: Any = Any, *, beside: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and annotation of everything in a tree of configs, itself first.

    Args:
        field: path of the config itself.
        beside: types that are left out, with what is in them.
    """
    if not isinstance(config, beside):
        yield field, config, annotation
        for entry in entries(config, annotation, field):
            yield from walk(entry.value, entry.path, entry.annotation, beside=beside)


def _arguments_for(value: Any, annotation: Any) -> tuple[Any, ...]:
    """Return (str, int) of ``dict[str, int] | None`` for a value that is a dict."""
    plain = declared(annotation).type
    kinds = [declared(kind).type for kind in get_args(plain)] if is_union(plain) else [plain]
    for kind in kinds:
        origin = get_origin(kind)
        if isinstance(origin, type) and isinstance(value, origin):
            return get_args(kind)
    return ()


def has_fixed_length(arguments: tuple[Any, ...]) -> bool:
    """Return True for the arguments of a tuple type with a fixed length."""
    return Ellipsis not in arguments


def _check(value: Any, annotation: Any, field: str) -> None:
    wanted, bounds, cure, *_ = declared(annotation)
    if is_union(wanted):
        _check_union(value, wanted, bounds, field, cure)
        return
    said = _fault(value, wanted, bounds)
    if said is not None:
        raise ConfigError(field, value, sentence(said, _config_of(value) or cure))
    if isinstance(value, Mapping):
        key_type = (*get_args(wanted), Any)[0]
        for key in value:
            _check(key, key_type, field)
    inner = entries(value, wanted, field)
    for entry in inner:
        _check(entry.value, entry.annotation, entry.path)
    for entry in inner:
        _check_limit(entry, value)


def _check_limit(entry: Entry, holder: Any) -> None:
    """Refuse a value above that of the field which its ``AtMost`` names."""
    name = declared(entry.annotation).at_most
    limit = getattr(holder, name) if name else None
    if limit is not None and entry.value is not None and entry.value > limit:
        raise ConfigError(entry.path, entry.value, f"must be at most {name} = {limit}")


def _check_union(value: Any, union: Any, bounds: tuple[Any, ...], field: str, cure: str) -> None:
    """Refuse a value that fits none of the types, or has a fault inside whichever it fits.

    Args:
        bounds: those that stand beside the union, and so are no bounds of None: ``Annotated[float |
            None, Gt(0)]``.
    """
    fitting = [option for option in get_args(union) if _has_type(value, declared(option).type)]
    if not fitting:
        raise ConfigError(field, value, sentence([f"be {type_in_words(union)}"], cure))
    problems = []
    for option in fitting:
        try:
            _check(value, option if value is None else _with_bounds(option, bounds, cure), field)
            return
        except ConfigError as problem:
            problems.append(problem)
    raise problems[-1]


def _with_bounds(annotation: Any, bounds: tuple[Any, ...], cure: str) -> Any:
    annotated: Any = Annotated  # a type made at run time, which no type checker can follow
    return annotated[(annotation, *bounds, Cure(cure))] if bounds else annotation


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


# ---- the verdict on one value


def _fault(value: Any, wanted: Any, bounds: tuple[Any, ...]) -> list[str] | None:
    """Return what a value must be and is not, as parts of a sentence.

    None: nothing is wrong with the value itself, what it holds left aside.
    """
    bounds_in_words = list(map(_bound_text, bounds))
    if wanted in _SCALARS or get_origin(wanted) is Literal:
        verdict = _verdict(_as_number(value, wanted), wanted, bounds)
        if verdict is None:
            return None
        if verdict == "finite_number":
            return ["be a finite number", *bounds_in_words]
        is_type = verdict.endswith(("_type", "_error")) and verdict != "value_error"
        return [f"be {type_in_words(wanted)}"] if is_type else bounds_in_words
    if not _has_type(value, wanted):
        return [f"be {type_in_words(wanted)}"]
    if bounds and _verdict(value, get_origin(wanted) or wanted, bounds) is not None:
        return bounds_in_words
    return None


def _verdict(value: Any, wanted: Any, bounds: tuple[Any, ...]) -> str | None:
    """Return pydantic's name of what is wrong with a value; None where nothing is."""
    try:
        _adapter(wanted, bounds).validate_python(value)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["type"]
    return None


@functools.cache
def _adapter(wanted: Any, bounds: tuple[Any, ...]) -> TypeAdapter[Any]:
    annotated: Any = Annotated
    config = ConfigDict(strict=True, allow_inf_nan=False)
    return TypeAdapter(annotated[(wanted, *bounds)] if bounds else wanted, config=config)


def _as_number(value: Any, wanted: Any) -> Any:
    """Return a number of any library as Python's own: pydantic would refuse numpy's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    if wanted is int:
        return int(value) if isinstance(value, numbers.Integral) else value
    try:
        return float(value) if wanted is float else value
    except OverflowError:  # a whole number that no float can hold
        return math.inf


def _has_type(value: Any, wanted: Any) -> bool:
    """Return whether a value has a type; True where that can't be told."""
    if wanted is None or wanted is types.NoneType:
        return value is None
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted in _SCALARS or origin is Literal:
        return _verdict(_as_number(value, wanted), wanted, ()) in (None, "finite_number")
    if is_union(wanted):
        return any(_has_type(value, declared(option).type) for option in arguments)
    if origin is tuple and has_fixed_length(arguments) and isinstance(value, tuple):
        return len(value) == len(arguments)
    try:
        return isinstance(value, origin or wanted)
    except TypeError:  # Any, a type variable, a protocol
        return True


def _config_of(value: Any) -> str:
    """Return the cure where a class, or what it builds, stands in the place of its Config."""
    owner = value if isinstance(value, type) else type(value)
    is_part = dataclasses.is_dataclass(getattr(owner, "Config", None))
    return f"write {owner.__name__}.Config(...)" if is_part else ""


# ---- words


_BOUND_TEXTS: dict[type, str] = {
    Ge: "be at least {.ge}",
    Gt: "be above {.gt}",
    Le: "be at most {.le}",
    Lt: "be below {.lt}",
    MinLen: "have at least {.min_length} entries",
    MaxLen: "have at most {.max_length} entries",
    Matches: "be {.said}",
}
"""Words of each bound. Metadata of other types is no bound."""

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "None",
    None: "None",
    dict: "a dict",
    list: "a list",
    tuple: "a tuple",
}


def _bound_text(bound: Any) -> str:
    return "not be empty" if bound == MinLen(1) else _BOUND_TEXTS[type(bound)].format(bound)


def bounds_said(annotation: Any) -> str:
    """Return the bounds of a field, or of what it holds, in words; empty where it has none."""
    plain, bounds, *_ = declared(annotation)
    if bounds:
        return sentence(map(_bound_text, bounds), "")
    return next(filter(None, map(bounds_said, get_args(plain))), "")


def sentence(parts: Collection[str] | Iterator[str], cure: str) -> str:
    """Return ``must be above 0 and at most 1; the cure``."""
    first, *others = parts
    text = " and ".join([f"must {first}", *(part.removeprefix("be ") for part in others)])
    return f"{text}; {cure}" if cure else text


def type_in_words(wanted: Any) -> str:
    """Return a type as an error names it, such as "a whole number or None"."""
    wanted = declared(wanted).type
    origin, arguments = get_origin(wanted), get_args(wanted)
    if is_union(wanted):
        return " or ".join(map(type_in_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple and has_fixed_length(arguments):
        return f"a tuple of {len(arguments)}"
    plain = origin or wanted
    name = getattr(plain, "__qualname__", str(plain))
    return _TYPE_NAMES.get(plain) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
