"""Plays a MessageEnv: calls its methods within their limits, and decides how the rollout ends."""

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from renderers import Renderer

from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.bounds import Changeable, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.envs.conversation import LARGE_TEXT, Conversation
from torchtitan.experiments.rl.envs.long_answers import cut_messages
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.messages import (
    checked_messages,
    checked_rewards,
    checked_tools,
)
from torchtitan.experiments.rl.envs.prompt import GroupPrompts
from torchtitan.experiments.rl.envs.special_texts import special_texts
from torchtitan.experiments.rl.envs.yield_queue import compute
from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    cause_text,
    users_traceback,
)
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutStatus, RolloutTurn

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RendererEnvConfig:
    """Limits of a rollout."""

    max_turns: PositiveInt = 8
    """Maximum number of completions of a rollout."""
    max_rollout_tokens: Annotated[int, Ge(2)] = 1024
    """Maximum number of tokens of a conversation. A prompt and its completion together never exceed
    it, so no training sample does."""
    max_answer_tokens: PositiveInt | None = None
    """Maximum number of tokens of a message with which the env answers the model, such as a tool's
    answer. A longer one is cut in the middle, where a line says how many are left out. None cuts
    nothing: an answer that leaves no room in ``max_rollout_tokens`` ends the rollout."""
    step_timeout_s: Changeable[PositiveFloat] = 60.0
    """Time limit in seconds of each call of ``reset``, ``step_message``, ``metadata`` and
    ``close``."""
    rollout_timeout_s: Changeable[PositiveFloat] = 600.0
    """Time limit in seconds from the reset to the terminal status, sampling included. The task that
    runs the rollout enforces it."""


