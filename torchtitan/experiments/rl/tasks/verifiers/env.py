"""A verifiers environment as a MessageEnv: its own rollout loop runs, and waits where it asks a model.

What it asks is the next prompt, and what the policy then says is its answer; between the two the RendererEnv does what it does
for every env. So the ids that are trained are the ids that were sampled, and limits, timeouts and records are any task's. That
goes for one growing conversation: where an environment rewrites what was said, asks twice at once or changes its tools, the
rollout is an error that says so. Imports verifiers with this module.
"""

import asyncio
from typing import Any

from renderers import Message, ToolSpec
from verifiers import Environment, State
from verifiers.clients import Client
from verifiers.types import ClientConfig, Messages, Response, SamplingArgs, Tool

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.verifiers.loading import score
from torchtitan.experiments.rl.tasks.verifiers.messages import to_messages, to_response, to_tool
from torchtitan.experiments.rl.user_code.calls import call_bounded, cause_of

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
