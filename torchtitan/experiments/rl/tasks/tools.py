"""Lets the model call tools: Python functions, or those of a server of the Model Context Protocol.

A task is made of rows, tools and rewards, without an env of one's own (`tool_task`). A row's
question opens the conversation. Each call of the model is answered by a message of role "tool", and
the rollout ends at an answer without a call.
"""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from renderers import Message, ToolSpec

from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, UserCodeError, cause_of
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn
from torchtitan.experiments.rl.tasks.questions import QuestionEnv, QuestionTask, row_task

NOT_TOOLS = ("close", "metadata")
"""Methods of a class of tools that the model can't call. The env calls them as a rollout ends."""
END_S = 5.0
"""Seconds that an MCP server has to end by itself, before its connection is cancelled."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MCPServer:
    """Server of the Model Context Protocol, given by its command or by its address.

    Each rollout opens a connection of its own, and with ``command`` a process of its own.
    """

    command: tuple[str, ...] = ()
    """Command that starts a server which speaks on stdin and stdout."""
    url: str | None = None
    """Address of a server that speaks HTTP, such as "http://localhost:8000/mcp"."""


class _NoTitles(GenerateJsonSchema):
    """Schemas without titles: a title repeats a name, and would cost tokens in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401 - pydantic's
        return False


class Tool:
    """Function that the model may call, with the description that the model sees."""

    def __init__(self, function: Callable[..., Any], name: str = ""):
        """Read the signature and the docstring of the function.

        Args:
            function: a function whose parameters all have types.
            name: name that the model calls it by; "" for the function's own.

        Raises:
            TypeError: a parameter has no type, or no name.
        """
        self.function = function
        self.name = name or function.__name__
        docstring = inspect.getdoc(function) or ""
        self._arguments = self._arguments_model(docstring)
        schema = self._arguments.model_json_schema(schema_generator=_NoTitles)
        parameters = {
            key: value
            for key, value in schema.items()
            if key not in ("title", "additionalProperties")
        }
        self.spec = _spec(self.name, docstring.partition("\n\n")[0], parameters)

    async def call(self, arguments: dict[str, Any]) -> object:
        """Call the function, and return what it returns.

        Raises:
            ValidationError: the arguments don't fit the parameters.
            UserCodeError: the function failed.
        """
        checked = self._arguments.model_validate(arguments)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        call = functools.partial(self.function, **values)
        return await ask(call, timeout_s=None, owner=self.name)

    def _arguments_model(self, docstring: str) -> type[BaseModel]:
        """Return a model with a field for each parameter, described by its line of the docstring.

        Raises:
            TypeError: a parameter has no type, or no name.
        """
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(self.function, eval_str=True).parameters.values():
            has_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not has_name or parameter.annotation is parameter.empty:
                raise TypeError(
                    f"{self.name}({parameter}): give each parameter a name and a type, such as "
                    "limit: int = 3"
                )
            line = rf"^\s*{parameter.name}\s*(?:\(.*\))?:\s*(.+)$"
            description = re.search(line, docstring, re.MULTILINE)
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (
                parameter.annotation,
                Field(default, description=description[1] if description else None),
            )
        return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)


@dataclass(slots=True)
class RemoteTool:
    """Tool of an MCP server."""

    name: str
    spec: ToolSpec
    client: Any
    """Client of the ``mcp`` package that is connected to the server."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """Have the server call the tool, and return the text parts of its answer.

        Raises:
            RuntimeError: the server says that the tool failed.
        """
        result = await self.client.call_tool(self.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return text


class _MCPConnection:
    """Connection to an MCP server.

    One asyncio task opens and closes it, because anyio lets only the task that has opened a scope
    close it.
    """

    def __init__(self, server: MCPServer):
        self._server = server
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def tools(self) -> list[RemoteTool]:
        """Return the tools of the server, once it is connected.

        Raises:
            Exception: the server can't be reached.
        """
        await asyncio.wait([self._client, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            await self._task  # raises what has failed
        client = self._client.result()
        listed = (await client.list_tools()).tools
        return [
            RemoteTool(
                tool.name, _spec(tool.name, tool.description or "", tool.input_schema), client
            )
            for tool in listed
        ]

    async def close(self) -> None:
        """Close the connection, which ends the server's process too. Takes at most 2 `END_S`."""
        self._closing.set()
        _, pending = await asyncio.wait([self._task], timeout=END_S)
        if pending:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=END_S)

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters

        command = self._server.command
        target: Any = self._server.url
        if command:
            target = StdioServerParameters(command=command[0], args=list(command[1:]))
        async with Client(target) as client:
            self._client.set_result(client)
            await self._closing.wait()


