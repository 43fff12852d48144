"""What every dialect turns a request into, what it makes its reply of, and what it refuses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from renderers import Message, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_unicode, checked_messages, checked_tools
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.printable import shown


class Refusal(Exception):
    """A request that is not answered. Each dialect has a form for it that its clients know."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        field: str | None = None,
    ):
        """
        Args:
            code: what is wrong, in a word; "context_length_exceeded" is the one that clients act on.
            field: of the request.
        """
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


@dataclass(kw_only=True, slots=True)
class ModelRequest:
    messages: list[Message]
    """Conversation so far. The policy answers it with a message of its own, also after the assistant's."""
    tools: list[ToolSpec] | None
    model: str
    max_tokens: int | None = None
    seed: int | None = None
    """Seed that the client wants; None: it sent none."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Values of TASKS_OWN that change something, unless the rollout has the same."""
    wishes: dict[str, Any] = field(default_factory=dict)
    """Values of WISHES that ask for something, by field."""
    stop: list[str] = field(default_factory=list)
    """Texts at which the model ends its answer. The client does not see them."""
    stop_field: str = "stop"
    """Name of that field in the client's dialect."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of chat completions ends with the usage."""


@dataclass(kw_only=True, slots=True)
class ModelReply:
    id: str
    created: int
    model: str
    """As the client called it."""
    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    """As OpenAI's chat completions have them."""
    finish: str
    """"stop", "length" or "tool_calls"."""
    stopped_at: str | None
    """The text of ``stop`` that ended it."""
    prompt_tokens: int
    completion_tokens: int


def cut_at_stop(content: str, stops: Sequence[str], *, at_text: bool) -> tuple[str, str | None]:
    """Return what comes before the first stop text, and that text; all of it and None if there is none.

    Args:
        at_text: True if the model ended at a text. Renderers strip the space around an answer, and
            with it that of a stop text at its end.
    """
    places = {content.find(stop): stop for stop in stops if stop in content}
    if not places and at_text:
        bare = {stop: stop.strip() for stop in stops}
        places = {
            len(content) - len(bare[stop]): stop for stop in stops if content.endswith(bare[stop])
        }
    if not places:
        return content, None
    return content[: min(places)], places[min(places)]


def reply_of(
    message: Message, *, length: bool, request: ModelRequest, stopped_at: str | None, **fields: Any
) -> ModelReply:
    """Make the reply of an answer.

    Args:
        message: the answer without its stop text.
        length: True if the answer ended at a limit of tokens.
        stopped_at: the client's stop text that ended it.
        fields: the other fields of a ModelReply.
    """
    calls = list(message.get("tool_calls") or ())
    length = length and stopped_at is None
    return ModelReply(
        model=request.model,
        content=message["content"],
        reasoning=message.get("reasoning_content") or "",
        tool_calls=calls,
        finish="length" if length else "tool_calls" if calls else "stop",
        stopped_at=stopped_at,
        **fields,
    )


FORM = "say in the prompt which form you want"
RECORDED = "leave it out: they are in the run's records"
WHOLE = "send the whole input with each request"
TEMPLATE = "leave it out: the run's renderer makes the prompt (the config's `renderer`)"
UNTRUNCATED = "leave it out: the task samples from the whole distribution"
NO_END = "leave it out: an answer ends where the model ends it, or at `stop`"
UNAVAILABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "ask once for each answer"),
    "logit_bias": (({},), "leave it out"),
    "frequency_penalty": ((0,), "leave it out, or 0"),
    "presence_penalty": ((0,), "leave it out, or 0"),
    "logprobs": ((False,), RECORDED),
    "top_logprobs": ((0,), RECORDED),
    "functions": (([],), "send them as tools"),
    "function_call": (("auto", "none"), 'send tools, and tool_choice "auto"'),
    "previous_response_id": ((), WHOLE),
    "conversation": ((), WHOLE),
    "background": ((False,), "leave it out, and wait for the answer"),
    "prompt": ((), "send instructions and input"),
    # vLLM's and SGLang's names.
    "best_of": ((1,), "ask once for each answer"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1,), "leave it out, or 1"),
    "repetition_penalty": ((1,), "leave it out, or 1"),
    "min_p": ((0,), UNTRUNCATED),
    "typical_p": ((1,), UNTRUNCATED),
    "bad_words": (([],), UNTRUNCATED),
    "allowed_token_ids": ((), UNTRUNCATED),
    "logits_processors": (([],), UNTRUNCATED),
    "min_tokens": ((0,), NO_END),
    "ignore_eos": ((False,), NO_END),
    "include_stop_str_in_output": ((False,), "leave it out, and add the stop text yourself"),
    "thinking_token_budget": ((), "leave it out, and send max_tokens"),
    "structured_outputs": (({},), FORM),
    "guided_json": ((), FORM),
    "guided_regex": ((), FORM),
    "guided_choice": ((), FORM),
    "guided_grammar": ((), FORM),
    "structural_tag": ((), FORM),
    "json_schema": ((), FORM),
    "regex": ((), FORM),
    "ebnf": ((), FORM),
    "prompt_logprobs": ((), RECORDED),
    "echo": ((False,), RECORDED),
    "chat_template": ((), TEMPLATE),
    "add_generation_prompt": ((True,), TEMPLATE),
    "continue_final_message": ((False,), TEMPLATE),
    "truncate_prompt_tokens": ((), TEMPLATE),
}
"""By field: the values that change nothing, None aside, and the way out. With others the answer's probabilities would not be
those that the trainer computes, or nothing here serves them."""
TASKS_OWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1,), UNTRUNCATED),
    "top_k": ((-1, 0), UNTRUNCATED),
    "stop_token_ids": (([],), NO_END),
    "chat_template_kwargs": (({},), TEMPLATE),
}
"""Fields that a client may also send with the value that the rollout has, beside those that change nothing: as UNAVAILABLE."""

