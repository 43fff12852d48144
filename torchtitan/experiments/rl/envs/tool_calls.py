"""Parses the tool calls of completions, each argument by the whole schema of its parameter.

A JSON call says which argument is a text. Families whose calls are XML (Qwen3.5, GLM, MiniMax)
write a text and a number alike: ``<parameter=x>42</parameter>``. Their parsers in the renderers
package look at the ``type`` of the parameter alone. So they refuse a text if the schema is a
``$ref``, as that of an Enum, or a list of types, and they read "42" as a number if a text or null
is allowed.

`parse_completion` gives such a parser simple schemas that say the same. It parses a completion a
second time, with every parameter declared as a text, if an argument was read as a number although
its parameter allows a text and no number, or as another such type. It takes the text from there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from renderers import Message, ParsedResponse, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.json_schema import (
    JSON_TYPES,
    allowed_types,
    example_object,
    type_of,
)

TypesByParameter = Mapping[str, frozenset[str]]
"""JSON types that each parameter of a tool allows."""
_TEXT = frozenset({"string"})


def parse_completion(
    renderer: Renderer,
    sampled_ids: list[int],
    *,
    tools: Sequence[ToolSpec] | None,
    prompt_ids: Sequence[int] | None,
) -> ParsedResponse:
    """Parse a completion.

    An argument whose parameter allows it only as a text is a text, whatever else it looks like.

    Args:
        renderer: the model's renderer.
        sampled_ids: tokens of the completion.
        tools: tools that the model was offered.
        prompt_ids: tokens of the prompt, if they are known.
    """
    if not tools:
        return renderer.parse_response(sampled_ids, tools=None, prompt_ids=prompt_ids)
    types = {}
    for tool in tools:
        name, parameters = _named_parameters(tool)
        types[name] = _parameter_types(parameters)
    parsed = renderer.parse_response(sampled_ids, tools=_plain_tools(types), prompt_ids=prompt_ids)
    misread = _misread_texts(parsed, types)
    if misread:
        text_types = {name: dict.fromkeys(of_tool, _TEXT) for name, of_tool in types.items()}
        as_texts = renderer.parse_response(
            sampled_ids, tools=_plain_tools(text_types), prompt_ids=prompt_ids
        )
        for index, argument in misread:
            text = _arguments_of(as_texts, index)[argument]
            _arguments_of(parsed, index)[argument] = text
    return parsed


def _misread_texts(
    parsed: ParsedResponse, types: Mapping[str, TypesByParameter]
) -> list[tuple[int, str]]:
    """Return the arguments that the parser took for another type, and that can only be texts.

    The parameter of such an argument allows a text, and does not allow the type that was read.

    Returns:
        The index of the call and the name of the argument, for each.
    """
    misread = []
    for index, call in enumerate(parsed.tool_calls):
        if not isinstance(call.arguments, dict):
            continue
        of_tool = types.get(call.name or "", {})
        for argument, value in call.arguments.items():
            allowed = of_tool.get(argument, JSON_TYPES)
            if "string" in allowed and type_of(value) not in allowed:
                misread.append((index, argument))
    return misread


def _arguments_of(parsed: ParsedResponse, index: int) -> dict[str, Any]:
    return cast(dict[str, Any], parsed.tool_calls[index].arguments)


def example_call(tool: ToolSpec) -> tuple[str, dict[str, Any]]:
    """Return the name of a tool and arguments that its schema allows.

    There is a small value for each parameter that the tool requires.
    """
    name, parameters = _named_parameters(tool)
    return name, example_object(parameters, parameters)


def call_ids(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    name: str,
    arguments: dict[str, Any],
) -> list[int] | None:
    """Return the tokens with which the model would call a tool, without the end of its turn.

    The result is None if the model's template renders the call as no continuation of the prompt, or
    if the call can't be read from these tokens.

    Args:
        renderer: the model's renderer.
        messages: the conversation before the call.
        tools: tools that the model is offered.
        name: name of the tool that is called.
        arguments: arguments of the call.
    """
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    reply = cast(Message, {"role": "assistant", "content": "", "tool_calls": [call]})
    rendered = renderer.render(list(messages), tools=list(tools), add_generation_prompt=True)
    prompt = list(rendered.token_ids)
    whole = list(renderer.render([*messages, reply], tools=list(tools)).token_ids)
    if whole[: len(prompt)] != prompt:
        return None
    completion = whole[len(prompt) :]
    stops = set(renderer.get_stop_token_ids())
    end = next((index for index, token in enumerate(completion) if token in stops), None)
    sampled = completion[:end]
    parsed = parse_completion(renderer, sampled, tools=tools, prompt_ids=prompt)
    calls = [(read.name, read.arguments) for read in parsed.tool_calls]
    return sampled if calls == [(name, arguments)] else None


def _named_parameters(tool: ToolSpec) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a tool, and the schema of its parameters."""
    function = cast(dict[str, Any], tool).get("function", tool)
    parameters = function.get("parameters")
    return function["name"], parameters if isinstance(parameters, Mapping) else {}


def _parameter_types(parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the types that each parameter allows, by the schema of all parameters."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: allowed_types(schema, parameters) for name, schema in properties.items()}


def _plain_tools(types: Mapping[str, TypesByParameter]) -> list[ToolSpec]:
    """Return tools whose parameters have these types, with schemas that every parser reads."""
    tools = []
    for name, parameters in types.items():
        properties = {parameter: _plain_schema(of) for parameter, of in parameters.items()}
        schema = {"type": "object", "properties": properties}
        tools.append(cast(ToolSpec, {"name": name, "parameters": schema}))
    return tools


def _plain_schema(allowed: Iterable[str]) -> dict[str, Any]:
    """Return a schema of one type, or of alternatives with one type each."""
    names = sorted(allowed)
    if len(names) == 1:
        return {"type": names[0]}
    return {"anyOf": [{"type": name} for name in names]}
