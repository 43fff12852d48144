"""Bounds of config fields, declared in the annotation of the field, and the walk that checks a tree of configs against them.

    count: PositiveInt = 10_000
    row_length: Annotated[int, Ge(2)] = 2048
    alpha: dict[str, PositiveFloat]

`check_fields` refuses a value that has not its declared type, a number that is not finite, and a value out of its bounds.
For other bounds than those below, use Ge, Gt, Le, Lt, Interval and MinLen of `annotated_types`. Other metadata is ignored. A
field whose type can't be checked (Any, a type variable, a name that can't be resolved) may hold anything.
"""

import dataclasses
import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen

from torchtitan.experiments.rl.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cure:
    """Metadata of a field: what to do about a wrong value. The error shows it after the bound."""

    text: str


@dataclass(frozen=True, slots=True)
class Matches:
    """Bound of a text: the whole of it matches ``pattern``, which is ``said`` in the error."""

    pattern: str
    said: str
    """Completes "must be"."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Metadata of a field: it is at most ``field``, another of the same config."""

    field: str


@dataclass(frozen=True, slots=True)
class _MayChange:
    """Metadata of a field: a run that is resumed may have another value."""


Changeable = Annotated[T, _MayChange()]
"""What a resumed run may change: how far, how fast and where it runs, with all that is inside. Other fields decide which data a
run sees and what it learns from it."""
PositiveInt = Annotated[int, Ge(1)]
ProcessCount = Annotated[int, Ge(1), Le(1024), Cure("a run has at most 1024 processes of a role")]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
NonEmptyStr = Annotated[str, MinLen(1)]

OF_OTHERS: dict[type, Mapping[str, Any]] = {}
"""Annotations of fields by name, of config classes of other packages, which declare no bounds, and of their subclasses."""


def check_config(config: Any, *, field: str, **context: Any) -> None:
    """Check the fields of a config, then what relates them: ``config.validate(field=field, **context)``.

    Args:
        field: path of this config, such as "tasks.sum_digits".
        context: what else this config's ``validate`` takes.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check_fields(config, field=field)
    config.validate(field=field, **context)


def check_fields(config: Any, *, field: str = "") -> None:
    """Check every value in a tree of dataclasses, dicts, lists and tuples against what its field declares.

    Args:
        field: path of the config itself, such as "tasks.sum_digits"; empty for a whole run.

    Raises:
        ConfigError: the first wrong value, by the path of its field, such as ``pre_batch_filters[0].margin``.
    """
    _check(config, Any, field)


class Declared(NamedTuple):
    """An annotation taken apart."""

    type: Any
    bounds: tuple[Any, ...]
    cure: str
    """Empty: none is declared."""
    may_change: bool = False
    """When a run is resumed."""
    at_most: str = ""
    """Another field."""


def declared(annotation: Any) -> Declared:
    """The plain type, the bounds and the cure of an annotation."""
    if get_origin(annotation) is not Annotated:
        return Declared(annotation, (), "")
    plain, *metadata = get_args(annotation)
    flat = [
        part
        for entry in metadata
        for part in (entry if isinstance(entry, GroupedMetadata) else (entry,))
    ]
    bounds = tuple(entry for entry in flat if type(entry) in _BOUNDS)
    cure = "; ".join(entry.text for entry in flat if isinstance(entry, Cure))
    at_most = "".join(entry.field for entry in flat if isinstance(entry, AtMost))
    return Declared(
        plain, bounds, cure, any(isinstance(entry, _MayChange) for entry in flat), at_most
    )


@functools.cache
def field_annotations(config_class: type) -> Mapping[str, Any]:
    """Annotations of a dataclass's fields, by name. Left out: one that can't be resolved, and a type variable. A subclass that
    declares a field again, for another default, and repeats only its type keeps the bounds."""
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        try:
            hints, plain_hints = (
                typing.get_type_hints(base, include_extras=True),
                typing.get_type_hints(base),
            )
        except Exception:  # evaluates what a user's class says as text, which may be anything
            hints = plain_hints = vars(base).get("__annotations__", {})
        for name in vars(base).get("__annotations__", {}):
            repeated = name in found and hints[name] == plain_hints[name] == plain[name]
            if not repeated:
                found[name], plain[name] = hints[name], plain_hints[name]
        found |= OF_OTHERS.get(base, {})
    return {name: hint for name, hint in found.items() if not isinstance(hint, str | TypeVar)}


def _check(value: Any, annotation: Any, field: str) -> None:
    wanted, bounds, cure, *_ = declared(annotation)
    if (
        value is None and bounds
    ):  # None where a bound stands beside it: Annotated[float | None, Gt(0)]
        bounds = ()
    if is_union(wanted):
        _check_union(value, wanted, field, cure)
    elif not _has_type(value, wanted):
        raise ConfigError(
            field, value, _sentence([f"be {_type_name(wanted)}"], _config_of(value) or cure)
        )
    elif _is_plain_number(wanted) and not _is_finite(value):
        raise ConfigError(
            field, value, _sentence(["be a finite number", *map(_bound_text, bounds)], cure)
        )
    if not all(_BOUNDS[type(bound)][0](value, bound) for bound in bounds):
        raise ConfigError(field, value, _sentence(map(_bound_text, bounds), cure))
    if not is_union(wanted):  # else the option that fits has looked inside
        entries = list(_entries(value, get_args(wanted), field))
        for entry, entry_annotation, entry_field in entries:
            _check(entry, entry_annotation, entry_field)
        for entry, entry_annotation, entry_field in entries:
            if (limit := declared(entry_annotation).at_most) and entry > (
                most := getattr(value, limit)
            ):
                raise ConfigError(entry_field, entry, f"must be at most {limit} = {most}")


def walk(
    config: Any, field: str = "", annotation: Any = Any, *, beside: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """What is in a tree of dataclasses, dicts, lists and tuples, itself first: path, value and its field's annotation. Keys of
    dicts too.

    Args:
        field: path of the config itself.
        beside: types that are left out, with what is in them.
    """
    if not isinstance(config, beside):
        yield field, config, annotation
        for entry, entry_annotation, path in _entries(config, (), field):
            yield from walk(entry, path, entry_annotation, beside=beside)


def _config_of(value: Any) -> str:
    """The cure where a class, or what its Config builds, stands in the place of the Config; else empty."""
    owner = value if isinstance(value, type) else type(value)
    return (
        f"write {owner.__name__}.Config(...)"
        if dataclasses.is_dataclass(getattr(owner, "Config", None))
        else ""
    )


def _check_union(value: Any, union: Any, field: str, cure: str) -> None:
    """Refuse a value that fits none of the types, and one with something wrong inside whichever it fits."""
    fitting = [option for option in get_args(union) if _has_type(value, declared(option).type)]
    if not fitting:
        raise ConfigError(field, value, _sentence([f"be {_type_name(union)}"], cure))
    problems = []
    for option in fitting:
        try:
            return _check(value, option, field)
        except ConfigError as problem:
            problems.append(problem)
    raise problems[-1]


def _entries(value: Any, arguments: tuple[Any, ...], field: str) -> Iterator[tuple[Any, Any, str]]:
    """What a value holds: each entry with its annotation and its path. A key has the path of its dict.

    Args:
        arguments: of the value's own annotation: [int] of ``list[int]``.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        annotations = field_annotations(type(value))
        for entry in dataclasses.fields(value):
            path = f"{field}.{entry.name}" if field else entry.name
            yield getattr(value, entry.name), annotations.get(entry.name, Any), path
    elif isinstance(value, Mapping):
        key_type, entry_type = arguments if len(arguments) == 2 else (Any, Any)
        for key, entry in value.items():
            yield key, key_type, field
            yield entry, entry_type, f"{field}.{key}"
    elif isinstance(value, list | tuple | set | frozenset):
        fixed = (
            isinstance(value, tuple) and len(arguments) == len(value) and Ellipsis not in arguments
        )
        for index, entry in enumerate(value):
            yield (
                entry,
                arguments[index] if fixed else (arguments or (Any,))[0],
                f"{field}[{index}]",
            )


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _has_type(value: Any, wanted: Any) -> bool:
    """Whether a value has a type, what it holds left aside. True where that can't be told."""
    if wanted is None or wanted is types.NoneType:
        return value is None
    if _is_plain_number(wanted):
        kind = numbers.Integral if wanted is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if is_union(wanted):
        return any(_has_type(value, declared(option).type) for option in get_args(wanted))
    origin = get_origin(wanted)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(wanted))
    if origin is tuple and Ellipsis not in get_args(wanted) and isinstance(value, tuple):
        return len(value) == len(get_args(wanted))
    try:
        return isinstance(value, origin or wanted)
    except TypeError:  # Any, a type variable, a protocol
        return True


