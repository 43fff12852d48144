"""A prompt in tokens, with the author and the message of each token."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from renderers import Message, RenderedTokens, ToolSpec

from torchtitan.experiments.rl.types import ROLE_IDS

MAX_TOKEN_ID = np.iinfo(np.int32).max


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """Tokens that the model samples from next, with the author of each."""

    ids: list[int]
    """[P]. Token ids as the renderer takes them."""
    token_ids: np.ndarray
    """int32 [P]. The same token ids."""
    role_ids: np.ndarray
    """int8 [P]. See `RolloutTurn.prompt_role_ids`."""
    is_content: np.ndarray
    """bool [P]. See `RolloutTurn.prompt_is_content`."""
    message_indices: np.ndarray
    """int16 [P]. See `RolloutTurn.prompt_message_indices`."""
    extends: bool = False
    """True if the prompt starts with the last prompt and its completion, token for token."""
    answers: dict[tuple[int, ...], Message] = field(default_factory=dict)
    """Short completions of the prompt, parsed. The rollouts of a group, which begin with one
    prompt, often give the same."""


PROMPT_ARRAYS: dict[str, Any] = {
    "token_ids": np.int32,
    "role_ids": np.int8,
    "is_content": np.bool_,
    "message_indices": np.int16,
}
"""Arrays of a prompt and their dtypes. A turn has each as ``prompt_<name>``."""

EMPTY_PROMPT = Prompt(
    ids=[], **dict[str, Any]((name, np.empty(0, dtype)) for name, dtype in PROMPT_ARRAYS.items())
)
"""Prompt before a conversation's first one."""


def first_prompt(rendered: RenderedTokens) -> Prompt:
    """Return the prompt of a whole conversation; see `next_prompt`."""
    return next_prompt(rendered, EMPTY_PROMPT, [])


def next_prompt(
    rendered: RenderedTokens,
    last: Prompt,
    sampled_ids: Sequence[int],
    *,
    kept: int = 0,
    answer_index: int = 0,
    first_index: int = 0,
) -> Prompt:
    """Return the prompt that a renderer gave, with the author and the message of each token.

    Args:
        rendered: tokens of the whole prompt. It describes all messages, or those from
            ``first_index`` on.
        last: prompt before this one.
        sampled_ids: completion of the last prompt.
        kept: number of tokens of the last prompt and its completion that this prompt starts with,
            described as they are there. Only the others are converted, or the turns of a long
            conversation would cost milliseconds each.
        answer_index: index of the completion's message in the conversation.
        first_index: index of the first message that ``rendered`` describes.

    Raises:
        ValueError: the prompt holds an image, has something else than token ids, or has fewer or
            more roles than token ids.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids = rendered.token_ids
    new_ids = np.asarray(ids[kept:])
    _check_token_ids(ids, new_ids)
    is_content = rendered.is_content[kept:]
    roles: Any = -1
    message_indices: Any = -1
    if is_content:  # without it, roles are guesses (see check_all_rendered)
        of_message = np.asarray(rendered.message_indices[kept:], np.int16)
        if not len(of_message) == len(is_content) == len(new_ids):
            raise ValueError(f"{len(of_message)} roles for {len(new_ids)} token ids")
        role_of_message = [ROLE_IDS.get(role, -1) for role in rendered.message_roles]
        roles = np.array([*role_of_message, -1])[of_message]  # -1, of no message, is the last entry
        message_indices = np.where(of_message < 0, -1, of_message + first_index)

    from_last = min(kept, len(last.ids))
    from_sampled = sampled_ids[: kept - from_last]

    def joined(name: str, sampled: Any, new: Any) -> np.ndarray:  # noqa: ANN401 - array or scalar
        array = np.empty(len(ids), PROMPT_ARRAYS[name])
        array[:from_last] = getattr(last, name)[:from_last]
        array[from_last:kept] = sampled
        array[kept:] = new
        return array

    return Prompt(
        ids=ids,
        token_ids=joined("token_ids", from_sampled, new_ids),
        role_ids=joined("role_ids", ROLE_IDS["assistant"], roles),
        is_content=joined("is_content", True, is_content or False),
        message_indices=joined("message_indices", answer_index, message_indices),
        extends=kept == len(last.ids) + len(sampled_ids),
    )


def _check_token_ids(ids: Sequence[int], new_ids: np.ndarray) -> None:
    is_valid = bool(ids)
    if is_valid and len(new_ids):
        is_valid = new_ids.ndim == 1 and new_ids.dtype.kind in "iu"
        is_valid = is_valid and new_ids.min() >= 0 and new_ids.max() <= MAX_TOKEN_ID
    if not is_valid:
        raise ValueError(
            f"the prompt's token ids are no list of integers from 0 to {MAX_TOKEN_ID}: "
            f"{str(ids)[:60]}"
        )


class GroupPrompts:
    """First prompts that were rendered for one group, by conversation and tools."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt | None] = {}
        self._lock = asyncio.Lock()

    async def first(
        self,
        conversation: list[Message],
        tools: list[ToolSpec] | None,
        render: Callable[[], Awaitable[Prompt | None]],
    ) -> Prompt | None:
        """Return the prompt of a conversation; None if it is too long for one.

        Its arrays are read-only, because other rollouts have the same.

        Args:
            render: called if no rollout of the group has rendered this conversation with these
                tools.
        """
        try:
            key = json.dumps((conversation, tools))
        except (TypeError, ValueError):  # of objects that JSON lacks, equality is not known
            return await render()
        async with self._lock:
            if key not in self._prompts:
                prompt = await render()
                self._prompts[key] = prompt
                for name in PROMPT_ARRAYS if prompt is not None else ():
                    getattr(prompt, name).flags.writeable = False
        return self._prompts[key]
