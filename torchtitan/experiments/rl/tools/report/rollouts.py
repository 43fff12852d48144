"""The page Rollouts: a list with filters, a group side by side, and one rollout as a conversation.

The token view of a rollout's training samples is here too.
"""

import contextlib
import functools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.command.run_folder import read_config
from torchtitan.experiments.rl.observability.rollouts import (
    calls_of,
    cut,
    last_messages,
    shown_turns,
)
from torchtitan.experiments.rl.rollouts.records import RecordedRollout, decode_rollout
from torchtitan.experiments.rl.rollouts.types import RolloutTurn
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun
from torchtitan.experiments.rl.types import ROLES, STREAMS, TrainingSample

MOST_TEXT = 1_000
"""Maximum number of characters of a filter."""
Text = Annotated[str, Field(max_length=MOST_TEXT)] | None
Count = Annotated[int, Field(ge=0, le=2**40)]
MOST_ROWS = 200
"""Maximum number of rows of a list."""
MOST_CHARACTERS = 20_000
"""Number of characters of a message that are shown, until the page asks for the whole."""
BEGINNING = 80
"""Number of characters of a message that the list shows."""
SEARCH_S = 2.0
"""Seconds after which a search in texts ends, and says where to go on."""
SORTS = {
    "newest": "evaluation IS NOT NULL, place DESC, line",
    "oldest": "evaluation IS NOT NULL, place, line",
    "highest": "reward IS NULL, reward DESC, place DESC",
    "lowest": "reward IS NULL, reward, place DESC",
    "longest": "tokens DESC, place DESC",
}
"""Order of the list, by its name."""
CONDITIONS = {
    "task": "task = :task",
    "step": "step = :step",
    "version": "version = :version",
    "status": "status = :status",
    "group": "group_id = :group",
    "min_reward": "reward >= :min_reward - 1e-9",
    "max_reward": "reward <= :max_reward + 1e-9",
    "outcome": "(outcome = :outcome OR substr(outcome, 1, length(:outcome) + 1) = :outcome || '/')",
}
"""Condition on a row of the index, by the filter that sets it."""


class Wanted(BaseModel):
    """Filters of the list. None passes every rollout."""

    task: Text = None
    step: Count | None = None
    """Step that trained on the rollout."""
    version: Count | None = None
    """Policy version that the rollout was started at."""
    status: Text = None
    outcome: Text = None
    """Column of the ledger, or its beginning up to a slash: "failed" takes "failed/error" too."""
    group: Text = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: Text = None
    """Text that any message of the rollout has, or its error, in upper or lower case."""
    sort: Literal[tuple(SORTS)] = "newest"  # type: ignore[valid-type]  # mypy wants written words
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 50
    offset: Count = 0
    """Number of rows to pass over, of those that the filters but ``text`` leave."""


def listed(run: ReportedRun, wanted: Wanted) -> Json:
    """Return the rows of the list that match.

    Returns:
        ``rows``; ``total``: number of rows that match without ``text``; ``evaluated``: number of
        these that are of evaluations; ``next``: the offset to go on from, None at the end.
    """
    filters = wanted.model_dump()
    conditions = [sql for name, sql in CONDITIONS.items() if filters[name] is not None]
    where = " AND ".join(conditions or ["1"])
    counts = f"SELECT COUNT(*), COUNT(evaluation) FROM rollouts WHERE {where}"
    total, evaluated = run.rows(counts, filters)[0]
    answer = {"total": total, "evaluated": evaluated, "next": None}
    query = (
        f"SELECT * FROM rollouts WHERE {where} ORDER BY {SORTS[wanted.sort]} "
        "LIMIT :limit OFFSET :offset"
    )
    text = (wanted.text or "").casefold()
    needle = _literal_in_json(text)
    records = functools.lru_cache(1)(run.records)  # rollouts of a group follow each other
    offset = wanted.offset
    rows: list[Json] = []
    deadline = time.monotonic() + SEARCH_S
    while page := run.rows(query, filters | {"offset": offset}):
        for row in page:
            offset += 1
            turns: list[RolloutTurn] = []
            # The file may have been cut back, or the record may be no rollout's.
            with contextlib.suppress(LookupError, ValueError):
                line = records(row["place"])[row["line"]]
                if needle in line.lower():
                    turns = decode_rollout(line).rollout.turns
            if not text or text in (row["error"] or "").casefold() or _is_said(text, turns):
                rows.append({**row, "key": f"{row['place']}-{row['line']}"} | _beginnings(turns))
            is_late = bool(text) and time.monotonic() > deadline
            if is_late or len(rows) == wanted.limit:
                return answer | {"rows": rows, "next": offset if offset < total else None}
    return answer | {"rows": rows}


