"""Rollouts of a group begin with the same conversation: it is rendered once, and equal answers to it are parsed once."""

import asyncio
import marshal
from collections.abc import Awaitable, Callable

from renderers import Message, ToolSpec

from torchtitan.experiments.rl.envs.prompt import Prompt

MAX_SHARED_TOKENS = 32
"""Longer completions are hardly ever equal."""


class GroupPrompts:
    """What the renderer has made for one group."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, Prompt] = {}
        self._answers: dict[int, dict[tuple[int, ...], Message]] = {}
        """Parsed completions, by the ``id`` of their prompt."""
        self._lock = asyncio.Lock()

    async def first(
        self, conversation: list[Message], tools: list[ToolSpec] | None, render: Callable[[], Awaitable[Prompt]]
    ) -> Prompt:
        """The prompt of a conversation. Its arrays are read-only: other rollouts have the same.

        Args:
            render: called if no rollout of the group has rendered this conversation with these tools.
        """
        try:
            key = marshal.dumps((conversation, tools), 2)  # 2: later formats depend on how often an object is referred to
        except ValueError:  # an object that JSON does not have: whether two are equal is not known
            return await render()
        async with self._lock:
            prompt = self._prompts.get(key)
            if prompt is None:
                prompt = self._prompts[key] = await render()
                self._answers[id(prompt)] = {}
                for array in (prompt.token_ids, prompt.role_ids, prompt.is_content):
                    array.flags.writeable = False
        return prompt

    def answer(self, prompt: Prompt, sampled_ids: list[int]) -> Message | None:
        """A completion of a first prompt, if a rollout has parsed the same one. Not to be changed."""
        answers = self._answers.get(id(prompt))
        return answers.get(tuple(sampled_ids)) if answers else None

    def keep_answer(self, prompt: Prompt, sampled_ids: list[int], message: Message) -> None:
        """Remember a parsed completion, if it is one of a first prompt."""
        answers = self._answers.get(id(prompt))
        if answers is not None and len(sampled_ids) <= MAX_SHARED_TOKENS:
            answers[tuple(sampled_ids)] = message