def _spec(name: str, description: str, parameters: dict[str, Any]) -> ToolSpec:
    """Return what the model is told of a tool, in the form that models saw in training."""
    function = {"name": name, "description": description, "parameters": parameters}
    return cast(ToolSpec, {"type": "function", "function": function})


CallKind = Literal["good_calls", "bad_calls", "failed_calls"]
"""Reward component that counts a call."""


class ToolEnv(QuestionEnv):
    """Env that answers the model's calls until the model answers without one.

    A call that can't be made is answered with what is wrong with it, so that the model can try
    again.
    """

    def __init__(
        self,
        row: dict[str, Any],
        question: str | Sequence[Message],
        config: "ToolTask.Config",
        *,
        control_tokens: bool = False,
    ):
        super().__init__(
            question, system_prompt=config.system_prompt, control_tokens=control_tokens
        )
        self.row = row
        self._config = config
        self._tools: dict[str, Tool | RemoteTool] = {}
        self._states: list[Any] = []
        """Connections, and objects with tools. All are closed as the rollout ends."""

    async def reset(self) -> ResetOutput:
        offered: list[tuple[str, str]] = []
        for source in self._config.tools:
            for tool in await self._open(source):
                offered.append((tool.name, _name_of(source)))
                self._tools[tool.name] = tool
        twice = _offered_twice(offered)
        if twice is not None:  # `ToolTask.Config` can't ask a server which tools it has
            raise ValueError(twice)
        self.tools = [tool.spec for tool in self._tools.values()]
        return await super().reset()

    async def step_message(self, message: Message) -> StepOutput:
        # Each is given without a call too, so that a mean is over all rollouts.
        counts: dict[CallKind, int] = dict.fromkeys(get_args(CallKind), 0)
        answers: list[Any] = []
        for call in message.get("tool_calls") or []:
            name = call["function"]["name"]
            content, kind = await self._answer(name, call["function"]["arguments"])
            counts[kind] += 1
            answers.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            )
        for _ in message.get("malformed_tool_calls") or []:
            counts["bad_calls"] += 1
            answers.append({"role": "tool", "content": "Error: the call is not well-formed"})
        return StepOutput(
            env_messages=answers,
            done=not answers,
            reward_components={str(kind): float(count) for kind, count in counts.items()},
            control_tokens=self._config.control_tokens,
        )

    async def metadata(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for state in self._states:
            if hasattr(state, "metadata"):
                merged |= await ask(state.metadata, timeout_s=None)
        return merged

    async def close(self) -> None:
        """Close every connection and every object, side by side.

        So one that fails, or takes all of the time that closing may take, keeps no other open.

        Raises:
            UserCodeError: some of them failed; has the cause of each.
        """
        calls = [
            ask(state.close, timeout_s=None) for state in self._states if hasattr(state, "close")
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise UserCodeError("; ".join(map(str, failures))) from failures[0]

    async def _open(self, source: object) -> list[Tool] | list[RemoteTool]:
        """Return the tools of one entry of the config's list.

        Raises:
            TypeError: the entry made an object without a public method.
        """
        if isinstance(source, MCPServer):
            connection = _MCPConnection(source)
            self._states.append(connection)
            return await connection.tools()
        function = cast(Callable[..., Any], source)
        if _makes_tools(function):
            state = await ask(function, self.row, timeout_s=None)
            self._states.append(state)
            methods = _methods(state)
            if not methods:
                raise TypeError(f"{type(state).__name__} has no public method to be a tool")
            return [Tool(method, name) for name, method in methods.items()]
        return [Tool(function)]

    async def _answer(self, name: str, arguments: str) -> tuple[str, CallKind]:
        """Make a call, and return the answer for the model with what the call counts as."""
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: no tool {name!r}; there are {', '.join(self._tools)}", "bad_calls"
        try:
            values = json.loads(arguments)
            if not isinstance(values, dict):
                raise TypeError("arguments: want a JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: {error}", "bad_calls"
        try:
            value = await tool.call(values)
            text = value if isinstance(value, str) else TypeAdapter(Any).dump_json(value).decode()
            return text, "good_calls"
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            return f"Error: {faults}", "bad_calls"
        except Exception as error:  # noqa: BLE001 - the tool is the user's
            if self._config.tool_errors == "fail":
                raise
            return f"Error: {cause_of(error)}", "failed_calls"


class ToolTask(QuestionTask):
    """Task that asks a question for each row, and gives the model tools to answer it with.

    Reward components count the calls: "good_calls", "bad_calls" (no such tool, or arguments that
    don't fit) and "failed_calls" (the tool raised). A rollout has all three, 0 where none was made.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        env: RendererEnvConfig = field(default_factory=RendererEnvConfig)
        tools: Annotated[
            list[Any], MinLen(1), Cure("give typed functions, classes of them, or MCPServer(...)")
        ]
        """Typed functions, sync or async; MCPServer; and classes, or functools.partial of one.

        Each rollout makes an object of a class for itself, called with the row. Public methods of
        the object are tools. What its ``metadata()`` returns is in Rollout.metadata, and its
        ``close`` is called as the rollout ends."""
        tool_errors: Literal["tell", "fail"] = "tell"
        """Consequence of a tool that raises: "tell" the model, or "fail" the rollout as ERROR."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(ToolTask.Config, self).validate(field=field, policy_path=policy_path)
            offered = []
            for index, source in enumerate(self.tools):
                for tool in _declared_tools(source, f"{field}.tools[{index}]"):
                    offered.append((tool.name, _name_of(source)))
            twice = _offered_twice(offered)
            if twice is not None:
                raise ConfigError(f"{field}.tools", [name for name, _ in offered], twice)

    config: Config

    def make_env(self, sample: DataSample) -> MessageEnv:
        row = sample.env_input
        return ToolEnv(
            row,
            self.question_of(row),
            self.config,
            control_tokens=self.writes_control_tokens,
        )

    def tools_of(self, row: dict[str, Any]) -> list[ToolSpec]:
        """Return what the model is told of the tools, but for those of servers.

        Raises:
            ValueError: the row brings tools of its own, which nothing could answer.
        """
        told = super().tools_of(row)
        if told:
            raise ValueError(
                f"its {self.config.tools_column!r} tell the model of tools, and the task offers "
                "its own: remove the column, or set tools_column = None if it is something else"
            )
        return list(self._declared)

    @functools.cached_property
    def _declared(self) -> list[ToolSpec]:
        return [tool.spec for source in self.config.tools for tool in _declared_tools(source, "")]

    def check_tools(self, tools: list[ToolSpec], *, field: str) -> str | None:
        """See Task. Count the rows once more if a server has brought tools."""
        if len(tools) == len(self._declared):
            return None
        for part, dataset in self._row_datasets():
            full = [
                index
                for index, row in enumerate(dataset.rows)
                if not self._has_room(self.question_of(row), tools)
            ]
            if full:
                return (
                    f"{field}.{part}: with the tools that the servers have, {len(full):,} of "
                    f"{len(dataset):,} rows leave no room for an answer in env.max_rollout_tokens "
                    f"= {self.config.env.max_rollout_tokens} (first: "
                    f"{dataset.rows.location(full[0])})"
                )
        return None


def tool_task(
    data: object,
    tools: list[Any],
    *reward_fns: Callable[..., Any] | RewardFn,
    **fields: Any,  # noqa: ANN401 - typed by the config
) -> ToolTask.Config:
    """Return the config of a ToolTask.

    Args:
        data: rows, as for ``row_task``.
        tools: functions, classes and servers, as for ToolTask.Config.
        reward_fns: functions ``fn(completion, row)`` of the last thing that the model says, or
            RewardFn.
        fields: ``validation`` and ``split`` of ``row_task``, and fields of ToolTask.Config, such as
            ``template`` and ``env=RendererEnvConfig(max_turns=8)``.

    Raises:
        ConfigError: the data is none of these.

    Example::

        from torchtitan.experiments.rl.tasks import right_answer, tool_task

        async def multiply(first: int, second: int) -> int:
            "Multiply two numbers."  # the model is told this, the names and the types
            return first * second

        rows = [{"question": "6 * 7?", "answer": "42"}]  # or a file, such as "rows.jsonl"
        task = tool_task(rows, [multiply], right_answer)
    """
    return row_task(ToolTask.Config, data, *reward_fns, tools=tools, **fields)


def _name_of(source: object) -> str:
    """Return the name by which an error tells an entry of the config's list from the others."""
    if isinstance(source, MCPServer):
        return f"MCPServer({source.url or ' '.join(source.command)})"
    kind = source.func if isinstance(source, functools.partial) else source
    return getattr(kind, "__qualname__", repr(kind))


def _offered_twice(offered: Sequence[tuple[str, str]]) -> str | None:
    """Return what is wrong if two tools have one name; None if no two have.

    Args:
        offered: names of the tools, each with the name of its source.
    """
    source_of: dict[str, str] = {}
    for name, source in offered:
        if name in source_of:
            return (
                f"{source_of[name]} and {source} both offer a tool named {name!r}: rename one, or "
                "leave one out"
            )
        source_of[name] = source
    return None


def _declared_tools(source: object, field: str) -> list[Tool]:
    """Return the tools of an entry of the config's list, as the model is told of them.

    A server says only when it is connected which it has, so there are none of one.

    Raises:
        ConfigError: no tools can be made of the entry; names ``field``.
    """
    if isinstance(source, MCPServer):
        if bool(source.command) == bool(source.url):
            raise ConfigError(field, source, "give its command or its url, and not both")
        return []
    if not callable(source):
        cure = "want a typed function, a class of them, or MCPServer(...)"
        raise ConfigError(field, source, cure)
    functions: dict[str, Callable[..., object]] = {getattr(source, "__name__", ""): source}
    if _makes_tools(source):
        kind = getattr(source, "func", source)
        if not isinstance(kind, type):
            cure = (
                "a functools.partial is called with the row to make an object with tools, and this "
                "one is of a function: write a typed function around it, or a class"
            )
            raise ConfigError(field, source, cure)
        functions = _methods(kind)
        for name, method in functions.items():
            if inspect.isfunction(inspect.getattr_static(kind, name)):
                # The first parameter is the object, which does not exist yet.
                bound = functools.partial(method, None)
                bound.__doc__ = method.__doc__
                functions[name] = bound
    try:
        return [Tool(function, name) for name, function in functions.items()]
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(field, source, str(error)) from None


def _makes_tools(source: object) -> bool:
    """Return True if the entry makes an object whose methods are tools: a class or a partial."""
    return isinstance(source, type | functools.partial)


def _methods(state: object) -> dict[str, Callable[..., Any]]:
    """Return the methods of an object, or of a class, that are tools, by name."""
    methods = inspect.getmembers(state, inspect.isroutine)
    return {name: method for name, method in methods if name[0] != "_" and name not in NOT_TOOLS}
