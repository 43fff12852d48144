"""A recorded rollout as people read it: as lines of text for ``rl-play``, and as JSON's values for the report's pages."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtitan.experiments.rl.rollouts.records import RecordedRollout
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout
from torchtitan.experiments.rl.types import TrainingSample

WIDTH = 100


def lines_of(
    record: RecordedRollout,
    *,
    tokens: bool = False,
    typed: Collection[int] = (),
    policy: str | None = None,
) -> list[str]:
    """One rollout as text: a header, the conversation that the model was given, and the rewards.

    Args:
        tokens: each completion's token ids too, with their log-probabilities.
        typed: turns whose tokens no model has sampled: these have none.
        policy: name of what sampled the rollout, in place of the versions; "" leaves it out.
    """
    rollout, shown = record.rollout, shown_turns(record.rollout, 0)
    versions = sorted({version for turn in shown for version in turn["versions"]})
    sampled_at = record.admitted_version if len(versions) < 2 else f"{versions[0]}-{versions[-1]}"
    facts = [
        rollout.rollout_id,
        rollout.status.value,
        "no reward" if rollout.reward is None else f"reward {rollout.reward:.3g}",
        record.outcome or "not counted",
        *filter(None, [f"policy {sampled_at}" if policy is None else policy]),
    ]
    lines = [f"━━ {' · '.join(facts)} ".ljust(WIDTH, "━")]
    lines += [f"   {line}" for line in calls_of(rollout)]
    for number, (turn, made) in enumerate(zip(shown, rollout.turns, strict=True)):
        of_agent = made.call is not None
        if turn["rewritten"]:
            lines.append(
                "   (from the beginning)" if of_agent else "   (the conversation was rewritten)"
            )
        for message in turn["messages"]:
            lines += _message(message)
        note = f"{turn['tokens']} tokens, {turn['generate_s']:.2f} s, {turn['finish_reason']}"
        lines += _message(turn["reply"])
        lines[-1] += f"   [turn {number + 1}, {note}]" if of_agent else f"   [{note}]"
        if tokens:
            lines.append(f"   tokens {_tokens(made.completion, typed=number in typed)}")
        if turn["reward_components"]:
            lines.append(
                f"   env rewards {_components(turn['reward_components'])} ({turn['env_s']:.2f} s)"
            )
    for message in last_messages(rollout, 0):
        lines += _message(message)
    if record.left_out:
        lines.append(f"   left out: {record.left_out}")
    if rollout.error:
        lines.append(f"   {rollout.status.value}: {rollout.error}")
        lines += [f"   {line}" for line in rollout.traceback.splitlines()]
    if rollout.reward_components:
        lines.append(f"   rewards {_components(rollout.reward_components)}")
    made_from = rollout.data_sample.env_input if rollout.data_sample else None
    return [*lines, f"   {_samples(record.rollout.samples)}; made from {cut(made_from, 200)}", ""]


def shown_turns(rollout: Rollout, most: int) -> list[dict[str, Any]]:
    """The turns as people read them, each with those of its prompt's messages that are new. Values are JSON's.

    Args:
        most: characters of a text; 0: all.
    """
    turns: list[dict[str, Any]] = []
    seen: list[int] = []
    for turn in rollout.turns:
        conversation = [id(message) for message in turn.prompt_messages]
        continues = conversation[: len(seen)] == seen
        new = turn.prompt_messages[len(seen) :] if continues else turn.prompt_messages
        turns.append(
            {
                "rewritten": not continues,
                "messages": [shown_message(message, most) for message in new],
                "reply": shown_message(turn.assistant_message, most),
                "tokens": len(turn.completion.token_ids),
                "finish_reason": turn.completion.finish_reason,
                "generate_s": turn.generate_s,
                "env_s": turn.env_s,
                "reward_components": turn.reward_components,
                "versions": sorted({int(v) for v in turn.completion.policy_versions}),
                "tools": None if turns else turn.tools,
            }
        )
        seen = [*conversation, id(turn.assistant_message)]
    return turns


def calls_of(rollout: Rollout) -> list[str]:
    """Who called when, of an agent's rollout: a line for each turn, a step further in for each turn that it goes on from.

    turn 1  0.02 s  chat, policy
      turn 2  0.31 s  chat, policy
      turn 3  0.30 s  chat, policy, undelivered
    """
    lines = []
    for number, turn in enumerate(rollout.turns, start=1):
        if turn.call is not None:
            facts = [
                turn.call["dialect"],
                turn.call["model"],
                *([turn.untrained] if turn.untrained else []),
            ]
            lines.append(
                f"{'  ' * turn.call['depth']}turn {number}  {turn.call['at_s']:.2f} s  {', '.join(facts)}"
            )
    return lines


def last_messages(rollout: Rollout, most: int) -> list[dict[str, Any]]:
    """The env's last messages, which are in no prompt."""
    return [
        shown_message(message, most)
        for message in (rollout.turns[-1].env_messages if rollout.turns else [])
    ]


def shown_message(message: Mapping[str, Any], most: int) -> dict[str, Any]:
    """A message's role and texts, each of at most ``most`` characters."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    return {
        "role": str(message.get("role")),
        "text": cut(message.get("content"), most),
        "thought": cut(message.get("reasoning_content"), most),
        "calls": [
            {"name": str(call.get("name")), "arguments": cut(call.get("arguments"), most)}
            for call in functions
        ],
    }


def cut(value: Any, most: int) -> str:
    """A value as text, without what is beyond ``most`` characters; 0: all of it. "" of None."""
    text = (
        ""
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    return (
        text
        if not most or len(text) <= most
        else f"{text[:most]}… ({len(text) - most:,} characters more)"
    )


def spoken(shown: Mapping[str, Any]) -> str:
    """What a ``shown_message`` thinks, says and calls."""
    parts = [f"(thinks) {shown['thought']}"] if shown["thought"] else []
    parts += [shown["text"]] if shown["text"] or not shown["calls"] else []
    return "\n".join(
        [*parts, *(f"(calls) {call['name']}({call['arguments']})" for call in shown["calls"])]
    )


def _message(shown: Mapping[str, Any]) -> list[str]:
    first, *others = spoken(shown).split("\n")
    return [f"{shown['role']:>9} │ {first}", *(f"{'':>9} │ {line}" for line in others)]


def _samples(samples: Sequence[TrainingSample]) -> str:
    text = f"{len(samples)} training sample{'s' * (len(samples) != 1)}"
    for name in ("advantages", "rl_weights", "ce_weights", "ref_kl_weights"):
        # Smallest and largest over the sampled tokens.
        parts = [
            values[s.loss_mask]
            for s in samples
            if (values := getattr(s, name)) is not None and s.loss_mask.any()
        ]
        if parts:
            ends = (min(part.min() for part in parts), max(part.max() for part in parts))
            text += f", {name.replace('advantages', 'advantage')} {' to '.join(dict.fromkeys(f'{end:.3g}' for end in ends))}"
    return text


def _tokens(completion: Completion, *, typed: bool) -> str:
    ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
    return " ".join(
        map(str, ids)
        if typed
        else (f"{token}:{logprob:.2f}" for token, logprob in zip(ids, logprobs, strict=True))
    )


def _components(components: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in components.items())
