"""A conversation in messages and in tokens: what keeps the two together, whoever drives it.

    open(messages)         prompt      P1
    add_completion(C1)     messages    ..., the completion as a message
    add_messages(answer)   prompt      P1 + C1 + E1, or P2 where the template rewrites history

Each completion is a turn. `rollouts/samples.py` makes training samples of the turns; no id that was sampled is rendered again.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np
from renderers import Message, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import assistant_message
from torchtitan.experiments.rl.envs.prompt import (
    LARGE_COMPLETION,
    GroupPrompts,
    Prompt,
    cannot_fit,
    first_prompt,
    next_prompt,
    off_the_loop_if,
)
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.samples import check_completion
from torchtitan.experiments.rl.rollouts.sealed import copied
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutTurn
from torchtitan.experiments.rl.user_code.calls import UserCodeError, cause_of

T = TypeVar("T")


class Conversation:
    """Opened once; then a completion and, while it goes on, the messages that answer it, in turns.

    Messages are given checked (`envs/messages.py`). Whatever the renderer raises is a UserCodeError that names it.
    """

    def __init__(self, renderer: Renderer, *, max_tokens: int, group: GroupPrompts | None = None):
        """
        Args:
            max_tokens: that a prompt and its completion may have together.
            group: what was rendered for the other conversations of its group.
        """
        self.messages: list[Message] = []
        """The whole conversation so far."""
        self.tools: list[ToolSpec] | None = None
        self.turns: list[RolloutTurn] = []
        """One per completion."""
        self._renderer, self._max_tokens, self._group = renderer, max_tokens, group or GroupPrompts()
        self.prompt: Prompt | None = None
        """What to sample from next; None: nothing."""
        self._chain: list[RolloutTurn] = []
        """The last turns, whose prompts are prefixes of the next."""
        self._prompted_at = 0.0

    @classmethod
    def after(cls, turns: list[RolloutTurn], renderer: Renderer, *, max_tokens: int) -> "Conversation":
        """The conversation as it stood after the last of ``turns``, to go on from there in another way."""
        last, forked = turns[-1], cls(renderer, max_tokens=max_tokens)
        assert last.prompt_message_indices is not None, "the turn is of a conversation"
        forked.turns, forked.tools = list(turns), last.tools
        forked.messages = [*last.prompt_messages, last.assistant_message]
        forked.prompt = Prompt(
            ids=last.prompt_token_ids.tolist(),
            token_ids=last.prompt_token_ids,
            role_ids=last.prompt_role_ids,
            is_content=last.prompt_is_content,
            message_indices=last.prompt_message_indices,
        )
        return forked

    @property
    def max_completion_tokens(self) -> int:
        """Tokens the next completion may have; 0 where there is no next prompt."""
        return self._max_tokens - len(self.prompt.ids) if self.prompt else 0

    async def open(self, messages: list[Message], tools: list[ToolSpec] | None) -> bool:
        """Render the opening conversation. False: it leaves no room for a completion."""
        self.messages, self.tools = messages, tools
        if cannot_fit(messages, self._max_tokens):
            return False
        prompt = self._group.first(messages, tools, lambda: first_prompt(self._renderer, messages, tools))
        return self._set_prompt(await self._rendering("render", prompt))

    async def add_completion(self, completion: Completion) -> RolloutTurn:
        """Record a completion of the prompt as a turn, and parse it into the conversation's next message.

        Raises:
            ValueError: it can't be trained on.
        """
        prompt = self.prompt
        assert prompt is not None, "there is no prompt to complete"
        check_completion(completion)
        turn = RolloutTurn(
            prompt_messages=list(self.messages),
            prompt_token_ids=prompt.token_ids,
            prompt_role_ids=prompt.role_ids,
            prompt_is_content=prompt.is_content,
            prompt_message_indices=prompt.message_indices,
            completion=completion,
            assistant_message={"role": "assistant", "content": ""},
            tools=self.tools,
            generate_s=time.perf_counter() - self._prompted_at,
        )
        self.turns.append(turn)
        self._chain.append(turn)
        sampled_ids = np.asarray(completion.token_ids).tolist()

        def parse() -> Message:
            known = self._group.answer(prompt, sampled_ids)
            if known is None:
                parsed = self._renderer.parse_response(sampled_ids, tools=self.tools, prompt_ids=prompt.ids)
                known = assistant_message(parsed, turn=len(self.turns) - 1)
                self._group.keep_answer(prompt, sampled_ids, known)
            return copied(known)

        parsing = off_the_loop_if(len(sampled_ids) > LARGE_COMPLETION, parse)
        turn.assistant_message = await self._rendering("parse_response", parsing)
        self.messages.append(turn.assistant_message)
        return turn

    async def add_messages(self, new: list[Message]) -> bool:
        """Render the prompt after messages that answer the last completion. False: it leaves no room for a completion."""
        last, turn = self.prompt, self.turns[-1]
        assert last is not None, "there is no completion to answer"
        if cannot_fit(new, self._max_tokens):
            return False
        sampled_ids = np.asarray(turn.completion.token_ids).tolist()
        following = next_prompt(self._renderer, last, sampled_ids, new, conversation=self.messages, tools=self.tools)
        return self._set_prompt(await self._rendering("render", following))

    def end(self) -> None:
        """There is no further prompt."""
        self.prompt = None

    def _set_prompt(self, prompt: Prompt) -> bool:
        self.prompt, self._prompted_at = prompt, time.perf_counter()
        if self.max_completion_tokens < 1:
            return False
        self._chain = self._chain if prompt.extends else []
        # The prompts of a conversation are prefixes of each other: kept as views, a long one is in memory once.
        for turn in self._chain:
            length = len(turn.prompt_token_ids)
            turn.prompt_token_ids = prompt.token_ids[:length]
            turn.prompt_role_ids, turn.prompt_is_content = prompt.role_ids[:length], prompt.is_content[:length]
            turn.prompt_message_indices = prompt.message_indices[:length]
        return True

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
