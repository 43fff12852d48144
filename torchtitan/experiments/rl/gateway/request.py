"""Requests and replies in no dialect, and the fields of requests that are refused or only counted.

    body ─ dialect.parse ─ checked_request ─▶ ModelRequest
    body ◀─ dialect.reply ◀─ ModelReply

The model is trained on what it samples, with the probabilities that the trainer computes. So a
field is refused if it would change these, or stands for a part of the conversation that the request
does not have (`UNAVAILABLE`), unless the rollout has the same value (`TASKS_OWN`). Fields that
frameworks send by themselves are counted instead (`WISHES`), and so is any that is not known here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

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
        """Say what is wrong, and what to do about it.

        Args:
            code: fault in one word. Clients act on "context_length_exceeded" alone.
            field: name of the field at fault.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field

    @property
    def openai_message(self) -> str:
        """Message in OpenAI's dialects."""
        return str(self)


CONTEXT_EXCEEDED = "context_length_exceeded"
"""Code of a refusal: the prompt leaves no room for an answer."""
BUDGET_EXCEEDED = "call_budget_exceeded"
"""Code of a refusal: the rollout has no calls or no tokens left."""
LIMIT_CODES = (CONTEXT_EXCEEDED, BUDGET_EXCEEDED)
"""Codes of refusals that a limit of the run has caused."""


class PromptTooLong(Refusal):
    """Refusal of a prompt that leaves no room for an answer, in words on which clients compact.

    OpenAI's own clients know it by the code, litellm and what stands on it by OpenAI's sentence,
    and Anthropic's clients by theirs.
    """

    def __init__(self, tokens: int | None, max_tokens: int):
        """Say how long the prompt is.

        Args:
            tokens: number of tokens of the prompt; None if it was not tokenised, because it can't
                fit.
            max_tokens: maximum number of tokens of a prompt and its answer together.
        """
        limit = max_tokens - 1
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._seen = "more tokens" if tokens is None else f"{tokens} tokens"
        super().__init__(
            f"{self._seen} > {limit} maximum (env.max_rollout_tokens): {COMPACT}",
            code=CONTEXT_EXCEEDED,
            field="messages",
        )

    def __reduce__(self) -> tuple[type["PromptTooLong"], tuple[int | None, int]]:
        return type(self), (self._tokens, self._max_tokens)

    @property
    def openai_message(self) -> str:
        return (
            f"This model's maximum context length is {self._max_tokens} tokens. However, your "
            f"messages resulted in {self._seen}, which leaves no room for an answer "
            f"(env.max_rollout_tokens): {COMPACT}"
        )


COMPACT = "compact the conversation, or begin a new one"


@dataclass(kw_only=True, slots=True)
class ModelRequest:
    """A request to a model, in no dialect."""

    messages: list[Message]
    """Conversation so far. The policy answers it with a message of its own, also if the last one is
    the assistant's."""
    tools: list[ToolSpec] | None
    model: str
    """Name of the model, as the client calls it."""
    max_tokens: int | None = None
    """Maximum number of tokens of the answer; None if the client sets none."""
    seed: int | None = None
    """Seed that the client wants; None if it sent none."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Values of the fields in TASKS_OWN that change something unless the rollout has the same."""
    wishes: dict[str, Any] = field(default_factory=dict)
    """Values of the fields in WISHES that ask for something."""
    ignored: list[str] = field(default_factory=list)
    """Names of what the client sent and nothing here reads: fields, and "tool TYPE" for tools that
    the provider would run or that are no functions."""
    stop: list[str] = field(default_factory=list)
    """Texts at which the model ends its answer. The client does not see them."""
    stop_field: str = "stop"
    """Name of that field in the client's dialect."""
    stream: bool = False
    stream_usage: bool = False
    """True if a stream of chat completions ends with the usage."""


