"""Prints recorded rollouts as conversations, with their rewards.

python -m torchtitan.experiments.rl.observability.rollouts outputs/RUN [--task NAME] [--status STATUS] [--outcome COLUMN]
    [--group ID] [--step N] [--min-reward R] [--max-reward R] [--validation] [--last] [--sort KEY] [--limit N] [--chars N]
    [--tokens]
"""

import argparse
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.printable import printable
from torchtitan.experiments.rl.process.setup import escape_unencodable_output
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.records import RecordedRollout, RecordKind
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutStatus
from torchtitan.experiments.rl.types import TrainingSample

WIDTH = 100
SORTED_BY: dict[str, Callable[[Rollout], float]] = {
    "reward": lambda rollout: -float("inf") if rollout.reward is None else rollout.reward,
    "tokens": lambda rollout: rollout.completion_tokens,
    "turns": lambda rollout: len(rollout.turns),
    "seconds": lambda rollout: sum(turn.generate_s + turn.env_s for turn in rollout.turns),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit code 1 where nothing matches or there is no such file."""
    escape_unencodable_output()
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.experiments.rl.observability.rollouts",
        description="Print recorded rollouts as conversations, with their rewards.",
    )
    parser.add_argument("path", type=Path, help="a run folder, or its rollouts.jsonl.gz")
    parser.add_argument("--task", help="only this task")
    parser.add_argument("--status", choices=[status.value for status in RolloutStatus if status.is_terminal()])
    parser.add_argument("--outcome", help='a column of the ledger, or its beginning: "trained", "failed", "filtered/pre/..."')
    parser.add_argument("--group", metavar="ID", help="only the rollouts of this group, such as sum_digits-12")
    parser.add_argument("--step", type=int, help="only groups that began when the policy had taken so many steps")
    parser.add_argument("--min-reward", type=float)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--validation", action="store_true", help="the rollouts of the evaluations, not those of training")
    parser.add_argument("--last", action="store_true", help="the last ones that match, not the first")
    parser.add_argument(
        "--sort", choices=SORTED_BY, help="those with the most of this first; of all that match, or of the --last"
    )
    parser.add_argument("--tokens", action="store_true", help="of each completion its token ids, with their log-probabilities")
    parser.add_argument("--limit", type=int, default=10, help="show so many (default 10); 0: all")
    parser.add_argument("--chars", type=int, default=2000, help="of a message, the rest is cut (default 2000); 0: all")
    options = parser.parse_args(arguments)
    shown = 0
    try:
        for record, mean in chosen(options):
            print(printable("\n".join(lines_of(record, group_mean=mean, chars=options.chars, tokens=options.tokens))))
            shown += 1
    except FileNotFoundError as error:
        print(f"{error.filename}: no such file; was the run started with recorder.fraction = 0?", file=sys.stderr)
        return 1
    except BrokenPipeError:  # piped into head
        sys.stderr.close()
        return 0
    if not shown:
        print("no rollout matches", file=sys.stderr)
    return 0 if shown else 1


def chosen(options: argparse.Namespace) -> Iterator[tuple[RecordedRollout, float | None]]:
    """The records to show, in their order, each with the mean reward of its group."""
    found, most = matching(options), options.limit or None
    if options.last:
        found = iter(deque(found, most))
    if options.sort is not None:
        by = SORTED_BY[options.sort]
        found = iter(sorted(found, key=lambda pair: by(pair[0].rollout), reverse=True))
    return itertools.islice(found, most)


def matching(options: argparse.Namespace) -> Iterator[tuple[RecordedRollout, float | None]]:
    """The records that pass the command's filters, each with the mean reward of its group."""
    kind: RecordKind = "validation" if options.validation else "training"
    for group_id, records in itertools.groupby(read_rollouts(options.path, kind), lambda record: record.rollout.group_id):
        if options.group not in (None, group_id):
            continue
        group = list(records)
        rewards = [record.rollout.reward for record in group if record.rollout.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        yield from ((record, mean) for record in group if _matches(record, options))


def _matches(record: RecordedRollout, options: argparse.Namespace) -> bool:
    rollout, reward = record.rollout, record.rollout.reward
    return (
        options.task in (None, rollout.task_name)
        and options.status in (None, rollout.status.value)
        and (options.outcome is None or (record.outcome or "").startswith(options.outcome))
        and options.step in (None, record.admitted_version)
        and (options.min_reward is None or (reward is not None and reward >= options.min_reward))
        and (options.max_reward is None or (reward is not None and reward <= options.max_reward))
    )


def lines_of(
    record: RecordedRollout,
    *,
    group_mean: float | None = None,
    chars: int = 0,
    tokens: bool = False,
    typed: Collection[int] = (),
) -> list[str]:
    """One rollout as text: a header, the conversation that the model was given, and the rewards.

    Args:
        group_mean: mean reward of its group.
        chars: of a message, the rest is cut; 0: all.
        tokens: each completion's token ids too, with their log-probabilities.
        typed: turns whose tokens no model has sampled: these have none.
    """
    rollout = record.rollout
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.3g}"
    facts = [rollout.rollout_id, rollout.status.value, reward, record.outcome or "not counted", f"policy {_versions(record)}"]
    facts += [] if group_mean is None else [f"group's mean {group_mean:.3g}"]
    lines = [f"━━ {' · '.join(facts)} ".ljust(WIDTH, "━")]
    seen: list[int] = []
    for number, turn in enumerate(rollout.turns):
        conversation = [id(message) for message in turn.prompt_messages]
        if conversation[: len(seen)] != seen:
            lines.append("   (the conversation was rewritten)")
            seen = []
        for message in turn.prompt_messages[len(seen) :]:
            lines += _message(message, chars=chars)
        note = f"{len(turn.completion.token_ids)} tokens, {turn.generate_s:.2f} s, {turn.completion.finish_reason}"
        lines += _message(turn.assistant_message, note=note, chars=chars)
        if tokens:
            lines.append(f"   tokens {_tokens(turn.completion, typed=number in typed)}")
        seen = [*conversation, id(turn.assistant_message)]
        if turn.reward_components:
            lines.append(f"   env rewards {_components(turn.reward_components)} ({turn.env_s:.2f} s)")
    if rollout.turns:  # the env's last messages, which are in no prompt
        for message in rollout.turns[-1].env_messages:
            lines += _message(message, chars=chars)
    if record.left_out:
        lines.append(f"   left out: {record.left_out}")
    if rollout.error:
        lines.append(f"   {rollout.status.value}: {rollout.error}")
    if rollout.reward_components:
        lines.append(f"   rewards {_components(rollout.reward_components)}")
    lines.append(f"   {_samples(record)}; made from {_cut(_plain(_env_input(record)), 200)}")
    return [*lines, ""]


def _message(message: dict, *, note: str = "", chars: int) -> list[str]:
    parts = []
    if thought := message.get("reasoning_content"):
        parts.append(f"(thinks) {_cut(thought, chars)}")
    content = message.get("content")
    if content or not message.get("tool_calls"):
        parts.append(_cut(_plain(content), chars))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"(calls) {function.get('name')}({_cut(_plain(function.get('arguments')), chars)})")
    text = "\n".join(parts).split("\n")
    name = str(message.get("role"))
    head = f"{name:>9} │ "
    lines = [head + text[0], *(f"{'':>9} │ {line}" for line in text[1:])]
    if note:
        lines[-1] += f"   [{note}]"
    return lines


