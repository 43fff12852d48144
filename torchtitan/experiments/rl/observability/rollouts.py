"""A recorded rollout as people read it: lines of text for ``rl-play``, structs for the report."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from torchtitan.experiments.rl.rollouts.records import RecordedRollout
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutTurn
from torchtitan.experiments.rl.types import TrainingSample

WIDTH = 100
"""Columns of a rollout's header."""


class ShownCall(msgspec.Struct):
    """Tool call of a message."""

    name: str
    arguments: str


class ShownMessage(msgspec.Struct):
    """Role and texts of a message, each text cut at some length."""

    role: str
    text: str
    thought: str
    calls: list[ShownCall]


class ShownTurn(msgspec.Struct, kw_only=True):
    """One turn, with the messages of its prompt that are new."""

    rewritten: bool
    """True if the prompt does not continue the turn before."""
    messages: list[ShownMessage]
    reply: ShownMessage
    tokens: int
    finish_reason: str
    generate_s: float
    env_s: float
    reward_components: dict[str, float]
    versions: list[int]
    tools: list[Any] | None
    """Tools of the rollout's first turn; None in a later one."""


def lines_of(
    record: RecordedRollout,
    *,
    tokens: bool = False,
    typed: Collection[int] = (),
    policy: str | None = None,
) -> list[str]:
    """Return one rollout as text: a header, the conversation as the model saw it, the rewards.

    Args:
        tokens: True for each completion's token ids too, with their log-probabilities.
        typed: indices of turns whose tokens no model has sampled: they have no log-probabilities.
        policy: name of what sampled the rollout, in place of the versions; "" leaves them out.
    """
    rollout = record.rollout
    shown = shown_turns(rollout, 0)
    lines = [_header(record, shown, policy)]
    lines += [f"   {line}" for line in calls_of(rollout)]
    for index, (shown_turn, turn) in enumerate(zip(shown, rollout.turns, strict=True)):
        lines += _turn_lines(index, shown_turn, turn)
        if tokens:
            lines.append(f"   tokens {_tokens(turn.completion, typed=index in typed)}")
        if turn.reward_components:
            rewards = _components(turn.reward_components)
            lines.append(f"   env rewards {rewards} ({turn.env_s:.2f} s)")
    for message in last_messages(rollout, 0):
        lines += _message_lines(message)
    if record.left_out:
        lines.append(f"   left out: {record.left_out}")
    if rollout.error:
        lines.append(f"   {rollout.status.value}: {rollout.error}")
        lines += [f"   {line}" for line in rollout.traceback.splitlines()]
    if rollout.reward_components:
        lines.append(f"   rewards {_components(rollout.reward_components)}")
    row = rollout.data_sample.env_input if rollout.data_sample else None
    lines.append(f"   {_samples(rollout.samples)}; made from {cut(row, 200)}")
    lines.append("")
    return lines


def shown_turns(rollout: Rollout, max_length: int) -> list[ShownTurn]:
    """Return the turns as people read them.

    Args:
        max_length: maximum number of characters of a text; 0 for all.
    """
    shown: list[ShownTurn] = []
    seen: list[int] = []
    """Ids of the messages of the conversation so far: the turns hold the same objects."""
    for turn in rollout.turns:
        conversation = [id(message) for message in turn.prompt_messages]
        continues = conversation[: len(seen)] == seen
        new = turn.prompt_messages[len(seen) :] if continues else turn.prompt_messages
        shown.append(
            ShownTurn(
                rewritten=not continues,
                messages=[shown_message(message, max_length) for message in new],
                reply=shown_message(turn.assistant_message, max_length),
                tokens=len(turn.completion.token_ids),
                finish_reason=turn.completion.finish_reason,
                generate_s=turn.generate_s,
                env_s=turn.env_s,
                reward_components=turn.reward_components,
                versions=np.unique(turn.completion.policy_versions).tolist(),
                tools=None if shown else turn.tools,
            )
        )
        seen = [*conversation, id(turn.assistant_message)]
    return shown


def calls_of(rollout: Rollout) -> list[str]:
    """Return a line for each call of an agent: when after the agent's start it was made, by what.

    A call is indented below the call whose conversation it continues::

        turn 1  at 0.02 s  chat, policy
          turn 2  at 0.31 s  chat, policy
          turn 3  at 0.30 s  chat, policy, undelivered
        2 refused: n = 4: not available here, ...
    """
    lines = []
    for number, turn in enumerate(rollout.turns, start=1):
        if turn.call is None:
            continue
        facts = [turn.call["dialect"], turn.call["model"]]
        if turn.untrained:
            facts.append(turn.untrained)
        indent = "  " * turn.call["depth"]
        lines.append(f"{indent}turn {number}  at {turn.call['at_s']:.2f} s  {', '.join(facts)}")
    lines += [f"{count} refused: {text}" for text, count in rollout.refusals.items()]
    return lines


