"""Between tokens and messages: a RendererEnv turns what a MessageEnv returns into prompts, and completions into messages."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
from annotated_types import Ge
from renderers import Message, Renderer

from torchtitan.experiments.rl.bounds import Changeable, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.messages import (
    assistant_message,
    checked_messages,
    checked_rewards,
    checked_tools,
)
from torchtitan.experiments.rl.envs.prompt import (
    LARGE_COMPLETION,
    GroupPrompts,
    Prompt,
    cannot_fit,
    first_prompt,
    next_prompt,
    off_the_loop_if,
)
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.samples import check_completion
from torchtitan.experiments.rl.rollouts.sealed import copied
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, call_user, cause_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class RendererEnvConfig:
    max_turns: PositiveInt = 8
    """Completions a rollout may have."""
    max_rollout_tokens: Annotated[int, Ge(2)] = 1024
    """Tokens the conversation may have: a prompt and its completion together never exceed it, so no training sample does."""
    step_timeout_s: Changeable[PositiveFloat] = 60.0
    """For each reset, step_message and close."""
    rollout_timeout_s: Changeable[PositiveFloat] = 600.0
    """From reset to the terminal status, sampling included. Enforced by the task that runs the rollout."""


@dataclass(kw_only=True, slots=True)
class TokenizedStepOutput:
    """Where the conversation stands after a reset or a completion."""

    next_prompt_token_ids: list[int] | None
    """[P]. What to sample from next; None on a terminal status."""
    next_prompt_messages: list[Message]
    """The whole conversation so far."""
    status: RolloutStatus
    env_messages: list[Message] = field(default_factory=list)
    """The env's answer to the completion; empty after initial_prompt."""
    env_reward_components: dict[str, float] = field(default_factory=dict)
    """What the env rewarded in this step."""
    assistant_message: Message | None = None
    """The completion, parsed; None after initial_prompt."""
    error: str | None = None
    """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""


class RendererEnv:
    """One conversation in tokens. Single use: initial_prompt once, then step_completion until the status is terminal.

    Nothing the MessageEnv does is raised here: exceptions, SystemExit, wrong return types and hangs become a status with its
    cause. The MessageEnv is closed as soon as the status is terminal; a caller that stops earlier calls close().

    An env whose methods are plain functions runs in a worker thread. One whose async methods block without awaiting
    (``time.sleep``, a sync HTTP client) stalls every rollout of the process, and no timeout can interrupt it: the metric
    ``perf/event_loop_lag_max_s`` shows it.
    """

    def __init__(
        self,
        *,
        message_env: MessageEnv,
        renderer: Renderer,
        config: RendererEnvConfig,
        group: GroupPrompts | None = None,
    ):
        """
        Args:
            group: what was rendered for the other rollouts of its group.
        """
        self._env = message_env
        self._name = type(message_env).__name__
        self._renderer = renderer
        self._config = config
        self._group = group or GroupPrompts()
        self._messages: list[Message] = []
        self._tools: list | None = None
        self._prompt: Prompt | None = None
        self._turns: list[RolloutTurn] = []
        self._chain: list[RolloutTurn] = []
        """The last turns, whose prompts are prefixes of the next."""
        self._status = RolloutStatus.ONGOING
        self._error: str | None = None
        self._started = self._closed = False
        self._prompted_at = 0.0
        self._reset_s = 0.0

    @property
    def turns(self) -> list[RolloutTurn]:
        """One per completion so far, also where the env then failed."""
        return self._turns

    @property
    def status(self) -> RolloutStatus:
        return self._status

    @property
    def error(self) -> str | None:
        """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""
        return self._error

    @property
    def prompt_token_ids(self) -> np.ndarray | None:
        """int32 [P]. The next prompt as generators take it; None where TokenizedStepOutput.next_prompt_token_ids is."""
        return self._prompt.token_ids if self._prompt else None

    @property
    def max_completion_tokens(self) -> int:
        """Tokens the next completion may have within max_rollout_tokens; 0 when there is no next prompt."""
        return self._config.max_rollout_tokens - len(self._prompt.ids) if self._prompt else 0

    async def initial_prompt(self) -> TokenizedStepOutput:
        """Reset the env and render its opening conversation.

        Raises:
            RuntimeError: called a second time.
        """
        if self._started:
            raise RuntimeError("this RendererEnv was used already: make a new one for each rollout")
        self._started = True
        await self._until_settled(self._reset)
        return self._output(None)

    async def step_completion(self, completion: Completion) -> TokenizedStepOutput:
        """Parse a completion, step the env with it and render the next prompt.

        The completion is recorded as a turn first: its tokens are kept whatever the env does then. A completion cut off at its
        token limit ("length") ends the rollout without stepping the env: half a message is not the model's whole answer, and
        an env acting on it (half a tool call, half a number) would reward or punish the cut.

        Raises:
            RuntimeError: there was no prompt to complete: before initial_prompt or after a terminal status.
        """
        prompt = self._prompt
        if prompt is None:
            raise RuntimeError(f"no prompt to complete: the rollout is {'over' if self._started else 'not started'}")
        turn = RolloutTurn(
            prompt_messages=list(self._messages),
            prompt_token_ids=prompt.token_ids,
            prompt_role_ids=prompt.role_ids,
            prompt_is_content=prompt.is_content,
            prompt_message_indices=prompt.message_indices,
            completion=completion,
            assistant_message={"role": "assistant", "content": ""},
            tools=self._tools,
            generate_s=time.perf_counter() - self._prompted_at,
        )
        await self._until_settled(lambda: self._step(turn, prompt))
        return self._output(turn)

    def finish(self, status: RolloutStatus, error: str | None = None) -> None:
        """End the rollout from outside, as a turn loop of one's own may; the first terminal status stays."""
        if not self._status.is_terminal():
            self._status, self._error = status, error
        if self._status.is_terminal():
            self._prompt = None

    async def close(self) -> None:
        """Close the MessageEnv unless that was done. What goes wrong in it is logged: it can't undo the rollout."""
        if self._closed:
            return
        self._closed = True
        if type(self._env).close is MessageEnv.close:
            return
        try:
            await call_user(self._env.close, timeout_s=self._config.step_timeout_s)
        except UserCodeError as error:
            logger.warning("%s.close failed: %s", self._name, error)

    async def _until_settled(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; turn what goes wrong into a status; close the env when the status is terminal."""
        try:
            await work()
        except asyncio.CancelledError:
            self.finish(RolloutStatus.ABORTED, "cancelled")
            await self.close()
            raise
        except UserCodeTimeout as error:
            self.finish(RolloutStatus.TIMEOUT, str(error))
        except Exception as error:
            self.finish(RolloutStatus.ERROR, cause_of(error))
        except BaseException as error:  # of a value of the env's
            self.finish(RolloutStatus.ERROR, f"{self._name}: {cause_of(error)}")
        if self._status.is_terminal():
            await self.close()

    async def _reset(self) -> None:
        started = time.perf_counter()
        reset = await self._call_env("reset", ResetOutput)
        self._reset_s = time.perf_counter() - started
        field = f"{self._name}.reset: ResetOutput"
        self._messages = checked_messages(reset.messages, f"{field}.messages")
        if not self._messages:
            raise ValueError(f"{field}.messages is empty: a conversation starts with a message")
        self._tools = checked_tools(reset.tools, f"{field}.tools")
        if cannot_fit(self._messages, self._config.max_rollout_tokens):
            return self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)
        prompt = self._group.first(
            self._messages, self._tools, lambda: first_prompt(self._renderer, self._messages, self._tools)
        )
        self._set_prompt(await self._rendering("render", prompt))

    async def _step(self, turn: RolloutTurn, prompt: Prompt) -> None:
        completion = turn.completion
        check_completion(completion)
        self._turns.append(turn)
        self._chain.append(turn)
        sampled_ids = np.asarray(completion.token_ids).tolist()

        def parse() -> Message:
            known = self._group.answer(prompt, sampled_ids)
            if known is None:
                parsed = self._renderer.parse_response(sampled_ids, tools=self._tools, prompt_ids=prompt.ids)
                known = assistant_message(parsed, turn=len(self._turns) - 1)
                self._group.keep_answer(prompt, sampled_ids, known)
            return copied(known)

        parsing = off_the_loop_if(len(sampled_ids) > LARGE_COMPLETION, parse)
        turn.assistant_message = await self._rendering("parse_response", parsing)
        self._messages.append(turn.assistant_message)
        if completion.finish_reason == "abort":
            return self.finish(RolloutStatus.ABORTED, "the generator aborted the completion")
        if completion.finish_reason == "length":
            return self.finish(RolloutStatus.TRUNCATED_LENGTH)

        # A copy: an env may edit the message it is given, and the record must not follow.
        message = copied(turn.assistant_message)
        started = time.perf_counter()
        try:
            step = await self._call_env("step_message", StepOutput, message)
        finally:
            turn.env_s = time.perf_counter() - started + (self._reset_s if len(self._turns) == 1 else 0.0)
        field = f"{self._name}.step_message: StepOutput"
        if not isinstance(step.done, bool | np.bool_):
            raise TypeError(f"{field}.done is '{text_of(step.done)}', want True or False")
        turn.reward_components = checked_rewards(step.reward_components, f"{field}.reward_components")
        turn.env_messages = checked_messages(step.env_messages, f"{field}.env_messages")
        self._messages.extend(turn.env_messages)
        if step.done:
            return self.finish(RolloutStatus.COMPLETED)
        if len(self._turns) >= self._config.max_turns:
            return self.finish(RolloutStatus.TRUNCATED_MAX_TURNS)
        if not turn.env_messages:
            raise ValueError(f"{field}.env_messages is empty though done is False: the model would answer itself")
        if cannot_fit(turn.env_messages, self._config.max_rollout_tokens):
            return self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)
        following = next_prompt(
            self._renderer, prompt, sampled_ids, turn.env_messages, conversation=self._messages, tools=self._tools
        )
        self._set_prompt(await self._rendering("render", following))

    async def _rendering(self, method: str, work: Awaitable[T]) -> T:
        """What the renderer makes.

        Raises:
            UserCodeError: it failed; names the renderer.
        """
        try:
            with trace.span(method):
                return await work
        except BaseException as error:
            running = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and running is not None and running.cancelling():
                raise
            raise UserCodeError(f"{type(self._renderer).__name__}.{method}: {cause_of(error)}") from error

    async def _call_env(self, method: str, wanted: type, *args: Any) -> Any:
        name, function, timeout_s = f"{self._name}.{method}", getattr(self._env, method), self._config.step_timeout_s
        with trace.span(name):
            output = await call_user(function, *args, timeout_s=timeout_s, owner=name)
        if not isinstance(output, wanted):
            raise TypeError(f"{name} returned {type(output).__name__}, want {wanted.__name__}")
        return output

    def _set_prompt(self, prompt: Prompt) -> None:
        if self._status.is_terminal():  # finished from outside meanwhile
            return
        self._prompt = prompt
        if self.max_completion_tokens < 1:
            return self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)
        self._chain = self._chain if prompt.extends else []
        # The prompts of a conversation are prefixes of each other: kept as views, a long one is in memory once.
        for turn in self._chain:
            length = len(turn.prompt_token_ids)
            turn.prompt_token_ids = prompt.token_ids[:length]
            turn.prompt_role_ids, turn.prompt_is_content = prompt.role_ids[:length], prompt.is_content[:length]
            turn.prompt_message_indices = prompt.message_indices[:length]

    def _output(self, turn: RolloutTurn | None) -> TokenizedStepOutput:
        self._prompted_at = time.perf_counter()
        return TokenizedStepOutput(
            next_prompt_token_ids=list(self._prompt.ids) if self._prompt else None,
            next_prompt_messages=list(self._messages),
            status=self._status,
            env_messages=turn.env_messages if turn else [],
            env_reward_components=turn.reward_components if turn else {},
            assistant_message=turn.assistant_message if turn else None,
            error=self._error,
        )
