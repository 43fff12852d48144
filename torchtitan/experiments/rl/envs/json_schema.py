"""Reads JSON schemas of tools' parameters: the types that one allows, and an example of a value."""

from collections.abc import Mapping
from typing import Any

JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
"""Names of all types of JSON."""
_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    type(None): "null",
}


def type_of(value: object) -> str:
    """Return the name that JSON schemas have for the type of a value."""
    return _NAMES.get(type(value), "object")


def allowed_types(
    schema: object, root: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the JSON types that a schema allows, its references and alternatives followed.

    Args:
        schema: the schema. What is no schema allows everything, but False, which allows nothing.
        root: the schema that holds ``schema``, in which references are looked up.
        seen: references that led here. One that leads to itself allows nothing by itself.
    """
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else JSON_TYPES
    # Every keyword limits what the others allow.
    allowed = JSON_TYPES & _declared_types(schema)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        allowed &= allowed_types(referred_schema(reference, root), root, seen | {reference})
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            types = (allowed_types(branch, root, seen) for branch in branches)
            allowed &= frozenset().union(*types)
    for part in schema.get("allOf") or ():
        allowed &= allowed_types(part, root, seen)
    return allowed


def _declared_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the keywords "type", "const" and "enum" of a schema allow."""
    allowed = JSON_TYPES
    declared = schema.get("type")
    if declared is not None:
        listed = [declared] if isinstance(declared, str) else declared
        names = {name for name in listed if isinstance(name, str)}
        if "number" in names:
            names.add("integer")
        allowed &= names
    if "const" in schema:
        allowed &= {type_of(schema["const"])}
    values = schema.get("enum")
    if isinstance(values, list):
        allowed &= {type_of(value) for value in values}
    return allowed


def referred_schema(reference: str, root: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    """Return the schema that a reference such as "#/$defs/Color" names.

    The result is True, a schema that allows everything, if there is no such schema.
    """
    schema: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key, True) if isinstance(schema, Mapping) else True
    return schema


def example_object(
    schema: Mapping[str, Any], root: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return an object that a schema allows, with a small value for each required property."""
    properties = schema.get("properties") or {}
    return {
        name: _example_value(properties.get(name), root, seen)
        for name in schema.get("required") or ()
    }


def _example_value(schema: object, root: Mapping[str, Any], seen: frozenset[str]) -> Any:  # noqa: ANN401 - any JSON
    """Return a value that a schema allows; None where the schema refers to itself."""
    if not isinstance(schema, Mapping):
        return "text"
    values = _listed_values(schema)
    if values:
        return values[0]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return None
        return _example_value(referred_schema(reference, root), root, seen | {reference})
    for keyword in ("anyOf", "oneOf", "allOf"):
        if _is_filled_list(schema.get(keyword)):
            return _example_value(schema[keyword][0], root, seen)
    return _example_of_type(schema, root, seen)


def _listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, as the only ones or as examples."""
    if "const" in schema:
        return [schema["const"]]
    for keyword in ("examples", "enum"):
        if _is_filled_list(schema.get(keyword)):
            return schema[keyword]
    return []


def _example_of_type(
    schema: Mapping[str, Any], root: Mapping[str, Any], seen: frozenset[str]
) -> Any:  # noqa: ANN401 - any JSON
    """Return a value of the first type that a schema names; a text if it names none."""
    declared = schema.get("type", "string")
    kind = declared if isinstance(declared, str) else next(iter(declared), "string")
    match kind:
        case "integer" | "number":
            return min(max(1, schema.get("minimum", 1)), schema.get("maximum", float("inf")))
        case "array":
            return [_example_value(schema["items"], root, seen)] if schema.get("items") else []
        case "object":
            return example_object(schema, root, seen)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "text"


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)
