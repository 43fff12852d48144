"""Which fields are options, with their bounds in ``--help``: ``--steps INT>=1``, ``--recorder.fraction 0<=FLOAT<=1``.

A field whose value no words can say (a function, rows, an object) is no option. ``--help`` shows it as ``{fixed}``.
"""

import dataclasses
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from tyro.conf import Fixed, arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from torchtitan.experiments.rl.bounds import FieldTypes, declared, field_annotations, is_union

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


def registry_with_bounds(field_types: FieldTypes) -> ConstructorRegistry:
    """tyro's rules, and one that names an option's value by its bounds and leaves out what no words can say. How a word becomes
    a value stays the same.

    Args:
        field_types: as for ``check_fields``.
    """
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
        annotations = field_annotations(info.type, field_types) if dataclasses.is_dataclass(info.type) else {}
        types_shown = (_option_type(annotations.get(entry.name, entry.type), entry) for entry in spec.fields)
        fields = (
            dataclasses.replace(entry, type=shown, helptext=_in_our_words(entry.helptext))
            for entry, shown in zip(spec.fields, types_shown, strict=True)
        )
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


def _option_type(annotation: Any, entry: StructFieldSpec) -> Any:
    """The annotation as tyro reads it: with bounds, less what no words can say."""
    if _has_options(entry.default) or _read_from_words(annotation) is not None:
        return _named_by_bounds(annotation)
    plain = declared(annotation).type
    said = [option for option in get_args(plain) if option is not types.NoneType and _read_from_words(option) is not None]
    annotated: Any = Annotated  # a type made at run time, which no type checker can follow
    spec = _read_from_words(Union[tuple(said)]) if is_union(plain) and said else None  # noqa: UP007 - of a list of types
    if spec is None:
        return annotated[(Any, *_LEFT_OUT)]
    # What the field holds may be of a type that can't be said.
    return annotated[Any, dataclasses.replace(spec, is_instance=lambda _: True, str_from_instance=lambda value: [_text(value)])]


def _in_our_words(text: str | Callable[[], str | None] | None) -> Callable[[], str | None]:
    """A field's help. torchtitan's own names an option of its trainer."""

    def read() -> str | None:
        found = text() if callable(text) else text
        return None if found is None else found.replace("training.steps", "steps")

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


def _named_by_bounds(annotation: Any) -> Any:
    """The annotation with each bounded number in it named by its bounds."""
    plain, bounds, _ = declared(annotation)
    if plain is not annotation:
        name = (_named_number(plain, bounds),) if plain in (int, float) and bounds else ()
        annotated: Any = Annotated  # a type made at run time, which no type checker can follow
        return annotated[_named_by_bounds(plain), *annotation.__metadata__, *name]
    if is_union(plain):
        return Union[tuple(map(_named_by_bounds, get_args(plain)))]  # noqa: UP007 - of a list of types
    if get_origin(plain) in (dict, list, tuple):
        return types.GenericAlias(get_origin(plain), tuple(map(_named_by_bounds, get_args(plain))))
    return annotation


def _named_number(plain: type, bounds: tuple[Any, ...]) -> PrimitiveConstructorSpec:
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(plain, set()))
    assert isinstance(spec, PrimitiveConstructorSpec)  # tyro knows int and float
    return dataclasses.replace(spec, metavar=_metavar(spec.metavar, bounds))


def _metavar(name: str, bounds: tuple[Any, ...]) -> str:
    low = next((bound for bound in bounds if isinstance(bound, Ge | Gt)), None)
    high = next((bound for bound in bounds if isinstance(bound, Le | Lt)), None)
    upper = "" if high is None else f"<={high.le}" if isinstance(high, Le) else f"<{high.lt}"
    if low is None:
        return f"{name}{upper}"
    least = low.ge if isinstance(low, Ge) else low.gt
    sign = ">=" if isinstance(low, Ge) else ">"
    return f"{least}{sign.replace('>', '<')}{name}{upper}" if upper else f"{name}{sign}{least}"