def _literal_in_json(text: str) -> bytes:
    """Return the bytes of a text that JSON writes as it is; empty if JSON would escape it.

    A line without these bytes need not be decoded for a search.
    """
    is_literal = text.isascii() and text.isprintable() and not set(text) & {'"', "\\"}
    return text.encode() if is_literal else b""


def _is_said(text: str, turns: list[RolloutTurn]) -> bool:
    """Return True if a message of the turns has ``text``, which is casefolded."""
    return any(
        text in _text_of(message).casefold() for turn in turns for message in _messages(turn)
    )


def choices(run: ReportedRun) -> dict[str, list[str]]:
    """Return the values that the filters can take, such as "failed" and "failed/error"."""
    taken = "SELECT DISTINCT {0} FROM rollouts WHERE {0} IS NOT NULL ORDER BY 1"
    columns = ("task", "status", "outcome")
    values = {name: [row[0] for row in run.rows(taken.format(name))] for name in columns}
    kinds = {outcome.partition("/")[0] for outcome in values["outcome"]}
    values["outcome"] = sorted(kinds.union(values["outcome"]))
    return values | {"sort": list(SORTS)}


def group(run: ReportedRun, place: int) -> Json:
    """Return the rollouts of the group at ``place``, side by side.

    Each has its rewards by component, its advantages and its last message; the group has the last
    message of its first prompt.

    Raises:
        LookupError: there is no such group.
    """
    records = [decode_rollout(line) for line in run.records(place)]
    if not records:
        raise LookupError(f"no group at {place}")
    members = []
    sample_ids = []
    first_messages = []
    for line, record in enumerate(records):
        members.append(_head(record, place, line) | {"last": _last_text(record)})
        if record.rollout.data_sample is not None:
            sample_ids.append(str(record.rollout.data_sample.sample_id))
        for turn in record.rollout.turns[:1]:
            first_messages += turn.prompt_messages[-1:]
    rewarded = [member for member in members if member["reward"] is not None]
    rewards = [member["reward"] for member in rewarded]
    median = statistics.median(rewards or [0.0])
    rewarded.sort(key=lambda member: -abs(member["reward"] - median))
    failed = [member for member in members if member["reward"] is None]
    prompt = cut(first_messages[0].get("content"), MOST_CHARACTERS) if first_messages else None
    return {
        "place": place,
        "weights": reward_weights(run, members[0]["task"]),
        "group_id": members[0]["group_id"],
        "sample_id": next(iter(sample_ids), None),
        "prompt": prompt,
        "mean": float(np.mean(rewards)) if rewards else None,
        "std": float(np.std(rewards)) if rewards else None,
        "members": members,
        "side_by_side": [member["key"] for member in [*rewarded, *failed]],
    }