def _versions(record: RecordedRollout) -> str:
    versions = sorted({int(v) for turn in record.rollout.turns for v in set(turn.completion.policy_versions.tolist())})
    return str(record.admitted_version) if len(versions) < 2 else f"{versions[0]}-{versions[-1]}"


def _samples(record: RecordedRollout) -> str:
    samples = record.rollout.samples
    text = f"{len(samples)} training sample{'s' * (len(samples) != 1)}"
    advantages = [s.advantages[s.loss_mask] for s in samples if s.advantages is not None and s.loss_mask.any()]
    values = sorted({round(float(value), 6) for part in advantages for value in (part.min(), part.max())})
    if values:
        text += f", advantage {values[0]:.3g}" + (f" to {values[-1]:.3g}" if len(values) > 1 else "")
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        if span := _span(samples, name):
            text += f", {name} {span}"
    return text


def _span(samples: Sequence[TrainingSample], name: str) -> str:
    """Smallest and largest of a weight over the sampled tokens; empty where no sample has it."""
    parts = [values[s.loss_mask] for s in samples if (values := getattr(s, name)) is not None and s.loss_mask.any()]
    if not parts:
        return ""
    low, high = min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _tokens(completion: Completion, *, typed: bool) -> str:
    if typed:
        return " ".join(map(str, completion.token_ids.tolist()))
    pairs = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
    return " ".join(f"{token}:{logprob:.2f}" for token, logprob in pairs)


def _env_input(record: RecordedRollout) -> Any:
    return record.rollout.data_sample.env_input if record.rollout.data_sample else None


def _components(components: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in components.items()
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, chars: int) -> str:
    return text if not chars or len(text) <= chars else f"{text[:chars]}… ({len(text) - chars:,} characters more)"


if __name__ == "__main__":
    sys.exit(main())
