"""A table of some conversations of a step, small enough for a tracker and safe to show."""

import json
from collections.abc import Sequence

from torchtitan.experiments.rl.observability.trackers.tracker import Table
from torchtitan.experiments.rl.printable import printable
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup

MOST_CHARACTERS = 8000
"""Of a conversation: of a longer one the beginning and the end are shown."""
COLUMNS = ("rollout", "task", "reward", "status", "conversation")


def samples_table(groups: Sequence[RolloutGroup], most: int) -> Table:
    """One rollout each of at most ``most`` groups; of each further group another place in the group."""
    chosen = [group.rollouts[number % len(group.rollouts)] for number, group in enumerate(groups[:most]) if group.rollouts]
    rows = [
        (
            printable(rollout.rollout_id),
            printable(rollout.task_name),
            rollout.reward,
            str(rollout.status),
            conversation(rollout),
        )
        for rollout in chosen
    ]
    return Table(name="samples", columns=COLUMNS, rows=rows)


def conversation(rollout: Rollout) -> str:
    """Its messages as text, safe to print, of at most MOST_CHARACTERS."""
    if not rollout.turns:
        return printable(rollout.error or "")[:MOST_CHARACTERS]
    last = rollout.turns[-1]
    messages = [*last.prompt_messages, last.assistant_message, *last.env_messages]
    text = printable("\n\n".join(map(_shown, messages)))
    if len(text) <= MOST_CHARACTERS:
        return text
    left_out = f"\n... cut from {len(text):,} characters ...\n"
    half = (MOST_CHARACTERS - len(left_out)) // 2
    return text[:half] + left_out + text[-half:]


def _shown(message: object) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    lines = [content if isinstance(content, str) else json.dumps(content, default=str, ensure_ascii=False)] if content else []
    if calls := message.get("tool_calls"):
        lines.append(json.dumps(calls, default=str, ensure_ascii=False))
    return f"{message.get('role', '?')}: " + "\n".join(lines)