def rollout(run: ReportedRun, place: int, line: int, *, whole: bool = False) -> Json:
    """Return one rollout as a conversation.

    Args:
        whole: True if long texts are not cut.

    Raises:
        LookupError: there is no such rollout.
    """
    recorded = decode_rollout(run.record(place, line))
    length = 0 if whole else MOST_CHARACTERS
    sample = recorded.rollout.data_sample
    example = None
    if sample is not None:
        example = {"sample_id": sample.sample_id, "env_input": cut(sample.env_input, length)}
    return _head(recorded, place, line) | {
        "weights": reward_weights(run, recorded.rollout.task_name),
        "traceback": recorded.rollout.traceback,
        "turns": msgspec.to_builtins(shown_turns(recorded.rollout, length)),
        "last_messages": msgspec.to_builtins(last_messages(recorded.rollout, length)),
        "calls": calls_of(recorded.rollout),
        "left_out": recorded.left_out,
        "samples": [
            {"tokens": len(s), "trained": int(_members(s).sum())} for s in recorded.rollout.samples
        ],
        "example": example,
        "advantage_is": _advantage_note(recorded),
    }


class _SaidTurn(msgspec.Struct):
    """Messages of a turn's record that `_beginnings` reads; the decoder passes over the rest."""

    prompt_messages: list[Any]
    assistant_message: Any


class _RecordedTurn(msgspec.Struct):
    fields: _SaidTurn


class _Said(msgspec.Struct):
    """Turns of a rollout's record without their tokens."""

    turns: list[_RecordedTurn] = []


def beginnings(run: ReportedRun, key: str) -> dict[str, str]:
    """Return `_beginnings` of the rollout with a key; empty ones if it can't be read any more.

    Its tokens are not decoded, so hundreds of long rollouts take a second.
    """
    place, line = map(int, key.split("-"))
    turns: list[_RecordedTurn] = []
    with contextlib.suppress(LookupError, ValueError):
        # The standard library parses halves of characters, which msgspec refuses.
        turns = msgspec.convert(json.loads(run.record(place, line)), _Said).turns
    return _beginnings([turn.fields for turn in turns])


def _beginnings(turns: Sequence[RolloutTurn | _SaidTurn]) -> dict[str, str]:
    """Return the beginnings of the first prompt's last message, and of the last answer."""
    asked = ""
    answered = ""
    if turns:
        asked = "".join(map(_text_of, turns[0].prompt_messages[-1:]))
        answered = _text_of(turns[-1].assistant_message)
    return {"asked": asked.strip()[:BEGINNING], "answered": answered.strip()[:BEGINNING]}


def _messages(turn: RolloutTurn) -> list[Any]:
    return [*turn.prompt_messages, turn.assistant_message, *turn.env_messages]


def _head(recorded: RecordedRollout, place: int, line: int) -> Json:
    """Return what every view of a rollout shows of it."""
    rollout = recorded.rollout
    names = ("rollout_id", "group_id", "status", "reward", "reward_components", "error")
    return {name: getattr(rollout, name) for name in names} | {
        "key": f"{place}-{line}",
        "place": place,
        "line": line,
        "task": rollout.task_name,
        "outcome": recorded.outcome,
        "version": recorded.admitted_version,
        "step": recorded.trained_step,
        "tokens": rollout.completion_tokens,
        "advantage": _advantage_range(rollout.samples),
    }


def reward_weights(run: ReportedRun, task: str) -> dict[str, float]:
    """Return the weights of a task's reward functions by name, as the config has them.

    Functions of a rubric's own ``register_funcs`` are in no config, and not in the result.
    """
    config: Any = read_config(run.folder)
    weights: dict[str, float] = {}
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # a config of others
        for entry in config["tasks"][task]["rubric"]["reward_fns"]:
            function = {"fn": entry} if isinstance(entry, str) else entry
            name = function.get("name") or function["fn"].rpartition(".")[2]
            weights[name] = float(function.get("weight", 1.0))
    return weights


def _advantage_range(samples: Sequence[TrainingSample]) -> dict[str, float] | None:
    """Return the range of the advantages of tokens that are trained on; None without any."""
    trained = [
        sample.advantages[_members(sample)] for sample in samples if sample.advantages is not None
    ]
    values = np.concatenate([*trained, np.zeros(0)])
    if not len(values):
        return None
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _members(sample: TrainingSample) -> np.ndarray:
    """Return the mask [T] of tokens with a weight in any component of the loss."""
    members = np.zeros(len(sample), bool)
    if sample.advantages is not None:
        rl_weights = sample.loss_mask if sample.rl_weights is None else sample.rl_weights
        members |= np.asarray(rl_weights) != 0
    for weights in (sample.ce_weights, sample.ref_kl_weights):
        if weights is not None:
            members |= np.asarray(weights) != 0
    return members


