"""A row of a dataset to a training sample: checked, rendered as rollouts are, with a weight on what is trained on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from renderers import Message, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_all_rendered, checked_messages, checked_tools
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.types import ROLE_IDS, TrainingSample


@dataclass(kw_only=True, slots=True)
class Conversation:
    messages: list[Message]
    tools: list[ToolSpec] | None


def conversation_of(row: Any, *, messages: str, tools: str) -> Conversation:
    """The conversation in a row.

    Tables give every message the fields of every other, empty: those are left out, and content that is None is "".

    Args:
        messages: the column of the messages.
        tools: the column of the tools; a row may have none.

    Raises:
        TypeError, ValueError: it is none; names the column and the entry.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"it is {shown(row)}, want a dict with {messages!r}")
    if messages not in row:
        raise ValueError(f"it has no column {messages!r}; it has {', '.join(map(str, row))}")
    given = _without_none(row[messages])
    if isinstance(given, list):
        given = [{"content": ""} | entry if isinstance(entry, dict) else entry for entry in given]
    checked = checked_messages(given, messages)
    if not checked:
        raise ValueError(f"{messages} is empty")
    found = _without_none(row.get(tools))
    return Conversation(messages=checked, tools=None if found is None else checked_tools(found, tools))


def sample_of(
    conversation: Conversation, renderer: Renderer, *, roles: Collection[str], task_name: str, rollout_id: str
) -> TrainingSample:
    """The conversation up to the last token that is trained on, with a ce weight of 1 on the tokens of ``roles``.

    What the template puts before an assistant's answer is part of a rollout's prompt, so it has no weight here either::

        token_ids    <system> <user> <assistant> <no thoughts>   answer  <end>
        ce_weights       0       0        0            0          1  1     1

    Raises:
        ValueError: the template has no place for a message, or nothing is trained on.
    """
    messages, tools = conversation.messages, conversation.tools
    rendered = renderer.render(messages, tools=tools)
    check_all_rendered(rendered, messages)
    token_ids, of_message = np.asarray(rendered.token_ids, np.int32), np.asarray(rendered.message_indices)
    role_ids = np.array([ROLE_IDS[message["role"]] for message in messages] + [-1], np.int8)[of_message]
    trained = np.asarray(rendered.is_content, bool) & np.isin(role_ids, [ROLE_IDS[role] for role in roles])
    trained[:1] = False  # nothing comes before it
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            prompt = renderer.render(messages[:index], tools=tools, add_generation_prompt=True).token_ids
            if token_ids[: len(prompt)].tolist() == list(prompt):
                trained[: len(prompt)] &= of_message[: len(prompt)] != index
    if not trained.any():
        raise ValueError(f"it has no message of {', '.join(roles)} with a token to train on")
    end = int(np.flatnonzero(trained)[-1]) + 1
    return TrainingSample(
        token_ids=token_ids[:end],
        loss_mask=np.zeros(end, bool),
        generator_logprobs=np.zeros(end, np.float32),
        policy_versions=np.full(end, -1, np.int32),
        role_ids=role_ids[:end],
        rl_weights=np.zeros(end, np.float32),
        ce_weights=trained[:end].astype(np.float32),
        task_name=task_name,
        rollout_id=rollout_id,
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_without_none(entry) for entry in value]
    return value
