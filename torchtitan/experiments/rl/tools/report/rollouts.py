"""The page Rollouts: which ones match, a group side by side, and one rollout as a conversation."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.config.run_folder import read_config
from torchtitan.experiments.rl.observability.rollouts import calls_of, cut, last_messages, plain, shown_turns
from torchtitan.experiments.rl.rollouts.records import RecordedRollout, decode_rollout
from torchtitan.experiments.rl.tools.report.run import ReportedRun
from torchtitan.experiments.rl.types import ROLES, STREAMS, TrainingSample

MOST_TEXT = 1_000
"""Characters of a filter."""
Text = Annotated[str, Field(max_length=MOST_TEXT)] | None
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


class Wanted(BaseModel):
    """Filters of the list; None: any."""

    task: Text = None
    step: Annotated[int, Field(ge=0, le=2**40)] | None = None
    status: Text = None
    outcome: Text = None
    """A column of the ledger, or the beginning of one up to a slash: "failed" means "failed/error" too."""
    group: Text = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: Text = None
    """In any message, whatever its case."""
    sort: Literal["newest", "oldest", "highest", "lowest", "longest"] = "newest"
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 50
    offset: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Of the rows that the other filters leave."""


def listed(run: ReportedRun, wanted: Wanted) -> dict[str, Any]:
    """
    Returns:
        ``rows``; ``total``: rows that match without ``text``; ``next``: the offset to go on from, None at the end.
    """
    where, values = _condition(wanted)
    total = run.index.rows(f"SELECT COUNT(*) FROM rollouts WHERE {where}", values)[0][0]
    limit, offset = wanted.limit, wanted.offset
    rows: list[dict[str, Any]] = []
    search = _Search(run, wanted.text) if wanted.text else None
    ends = time.monotonic() + SEARCH_S
    while len(rows) < limit and offset < total and time.monotonic() < ends:
        page = run.index.rows(
            f"SELECT * FROM rollouts WHERE {where} ORDER BY {SORTS[wanted.sort]} LIMIT ? OFFSET ?", [*values, limit, offset]
        )
        if not page:
            break
        for row in page:
            offset += 1
            if search is None or search.matches(row["place"], row["line"]):
                rows.append(_row(row) | _beginnings(run, row))
            if len(rows) == limit or (search is not None and time.monotonic() > ends):
                break
    return {"rows": rows, "total": total, "next": offset if offset < total else None}


def choices(run: ReportedRun) -> dict[str, list[str]]:
    """Values that the filters can take."""

    def distinct(column: str) -> list[str]:
        rows = run.index.rows(f"SELECT DISTINCT {column} FROM rollouts WHERE {column} IS NOT NULL ORDER BY 1")
        return [row[0] for row in rows]

    return {"task": distinct("task"), "status": distinct("status"), "outcome": distinct("outcome"), "sort": list(SORTS)}


def group(run: ReportedRun, place: int) -> dict[str, Any]:
    """The rollouts of the group at ``place``: rewards by component, their advantages, and the last message of the first prompt.

    Raises:
        LookupError: there is none.
    """
    members = []
    prompt = sample_id = None
    for line, record in enumerate(run.index.records(place)):
        rollout = decode_rollout(record)
        members.append(_head(rollout, place, line) | {"last": _last_text(rollout)})
        sample, turns = rollout.rollout.data_sample, rollout.rollout.turns
        sample_id = sample_id if sample is None else str(sample.sample_id)
        if prompt is None and turns:
            prompt = cut(turns[0].prompt_messages[-1].get("content"), MOST_CHARACTERS) if turns[0].prompt_messages else None
    if not members:
        raise LookupError(f"no group at {place}")
    rewards = [member["reward"] for member in members if member["reward"] is not None]
    usual = float(np.median(rewards)) if rewards else 0.0
    odd_first = sorted(members, key=lambda member: -abs((member["reward"] or 0.0) - usual))
    return {
        "place": place,
        "group_id": members[0]["group_id"],
        "sample_id": sample_id,
        "prompt": prompt,
        "mean": float(np.mean(rewards)) if rewards else None,
        "std": float(np.std(rewards)) if rewards else None,
        "members": members,
        "side_by_side": [member["key"] for member in odd_first],
    }