def _advantage_note(recorded: RecordedRollout) -> str | None:
    """Return why nothing of the rollout was trained on, if its outcome says so."""
    if recorded.outcome == "failed/group_too_small":
        return "Not trained on: too few rollouts of its group have a reward (min_group_size)."
    kind, _, filtered_by = (recorded.outcome or "").partition("/")
    slot, _, name = filtered_by.partition("/")
    notes = {
        "filtered": f"Dropped by the {slot}_batch_filters entry {name}.",
        "failed": "Failed: it has no reward, and is in no statistics of its group.",
        "oversized": "One of its samples is longer than a row (batcher.row_length).",
    }
    return notes.get(kind)


def _text_of(message: Any) -> str:  # noqa: ANN401 - a record may hold any JSON
    """Return all that a message says: its content, its reasoning and its calls' arguments."""
    parts = [cut(message.get("content"), 0), cut(message.get("reasoning_content"), 0)]
    parts += [
        cut(call.get("function", call).get("arguments"), 0)
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(parts)


def _last_text(recorded: RecordedRollout) -> str:
    turns = recorded.rollout.turns
    return cut(turns[-1].assistant_message.get("content"), 0)[:500] if turns else ""


MOST_TOKENS = 4_000
"""Maximum number of tokens of one answer of the token view."""


def tokenizer_of(run: ReportedRun) -> Tokenizer | None:
    """Return the tokenizer of the run's final policy, or else of its config's model."""
    model: Any = (read_config(run.folder) or {}).get("model")
    named = model.get("hf_assets_path") if isinstance(model, dict) else None
    for folder in [*policies(run.folder), *([Path(named)] if isinstance(named, str) else [])]:
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # noqa: BLE001 - tokenizers raises Exception itself, for any bad file
            continue
    return None


def token_streams(
    run: ReportedRun, place: int, line: int, sample: int, offset: int, tokenizer: Tokenizer | None
) -> Json:
    """Return the token streams of one training sample of a rollout, from ``offset`` on.

    A ratio of a token that was not sampled is NaN. ``texts`` are those of the ids, special tokens
    included; None without a tokenizer.

    Raises:
        LookupError: there is no such sample.
    """
    samples = decode_rollout(run.record(place, line)).rollout.samples
    if not 0 <= sample < len(samples):
        raise LookupError(f"the rollout has {len(samples)} training samples")
    chosen = samples[sample]
    part = slice(offset, offset + MOST_TOKENS)
    ids = chosen.token_ids[part].tolist()
    streams = {
        name: getattr(chosen, name)
        for name, declared in STREAMS.items()
        if name != "token_ids" and not declared.dims
    }
    if streams["rl_weights"] is None and chosen.advantages is not None:
        streams["rl_weights"] = chosen.loss_mask.astype(np.float64)
    if chosen.trainer_logprobs is not None:
        with np.errstate(over="ignore"):
            ratios = np.exp(chosen.trainer_logprobs.astype(np.float64) - chosen.generator_logprobs)
        streams |= {
            "trainer_logprobs": chosen.trainer_logprobs,
            "ratio": np.where(chosen.loss_mask, ratios, np.nan),
        }
    shown = {name: values[part].tolist() for name, values in streams.items() if values is not None}
    if "role_ids" in shown:
        shown["role_ids"] = [ROLES[role] if role >= 0 else None for role in shown["role_ids"]]
    added = {}
    texts = None
    if tokenizer is not None:
        added = tokenizer.get_added_tokens_decoder()
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return {
        "length": len(chosen),
        "offset": offset,
        "ids": ids,
        "texts": texts,
        "special": [token in added and added[token].special for token in ids],
        "streams": shown,
    }
