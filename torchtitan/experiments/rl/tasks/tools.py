"""Tools that are Python functions, or a server's of the Model Context Protocol: rows, tools and rewards, and no env to write.

async def search(query: str, limit: int = 3) -> str:
    \"\"\"Search the notes.

    query: words that a note has to have
    \"\"\"
    ...

task = tool_task("rows.jsonl", [search], reward)
"""

import asyncio
import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from annotated_types import MinLen
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from renderers import Message, ToolSpec

from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, cause_of
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn
from torchtitan.experiments.rl.tasks.questions import QuestionEnv, QuestionTask, row_task

NOT_TOOLS = ("close", "metadata")
"""Methods of a class of tools that the model does not call: the rollout does at its end, as of a MessageEnv."""
END_S = 5.0
"""What an MCP server has to end by itself."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MCPServer:
    """A server of the Model Context Protocol. Each rollout has its connection, and with ``command`` a process."""

    command: tuple[str, ...] = ()
    """Starts one that speaks on stdin and stdout."""
    url: str | None = None
    """Of one that speaks HTTP, such as "http://localhost:8000/mcp"."""


class _NoTitles(GenerateJsonSchema):
    """A title repeats a name, in tokens of every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class Tool:
    """A function that the model may call: what the model is told of it, and the call."""

    def __init__(self, function: Callable[..., Any], name: str = ""):
        """
        Raises:
            TypeError: a parameter has no type, or no name.
        """
        self.function, self.name = function, name or function.__name__
        fields: dict[str, Any] = {}
        about = inspect.getdoc(function) or ""
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not named or parameter.annotation is parameter.empty:
                raise TypeError(
                    f"{self.name}({parameter}): give each parameter a name and a type, such as limit: int = 3"
                )
            said = re.search(rf"^\s*{parameter.name}\s*(?:\(.*\))?:\s*(.+)$", about, re.MULTILINE)
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (
                parameter.annotation,
                Field(default, description=said[1] if said else None),
            )
        self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = self._arguments.model_json_schema(schema_generator=_NoTitles)
        parameters = {
            key: value
            for key, value in parameters.items()
            if key not in ("title", "additionalProperties")
        }
        self.spec = _spec(self.name, about.partition("\n\n")[0], parameters)

    async def call(self, arguments: dict[str, Any]) -> Any:
        """
        Raises:
            ValidationError: arguments that don't fit.
            UserCodeError: it failed.
        """
        given = self._arguments.model_validate(arguments)
        values = {name: getattr(given, name) for name in type(given).model_fields}
        return await ask(
            functools.partial(self.function, **values), timeout_s=None, owner=self.name
        )