def rollout(run: ReportedRun, place: int, line: int, *, whole: bool = False) -> dict[str, Any]:
    """One rollout as a conversation.

    Args:
        whole: texts are not cut.

    Raises:
        LookupError: there is none.
    """
    recorded = decode_rollout(run.index.record(place, line))
    most = 0 if whole else MOST_CHARACTERS
    sample = recorded.rollout.data_sample
    return _head(recorded, place, line) | {
        "turns": shown_turns(recorded.rollout, most),
        "last_messages": last_messages(recorded.rollout, most),
        "calls": calls_of(recorded.rollout),
        "left_out": recorded.left_out,
        "samples": [{"tokens": len(s), "trained": int(_members(s).sum())} for s in recorded.rollout.samples],
        "example": None if sample is None else {"sample_id": sample.sample_id, "env_input": cut(sample.env_input, most)},
        "advantage_is": _advantage_note(recorded),
    }


def _condition(wanted: Wanted) -> tuple[str, list[Any]]:
    asked = {
        "task = ?": wanted.task,
        "step = ?": wanted.step,
        "status = ?": wanted.status,
        "group_id = ?": wanted.group,
        "reward >= ?": wanted.min_reward,
        "reward <= ?": wanted.max_reward,
    }
    asked = {condition: value for condition, value in asked.items() if value is not None}
    where, values = list(asked), list(asked.values())
    if wanted.outcome is not None:
        where.append("(outcome = ? OR substr(outcome, 1, ?) = ?)")
        values += [wanted.outcome, len(wanted.outcome) + 1, f"{wanted.outcome}/"]
    return " AND ".join(where) or "1", values


def _row(row: Any) -> dict[str, Any]:
    return dict(row) | {"key": f"{row['place']}-{row['line']}"}


def _beginnings(run: ReportedRun, row: Any) -> dict[str, str]:
    """Of the last message that the model was first shown, and of its last answer."""
    try:
        own = decode_rollout(run.index.record(row["place"], row["line"])).rollout
    except (LookupError, ValueError):
        return {"asked": "", "answered": ""}
    shown = own.turns[0].prompt_messages if own.turns else []
    asked = _text_of(shown[-1]) if shown else ""
    answered = _text_of(own.turns[-1].assistant_message).strip() if own.turns else ""
    return {"asked": asked[:BEGINNING], "answered": answered[:BEGINNING]}


class _Search:
    """For a text in the messages of rollouts, whatever its case."""

    def __init__(self, run: ReportedRun, text: str):
        self._run, self._text = run, text.casefold()
        # A text that JSON writes as it is must be in the line: most lines need not be decoded.
        plain = text.isascii() and text.isprintable() and not set(text) & {'"', "\\"}
        self._bytes = text.lower().encode() if plain else b""
        self._place, self._lines = -1, list[bytes]()

    def matches(self, place: int, line: int) -> bool:
        """Rollouts of a group are asked for one after the other: it is read once."""
        if place != self._place:
            try:
                self._place, self._lines = place, self._run.index.records(place)
            except LookupError:
                return False
        if line >= len(self._lines) or self._bytes not in self._lines[line].lower():
            return False
        try:
            found = decode_rollout(self._lines[line]).rollout
        except ValueError:
            return False
        return any(
            self._text in _text_of(message).casefold()
            for turn in found.turns
            for message in (*turn.prompt_messages, turn.assistant_message, *turn.env_messages)
        )


