"""The page Rollouts: which ones match, a group side by side, and one rollout as a conversation."""

import contextlib
import functools
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.config.run_folder import read_config
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
"""Characters of a filter."""
Text = Annotated[str, Field(max_length=MOST_TEXT)] | None
Count = Annotated[int, Field(ge=0, le=2**40)]
MOST_ROWS = 200
"""Of a list."""
MOST_CHARACTERS = 20_000
"""Of one message; the rest is asked for by itself."""
BEGINNING = 80
"""Characters of a message in the list."""
SEARCH_S = 2.0
"""A search in texts ends after it, and says where it goes on."""
SORTS = {
    "newest": "evaluation IS NOT NULL, place DESC, line",
    "oldest": "evaluation IS NOT NULL, place, line",
    "highest": "reward IS NULL, reward DESC, place DESC",
    "lowest": "reward IS NULL, reward, place DESC",
    "longest": "tokens DESC, place DESC",
}


CONDITIONS = {
    "task": "task = :task",
    "step": "step = :step",
    "status": "status = :status",
    "group": "group_id = :group",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "outcome": "(outcome = :outcome OR substr(outcome, 1, length(:outcome) + 1) = :outcome || '/')",
}


class Wanted(BaseModel):
    """Filters of the list; None: any."""

    task: Text = None
    step: Count | None = None
    status: Text = None
    outcome: Text = None
    """A column of the ledger, or the beginning of one up to a slash: "failed" means "failed/error" too."""
    group: Text = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: Text = None
    """In any message, whatever its case."""
    sort: Literal[tuple(SORTS)] = "newest"  # type: ignore[valid-type]  # mypy takes written words only
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 50
    offset: Count = 0
    """Of the rows that the other filters leave."""


def listed(run: ReportedRun, wanted: Wanted) -> Json:
    """
    Returns:
        ``rows``; ``total``: rows that match without ``text``; ``next``: the offset to go on from, None at the end.
    """
    asked, text, offset = wanted.model_dump(), (wanted.text or "").casefold(), wanted.offset
    where = " AND ".join(
        [sql for name, sql in CONDITIONS.items() if asked[name] is not None] or "1"
    )
    total = run.rows(f"SELECT COUNT(*) FROM rollouts WHERE {where}", asked)[0][0]
    query = f"SELECT * FROM rollouts WHERE {where} ORDER BY {SORTS[wanted.sort]} LIMIT :limit OFFSET :offset"
    # A text that JSON writes as it is must be in the line: most lines need not be decoded.
    in_line = (
        text.encode()
        if text.isascii() and text.isprintable() and not set(text) & {'"', "\\"}
        else b""
    )
    records = functools.lru_cache(1)(run.records)  # rollouts of a group come one after the other
    rows: list[Json] = []
    ends = time.monotonic() + SEARCH_S
    while len(rows) < wanted.limit and (page := run.rows(query, asked | {"offset": offset})):
        for row in page:
            offset += 1
            turns: list[RolloutTurn] = []
            with contextlib.suppress(
                LookupError, ValueError
            ):  # the file was cut back, or the record is no rollout's
                line = records(row["place"])[row["line"]]
                turns = decode_rollout(line).rollout.turns if in_line in line.lower() else []
            if not text or any(
                text in _text_of(message).casefold()
                for turn in turns
                for message in _messages(turn)
            ):
                rows.append({**row, "key": f"{row['place']}-{row['line']}"} | _beginnings(turns))
            late = text and time.monotonic() > ends
            if late or len(rows) == wanted.limit:
                return {"rows": rows, "total": total, "next": offset if offset < total else None}
    return {"rows": rows, "total": total, "next": None}


def choices(run: ReportedRun) -> dict[str, list[str]]:
    """Values that the filters can take."""
    taken = "SELECT DISTINCT {0} FROM rollouts WHERE {0} IS NOT NULL ORDER BY 1"
    columns = ("task", "status", "outcome")
    return {name: [row[0] for row in run.rows(taken.format(name))] for name in columns} | {
        "sort": list(SORTS)
    }


def group(run: ReportedRun, place: int) -> Json:
    """The rollouts of the group at ``place``: rewards by component, their advantages, and the last message of the first prompt.

    Raises:
        LookupError: there is none.
    """
    found = [decode_rollout(record) for record in run.records(place)]
    if not found:
        raise LookupError(f"no group at {place}")
    members = [
        _head(one, place, line) | {"last": _last_text(one)} for line, one in enumerate(found)
    ]
    examples = [
        str(one.rollout.data_sample.sample_id)
        for one in found
        if one.rollout.data_sample is not None
    ]
    first = [
        message
        for one in found
        for turn in one.rollout.turns[:1]
        for message in turn.prompt_messages[-1:]
    ]
    rewards = [member["reward"] for member in members if member["reward"] is not None]
    usual = statistics.median(rewards or [0.0])
    odd_first = sorted(members, key=lambda member: -abs((member["reward"] or 0.0) - usual))
    return {
        "place": place,
        "group_id": members[0]["group_id"],
        "sample_id": next(iter(examples), None),
        "prompt": cut(first[0].get("content"), MOST_CHARACTERS) if first else None,
        "mean": float(np.mean(rewards)) if rewards else None,
        "std": float(np.std(rewards)) if rewards else None,
        "members": members,
        "side_by_side": [member["key"] for member in odd_first],
    }