@dataclass(slots=True)
class RemoteTool:
    """A tool of an MCP server."""

    name: str
    spec: ToolSpec
    client: Any

    async def call(self, arguments: dict[str, Any]) -> str:
        """
        Raises:
            RuntimeError: the server says that it failed.
        """
        result = await self.client.call_tool(self.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return text


class _Connection:
    """To an MCP server, held by one asyncio task: what opened one of anyio's scopes has to close it."""

    def __init__(self, server: MCPServer):
        self._server = server
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def tools(self) -> list[RemoteTool]:
        """
        Raises:
            Exception: the server can't be reached.
        """
        await asyncio.wait([self._client, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            await self._task  # it raised
        client = self._client.result()
        listed = (await client.list_tools()).tools
        return [
            RemoteTool(
                tool.name, _spec(tool.name, tool.description or "", tool.input_schema), client
            )
            for tool in listed
        ]

    async def close(self) -> None:
        """The server's process ends too."""
        self._closing.set()
        if (await asyncio.wait([self._task], timeout=END_S))[1]:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=END_S)

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters

        command = self._server.command
        target = (
            StdioServerParameters(command=command[0], args=list(command[1:]))
            if command
            else self._server.url
        )
        async with Client(cast(Any, target)) as client:
            self._client.set_result(client)
            await self._closing.wait()


def _spec(name: str, description: str, parameters: dict[str, Any]) -> ToolSpec:
    # With its wrapping, because that is what models saw in training.
    return cast(
        ToolSpec,
        {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        },
    )


class ToolEnv(QuestionEnv):
    """Answers the model's calls until it answers without one. A call that can't be made is answered in words."""

    def __init__(
        self, row: dict[str, Any], question: str | Sequence[Message], config: "ToolTask.Config"
    ):
        super().__init__(question, system_prompt=config.system_prompt)
        self.row, self._config = row, config
        self._tools: dict[str, Tool | RemoteTool] = {}
        self._states: list[Any] = []
        """What is closed at the end: connections, and objects of the classes of tools."""

    async def reset(self) -> ResetOutput:
        for given in self._config.tools:
            found: list[Any]
            if isinstance(given, MCPServer):
                self._states.append(_Connection(given))
                found = await self._states[-1].tools()
            elif _makes_tools(given):
                self._states.append(await ask(given, self.row, timeout_s=None))
                found = [Tool(method, name) for name, method in _methods(self._states[-1]).items()]
            else:
                found = [Tool(given)]
            self._tools |= {tool.name: tool for tool in found}
        tools = [tool.spec for tool in self._tools.values()]
        return ResetOutput(
            messages=self.messages, tools=tools, control_tokens=True
        )  # the task has checked its rows

    async def step_message(self, message: Message) -> StepOutput:
        counts: Counter[str] = Counter()
        answers: list[Any] = []
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            content, outcome = await self._answer(name, arguments)
            counts[outcome] += 1
            answers.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            )
        for _ in message.get("malformed_tool_calls") or []:
            counts["bad_calls"] += 1
            answers.append({"role": "tool", "content": "Error: the call is not well-formed"})
        return StepOutput(
            env_messages=answers,
            done=not answers,
            reward_components={k: float(v) for k, v in counts.items()},
            control_tokens=self._config.control_tokens,
        )

    async def _answer(self, name: str, arguments: str) -> tuple[str, str]:
        """What a call is answered with, and what it counts as."""
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: no tool {name!r}; there are {', '.join(self._tools)}", "bad_calls"
        try:
            given = json.loads(arguments)
            if not isinstance(given, dict):
                raise TypeError("arguments: want a JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: {error}", "bad_calls"
        try:
            value = await tool.call(given)
            text = value if isinstance(value, str) else TypeAdapter(Any).dump_json(value).decode()
            return text, "good_calls"
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            return f"Error: {faults}", "bad_calls"
        except Exception as error:
            if self._config.tool_errors == "fail":
                raise
            return f"Error: {cause_of(error)}", "failed_calls"

    async def metadata(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for state in self._states:
            if hasattr(state, "metadata"):
                known |= await ask(state.metadata, timeout_s=None)
        return known

    async def close(self) -> None:
        for state in self._states:
            if hasattr(state, "close"):
                await ask(state.close, timeout_s=None)


class ToolTask(QuestionTask):
    """A question of each row, and tools to answer it with.

    Reward components count the calls: "good_calls", "bad_calls" (no such tool, or arguments that don't fit) and
    "failed_calls" (the tool raised).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        env: RendererEnvConfig = field(default_factory=RendererEnvConfig)
        tools: Annotated[
            list[Any], MinLen(1), Cure("give typed functions, classes of them, or MCPServer(...)")
        ]
        """Typed functions, sync or async; MCPServer; and classes, or functools.partial of one: each rollout has an object of
        its own, called with the row, whose public methods are tools. What its ``metadata()`` returns is in Rollout.metadata,
        and ``close`` is called at the end."""
        tool_errors: Literal["tell", "fail"] = "tell"
        """A tool that raises is told to the model, or ends the rollout as ERROR."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(ToolTask.Config, self).validate(field=field, policy_path=policy_path)
            for index, given in enumerate(self.tools):
                at = f"{field}.tools[{index}]"
                if isinstance(given, MCPServer):
                    if bool(given.command) == bool(given.url):
                        raise ConfigError(at, given, "give its command or its url, and not both")
                elif not callable(given):
                    raise ConfigError(
                        at, given, "want a typed function, a class of them, or MCPServer(...)"
                    )
                else:
                    functions = {getattr(given, "__name__", ""): given}
                    if _makes_tools(given):  # a method's first parameter is the object
                        methods = _methods(getattr(given, "func", given)).items()
                        functions = {
                            name: functools.partial(method, None) for name, method in methods
                        }
                    try:
                        for name, function in functions.items():
                            Tool(function, name)
                    except (TypeError, ValueError, NameError) as error:
                        raise ConfigError(at, given, str(error)) from None

    config: Config

    def make_env(self, sample: DataSample) -> MessageEnv:
        return ToolEnv(sample.env_input, self.asked(sample.env_input), self.config)


def tool_task(
    data: Any, tools: list[Any], *reward_fns: Callable[..., Any] | RewardFn, **fields: Any
) -> ToolTask.Config:
    """The config of a ToolTask.

    Args:
        data: as for ``question_task``, also ``validation`` and ``split``.
        tools: see ToolTask.Config.
        reward_fns: functions ``fn(completion, row)`` of the last thing that the model says, or RewardFn.
        fields: of ToolTask.Config, such as ``template`` and ``env=RendererEnvConfig(max_turns=8)``.

    Raises:
        ConfigError: the data is none of these.
    """
    return row_task(ToolTask.Config, data, *reward_fns, tools=tools, **fields)


def _makes_tools(given: Any) -> bool:
    return isinstance(given, type | functools.partial)


def _methods(state: Any) -> dict[str, Any]:
    """Those of an object, or of a class, that are tools."""
    methods = inspect.getmembers(state, inspect.isroutine)
    return {name: method for name, method in methods if name[0] != "_" and name not in NOT_TOOLS}