TEXT = {"type": "text"}
FORMS = ("response_format", "text", "output_config", "output_format")
"""Fields that ask for JSON, as the dialects call them."""
FORM_TYPES = ("json_schema", "json_object")
TOOL = 'send "auto", or "none" with no tools, and say in the prompt which tool to call'
ONE_CALL = "leave it out, and say in the prompt to call one tool at a time"
WISHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_choice": (("auto", "none"), TOOL),
    **dict.fromkeys(FORMS, ((TEXT,), FORM)),
    "parallel_tool_calls": ((True,), ONE_CALL),
    "temperature": ((), "leave it out: it is the task's (sampling.temperature)"),
    "reasoning_effort": ((), TEMPLATE),
    "reasoning": (({},), TEMPLATE),
    "thinking": ((), TEMPLATE),
    "effort": ((), TEMPLATE),
    "verbosity": ((), FORM),
}
"""Fields that frameworks send by themselves, where their users can't leave them out, as UNAVAILABLE has them.

The call is answered as if the field were not there: its tools are offered, and the text is the policy's. The rollout
counts how often each was sent, and how often the answer was another than what it asks for. A task may refuse them
(``refused_fields``).
"""


def unavailable(name: str, value: Any, cure: str) -> Refusal:
    """Return the refusal of a field that would change what the model is trained on."""
    why = "not available here, where the model is trained on what it samples"
    return Refusal(f"{name} = {shown(value)}: {why}; {cure}", code="unsupported_value", field=name)


