"""Arguments of tool calls, as each family's format writes them."""

import json
from enum import Enum
from typing import Any, Literal

import pytest

from tests.unit.renderer_families import family_renderer, family_tokenizer
from torchtitan.experiments.rl.envs.json_schema import allowed_types
from torchtitan.experiments.rl.envs.messages import assistant_message
from torchtitan.experiments.rl.envs.tool_calls import parse_completion
from torchtitan.experiments.rl.tasks.tools import Tool


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    TOP = "top"


def schema_of(annotation: Any) -> dict:
    """The parameters of a typed function ``f(x)``."""

    def f(x):
        pass

    f.__annotations__ = {"x": annotation}
    return Tool(f).spec["function"]["parameters"]


def mcp(**x: Any) -> dict:
    """The parameters of a server's tool."""
    return {"type": "object", "properties": {"x": x}, "required": ["x"]}


CASES = {
    "Enum": (schema_of(Color), "red", "red"),
    "Enum, or null": (schema_of(Color | None), "red", "red"),
    "null, where an Enum may be": (schema_of(Color | None), "null", None),
    "Enum of mixed values": (schema_of(Level), "top", "top"),
    "Enum of mixed values, a number": (schema_of(Level), "1", 1),
    "Literal of mixed values": (schema_of(Literal["a", 1]), "a", "a"),
    "any value": (schema_of(Any), "hello", "hello"),
    "list of types": (mcp(type=["string", "null"]), "hello", "hello"),
    "list of types, a number": (mcp(type=["string", "null"]), "42", "42"),
    "list of types, null": (mcp(type=["string", "null"]), "null", None),
    "allOf": (
        mcp(allOf=[{"$ref": "#/$defs/C"}]) | {"$defs": {"C": {"type": "string"}}},
        "042",
        "042",
    ),
    "text or null, a number": (schema_of(str | None), "42", "42"),
    "text or null, digits behind the point": (schema_of(str | None), "1.50", "1.50"),
    "text or null, an object": (schema_of(str | None), '{"a":  1}', '{"a":  1}'),
    "text or bool, a number": (schema_of(str | bool), "42", "42"),
    "text or bool, a bool": (schema_of(str | bool), "true", True),
    "text or number, a number": (schema_of(str | float), "42", 42),
    "text": (schema_of(str), "42", "42"),
    "number": (schema_of(int), "42", 42),
    "number or null": (schema_of(int | None), "null", None),
}
FAMILIES = {
    "qwen3.5, as its template": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm-4.5": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n</invoke>\n</minimax:tool_call>',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def message_of(reply: str, parameters: dict, settings: str, folder):
    renderer = family_renderer(settings, folder)
    ids = family_tokenizer(renderer.config.name).encode(reply, add_special_tokens=False)
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": parameters},
    }
    return assistant_message(parse_completion(renderer, ids, tools=[tool], prompt_ids=None), turn=0)


@pytest.mark.parametrize("settings", FAMILIES)
@pytest.mark.parametrize(("parameters", "text", "value"), CASES.values(), ids=CASES)
def test_an_xml_argument_has_the_type_that_its_whole_schema_allows(
    parameters, text, value, settings, folder
):
    message = message_of(FAMILIES[settings].format(text), parameters, settings, folder)
    assert "malformed_tool_calls" not in message
    (call,) = message["tool_calls"]
    read = json.loads(call["function"]["arguments"])
    assert read == {"x": value} and type(read["x"]) is type(value)


@pytest.mark.parametrize("value", [42, "42", "red", None, True])
def test_a_json_argument_stays_what_the_model_wrote(value, folder):
    reply = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {'x': value}})}\n</tool_call>"
    for parameters in (schema_of(str | None), schema_of(int | str), schema_of(Color)):
        (call,) = message_of(reply, parameters, "qwen3, no thinking", folder)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": value}


def test_a_text_where_none_is_allowed_is_malformed(folder):
    for annotation in (int, int | None, list[int]):
        message = message_of(
            FAMILIES["minimax-m2"].format("many"), schema_of(annotation), "minimax-m2", folder
        )
        assert [attempt["status"] for attempt in message["malformed_tool_calls"]] == [
            "invalid_json"
        ]


def test_a_schema_that_refers_to_itself_ends():
    root = {"$defs": {"Tree": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Tree"}]}}}
    assert allowed_types({"$ref": "#/$defs/Tree"}, root) == {"string"}
    assert "string" in allowed_types({"$ref": "#/$defs/Absent"}, root)