@dataclass(kw_only=True, slots=True)
class ModelReply:
    """Reply of a model, in no dialect."""

    id: str
    created: int
    """Time of the reply, in seconds since 1970."""
    model: str
    """Name of the model, as the client called it."""
    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    """Calls as OpenAI's chat completions have them."""
    finish: str
    """Reason for the end: "stop", "length" or "tool_calls"."""
    stopped_at: str | None
    """Text of the request's ``stop`` that ended the answer."""
    prompt_tokens: int
    completion_tokens: int


class FieldRule(NamedTuple):
    """Rule for a field of requests."""

    harmless: tuple[Any, ...]
    """Values that change nothing. None is always one."""
    cure: str
    """Advice to a client that sends another value."""


def cut_at_stop(content: str, stops: Sequence[str], *, at_text: bool) -> tuple[str, str | None]:
    """Return what comes before the first stop text, and that text.

    Without a stop text in it, the content is returned whole, and None.

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
    message: Message,
    *,
    length: bool,
    request: ModelRequest,
    stopped_at: str | None,
    **fields: Any,  # noqa: ANN401 - typed by ModelReply
) -> ModelReply:
    """Make the reply of an answer.

    Args:
        message: the answer without its stop text.
        length: True if the answer ended at a limit of tokens.
        stopped_at: the client's stop text that ended it.
        fields: the other fields of a ModelReply.
    """
    calls = list(message.get("tool_calls") or ())
    finish = "tool_calls" if calls else "stop"
    if length and stopped_at is None:
        finish = "length"
    return ModelReply(
        model=request.model,
        content=message["content"],
        reasoning=message.get("reasoning_content") or "",
        tool_calls=calls,
        finish=finish,
        stopped_at=stopped_at,
        **fields,
    )


FORM = "say in the prompt which form you want"
RECORDED = "leave it out: they are in the run's records"
WHOLE = "send the whole conversation with each request: nothing is stored"
YOURSELF = "leave it out, and let the agent do it: nothing but the model runs here"
TEMPLATE = "leave it out: the run's renderer makes the prompt (the config's `renderer`)"
UNTRUNCATED = "leave it out: the task samples from the whole distribution"
NO_END = "leave it out: an answer ends where the model ends it, or at `stop`"
UNAVAILABLE: dict[str, FieldRule] = {
    "n": FieldRule((1,), "ask once for each answer"),
    "logit_bias": FieldRule(({},), "leave it out"),
    "frequency_penalty": FieldRule((0,), "leave it out, or 0"),
    "presence_penalty": FieldRule((0,), "leave it out, or 0"),
    "logprobs": FieldRule((False,), RECORDED),
    "top_logprobs": FieldRule((0,), RECORDED),
    "functions": FieldRule(([],), "send them as tools"),
    "function_call": FieldRule(("auto", "none"), 'send tools, and tool_choice "auto"'),
    "previous_response_id": FieldRule((), WHOLE),
    "conversation": FieldRule((), WHOLE),
    "thread": FieldRule((), WHOLE),
    "prompt": FieldRule((), "send instructions and input"),
    "compaction": FieldRule((), "ask for the summary in a message of your own"),
    "container": FieldRule((), YOURSELF),
    "mcp_servers": FieldRule(([],), "offer the servers' tools as functions"),
    "web_search_options": FieldRule((), YOURSELF),
    "background": FieldRule((False,), "leave it out, and wait for the answer"),
    "modalities": FieldRule((["text"],), "leave it out: the model writes text"),
    "audio": FieldRule((), "leave it out: the model writes text"),
    # vLLM's and SGLang's names.
    "documents": FieldRule(([],), "put them into a message"),
    "best_of": FieldRule((1,), "ask once for each answer"),
    "use_beam_search": FieldRule((False,), "leave it out"),
    "length_penalty": FieldRule((1,), "leave it out, or 1"),
    "repetition_penalty": FieldRule((1,), "leave it out, or 1"),
    "min_p": FieldRule((0,), UNTRUNCATED),
    "typical_p": FieldRule((1,), UNTRUNCATED),
    "bad_words": FieldRule(([],), UNTRUNCATED),
    "allowed_token_ids": FieldRule((), UNTRUNCATED),
    "logits_processors": FieldRule(([],), UNTRUNCATED),
    "min_tokens": FieldRule((0,), NO_END),
    "ignore_eos": FieldRule((False,), NO_END),
    "include_stop_str_in_output": FieldRule(
        (False,), "leave it out, and add the stop text yourself"
    ),
    "thinking_token_budget": FieldRule((), "leave it out, and send max_tokens"),
    "structured_outputs": FieldRule(({},), FORM),
    "guided_json": FieldRule((), FORM),
    "guided_regex": FieldRule((), FORM),
    "guided_choice": FieldRule((), FORM),
    "guided_grammar": FieldRule((), FORM),
    "structural_tag": FieldRule((), FORM),
    "json_schema": FieldRule((), FORM),
    "regex": FieldRule((), FORM),
    "ebnf": FieldRule((), FORM),
    "prompt_logprobs": FieldRule((), RECORDED),
    "echo": FieldRule((False,), RECORDED),
    "chat_template": FieldRule((), TEMPLATE),
    "add_generation_prompt": FieldRule((True,), TEMPLATE),
    "continue_final_message": FieldRule((False,), TEMPLATE),
    "truncate_prompt_tokens": FieldRule((), TEMPLATE),
}
"""Rules of fields that are refused. With other values the answer's probabilities would not be those
that the trainer computes, or the conversation would lack a part, or nothing here serves them."""
TASKS_OWN: dict[str, FieldRule] = {
    "top_p": FieldRule((1,), UNTRUNCATED),
    "top_k": FieldRule((-1, 0), UNTRUNCATED),
    "stop_token_ids": FieldRule(([],), NO_END),
    "chat_template_kwargs": FieldRule(({},), TEMPLATE),
}
"""Rules of fields that a client may also send with the value that the rollout has."""

TEXT = {"type": "text"}
FORMS = ("response_format", "text", "output_config", "output_format")
"""Fields that ask for JSON, as the dialects call them."""
FORM_TYPES = ("json_schema", "json_object")
"""Types of forms that are taken for a wish. Others are refused."""
TOOL = 'send "auto", or "none" with no tools, and say in the prompt which tool to call'
ONE_CALL = "leave it out, and say in the prompt to call one tool at a time"
OWN_HISTORY = "leave it out: the model is given what the request has; shorten that yourself"
WISHES: dict[str, FieldRule] = {
    "tool_choice": FieldRule(("auto", "none"), TOOL),
    **dict.fromkeys(FORMS, FieldRule((TEXT,), FORM)),
    "parallel_tool_calls": FieldRule((True,), ONE_CALL),
    "temperature": FieldRule((), "leave it out: it is the task's (sampling.temperature)"),
    "reasoning_effort": FieldRule((), TEMPLATE),
    "reasoning": FieldRule(({},), TEMPLATE),
    "thinking": FieldRule((), TEMPLATE),
    "effort": FieldRule((), TEMPLATE),
    "verbosity": FieldRule((), FORM),
    "context_management": FieldRule(([], {}), OWN_HISTORY),
    "truncation": FieldRule(("disabled",), OWN_HISTORY),
}
"""Rules of fields that frameworks send by themselves, and that their users can't leave out.