class RendererEnv:
    """One conversation of a MessageEnv, in tokens.

    It is used once: ``initial_prompt``, then ``step_completion`` until the status is terminal.

    Nothing that the MessageEnv does is raised here: exceptions, SystemExit, wrong return types and
    hangs become a status with its cause. The MessageEnv is closed as soon as the status is
    terminal; a caller that stops earlier calls ``close``.

    An env whose methods are plain functions runs in a worker thread. One whose async methods block
    without awaiting (``time.sleep``, a sync HTTP client) stalls every rollout of the process, and
    no timeout can interrupt it: the metric ``perf/event_loop_lag_max_s`` shows it.
    """

    def __init__(
        self,
        *,
        message_env: MessageEnv,
        renderer: Renderer,
        config: RendererEnvConfig,
        group: GroupPrompts | None = None,
    ):
        """Wrap an env that no rollout has used.

        Args:
            group: prompts that were rendered for other rollouts of the group.
        """
        self.status = RolloutStatus.ONGOING
        self.error: str | None = None
        """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""
        self.traceback = ""
        """See `Rollout.traceback`."""
        self.metadata: dict[str, Any] = {}
        """Metadata of the MessageEnv, once it is closed."""
        self.cut_answers = 0
        """Number of answers so far that were cut in the middle."""
        self._env = message_env
        self._name = type(message_env).__name__
        self._renderer = renderer
        self._config = config
        self._conversation = Conversation(
            renderer, max_tokens=config.max_rollout_tokens, group=group
        )
        self._started = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        """Task that closes the MessageEnv, once it has begun."""
        self._reset_s = 0.0

    @property
    def turns(self) -> list[RolloutTurn]:
        """One turn per completion so far, also if the env then failed."""
        return self._conversation.turns

    @property
    def prompt_token_ids(self) -> np.ndarray | None:
        """Next prompt as generators take it, int32 [P].

        None before the first prompt and on a terminal status.
        """
        return self._conversation.prompt.token_ids if self._conversation.prompt else None

    @property
    def max_completion_tokens(self) -> int:
        """Maximum number of tokens of the next completion; 0 if there is no next prompt."""
        return self._conversation.max_completion_tokens

    @property
    def special_texts(self) -> int:
        """Number of the env's messages so far that had the text of a special token.

        It was rendered as text, and so is not one that ``control_tokens`` allowed.
        """
        return self._conversation.special_texts

    async def initial_prompt(self) -> None:
        """Reset the env and render its opening conversation.

        Raises:
            RuntimeError: called a second time.
        """
        if self._started:
            raise RuntimeError("this RendererEnv was used already: make a new one for each rollout")
        self._started = True
        await self._settle(self._reset)

    async def step_completion(self, completion: Completion) -> None:
        """Parse a completion, step the env with it and render the next prompt.

        The completion is recorded as a turn first: its tokens are kept whatever the env does then.
        A completion cut off at its token limit ("length") ends the rollout without stepping the
        env: half a message is not the model's whole answer, and an env acting on it (half a tool
        call, half a number) would reward or punish the cut.

        Raises:
            RuntimeError: there was no prompt to complete: before ``initial_prompt`` or after a
                terminal status.
        """
        if self.prompt_token_ids is None:
            state = "over" if self._started else "not started"
            raise RuntimeError(f"no prompt to complete: the rollout is {state}")
        await self._settle(lambda: self._step(completion))

    def finish(
        self, status: RolloutStatus, error: str | None = None, *, traceback: str = ""
    ) -> None:
        """End the rollout from outside, as an overridden turn loop may.

        The first terminal status stays.

        Args:
            error: cause of an ERROR, TIMEOUT or ABORTED status, in one line.

        Raises:
            ValueError: there is no such status.
        """
        if not self.status.is_terminal():
            cause = None if error is None else cause_text(error)
            self._set_status(RolloutStatus(status), cause, traceback)
        if self.status.is_terminal():
            self._conversation.end()

    def _set_status(self, status: RolloutStatus, error: str | None, traceback: str) -> None:
        self.status = status
        self.error = error
        self.traceback = traceback

    async def close(self) -> None:
        """Ask the MessageEnv for its metadata, and close it; the second time, wait for the closing.

        A caller that is cancelled interrupts the question, but not the closing. So does the second
        caller, who comes while the question is open only if that was abandoned. A failure of the
        env's ``close`` is logged: it can't undo the rollout.
        """
        try:
            if not self._closed:
                self._closed = True
                self._conversation.end()
                ended_well = self.status.is_terminal() and not self.status.is_error()
                if ended_well and type(self._env).metadata is not MessageEnv.metadata:
                    await self._take_metadata()
        finally:
            if self._closing is None and type(self._env).close is not MessageEnv.close:
                self._closing = asyncio.create_task(self._close_env())
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close_env(self) -> None:
        try:
            await ask(self._env.close, timeout_s=self._config.step_timeout_s)
        except UserCodeError as error:
            logger.warning("%s.close failed: %s", self._name, error)

    async def _take_metadata(self) -> None:
        try:
            said = await self._call_env("metadata", dict)
            self.metadata = read_only(json.loads(json.dumps(said)))
        except UserCodeTimeout as error:
            self._set_status(RolloutStatus.TIMEOUT, sentence(error), "")
        except UserCodeError as error:
            self._set_status(RolloutStatus.ERROR, str(error), users_traceback(error))
        except (TypeError, ValueError, RecursionError) as error:
            cause = f"{self._name}.metadata: {cause_of(error)}"
            self._set_status(RolloutStatus.ERROR, cause, self.traceback)

    async def _settle(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, turn what goes wrong into a status, and close the env on a terminal one."""
        try:
            await work()
        except asyncio.CancelledError:
            self.finish(RolloutStatus.ABORTED, "cancelled")
            await self.close()
            raise
        except UserCodeTimeout as error:
            self.finish(RolloutStatus.TIMEOUT, sentence(error))
        except Exception as error:  # noqa: BLE001 - whatever an env's values raise
            self.finish(RolloutStatus.ERROR, cause_of(error), traceback=users_traceback(error))
        except BaseException as error:  # noqa: BLE001 - a value of the env's may exit
            cause = f"{self._name}: {cause_of(error)}"
            self.finish(RolloutStatus.ERROR, cause, traceback=users_traceback(error))
        if self.status.is_terminal():
            # It may have been finished from outside while a prompt was rendered.
            self._conversation.end()
            await self.close()

    async def _reset(self) -> None:
        started = time.perf_counter()
        reset = await self._call_env("reset", ResetOutput)
        self._reset_s = time.perf_counter() - started
        field = f"{self._name}.reset: ResetOutput"
        messages = checked_messages(reset.messages, f"{field}.messages")
        if not messages:
            raise ValueError(f"{field}.messages is empty: a conversation starts with a message")
        tools = checked_tools(reset.tools, f"{field}.tools")
        opening = self._conversation.open(
            messages, tools, control_tokens=bool(reset.control_tokens)
        )
        if not await opening:
            self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)

    async def _step(self, completion: Completion) -> None:
        turn = await self._conversation.add_completion(completion)
        if completion.finish_reason == "abort":
            return self.finish(RolloutStatus.ABORTED, "the generator aborted the completion")
        if completion.finish_reason == "length":
            return self.finish(RolloutStatus.TRUNCATED_LENGTH)

        is_done = await self._take_answer(turn)
        if is_done:
            return self.finish(RolloutStatus.COMPLETED)
        if len(self.turns) >= self._config.max_turns:
            return self.finish(RolloutStatus.TRUNCATED_MAX_TURNS)
        if not turn.env_messages:
            raise ValueError(
                f"{self._name}.step_message: StepOutput.env_messages is empty though done is "
                "False: the model would answer itself"
            )
        if not await self._conversation.add_messages(turn.env_messages):
            self.finish(RolloutStatus.TRUNCATED_PROMPT_OVERFLOW)

    async def _take_answer(self, turn: RolloutTurn) -> bool:
        """Step the env with the turn's message, record its answer, and return whether it is done.

        Raises:
            TypeError: the answer is no answer; names the field.
        """
        started = time.perf_counter()
        try:
            step = await self._call_env("step_message", StepOutput, turn.assistant_message)
        finally:
            turn.env_s = time.perf_counter() - started
            if len(self.turns) == 1:
                turn.env_s += self._reset_s
        field = f"{self._name}.step_message: StepOutput"
        if not isinstance(step.done, bool | np.bool_):
            raise TypeError(f"{field}.done is '{text_of(step.done)}', want True or False")
        turn.reward_components = checked_rewards(
            step.reward_components, f"{field}.reward_components"
        )
        turn.env_messages = checked_messages(step.env_messages, f"{field}.env_messages")
        await self._cut_long(turn)
        self._conversation.extend(turn.env_messages, control_tokens=bool(step.control_tokens))
        return bool(step.done)

    async def _cut_long(self, turn: RolloutTurn) -> None:
        """Cut the answers of a turn that are longer than ``max_answer_tokens``."""
        limit = self._config.max_answer_tokens
        if limit is None:
            return
        texts = special_texts(self._renderer)
        if texts is None:
            return
        messages = turn.env_messages
        size = sum(len(str(message["content"])) for message in messages)
        cutting = functools.partial(cut_messages, messages, limit, texts)
        turn.env_messages, count = await compute(cutting, large=size > LARGE_TEXT)
        self.cut_answers += count

    async def _call_env(self, method: str, wanted: type, *args: object) -> Any:  # noqa: ANN401 - an instance of `wanted`
        name = f"{self._name}.{method}"
        with trace.span(name):
            output = await ask(
                getattr(self._env, method),
                *args,
                timeout_s=self._config.step_timeout_s,
                owner=name,
            )
        if not isinstance(output, wanted):
            raise TypeError(f"{name} returned {type(output).__name__}, want {wanted.__name__}")
        return output