def checked_request(
    body: Mapping[str, Any], messages: list[Any], tools: list[Any], **fields: Any
) -> ModelRequest:
    """
    Args:
        body: the request; where a dialect nests what UNAVAILABLE names, with the value itself.
        fields: of the ModelRequest.

    Raises:
        Refusal: messages or tools that the model can't be given, and values of other fields; by field, value and cure.
    """
    for name, (harmless, cure) in UNAVAILABLE.items():
        if (value := body.get(name)) is not None and value not in harmless:
            raise unavailable(name, value, cure)
    sampling, wishes = _asked_for(body, TASKS_OWN), _asked_for(body, WISHES)
    # Templates know one system message, at the beginning. What the clients' developers say is one.
    begin = next(
        (
            i
            for i, message in enumerate(messages)
            if message.get("role") not in ("system", "developer")
        ),
        len(messages),
    )
    if begin:
        said = [text(message.get("content"), "messages") for message in messages[:begin]]
        messages = [{"role": "system", "content": "\n\n".join(said)}, *messages[begin:]]
    messages = [
        message | {"role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]
    model, limit, seed = body.get("model"), fields.get("max_tokens"), body.get("seed")
    try:
        checked = checked_messages(messages, "messages")
        known_tools = checked_tools(tools, "tools") if body.get("tool_choice") != "none" else None
        check_unicode(model, "model")
    except (TypeError, ValueError) as error:
        raise Refusal(str(error), field=str(error).split()[0].partition("[")[0]) from None
    if not checked:
        raise Refusal("messages are empty: send at least one of the user's", field="messages")
    if checked[-1].get("tool_calls"):
        raise Refusal(
            "messages end with calls of tools: send a tool's message with the result of each",
            field="messages",
        )
    _check_wishes(wishes, known_tools or [])
    if not isinstance(model, str):
        raise Refusal(f'model is {shown(model)}, want a name such as "policy"', field="model")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise Refusal(
            f"max_tokens is {shown(limit)}, want an integer from 1 up", field="max_tokens"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise Refusal(f"seed is {shown(seed)}, want an integer", field="seed")
    return ModelRequest(
        messages=_with_tool_names(checked),
        tools=known_tools,
        model=model,
        seed=seed,
        sampling=sampling,
        wishes=wishes,
        stream=bool(body.get("stream")),
        **fields,
    )


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the tool's name in each result of a tool.

    Some templates show which tool a result is of, and clients send the call's id alone.
    """
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call.get("function", call)["name"]
        called = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and called and "name" not in message:
            message = cast(Message, read_only({**message, "name": called}))
        named.append(message)
    return named


def _asked_for(
    body: Mapping[str, Any], fields: Mapping[str, tuple[tuple[Any, ...], str]]
) -> dict[str, Any]:
    """Return the values of these fields that ask for something."""
    sent = {name: body.get(name) for name in fields}
    return {
        name: value
        for name, value in sent.items()
        if value is not None and value not in fields[name][0]
    }


def _check_wishes(wishes: Mapping[str, Any], tools: Sequence[ToolSpec]) -> None:
    """Raise Refusal for a tool that is forced and not offered, and for forms that are none of JSON."""
    for name, value in wishes.items():
        kind = value.get("type") if isinstance(value, dict) else None
        if name in FORMS and kind not in FORM_TYPES:
            raise unavailable(name, value, FORM)
        if name != "tool_choice":
            continue
        wanted = forced_tool(value)
        if wanted is None:
            raise unavailable(name, value, TOOL)
        offered = [tool.get("function", tool)["name"] for tool in tools]
        if not offered or wanted not in ("", *offered):
            cure = f"the request offers {', '.join(offered) or 'no tools'}: offer what it is to call in `tools`"
            raise Refusal(f"{name} = {shown(value)}: {cure}", code="invalid_value", field=name)


def forced_tool(choice: Any) -> str | None:
    """Return the tool that a tool_choice forces; "" for any of those offered; None if it is in no form of a forced call."""
    if choice == "required":
        return ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def is_unmet(name: str, value: Any, reply: ModelReply) -> bool:
    """Return True if the policy's answer shows by itself that it is not what the wish asks for."""
    called = [call["function"]["name"] for call in reply.tool_calls]
    if name == "tool_choice":
        wanted = forced_tool(value)
        return wanted not in called if wanted else not called
    if name == "parallel_tool_calls":
        return len(called) > 1
    return name in FORMS and not called and not _is_json_object(reply.content)


def _is_json_object(content: str) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def function_tool(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """A tool as the model is told of it.

    Args:
        parameters: where ``tool`` has their schema.
    """
    about = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get(parameters),
    }
    return {
        "type": "function",
        "function": {name: value for name, value in about.items() if value is not None},
    }


def text(content: Any, field: str, types: tuple[str, ...] = ("text",)) -> str:
    """A content that is a text, nothing, or a list of parts.

    Raises:
        Refusal: something else, such as a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"{field} is {shown(content)}, want a text or a list of parts", field=field)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types or not isinstance(part.get("text"), str):
            raise Refusal(
                f"{field} has a part of type {shown(kind)}: only text reaches the model; leave it out",
                field=field,
            )
    return "\n".join(part["text"] for part in content)


def listed(value: Any, field: str) -> list[dict[str, Any]]:
    """
    Raises:
        Refusal: not a list of dicts.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Refusal(f"{field} is {shown(value)}, want a list of objects", field=field)
    return value


def texts(value: Any, field: str) -> list[str]:
    """
    Raises:
        Refusal: neither a text nor a list of them; an empty text.
    """
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(entry, str) and entry for entry in given):
        raise Refusal(f"{field} is {shown(value)}, want texts that are not empty", field=field)
    return given


MODEL_FAILED = 502
"""Status of a refusal because another model than the policy failed."""


def openai_error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refusal),
            "type": kind,
            "param": refusal.field,
            "code": refusal.code,
        }
    }


def event(fields: dict[str, Any], kind: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(fields)}\n\n".encode()


def typed_event(kind: str, **fields: Any) -> bytes:
    """An event that says of which kind it is."""
    return event({"type": kind, **fields}, kind)


def json_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; another value as the only entry of one."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