The call is answered as if the field were not there: its tools are offered, and the text is the
policy's. The rollout counts how often each field was sent, and how often the answer was another
than the field asks for. A task may refuse them (``refused_fields``).
"""

READ = frozenset(
    """
    input instructions max_completion_tokens max_output_tokens max_tokens messages model seed stop
    stop_sequences stream stream_options system tools
    """.split()
)
"""Fields that the dialects read, beside those that have a rule."""
HARMLESS = frozenset(
    """
    billing_policy cache_control cache_salt client_metadata diagnostics inference_geo metadata
    moderation prediction priority prompt_cache_key prompt_cache_options prompt_cache_retention
    request_id safety_identifier service_tier speed store user user_profile_id workspace_id
    """.split()
)
"""Fields that change nothing of what the model is asked: prices, caches, records."""
KNOWN = READ | HARMLESS | UNAVAILABLE.keys() | TASKS_OWN.keys() | WISHES.keys()

MAX_TOOLS = 1024
"""Maximum number of tools of a request, eight times OpenAI's own limit. Rendering so many takes
some 8 s, in a thread, and three times as many longer than a rendering may take."""


def unavailable(name: str, value: object, cure: str) -> Refusal:
    """Return the refusal of a field that would change what the model is trained on."""
    why = "not available here, where the model is trained on what it samples"
    return Refusal(f"{name} = {shown(value)}: {why}; {cure}", code="unsupported_value", field=name)


def checked_request(
    body: Mapping[str, Any],
    messages: list[Any],
    tools: list[Any],
    other_tools: Sequence[str] = (),
    **fields: Any,  # noqa: ANN401 - typed by ModelRequest
) -> ModelRequest:
    """Return the request that a dialect has parsed, with every field checked.

    Args:
        body: the request. Fields that the dialect nests, such as ``text.format`` of responses, have
            been moved to the top, under the names that UNAVAILABLE and WISHES have.
        messages: conversation as OpenAI's chat completions have it.
        tools: tools in the same form.
        other_tools: types of the tools that the dialect has left out.
        fields: the other fields of a ModelRequest.

    Raises:
        Refusal: messages or tools can't be given to the model, or another field has a value that
            can't be met; names field, value and cure.
    """
    for name, rule in UNAVAILABLE.items():
        value = body.get(name)
        if value is not None and value not in rule.harmless:
            raise unavailable(name, value, rule.cure)
    sampling = _asked_for(body, TASKS_OWN)
    wishes = _asked_for(body, WISHES)
    model = body.get("model")
    if len(tools) > MAX_TOOLS:
        raise Refusal(
            f"tools has {len(tools)} entries, want at most {MAX_TOOLS}: offer those that the agent "
            "needs now",
            field="tools",
        )
    messages = _with_one_system_message(messages)
    try:
        checked = checked_messages(messages, "messages")
        known_tools = checked_tools(tools, "tools") if body.get("tool_choice") != "none" else None
        check_unicode(model, "model")
    except (TypeError, ValueError) as error:
        raise Refusal(str(error), field=str(error).split()[0].partition("[")[0]) from None
    _check_messages(checked)
    _check_wishes(wishes, known_tools or [])
    if not isinstance(model, str):
        raise Refusal(f'model is {shown(model)}, want a name such as "policy"', field="model")
    limit = fields.get("max_tokens")
    if limit is not None and (not _is_integer(limit) or limit < 1):
        raise Refusal(
            f"max_tokens is {shown(limit)}, want an integer from 1 up", field="max_tokens"
        )
    seed = body.get("seed")
    if seed is not None and not _is_integer(seed):
        raise Refusal(f"seed is {shown(seed)}, want an integer", field="seed")
    return ModelRequest(
        messages=_with_tool_names(checked),
        tools=known_tools,
        model=model,
        seed=seed,
        sampling=sampling,
        wishes=wishes,
        ignored=[
            *(name for name, value in body.items() if name not in KNOWN and value is not None),
            *(f"tool {kind}" for kind in other_tools),
        ],
        stream=bool(body.get("stream")),
        **fields,
    )


def _with_one_system_message(messages: list[Any]) -> list[Any]:
    """Return the messages with those of system and developer at the beginning joined to one.

    Templates know one system message, and no developer's.
    """
    roles = ("system", "developer")
    count = 0
    while count < len(messages) and messages[count].get("role") in roles:
        count += 1
    rest = [
        message | {"role": "system"} if message.get("role") == "developer" else message
        for message in messages[count:]
    ]
    if not count:
        return rest
    said = [text(message.get("content"), "messages") for message in messages[:count]]
    return [{"role": "system", "content": "\n\n".join(said)}, *rest]


def _check_messages(messages: Sequence[Message]) -> None:
    """Raise Refusal if the model has nothing to answer."""
    if not messages:
        raise Refusal("messages are empty: send at least one of the user's", field="messages")
    if messages[-1].get("tool_calls"):
        raise Refusal(
            "messages end with calls of tools: send a tool's message with the result of each",
            field="messages",
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def _asked_for(body: Mapping[str, Any], fields: Mapping[str, FieldRule]) -> dict[str, Any]:
    """Return the values of these fields that ask for something."""
    sent = {name: body.get(name) for name in fields}
    return {
        name: value
        for name, value in sent.items()
        if value is not None and value not in fields[name].harmless
    }


def _check_wishes(wishes: Mapping[str, Any], tools: Sequence[ToolSpec]) -> None:
    """Raise Refusal if a tool is forced and not offered, or a form is not JSON."""
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
            raise Refusal(
                f"{name} = {shown(value)}: the request offers {', '.join(offered) or 'no tools'}: "
                "offer what it is to call in `tools`",
                code="invalid_value",
                field=name,
            )


def forced_tool(choice: object) -> str | None:
    """Return the tool that a tool_choice forces; "" for any of those offered.

    None if the choice is in no form of a forced call.
    """
    if choice == "required":
        return ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def is_unmet(name: str, value: object, reply: ModelReply) -> bool:
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
    """Return a tool as the model is told of it.

    Args:
        parameters: name of the field in which ``tool`` has the schema of its parameters.
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


