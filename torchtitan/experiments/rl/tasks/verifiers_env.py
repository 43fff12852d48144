"""A verifiers environment as a MessageEnv: its own rollout loop runs, and waits where it asks a model.

What it asks is the next prompt, and what the policy then says is its answer; between the two the RendererEnv does what it does
for every env. So the ids that are trained are the ids that were sampled, and limits, timeouts and records are any task's. That
goes for one growing conversation: where an environment rewrites what was said, asks twice at once or changes its tools, the
rollout is an error that says so.

Environments are adapted to a run in three ways:

1. An Environment sets handlers of SIGINT and SIGTERM when it is made. Here it sets none: an actor's thread may not, and the
   command handles Ctrl-C.
2. A verifiers rubric counts a reward function that raises as 0. Here the rollout ends as an error.
3. A sync reward function would hold up the event loop: here it runs in a worker thread.

Imports verifiers with this module.
"""

import asyncio
import contextvars
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import verifiers
from renderers import Message, ToolSpec
from verifiers import Environment, State
from verifiers.clients import Client
from verifiers.types import ClientConfig, Messages, Response, ResponseMessage, SamplingArgs, Tool, ToolCall
from verifiers.types import Message as VerifiersMessage

from torchtitan.experiments.rl.compat.verifiers import compares_rollouts, no_signal_handlers, replace_reward_functions
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.process.setup import take_log_of
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded, call_user, cause_of, is_finite_number

_failures: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures of the reward functions of one rollout")


@functools.cache
def load_environment(name: str, args: str) -> "verifiers.Environment":
    """The environment that ``name``'s module makes of ``args``, JSON; the same object for the same arguments.

    Raises:
        Exception: whatever the environment's own code raises.
    """
    take_log_of("verifiers")
    with no_signal_handlers():
        environment = verifiers.load_environment(name, **json.loads(args))
    replace_reward_functions(environment, _watched)
    return environment


def scores_groups(environment: "verifiers.Environment") -> bool:
    """Whether some reward function compares rollouts."""
    return compares_rollouts(environment)


async def score(environment: "verifiers.Environment", state: "verifiers.State") -> dict[str, float]:
    """Have the environment's rubric score a finished rollout: its functions' values by name, and their weighted sum, "reward".

    Raises:
        RuntimeError: a reward function failed; names each that did.
    """
    failures: list[str] = []
    _failures.set(failures)  # a context variable: other rollouts have their own
    try:
        await environment.rubric.score_rollout(state)
    finally:
        await environment.rubric.cleanup(state)
    if failures:
        raise RuntimeError("; ".join(failures))
    return {**state["metrics"], "reward": state["reward"]}


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function in a thread if it is sync, with its failures added to ``_failures``."""

    @functools.wraps(function)  # rubrics read the signature to know what to pass
    async def watched(*args: Any, **kwargs: Any) -> Any:
        failures = _failures.get([])
        try:
            value = await call_user(functools.partial(function, *args, **kwargs), timeout_s=None)
        except UserCodeError as error:
            failures.append(f"reward function {function.__name__!r}: {error}")
            raise
        if not is_finite_number(value):
            failures.append(f"reward function {function.__name__!r} returned {str(value)[:60]!r}, want a finite number")
        return value

    return watched


def to_messages(messages: Iterable[VerifiersMessage]) -> list[Message]:
    """As the renderers package has them. A tool's answer gets the tool's name, which verifiers leaves out and some templates
    show."""
    converted: list[Message] = []
    called: dict[str, str] = {}
    for message in messages:
        # Messages of the old text-completion API stand for the user's.
        role = "user" if message.role == "text" else message.role
        content = message.content or ""
        made: Message = {"role": role, "content": content if isinstance(content, str) else [_part(part) for part in content]}
        if reasoning := getattr(message, "reasoning_content", None):
            made["reasoning_content"] = reasoning
        if calls := getattr(message, "tool_calls", None):
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            called |= {call.id: call.name for call in calls}
        if role == "tool":
            made["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                made["name"] = called[message.tool_call_id]
        converted.append(made)
    return converted


def to_tool(tool: Tool) -> ToolSpec:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def to_response(message: Message) -> Response:
    """An assistant message as a model's response. Malformed tool calls stay in its content, as text."""
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    said = ResponseMessage(
        content=message["content"],
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id="", created=0, model="policy", message=said)


def _part(part: Any) -> dict:
    return dict(part) if isinstance(part, dict) else part.model_dump()


Request = tuple[list[Message], list[ToolSpec]]