def rollout(run: ReportedRun, place: int, line: int, *, whole: bool = False) -> Json:
    """One rollout as a conversation.

    Args:
        whole: texts are not cut.

    Raises:
        LookupError: there is none.
    """
    recorded = decode_rollout(run.record(place, line))
    most = 0 if whole else MOST_CHARACTERS
    sample = recorded.rollout.data_sample
    return _head(recorded, place, line) | {
        "turns": msgspec.to_builtins(shown_turns(recorded.rollout, most)),
        "last_messages": msgspec.to_builtins(last_messages(recorded.rollout, most)),
        "calls": calls_of(recorded.rollout),
        "left_out": recorded.left_out,
        "samples": [
            {"tokens": len(s), "trained": int(_members(s).sum())} for s in recorded.rollout.samples
        ],
        "example": None
        if sample is None
        else {"sample_id": sample.sample_id, "env_input": cut(sample.env_input, most)},
        "advantage_is": _advantage_note(recorded),
    }


def _beginnings(turns: list[RolloutTurn]) -> dict[str, str]:
    """Of the last message that the model was first shown, and of its last answer."""
    asked = [message for turn in turns[:1] for message in turn.prompt_messages[-1:]]
    shown = {"asked": asked, "answered": [turn.assistant_message for turn in turns[-1:]]}
    return {
        name: "".join(map(_text_of, messages)).strip()[:BEGINNING]
        for name, messages in shown.items()
    }


def _messages(turn: RolloutTurn) -> list[Any]:
    return [*turn.prompt_messages, turn.assistant_message, *turn.env_messages]


def _head(recorded: RecordedRollout, place: int, line: int) -> Json:
    own = recorded.rollout
    members = [
        sample.advantages[_members(sample)]
        for sample in own.samples
        if sample.advantages is not None
    ]
    values = np.concatenate([*members, np.zeros(0)])
    advantage = (
        {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
        if len(values)
        else None
    )
    plainly = ("rollout_id", "group_id", "status", "reward", "reward_components", "error")
    return {name: getattr(own, name) for name in plainly} | {
        "key": f"{place}-{line}",
        "place": place,
        "line": line,
        "task": own.task_name,
        "outcome": recorded.outcome,
        "step": recorded.admitted_version,
        "tokens": own.completion_tokens,
        "advantage": advantage,
    }


def _members(sample: TrainingSample) -> np.ndarray:
    """bool [T]: tokens with a weight in any component of the loss."""
    found = np.zeros(len(sample), bool)
    rl = sample.loss_mask if sample.rl_weights is None else sample.rl_weights != 0
    for weights in (
        rl if sample.advantages is not None else None,
        sample.ce_weights,
        sample.ref_kl_weights,
    ):
        if weights is not None:
            found |= np.asarray(weights) != 0
    return found


def _advantage_note(recorded: RecordedRollout) -> str | None:
    """Why nothing of the rollout was trained on, where that follows from its outcome."""
    kind, _, filtered_by = (recorded.outcome or "").partition("/")
    slot, _, name = filtered_by.partition("/")
    notes = {
        "filtered": f"Dropped by the {slot}_batch_filters entry {name}.",
        "failed": "Failed: it has no reward, and is in no statistics of its group.",
        "oversized": "One of its samples is longer than a row (batcher.row_length).",
    }
    return notes.get(kind)


def _text_of(message: Any) -> str:
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
"""Of one answer of the token view."""


def tokenizer_of(run: ReportedRun) -> Tokenizer | None:
    """That of the run's final policy, else of the model that its config names."""
    model: Any = (read_config(run.folder) or {}).get("model")
    named = model.get("hf_assets_path") if isinstance(model, dict) else None
    for folder in [*policies(run.folder), *([Path(named)] if isinstance(named, str) else [])]:
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library's own type, for no file and for a file of any content
            continue
    return None


def token_streams(
    run: ReportedRun, place: int, line: int, sample: int, offset: int, tokenizer: Tokenizer | None
) -> Json:
    """A part of the token streams of one training sample of a rollout, NaN where a ratio has no meaning. ``texts`` of its ids,
    special tokens too, are None where there is no tokenizer.

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
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return {
        "length": len(chosen),
        "offset": offset,
        "ids": ids,
        "texts": None
        if tokenizer is None
        else [tokenizer.decode([token], skip_special_tokens=False) for token in ids],
        "special": [token in added and added[token].special for token in ids],
        "streams": shown,
    }