def last_messages(rollout: Rollout, max_length: int) -> list[ShownMessage]:
    """Return the env's last messages, which are in no prompt."""
    if not rollout.turns:
        return []
    return [shown_message(message, max_length) for message in rollout.turns[-1].env_messages]


def shown_message(message: Mapping[str, Any], max_length: int) -> ShownMessage:
    """Return a message's role and texts, each of at most ``max_length`` characters; 0 for all."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    return ShownMessage(
        role=str(message.get("role")),
        text=cut(message.get("content"), max_length),
        thought=cut(message.get("reasoning_content"), max_length),
        calls=[
            ShownCall(
                name=str(function.get("name")),
                arguments=cut(function.get("arguments"), max_length),
            )
            for function in functions
        ],
    )


def cut(value: object, max_length: int) -> str:
    """Return a value as text of at most ``max_length`` characters; 0 for all. None is "".

    What is cut off is counted at the end.
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if max_length == 0 or len(text) <= max_length:
        return text
    return f"{text[:max_length]}… ({len(text) - max_length:,} characters more)"


def spoken(message: ShownMessage) -> str:
    """Return what a message thinks, says and calls, as text."""
    lines = []
    if message.thought:
        lines.append(f"(thinks) {message.thought}")
    if message.text or not message.calls:
        lines.append(message.text)
    lines += [f"(calls) {call.name}({call.arguments})" for call in message.calls]
    return "\n".join(lines)


def _header(record: RecordedRollout, shown: Sequence[ShownTurn], policy: str | None) -> str:
    rollout = record.rollout
    if policy is None:
        versions = sorted({version for turn in shown for version in turn.versions})
        several = len(versions) > 1
        sampled_at = f"{versions[0]}-{versions[-1]}" if several else str(record.admitted_version)
        policy = f"policy {sampled_at}"
    facts = [
        rollout.rollout_id,
        rollout.status.value,
        "no reward" if rollout.reward is None else f"reward {rollout.reward:.3g}",
        record.outcome or "not counted",
    ]
    if policy:
        facts.append(policy)
    return f"━━ {' · '.join(facts)} ".ljust(WIDTH, "━")


def _turn_lines(index: int, shown: ShownTurn, turn: RolloutTurn) -> list[str]:
    is_agents = turn.call is not None
    lines = []
    if shown.rewritten:
        lines.append(
            "   (from the beginning)" if is_agents else "   (the conversation was rewritten)"
        )
    for message in shown.messages:
        lines += _message_lines(message)
    lines += _message_lines(shown.reply)
    note = f"{shown.tokens} tokens, {shown.generate_s:.2f} s, {shown.finish_reason}"
    lines[-1] += f"   [turn {index + 1}, {note}]" if is_agents else f"   [{note}]"
    return lines


def _message_lines(message: ShownMessage) -> list[str]:
    first, *others = spoken(message).split("\n")
    return [f"{message.role:>9} │ {first}", *(f"{'':>9} │ {line}" for line in others)]


def _samples(samples: Sequence[TrainingSample]) -> str:
    """Return the number of samples, and the range of their credit over the sampled tokens."""
    text = f"{len(samples)} training sample{'s' * (len(samples) != 1)}"
    for stream in ("advantages", "rl_weights", "ce_weights", "ref_kl_weights"):
        values = [
            getattr(sample, stream)[sample.loss_mask]
            for sample in samples
            if getattr(sample, stream) is not None and sample.loss_mask.any()
        ]
        if values:
            smallest = f"{min(part.min() for part in values):.3g}"
            largest = f"{max(part.max() for part in values):.3g}"
            name = "advantage" if stream == "advantages" else stream
            text += f", {name} {smallest}"
            text += f" to {largest}" if largest != smallest else ""
    return text


def _tokens(completion: Completion, *, typed: bool) -> str:
    ids = completion.token_ids.tolist()
    if typed:
        return " ".join(map(str, ids))
    logprobs = completion.logprobs.tolist()
    return " ".join(f"{token}:{logprob:.2f}" for token, logprob in zip(ids, logprobs, strict=True))


def _components(components: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in components.items())
