"""Bounds of fields in ``--help``: ``--steps INT>=1``, ``--recorder.fraction 0<=FLOAT<=1``."""

import dataclasses
import types
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from torchtitan.experiments.rl.bounds import FieldTypes, declared, field_annotations, is_union


def registry_with_bounds(field_types: FieldTypes) -> ConstructorRegistry:
    """tyro's rules, and one that names an option's value by its bounds. How a word becomes a value stays the same.

    Args:
        field_types: as for ``check_fields``.
    """
    registry = ConstructorRegistry()
    asking = False

    @registry.struct_rule
    def dataclass_with_bounds(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal asking
        if asking or not dataclasses.is_dataclass(info.type):
            return None
        asking = True  # the rule steps aside, so that tyro's own answers
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        annotations = field_annotations(info.type, field_types)
        types_shown = (_named_by_bounds(annotations.get(entry.name, entry.type)) for entry in spec.fields)
        fields = (dataclasses.replace(entry, type=shown) for entry, shown in zip(spec.fields, types_shown, strict=True))
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


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
