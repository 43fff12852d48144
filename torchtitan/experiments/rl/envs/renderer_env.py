"""Plays a MessageEnv: calls its methods within their limits, and says how the rollout ends."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from renderers import Message, Renderer

from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.bounds import Changeable, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.envs.conversation import Conversation
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.messages import (
    checked_messages,
    checked_rewards,
    checked_tools,
)
from torchtitan.experiments.rl.envs.prompt import GroupPrompts
from torchtitan.experiments.rl.envs.renderer import control_token_in
from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    users_traceback,
)
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutStatus, RolloutTurn

logger = logging.getLogger(__name__)


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
        self._renderer = renderer
        self._name = type(message_env).__name__
        self._config = config
        self._conversation = Conversation(
            renderer, max_tokens=config.max_rollout_tokens, group=group
        )
        self.status = RolloutStatus.ONGOING
        self.error: str | None = None
        """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""
        self.traceback = ""
        """See Rollout."""
        self.metadata: dict[str, Any] = {}
        """Of the MessageEnv, once it is closed."""
        self._started = self._closed = False
        self._reset_s = 0.0

    @property
    def turns(self) -> list[RolloutTurn]:
        """One per completion so far, also where the env then failed."""
        return self._conversation.turns

    @property
    def prompt_token_ids(self) -> np.ndarray | None:
        """int32 [P]. The next prompt as generators take it; None before the first and on a terminal status."""
        return self._conversation.prompt.token_ids if self._conversation.prompt else None

    @property
    def max_completion_tokens(self) -> int:
        """Tokens the next completion may have within max_rollout_tokens; 0 when there is no next prompt."""
        return self._conversation.max_completion_tokens

    async def initial_prompt(self) -> None:
        """Reset the env and render its opening conversation.

        Raises:
            RuntimeError: called a second time.
        """
        if self._started:
            raise RuntimeError("this RendererEnv was used already: make a new one for each rollout")
        self._started = True
        await self._until_settled(self._reset)

    async def step_completion(self, completion: Completion) -> None:
        """Parse a completion, step the env with it and render the next prompt.

        The completion is recorded as a turn first: its tokens are kept whatever the env does then. A completion cut off at its
        token limit ("length") ends the rollout without stepping the env: half a message is not the model's whole answer, and
        an env acting on it (half a tool call, half a number) would reward or punish the cut.

        Raises:
            RuntimeError: there was no prompt to complete: before initial_prompt or after a terminal status.
        """
        if self.prompt_token_ids is None:
            raise RuntimeError(
                f"no prompt to complete: the rollout is {'over' if self._started else 'not started'}"
            )
        await self._until_settled(lambda: self._step(completion))

    def finish(
        self, status: RolloutStatus, error: str | None = None, *, traceback: str = ""
    ) -> None:
        """End the rollout from outside, as an overridden turn loop may; the first terminal status stays."""
        if not self.status.is_terminal():
            self.status, self.error, self.traceback = status, error, traceback
        if self.status.is_terminal():
            self._conversation.end()

    async def close(self) -> None:
        """Ask the MessageEnv for its metadata, and close it, unless that was done. What goes wrong in ``close`` is logged: it
        can't undo the rollout."""
        if self._closed:
            return
        self._closed = True
        ended_well = self.status.is_terminal() and not self.status.is_error()
        if ended_well and type(self._env).metadata is not MessageEnv.metadata:
            try:
                self.metadata = json.loads(json.dumps(await self._call_env("metadata", dict)))
            except UserCodeError as error:
                self.status, self.error, self.traceback = (
                    RolloutStatus.ERROR,
                    str(error),
                    users_traceback(error),
                )
            except (TypeError, ValueError) as error:
                self.status, self.error = (
                    RolloutStatus.ERROR,
                    f"{self._name}.metadata: {cause_of(error)}",
                )
        if type(self._env).close is not MessageEnv.close:
            try:
                await ask(self._env.close, timeout_s=self._config.step_timeout_s)
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
            self.finish(RolloutStatus.ERROR, cause_of(error), traceback=users_traceback(error))
        except BaseException as error:  # of a value of the env's
            self.finish(
                RolloutStatus.ERROR,
                f"{self._name}: {cause_of(error)}",
                traceback=users_traceback(error),
            )
        if self.status.is_terminal():
            self._conversation.end()  # it may have been finished from outside while a prompt was rendered
            await self.close()

    async def _reset(self) -> None:
        started = time.perf_counter()
        reset = await self._call_env("reset", ResetOutput)
        self._reset_s = time.perf_counter() - started
        field = f"{self._name}.reset: ResetOutput"
        messages = checked_messages(reset.messages, f"{field}.messages")
        if not messages:
            raise ValueError(f"{field}.messages is empty: a conversation starts with a message")
        if not reset.control_tokens:
            self._check_control_tokens(messages, f"{field}.messages")
        if not await self._conversation.open(
            messages, checked_tools(reset.tools, f"{field}.tools")
        ):
            self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)

    async def _step(self, completion: Completion) -> None:
        turn = await self._conversation.add_completion(completion)
        if completion.finish_reason == "abort":
            return self.finish(RolloutStatus.ABORTED, "the generator aborted the completion")
        if completion.finish_reason == "length":
            return self.finish(RolloutStatus.TRUNCATED_LENGTH)

        started = time.perf_counter()
        try:
            step = await self._call_env("step_message", StepOutput, turn.assistant_message)
        finally:
            turn.env_s = (
                time.perf_counter() - started + (self._reset_s if len(self.turns) == 1 else 0.0)
            )
        field = f"{self._name}.step_message: StepOutput"
        if not isinstance(step.done, bool | np.bool_):
            raise TypeError(f"{field}.done is '{text_of(step.done)}', want True or False")
        turn.reward_components = checked_rewards(
            step.reward_components, f"{field}.reward_components"
        )
        turn.env_messages = checked_messages(step.env_messages, f"{field}.env_messages")
        if not step.control_tokens:
            self._check_control_tokens(turn.env_messages, f"{field}.env_messages")
        self._conversation.messages.extend(turn.env_messages)
        if step.done:
            return self.finish(RolloutStatus.COMPLETED)
        if len(self.turns) >= self._config.max_turns:
            return self.finish(RolloutStatus.TRUNCATED_MAX_TURNS)
        if not turn.env_messages:
            raise ValueError(
                f"{field}.env_messages is empty though done is False: the model would answer itself"
            )
        if not await self._conversation.add_messages(turn.env_messages):
            self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)

    def _check_control_tokens(self, messages: list[Message], field: str) -> None:
        """
        Raises:
            ValueError: a message has a text that would be a control token of the prompt.
        """
        for index, message in enumerate(messages):
            if (token := control_token_in(message, self._renderer)) is not None:
                kind = field.rpartition(": ")[2].partition(".")[0]
                raise ValueError(
                    f"{field}[{index}] has {token!r}, where it would be a control token and could end the message: "
                    f"change the text, or give {kind}(control_tokens=True) if that is meant"
                )

    async def _call_env(self, method: str, wanted: type, *args: Any) -> Any:
        name, function, timeout_s = (
            f"{self._name}.{method}",
            getattr(self._env, method),
            self._config.step_timeout_s,
        )
        with trace.span(name):
            output = await ask(function, *args, timeout_s=timeout_s, owner=name)
        if not isinstance(output, wanted):
            raise TypeError(f"{name} returned {type(output).__name__}, want {wanted.__name__}")
        return output
