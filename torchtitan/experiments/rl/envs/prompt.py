"""Prompts: what the renderer makes of a conversation, and who computes it when."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_all_rendered
from torchtitan.experiments.rl.rollouts.yield_queue import Line, yield_queue
from torchtitan.experiments.rl.types import ROLE_IDS

T = TypeVar("T")

LARGE_TEXT = 20_000
"""Characters above which rendering leaves the event loop: so many take some 20 ms, a million of them a second or two."""

LARGE_COMPLETION = 5_000
"""The same of parsing, in tokens."""

LONGEST_TOKEN = 256
"""Characters; no token of a vocabulary in use has more than 128."""

MAX_TOKEN_ID = np.iinfo(np.int32).max

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
    message_indices: np.ndarray
    """int16 [P]. See RolloutTurn.prompt_message_indices."""
    extends: bool = False
    """Starts with the last prompt and its completion, token for token."""


async def first_prompt(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> Prompt:
    """The prompt of a conversation nothing was sampled in.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """
    return await off_the_loop_if(
        _characters(conversation) > LARGE_TEXT,
        lambda: _prompt(_rendered_anew(renderer, conversation, tools)),
        line=Line.FIRST_PROMPT,
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

    answer = len(conversation) - len(new) - 1  # the completion's message

    def bridged() -> Prompt | None:
        rendered = renderer.bridge_to_next_turn(last.ids, sampled_ids, new, tools=tools)
        if rendered is None:
            return None
        # It describes the new messages alone. It kept less than all where a completion goes on after the end of its turn.
        kept = _kept(rendered, last, sampled_ids)
        check_all_rendered(rendered, new, start=kept)
        return _prompt(rendered, last, sampled_ids, kept=kept, answer=answer, first=answer + 1)

    def anew() -> Prompt:
        rendered = _rendered_anew(renderer, conversation, tools)
        kept = _kept(rendered, last, sampled_ids)
        return _prompt(rendered, last, sampled_ids, kept=kept if kept == len(last.ids) + len(sampled_ids) else 0, answer=answer)

    prompt = await off_the_loop_if(_characters(new) > LARGE_TEXT, bridged)
    if prompt is None:
        prompt = await off_the_loop_if(_characters(conversation) > LARGE_TEXT, anew)
    return prompt


def cannot_fit(messages: Sequence[Message], tokens: int) -> bool:
    """Whether messages are too long for so many tokens whatever their text is: those need not be tokenised."""
    return _characters(messages) > LONGEST_TOKEN * tokens


async def off_the_loop_if(large: bool, call: Callable[[], T], *, line: Line = Line.ANSWER) -> T:
    """Compute something in a thread if it is large, or else here, in an iteration of the event loop of its own."""
    if large:
        return await asyncio.get_running_loop().run_in_executor(_RENDER_THREAD, call)
    queue = yield_queue()
    if not queue.held:
        await queue.wait(line)
    return call()


def _rendered_anew(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> RenderedTokens:
    rendered = renderer.render(conversation, tools=tools, add_generation_prompt=True)
    check_all_rendered(rendered, conversation)
    return rendered


def _kept(rendered: RenderedTokens, last: Prompt, sampled_ids: list[int]) -> int:
    """Tokens of the last prompt and its completion that the prompt starts with."""
    start = len(last.ids)
    end = start + len(sampled_ids)
    if rendered.token_ids[start:end] == sampled_ids and rendered.token_ids[:start] == last.ids:
        return end
    pairs = enumerate(zip(rendered.token_ids, [*last.ids, *sampled_ids], strict=False))
    return next((index for index, (new, old) in pairs if new != old), min(end, len(rendered.token_ids)))


def _prompt(
    rendered: RenderedTokens,
    last: Prompt | None = None,
    sampled_ids: Sequence[int] = (),
    *,
    kept: int = 0,
    answer: int = 0,
    first: int = 0,
) -> Prompt:
    """
    Args:
        last: the last prompt; ``sampled_ids`` are its completion.
        kept: tokens of these two that the prompt starts with, described as they are there. Only the others are converted, or
            the turns of a long conversation would cost milliseconds each.
        answer: index of the completion's message in the conversation.
        first: that of the first message that ``rendered`` describes.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids = rendered.token_ids
    new_ids = np.asarray(ids[kept:])
    are_ids = new_ids.size == 0 or (new_ids.dtype.kind in "iu" and new_ids.ndim == 1 and new_ids.item(new_ids.argmin()) >= 0)
    if not (ids and are_ids):
        raise ValueError(f"the prompt's token ids are no list of integers from 0 up: {str(ids)[:60]}")
    if new_ids.size and new_ids.item(new_ids.argmax()) > MAX_TOKEN_ID:
        raise ValueError(f"the prompt has a token id of {new_ids.max()}")
    token_ids, role_ids, is_content = np.empty(len(ids), np.int32), np.empty(len(ids), np.int8), np.empty(len(ids), bool)
    message_indices = np.empty(len(ids), np.int16)
    if last is not None and kept:
        prompted = min(kept, len(last.ids))
        token_ids[:prompted] = last.token_ids[:prompted]
        role_ids[:prompted] = last.role_ids[:prompted]
        is_content[:prompted] = last.is_content[:prompted]
        message_indices[:prompted], message_indices[prompted:kept] = last.message_indices[:prompted], answer
        token_ids[prompted:kept] = sampled_ids[: kept - prompted]
        role_ids[prompted:kept], is_content[prompted:kept] = ROLE_IDS["assistant"], True
    token_ids[kept:] = new_ids
    if rendered.is_content:  # without it, roles are guesses (see check_all_rendered)
        is_content[kept:] = rendered.is_content[kept:]
        of_message = np.array([ROLE_IDS.get(role, -1) for role in rendered.message_roles] + [-1], np.int8)
        of_message_index = np.asarray(rendered.message_indices[kept:], np.int16)
        new_roles = of_message[of_message_index]  # -1, of no message, is the last
        if len(new_roles) != len(new_ids):
            raise ValueError(f"{len(new_roles)} roles for {len(new_ids)} token ids")
        role_ids[kept:] = new_roles
        message_indices[kept:] = np.where(of_message_index < 0, -1, of_message_index + first)
    else:
        role_ids[kept:], is_content[kept:], message_indices[kept:] = -1, False, -1
    extends = last is not None and kept == len(last.ids) + len(sampled_ids)
    return Prompt(
        ids=ids,
        token_ids=token_ids,
        role_ids=role_ids,
        is_content=is_content,
        message_indices=message_indices,
        extends=extends,
    )


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
