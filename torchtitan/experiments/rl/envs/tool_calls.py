"""Parses completions, and reads the arguments of tool calls by the whole schema of each parameter.

Families whose calls are XML (Qwen3.5, GLM, MiniMax) write a text and a number alike: ``<parameter=x>42</parameter>``.
Their parsers look at the ``type`` of a parameter alone. So they refuse a text where the schema is a ``$ref`` (an Enum) or
lists its types, and read "42" as a number where the schema allows a text or null. Calls in JSON say what is a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from renderers import ParsedResponse, Renderer, ToolSpec

JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


def parse_completion(
    renderer: Renderer, sampled_ids: list[int], *, tools: Sequence[ToolSpec] | None, prompt_ids: Sequence[int] | None
) -> ParsedResponse:
    """Parse a completion. An argument that its parameter allows only as a text is a text, whatever else it looks like."""
    if not tools:
        return renderer.parse_response(sampled_ids, tools=None, prompt_ids=prompt_ids)
    types = {name: _parameter_types(parameters) for name, parameters in map(_named_parameters, tools)}
    parsed = renderer.parse_response(sampled_ids, tools=_plain_tools(types), prompt_ids=prompt_ids)
    misread = [
        (index, argument)
        for index, call in enumerate(parsed.tool_calls)
        if isinstance(call.arguments, dict)
        for argument, value in call.arguments.items()
        if _is_text_only(types.get(call.name or "", {}).get(argument, JSON_TYPES), value)
    ]
    if misread:
        texts = {name: dict.fromkeys(of_tool, frozenset({"string"})) for name, of_tool in types.items()}
        as_texts = renderer.parse_response(sampled_ids, tools=_plain_tools(texts), prompt_ids=prompt_ids)
        for index, argument in misread:
            arguments = cast(dict[str, Any], parsed.tool_calls[index].arguments)
            arguments[argument] = cast(dict[str, Any], as_texts.tool_calls[index].arguments)[argument]
    return parsed


def types_of(schema: Any, root: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the JSON types that a schema allows, its references and alternatives followed.

    Args:
        root: the schema that holds ``schema``, in which references are looked up.
        seen: references that led here. One that leads to itself allows nothing by itself.
    """
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else JSON_TYPES
    allowed = JSON_TYPES
    if isinstance(reference := schema.get("$ref"), str):
        target = _referred(reference, root)
        allowed &= frozenset() if reference in seen else types_of(target, root, seen | {reference})
    if (declared := schema.get("type")) is not None:
        names = [declared] if isinstance(declared, str) else [name for name in declared if isinstance(name, str)]
        allowed &= frozenset(names) | (frozenset({"integer"}) if "number" in names else frozenset())
    if "const" in schema:
        allowed &= frozenset({type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        allowed &= frozenset(map(type_of, values))
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list):
            allowed &= frozenset().union(*(types_of(branch, root, seen) for branch in alternatives))
    for part in schema.get("allOf") or ():
        allowed &= types_of(part, root, seen)
    return allowed


def type_of(value: Any) -> str:
    """Return the name that JSON schemas have for the type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that "#/$defs/Color" names; True, which allows everything, where there is none."""
    found: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~"), True) if isinstance(found, Mapping) else True
    return found


def _named_parameters(tool: ToolSpec) -> tuple[str, Mapping[str, Any]]:
    function = cast(dict[str, Any], tool).get("function", tool)
    parameters = function.get("parameters")
    return function["name"], parameters if isinstance(parameters, Mapping) else {}


def _parameter_types(parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: types_of(schema, parameters) for name, schema in properties.items()}


def _is_text_only(allowed: frozenset[str], value: Any) -> bool:
    """Return whether a value that is no text stands where its schema allows a text, and no value of this type."""
    return "string" in allowed and type_of(value) not in allowed


def _plain_tools(types: Mapping[str, Mapping[str, Iterable[str]]]) -> list[ToolSpec]:
    """Return the tools as parsers read them: each parameter has one type, or "anyOf" with one type in each branch."""

    def plain(allowed: Iterable[str]) -> dict[str, Any]:
        names = sorted(allowed)
        return {"type": names[0]} if len(names) == 1 else {"anyOf": [{"type": name} for name in names]}

    return [
        cast(
            ToolSpec,
            {"name": name, "parameters": {"type": "object", "properties": {key: plain(of) for key, of in parameters.items()}}},
        )
        for name, parameters in types.items()
    ]