def _head(recorded: RecordedRollout, place: int, line: int) -> dict[str, Any]:
    own = recorded.rollout
    members = [sample.advantages[_members(sample)] for sample in own.samples if sample.advantages is not None]
    values = np.concatenate(members) if members else np.zeros(0)
    return {
        "key": f"{place}-{line}",
        "place": place,
        "line": line,
        "rollout_id": own.rollout_id,
        "group_id": own.group_id,
        "task": own.task_name,
        "status": own.status.value,
        "outcome": recorded.outcome,
        "step": recorded.admitted_version,
        "reward": own.reward,
        "reward_components": own.reward_components,
        "error": own.error,
        "tokens": own.completion_tokens,
        "turns_count": len(own.turns),
        "advantage": {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
        if len(values)
        else None,
    }


def _members(sample: TrainingSample) -> np.ndarray:
    """bool [T]: tokens with a weight in any component of the loss."""
    found = np.zeros(len(sample), bool)
    rl = sample.loss_mask if sample.rl_weights is None else sample.rl_weights != 0
    for weights in (rl if sample.advantages is not None else None, sample.ce_weights, sample.ref_kl_weights):
        if weights is not None:
            found |= np.asarray(weights) != 0
    return found


def _advantage_note(recorded: RecordedRollout) -> str | None:
    """Why nothing of the rollout was trained on, where that follows from its outcome."""
    outcome = recorded.outcome or ""
    if outcome.startswith("filtered/"):
        _, slot, name = (outcome.split("/", 2) + ["", ""])[:3]
        return f"Dropped by the {slot}_batch_filters entry {name}."
    if outcome.startswith("failed"):
        return "Failed: it has no reward, and is in no statistics of its group."
    if outcome == "oversized":
        return "One of its samples is longer than a row (batcher.row_length)."
    return None


def _text_of(message: Any) -> str:
    parts = [plain(message.get("content")), plain(message.get("reasoning_content"))]
    parts += [plain((call.get("function") or {}).get("arguments")) for call in message.get("tool_calls") or []]
    return "\n".join(parts)


def _last_text(recorded: RecordedRollout) -> str:
    turns = recorded.rollout.turns
    return plain(turns[-1].assistant_message.get("content"))[:500] if turns else ""


TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENS = 4_000
"""Of one answer of the token view."""


class TokenTexts:
    """Looks for the tokenizer in the run's folder (its final policy), then in the model's, which its config names."""

    def __init__(self, run_dir: Path):
        self._tokenizer = _found(run_dir)
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each id, special tokens too. None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]

    def special(self, ids: Sequence[int]) -> list[bool]:
        """Whether each is a special token."""
        return [token in self._special for token in ids]


def _found(run_dir: Path) -> Tokenizer | None:
    model: Any = (read_config(run_dir) or {}).get("model")
    folders = policies(run_dir)
    if isinstance(model, dict) and isinstance(model.get("hf_assets_path"), str):
        folders.append(Path(model["hf_assets_path"]))
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            try:
                return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            except Exception:  # the library's own type, for a file of any content
                continue
    return None


def token_streams(run: ReportedRun, place: int, line: int, sample: int, offset: int, texts: TokenTexts) -> dict[str, Any]:
    """A part of the token streams of one training sample of a rollout.

    Raises:
        LookupError: there is no such sample.
    """
    recorded = decode_rollout(run.index.record(place, line))
    samples = recorded.rollout.samples
    if not 0 <= sample < len(samples):
        raise LookupError(f"the rollout has {len(samples)} training samples")
    chosen = samples[sample]
    part = slice(max(0, offset), max(0, offset) + MOST_TOKENS)
    ids = [int(token) for token in chosen.token_ids[part]]
    streams = {name: _plain(getattr(chosen, name), part) for name in STREAMS if name != "token_ids"}
    if (roles := streams.get("role_ids")) is not None:
        streams["role_ids"] = [ROLES[role] if role >= 0 else None for role in roles]
    if streams.get("rl_weights") is None and chosen.advantages is not None:
        streams["rl_weights"] = [float(member) for member in chosen.loss_mask[part]]
    if chosen.trainer_logprobs is not None:
        streams["trainer_logprobs"] = _plain(chosen.trainer_logprobs, part)
        with np.errstate(over="ignore"):
            ratios = np.exp(chosen.trainer_logprobs.astype(np.float64) - chosen.generator_logprobs)
        streams["ratio"] = _plain(np.where(chosen.loss_mask, ratios, np.nan), part)
    return {
        "length": len(chosen),
        "offset": part.start,
        "ids": ids,
        "texts": texts.of(ids),
        "special": texts.special(ids),
        "streams": {name: values for name, values in streams.items() if values is not None},
        "temperature": chosen.temperature,
    }


def _plain(values: Any, part: slice) -> list[Any] | None:
    if values is None:
        return None
    return [
        None if isinstance(value, float) and not np.isfinite(value) else value for value in np.asarray(values)[part].tolist()
    ]