class VerifiersEnv(MessageEnv):
    """Gives the rubric's "reward" and the value of each of its functions in the step that ends the rollout."""

    def __init__(self, environment: Environment, row: dict[str, Any]):
        self._environment = environment
        self._row = row
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self._playing: asyncio.Task[State] | None = None
        self._said: list[Message] = []
        self._tools: list[ToolSpec] = []

    async def reset(self) -> ResetOutput:
        # Bounded by the steps' limits, and by close(); call_bounded for a sys.exit(), which would end the event loop.
        self._playing = asyncio.create_task(call_bounded(self._play, timeout_s=None))
        request = await self._next_request()
        if request is None:
            _raise_failure(await self._ended())
            raise RuntimeError("the environment ended before it asked the model anything")
        self._said, self._tools = request
        return ResetOutput(messages=self._said, tools=self._tools)

    async def step_message(self, message: Message) -> StepOutput:
        self._said = self._said + to_messages([to_response(message).message])
        answer, self._answer = self._answer, None
        assert answer is not None
        if not answer.done():  # the environment may have stopped waiting
            answer.set_result(message)
        request = await self._next_request()
        if request is None:
            return await self._final_step(await self._ended())
        messages, tools = request
        if messages[: len(self._said)] != self._said:
            raise ValueError(f"the environment rewrote the conversation: {_first_change(self._said, messages)}")
        if tools != self._tools:
            raise ValueError("the environment changed its tools in mid-conversation: prompts show one set")
        tail = messages[len(self._said) :]
        self._said = messages
        return StepOutput(env_messages=tail, done=False)

    async def close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)

    async def ask(self, messages: list[Message], tools: list[ToolSpec]) -> Message:
        """The policy's message for this prompt. The environment calls this through its client."""
        if self._answer is not None:
            raise RuntimeError("the environment asks the model twice at once: one conversation is trained")
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((messages, tools))
        return await self._answer

    async def _play(self) -> State:
        return await self._environment.rollout(self._row, client=AskingClient(self), model="policy", sampling_args={})

    async def _next_request(self) -> Request | None:
        """The environment's next request; None when its rollout has ended."""
        asked = asyncio.create_task(self._requests.get())
        assert self._playing is not None
        waiting: set[asyncio.Future[Any]] = {asked, self._playing}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    async def _ended(self) -> State:
        """What the environment's rollout ended in; it is over."""
        assert self._playing is not None
        return await self._playing

    async def _final_step(self, state: State) -> StepOutput:
        _raise_failure(state)
        rewards = await score(self._environment, state)
        conversation = to_messages([*state["prompt"], *state["completion"]])
        # The environment's last messages are for the record. One that renders its completion itself has none.
        said = len(self._said)
        last_words = conversation[said:] if conversation[:said] == self._said else []
        return StepOutput(env_messages=last_words, done=True, reward_components=rewards)


class AskingClient(Client):
    """The client that the environment calls as its model."""

    def __init__(self, env: VerifiersEnv):
        super().__init__(env)

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: SamplingArgs, tools: list[ToolSpec] | None = None, **kwargs: Any
    ) -> Message:
        """Ignores the environment's sampling arguments: the task sets the sampling."""
        return await self.client.ask(prompt, tools or [])

    async def to_native_prompt(self, messages: Messages) -> tuple[list[Message], dict]:
        return to_messages(messages), {}

    async def to_native_tool(self, tool: Tool) -> ToolSpec:
        return to_tool(tool)

    async def from_native_response(self, response: Message) -> Response:
        return to_response(response)

    async def raise_from_native_response(self, response: Message) -> None:
        """Raises nothing for an empty answer: the rubric scores it."""

    def setup_client(self, config: ClientConfig) -> VerifiersEnv:
        raise TypeError("made from an env, not from a config")

    async def close(self) -> None:
        pass


def _raise_failure(state: State) -> None:
    if (error := state["error"]) is not None:
        cause = f", from {cause_of(error.__cause__)}" if error.__cause__ else ""
        raise RuntimeError(f"the environment's rollout failed: {cause_of(error)}{cause}")
    if state.get("timed_out"):
        raise TimeoutError("the environment's own time limit (timeout_seconds) ran out")


def _first_change(said: list[Message], messages: list[Message]) -> str:
    for index, before in enumerate(said):
        after = messages[index] if index < len(messages) else None
        if after != before:
            return f"message {index} was {str(before)[:80]}, is {str(after)[:80] if after else 'gone'}"
    return "nothing changed"
