"""Prompts: what the renderer makes of a conversation, and who computes it when."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_all_rendered
from torchtitan.experiments.rl.rollouts.yield_queue import yield_queue
from torchtitan.experiments.rl.types import ROLE_IDS

T = TypeVar("T")

LARGE_TEXT = 20_000
"""Characters above which rendering leaves the event loop: so many take some 20 ms, a million of them a second or two."""

LARGE_COMPLETION = 5_000
"""The same of parsing, in tokens."""

LONGEST_TOKEN = 256
"""Characters; no token of a vocabulary in use has more than 128."""

_RENDER_THREAD = ThreadPoolExecutor(1, thread_name_prefix="render")
"""For large texts, one at a time: several would keep the interpreter from the event loop."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    ids: list[int]
    """[P]. The list that the renderer takes."""
    token_ids: np.ndarray
    """int32 [P]. The same."""
    role_ids: np.ndarray
    """int8 [P]. See RolloutTurn.prompt_role_ids."""
    is_content: np.ndarray
    """bool [P]. See RolloutTurn.prompt_is_content."""
    extends: bool = False
    """Starts with the last prompt and its completion, token for token."""

    def completed(self, sampled_ids: list[int]) -> "Prompt":
        """With what was sampled after it."""
        count = len(sampled_ids)
        return Prompt(
            ids=self.ids + sampled_ids,
            token_ids=np.concatenate([self.token_ids, np.asarray(sampled_ids, np.int32)]),
            role_ids=np.concatenate([self.role_ids, np.full(count, ROLE_IDS["assistant"], np.int8)]),
            is_content=np.concatenate([self.is_content, np.ones(count, bool)]),
        )


async def first_prompt(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> Prompt:
    """The prompt of a conversation nothing was sampled in.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """
    return await off_the_loop_if(
        _characters(conversation) > LARGE_TEXT, lambda: _prompt(_rendered_anew(renderer, conversation, tools))
    )


async def next_prompt(
    renderer: Renderer,
    last: Prompt,
    sampled_ids: list[int],
    new: list[Message],
    *,
    conversation: list[Message],
    tools: list[ToolSpec] | None,
) -> Prompt:
    """The prompt after a completion and the ``new`` messages the env answered with, which end the conversation.

    Sampled tokens stay as they are where the renderer can go on from them. Where it can't, it renders the conversation anew.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """

    def bridged() -> Prompt | None:
        rendered = renderer.bridge_to_next_turn(last.ids, sampled_ids, new, tools=tools)
        if rendered is None:
            return None
        check_all_rendered(rendered, new)
        # It describes the new messages alone. It kept less than all where a completion goes on after the end of its turn.
        before = last.completed(sampled_ids)
        return _prompt(rendered, before, kept=_kept(rendered, before))

    def anew() -> Prompt:
        rendered = _rendered_anew(renderer, conversation, tools)
        before = last.completed(sampled_ids)
        kept = _kept(rendered, before)
        return _prompt(rendered, before, kept=kept if kept == len(before.ids) else 0)

    prompt = await off_the_loop_if(_characters(new) > LARGE_TEXT, bridged)
    if prompt is None:
        prompt = await off_the_loop_if(_characters(conversation) > LARGE_TEXT, anew)
    return prompt


def cannot_fit(messages: Sequence[Message], tokens: int) -> bool:
    """Whether messages are too long for so many tokens whatever their text is: those need not be tokenised."""
    return _characters(messages) > LONGEST_TOKEN * tokens


async def off_the_loop_if(large: bool, call: Callable[[], T]) -> T:
    """Compute something in a thread if it is large, or else here, in an iteration of the event loop of its own."""
    if large:
        return await asyncio.get_running_loop().run_in_executor(_RENDER_THREAD, call)
    await yield_queue().wait()
    return call()


def _rendered_anew(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> RenderedTokens:
    rendered = renderer.render(conversation, tools=tools, add_generation_prompt=True)
    check_all_rendered(rendered, conversation)
    return rendered


def _kept(rendered: RenderedTokens, before: Prompt) -> int:
    """Tokens of ``before`` that the prompt starts with."""
    if rendered.token_ids[: len(before.ids)] == before.ids:
        return len(before.ids)
    pairs = enumerate(zip(rendered.token_ids, before.ids, strict=False))
    return next((index for index, (new, old) in pairs if new != old), len(rendered.token_ids))


def _prompt(rendered: RenderedTokens, before: Prompt | None = None, *, kept: int = 0) -> Prompt:
    """
    Args:
        before: the last prompt and its completion.
        kept: tokens of ``before`` that the prompt starts with, described as they are there. Only the others are converted, or
            the turns of a long conversation would cost milliseconds each.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids = rendered.token_ids
    new_ids = np.asarray(ids[kept:])
    if not ids or (new_ids.size and (new_ids.dtype.kind not in "iu" or new_ids.ndim != 1 or new_ids.min() < 0)):
        raise ValueError(f"the prompt's token ids are no list of integers from 0 up: {str(ids)[:60]}")
    if new_ids.size and new_ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"the prompt has a token id of {new_ids.max()}")
    token_ids = new_ids.astype(np.int32)
    role_ids, is_content = np.full(len(token_ids), -1, np.int8), np.zeros(len(token_ids), bool)
    if rendered.is_content:  # without it, roles are guesses (see check_all_rendered)
        is_content[:] = rendered.is_content[kept:]
        of_message = np.array([ROLE_IDS.get(role, -1) for role in rendered.message_roles] + [-1], np.int8)
        role_ids = of_message[rendered.message_indices[kept:]]  # -1, of no message, is the last
        if len(role_ids) != len(token_ids):
            raise ValueError(f"{len(role_ids)} roles for {len(token_ids)} token ids")
    if before is not None and kept:
        token_ids = np.concatenate([before.token_ids[:kept], token_ids])
        role_ids = np.concatenate([before.role_ids[:kept], role_ids])
        is_content = np.concatenate([before.is_content[:kept], is_content])
    extends = before is not None and kept == len(before.ids)
    return Prompt(ids=ids, token_ids=token_ids, role_ids=role_ids, is_content=is_content, extends=extends)


def _characters(messages: Sequence[Message]) -> int:
    """Of their text; templates may strip the space around it."""
    count = 0
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text.strip()) if isinstance(text, str) else 0
    return count