def text(content: object, field: str, types: tuple[str, ...] = ("text",)) -> str:
    """Return a content as one text. It may be a text, nothing, or a list of parts.

    A part of type "refusal" is what the assistant said too.

    Args:
        types: types of parts that are texts.

    Raises:
        Refusal: the content has something else, such as a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"{field} is {shown(content)}, want a text or a list of parts", field=field)
    said: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        words = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*types, "refusal") or not isinstance(words, str):
            raise Refusal(
                f"{field} has a part of type {shown(kind)}: only text reaches the model; leave it "
                "out",
                field=field,
            )
        said.append(words)
    return "\n".join(said)


def is_function(tool: Mapping[str, Any]) -> bool:
    """Return True if the client runs the tool, and the model gives arguments by name.

    Others are those that a provider runs, such as a web search, and "custom" ones, whose argument
    is a text. The model is not told of them.
    """
    return tool.get("type", "function") == "function"


def listed(value: object, field: str) -> list[dict[str, Any]]:
    """Return a list of objects; an empty one for None.

    Raises:
        Refusal: the value is no list of objects.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Refusal(f"{field} is {shown(value)}, want a list of objects", field=field)
    return value


def texts(value: object, field: str) -> list[str]:
    """Return a text, or a list of texts, as a list.

    Raises:
        Refusal: the value is something else, or a text is empty.
    """
    entries = [value] if isinstance(value, str) else value or []
    if not isinstance(entries, list) or not all(
        isinstance(entry, str) and entry for entry in entries
    ):
        raise Refusal(f"{field} is {shown(value)}, want texts that are not empty", field=field)
    return entries


MODEL_FAILED = 502
"""Status of a refusal because another model than the policy failed."""


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal, or the event of a stream, in OpenAI's dialects."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {
        "error": {
            "message": refusal.openai_message,
            "type": kind,
            "param": refusal.field,
            "code": refusal.code,
        }
    }


def event(fields: dict[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(fields)}\n\n".encode()


def typed_event(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
    """Return an event with its kind in its data."""
    return event({"type": kind, **fields}, kind)


def json_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Another value is the only entry of one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
