"""Prompts: what the renderer makes of a conversation, and who computes it when."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_all_rendered
from torchtitan.experiments.rl.envs.turnstile import turnstile

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
    """[P]. As the renderer wants them back."""
    token_ids: np.ndarray
    """int32 [P]. The same."""
    roles: list[str | None]
    """[P]. See RolloutTurn.prompt_roles."""
    is_content: np.ndarray
    """bool [P]. See RolloutTurn.prompt_is_content."""
    extends: bool = False
    """Starts with the last prompt and its completion, token for token."""


async def first_prompt(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> Prompt:
    """The prompt of a conversation nothing was sampled in.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """
    return _prompt(await _rendered_anew(renderer, conversation, tools), np.empty(0, np.int32))


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
    before = np.concatenate([last.token_ids, np.asarray(sampled_ids, np.int32)])
    bridged = await off_the_loop_if(
        _characters(new) > LARGE_TEXT, lambda: renderer.bridge_to_next_turn(last.ids, sampled_ids, new, tools=tools)
    )
    if bridged is None:
        return _prompt(await _rendered_anew(renderer, conversation, tools), before)
    check_all_rendered(bridged, new)
    if bridged.token_ids[: len(before)] != last.ids + sampled_ids:  # cut after an earlier end of the turn
        return _prompt(bridged, before)
    return _prompt(bridged, before, described=len(before))


def cannot_fit(messages: Sequence[Message], tokens: int) -> bool:
    """Whether messages are too long for so many tokens whatever they say: those need not be tokenised."""
    return _characters(messages) > LONGEST_TOKEN * tokens


async def off_the_loop_if(large: bool, call: Callable[[], T]) -> T:
    """Compute something in a thread if it is large, or else here, in an iteration of the event loop of its own."""
    if large:
        return await asyncio.get_running_loop().run_in_executor(_RENDER_THREAD, call)
    await turnstile().wait_turn()
    return call()


async def _rendered_anew(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> RenderedTokens:
    rendered = await off_the_loop_if(
        _characters(conversation) > LARGE_TEXT,
        lambda: renderer.render(conversation, tools=tools, add_generation_prompt=True),
    )
    check_all_rendered(rendered, conversation)
    return rendered


def _prompt(rendered: RenderedTokens, before: np.ndarray, *, described: int = 0) -> Prompt:
    """
    Args:
        before: int32. The last prompt and its completion.
        described: tokens of the prompt that are ``before``, and that earlier turns described. Only the others are converted, or
            the turns of a long conversation would cost milliseconds each.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids = rendered.token_ids
    token_ids = np.concatenate([before[:described], np.asarray(ids[described:], np.int32)])
    is_content = np.zeros(len(ids), bool)
    roles: list[str | None] = [None] * len(ids)
    if rendered.is_content:  # without it, roles are guesses (see check_all_rendered)
        is_content[described:] = rendered.is_content[described:]
        indices, of_message = rendered.message_indices[described:], rendered.message_roles
        roles[described:] = [of_message[index] if index >= 0 else None for index in indices]
    return Prompt(
        ids=ids,
        token_ids=token_ids,
        roles=roles,
        is_content=is_content,
        extends=np.array_equal(token_ids[: len(before)], before),
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