def _is_plain_number(wanted: Any) -> bool:
    return wanted is int or wanted is float


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number no float can hold
        return False


_BOUNDS: dict[type, tuple[Callable[[Any, Any], Any], str]] = {
    Ge: (lambda value, bound: value >= bound.ge, "be at least {.ge}"),
    Gt: (lambda value, bound: value > bound.gt, "be above {.gt}"),
    Le: (lambda value, bound: value <= bound.le, "be at most {.le}"),
    Lt: (lambda value, bound: value < bound.lt, "be below {.lt}"),
    MinLen: (
        lambda value, bound: len(value) >= bound.min_length,
        "have at least {.min_length} entries",
    ),
    Matches: (lambda value, bound: re.fullmatch(bound.pattern, value), "be {.said}"),
}
"""By type: whether a value holds it, and its text."""


def _bound_text(bound: Any) -> str:
    return "not be empty" if bound == MinLen(1) else _BOUNDS[type(bound)][1].format(bound)


def bounds_said(annotation: Any) -> str:
    """The bounds of a field, or of what it holds, in the words of its errors; empty where it has none."""
    plain, bounds, *_ = declared(annotation)
    if bounds:
        return _sentence(map(_bound_text, bounds), "")
    return next(filter(None, map(bounds_said, get_args(plain))), "")


def _sentence(parts: Collection[str] | Iterator[str], cure: str) -> str:
    """``must be above 0 and at most 1; the cure``."""
    first, *others = parts
    return " and ".join([f"must {first}", *(part.removeprefix("be ") for part in others)]) + (
        f"; {cure}" if cure else ""
    )


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


def _type_name(wanted: Any) -> str:
    wanted = declared(wanted).type
    if is_union(wanted):
        return " or ".join(_type_name(option) for option in get_args(wanted))
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple and Ellipsis not in arguments:
        return f"a tuple of {len(arguments)}"
    plain = origin or wanted
    name = getattr(plain, "__qualname__", str(plain))
    return _TYPE_NAMES.get(plain) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
