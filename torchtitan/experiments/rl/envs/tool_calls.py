"""Parses completions, and reads and writes the arguments of tool calls by the whole schema of each parameter.

Families whose calls are XML (Qwen3.5, GLM, MiniMax) write a text and a number alike: ``<parameter=x>42</parameter>``.
Their parsers look at the ``type`` of a parameter alone. So they refuse a text where the schema is a ``$ref`` (an Enum) or
lists its types, and read "42" as a number where the schema allows a text or null. Calls in JSON say what is a text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from renderers import Message, ParsedResponse, Renderer, ToolSpec

JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


def parse_completion(
    renderer: Renderer,
    sampled_ids: list[int],
    *,
    tools: Sequence[ToolSpec] | None,
    prompt_ids: Sequence[int] | None,
) -> ParsedResponse:
    """Parse a completion. An argument that its parameter allows only as a text is a text, whatever else it looks like."""
    if not tools:
        return renderer.parse_response(sampled_ids, tools=None, prompt_ids=prompt_ids)
    types = {
        name: _parameter_types(parameters) for name, parameters in map(_named_parameters, tools)
    }
    parsed = renderer.parse_response(sampled_ids, tools=_plain_tools(types), prompt_ids=prompt_ids)
    misread = [
        (index, argument)
        for index, call in enumerate(parsed.tool_calls)
        if isinstance(call.arguments, dict)
        for argument, value in call.arguments.items()
        if _is_text_only(types.get(call.name or "", {}).get(argument, JSON_TYPES), value)
    ]
    if misread:
        texts = {
            name: dict.fromkeys(of_tool, frozenset({"string"})) for name, of_tool in types.items()
        }
        as_texts = renderer.parse_response(
            sampled_ids, tools=_plain_tools(texts), prompt_ids=prompt_ids
        )
        for index, argument in misread:
            arguments = cast(dict[str, Any], parsed.tool_calls[index].arguments)
            arguments[argument] = cast(dict[str, Any], as_texts.tool_calls[index].arguments)[
                argument
            ]
    return parsed


def types_of(
    schema: Any, root: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> frozenset[str]:
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
        names = (
            [declared]
            if isinstance(declared, str)
            else [name for name in declared if isinstance(name, str)]
        )
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
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        type(None): "null",
    }
    return names.get(type(value), "object")


def example_call(tool: ToolSpec) -> tuple[str, dict[str, Any]]:
    """Return the name of a tool and arguments that its schema allows: a small value for each parameter that it requires."""
    name, parameters = _named_parameters(tool)
    return name, _example_object(parameters, parameters, frozenset())


def call_ids(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    name: str,
    arguments: dict[str, Any],
) -> list[int] | None:
    """Return the tokens with which the model would call a tool after ``messages``, without the end of its turn.

    None: the renderer's template does not go on from the prompt, or the call can't be read from these tokens.
    """
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    reply = cast(Message, {"role": "assistant", "content": "", "tool_calls": [call]})
    prompt = list(
        renderer.render(list(messages), tools=list(tools), add_generation_prompt=True).token_ids
    )
    whole = list(renderer.render([*messages, reply], tools=list(tools)).token_ids)
    if whole[: len(prompt)] != prompt:
        return None
    sampled, stops = whole[len(prompt) :], set(renderer.get_stop_token_ids())
    end = next((index for index, token in enumerate(sampled) if token in stops), len(sampled))
    parsed = parse_completion(renderer, sampled[:end], tools=tools, prompt_ids=prompt)
    read = [(found.name, found.arguments) for found in parsed.tool_calls]
    return sampled[:end] if read == [(name, arguments)] else None


def _example_object(
    schema: Mapping[str, Any], root: Mapping[str, Any], seen: frozenset[str]
) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    return {
        name: _example_value(properties.get(name), root, seen)
        for name in schema.get("required") or ()
    }


def _example_value(schema: Any, root: Mapping[str, Any], seen: frozenset[str]) -> Any:
    """Return a value that a schema allows; None where it refers to itself."""
    if not isinstance(schema, Mapping):
        return "text"
    if "const" in schema:
        return schema["const"]
    for choices in ("examples", "enum"):
        if isinstance(schema.get(choices), list) and schema[choices]:
            return schema[choices][0]
    if isinstance(reference := schema.get("$ref"), str):
        return (
            None
            if reference in seen
            else _example_value(_referred(reference, root), root, seen | {reference})
        )
    for parts in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(parts), list) and schema[parts]:
            return _example_value(schema[parts][0], root, seen)
    declared = schema.get("type", "string")
    kind = declared if isinstance(declared, str) else next(iter(declared), "string")
    if kind in ("integer", "number"):
        return min(max(1, schema.get("minimum", 1)), schema.get("maximum", float("inf")))
    if kind == "array":
        return [_example_value(schema["items"], root, seen)] if schema.get("items") else []
    if kind == "object":
        return _example_object(schema, root, seen)
    return {"boolean": True, "null": None}.get(kind, "text")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that "#/$defs/Color" names; True, which allows everything, where there is none."""
    found: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = (
            found.get(key.replace("~1", "/").replace("~0", "~"), True)
            if isinstance(found, Mapping)
            else True
        )
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
        return (
            {"type": names[0]} if len(names) == 1 else {"anyOf": [{"type": name} for name in names]}
        )

    return [
        cast(
            ToolSpec,
            {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: plain(of) for key, of in parameters.items()},
                },
            },
        )
        for name, parameters in types.items()
    ]
