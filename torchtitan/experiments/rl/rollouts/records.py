"""A rollout as one line of JSON, and the same rollout from that line.

A line reads from left to right: who it is and how it ended, what its env was made from, its turns, its training samples.

1. Nothing is written twice. Of a turn's prompt, messages and token ids, only what follows the longest part it shares with the
   turn before (``prompt_kept`` tokens, ``messages_kept`` messages), so a long conversation is written once, not once a turn.
   Streams of samples that `samples_from_turns` gives again are left out; an algorithm's (advantages, weights) are written.
2. Nothing is lost. float32 values have 9 significant digits, which name each of them exactly; values that are not finite, which
   JSON lacks, are strings. Streams with few changes are ``{"runs": [[count, value], ...]}``.
3. What JSON can't hold is written as well as it can: an env_input as its ``repr``, under ``env_input_repr``.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from torchtitan.experiments.rl.rollouts.json_values import bits_of, decoded_stream, encoded_stream, is_json, json_bytes, shown
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import Completion, DataSample, Rollout, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import ROLE_IDS, ROLES, STREAMS, TrainingSample

FORMAT = 1


@dataclass(kw_only=True, slots=True)
class RecordedRollout:
    rollout: Rollout
    """As it was, but for what JSON changes in env_input and info: tuples are lists, keys strings, other objects their repr."""
    outcome: str | None
    """Column of the ledger it ended in, such as "trained" or "filtered/zero_advantage"."""
    admitted_version: int
    """Policy version the generators held when its group was admitted."""
    left_out: str | None = None
    """Why the rollout has no turns and no samples here; None: it is whole."""


def encode_rollout(rollout: Rollout, *, outcome: str | None, admitted_version: int, max_bytes: int) -> bytes:
    """One line, its newline included. Above ``max_bytes`` turns and samples are left out, and ``left_out`` says so."""
    header = {
        "format": FORMAT,
        "rollout_id": rollout.rollout_id,
        "task": rollout.task_name,
        "outcome": outcome,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "reward_components": dict(rollout.reward_components),
        "error": rollout.error,
        "group_id": rollout.group_id,
        "index_in_group": rollout.index_in_group,
        "admitted_version": admitted_version,
        "completion_tokens": rollout.completion_tokens,
    }
    data = rollout.data_sample
    if data is not None:
        header["sample_id"] = data.sample_id
    # In pieces: one call of the encoder holds the interpreter until it is done.
    head = json_bytes(header)[:-1]
    pieces, size = [head], len(head)
    for piece in _body(rollout):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            reason = f"turns, samples and env_input: more than {max_bytes:,} bytes (recorder.max_rollout_bytes)"
            rest = json_bytes({"turn_count": len(rollout.turns), "left_out": reason})
            return head + b"," + rest[1:] + b"\n"
    return b"".join(pieces) + b"}\n"


def decode_rollout(line: bytes | str) -> RecordedRollout:
    """
    Raises:
        ValueError: not a line of `encode_rollout`'s, or torn.
    """
    try:
        record = json.loads(line)
        if record["format"] != FORMAT:
            raise ValueError(f"a record of format {record['format']}, want {FORMAT}")
        data = None
        if "sample_id" in record:
            env_input = record.get("env_input", record.get("env_input_repr"))
            data = DataSample(sample_id=record["sample_id"], env_input=env_input, info=record.get("info", {}))
        rollout = Rollout(
            group_id=record["group_id"],
            index_in_group=record["index_in_group"],
            task_name=record["task"],
            data_sample=data,
            turns=_decoded_turns(record.get("turns", [])),
            status=RolloutStatus(record["status"]),
            reward=record["reward"],
            reward_components=record["reward_components"],
            error=record["error"],
        )
        rollout.samples = _decoded_samples(record.get("samples", []), rollout)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a rollout's record: {type(error).__name__}: {error}") from error
    return RecordedRollout(
        rollout=rollout,
        outcome=record["outcome"],
        admitted_version=record["admitted_version"],
        left_out=record.get("left_out"),
    )


def _body(rollout: Rollout) -> Iterable[bytes]:
    """What follows the header, as pieces of JSON text."""
    data = rollout.data_sample
    if data is not None:
        if is_json(data.env_input):
            yield b',"env_input":' + json_bytes(data.env_input)
        else:
            yield b',"env_input_repr":' + json_bytes(shown(data.env_input))
        yield b',"info":' + json_bytes(data.info)
    yield b',"turns":['
    before: RolloutTurn | None = None
    for turn in rollout.turns:
        yield b"," * (before is not None) + json_bytes(_turn(turn, before))
        before = turn
    yield b'],"samples":['
    derived = _derived_samples(rollout, [sample.temperature for sample in rollout.samples])
    for index, sample in enumerate(rollout.samples):
        base = derived[index] if index < len(derived) else None
        yield b"," * (index > 0) + json_bytes(_sample(sample, base))
    yield b"]"


# ---- turns


def _turn(turn: RolloutTurn, before: RolloutTurn | None) -> dict[str, Any]:
    kept_tokens = _shared(turn.prompt_token_ids, _tokens(before))
    kept_messages = _shared_messages(turn.prompt_messages, _conversation(before))
    record = {
        "messages_kept": kept_messages,
        "messages": turn.prompt_messages[kept_messages:],
        "assistant_message": turn.assistant_message,
        "env_messages": turn.env_messages,
        "finish_reason": turn.completion.finish_reason,
        "reward_components": turn.reward_components,
        "generate_s": turn.generate_s,
        "env_s": turn.env_s,
        "prompt_kept": kept_tokens,
        "prompt_ids": turn.prompt_token_ids[kept_tokens:].tolist(),
        "prompt_spans": _spans(turn, before, kept_tokens),
        "completion_ids": turn.completion.token_ids.tolist(),
        "logprobs": encoded_stream(turn.completion.logprobs, np.float32),
        "policy_versions": encoded_stream(turn.completion.policy_versions, np.int32),
    }
    if before is None or turn.tools != before.tools:
        record["tools"] = turn.tools
    return record


def _decoded_turns(records: list[dict[str, Any]]) -> list[RolloutTurn]:
    turns: list[RolloutTurn] = []
    for record in records:
        before = turns[-1] if turns else None
        prompt = np.concatenate([_tokens(before)[: record["prompt_kept"]], np.asarray(record["prompt_ids"], np.int32)])
        role_ids, is_content = _decoded_spans(record["prompt_spans"], before, len(prompt))
        turns.append(
            RolloutTurn(
                prompt_messages=_conversation(before)[: record["messages_kept"]] + record["messages"],
                prompt_token_ids=prompt,
                prompt_role_ids=role_ids,
                prompt_is_content=is_content,
                completion=Completion(
                    token_ids=np.asarray(record["completion_ids"], np.int32),
                    logprobs=decoded_stream(record["logprobs"], np.float32),
                    policy_versions=decoded_stream(record["policy_versions"], np.int32),
                    finish_reason=record["finish_reason"],
                ),
                assistant_message=record["assistant_message"],
                tools=record["tools"] if before is None else record.get("tools", before.tools),
                env_messages=record["env_messages"],
                reward_components=record["reward_components"],
                generate_s=record["generate_s"],
                env_s=record["env_s"],
            )
        )
    return turns


def _tokens(turn: RolloutTurn | None) -> np.ndarray:
    """Prompt and completion."""
    if turn is None:
        return np.empty(0, np.int32)
    return np.concatenate([turn.prompt_token_ids, turn.completion.token_ids]).astype(np.int32, copy=False)


def _conversation(turn: RolloutTurn | None) -> list:
    return [] if turn is None else [*turn.prompt_messages, turn.assistant_message, *turn.env_messages]


def _shared(ids: np.ndarray, before: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(ids), len(before))
    differ = ids[:length] != before[:length]
    return int(differ.argmax()) if differ.any() else length


def _shared_messages(messages: list, before: list) -> int:
    """As _shared, by identity: the turns of a conversation hold the same messages."""
    count = 0
    for message, same in zip(messages, before, strict=False):
        if message is not same:
            break
        count += 1
    return count


def _spans(turn: RolloutTurn, before: RolloutTurn | None, kept: int) -> list[list]:
    """Runs of ``[count, role, is_content]``: over the whole prompt, or over what follows the kept tokens, where the turn before
    describes those alike."""
    role_ids, is_content = turn.prompt_role_ids, turn.prompt_is_content
    alike = all(
        np.array_equal(mine[:kept], theirs[:kept])
        for mine, theirs in zip((role_ids, is_content), _description(before), strict=True)
    )
    start = kept if alike else 0
    described = zip(role_ids[start:].tolist(), is_content[start:].tolist(), strict=True)
    runs = [(sum(1 for _ in run), role, content) for (role, content), run in groupby(described)]
    return [[count, ROLES[role] if role >= 0 else None, content] for count, role, content in runs]


def _decoded_spans(spans: list[list], before: RolloutTurn | None, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    counts = [count for count, _, _ in spans]
    kept = tokens - sum(counts)
    roles = np.array([ROLE_IDS.get(role, -1) for _, role, _ in spans], np.int8)
    contents = np.array([content for _, _, content in spans], bool)
    role_ids, is_content = _description(before)
    return (
        np.concatenate([role_ids[:kept], np.repeat(roles, counts)]),
        np.concatenate([is_content[:kept], np.repeat(contents, counts)]),
    )


def _description(turn: RolloutTurn | None) -> tuple[np.ndarray, np.ndarray]:
    """Role ids and is_content of the prompt and the completion."""
    if turn is None:
        return np.empty(0, np.int8), np.empty(0, bool)
    sampled = len(turn.completion.token_ids)
    return (
        np.concatenate([turn.prompt_role_ids, np.full(sampled, ROLE_IDS["assistant"], np.int8)]),
        np.concatenate([turn.prompt_is_content, np.ones(sampled, bool)]),
    )


# ---- samples


def _derived_samples(rollout: Rollout, temperatures: Sequence[float]) -> list[TrainingSample]:
    """What the turns alone give; nothing where they can't give any."""
    try:
        samples = samples_from_turns(rollout.turns, task_name=rollout.task_name, rollout_id=rollout.rollout_id, temperature=1.0)
    except ValueError:
        return []
    for sample, temperature in zip(samples, temperatures, strict=False):
        sample.temperature = temperature
    return samples


def _sample(sample: TrainingSample, base: TrainingSample | None) -> dict[str, Any]:
    record = {"tokens": len(sample), "temperature": sample.temperature}
    if base is None or len(base) != len(sample):
        record["from_turns"], base = False, None
    for name, stream in STREAMS.items():
        dtype = stream.dtype
        values, derived = getattr(sample, name), getattr(base, name, None)
        if values is None:
            if derived is not None:
                record[name] = None
        elif derived is None or bits_of(values, dtype).tobytes() != bits_of(derived, dtype).tobytes():
            record[name] = encoded_stream(values, dtype)
    return record


def _decoded_samples(records: list[dict[str, Any]], rollout: Rollout) -> list[TrainingSample]:
    derived = _derived_samples(rollout, [record["temperature"] for record in records]) if records else []
    samples = []
    for index, record in enumerate(records):
        streams = {name: decoded_stream(record[name], stream.dtype) for name, stream in STREAMS.items() if name in record}
        if record.get("from_turns", True):
            sample = derived[index]
            for name, values in streams.items():
                setattr(sample, name, values)
        else:
            sample = TrainingSample(
                temperature=record["temperature"], task_name=rollout.task_name, rollout_id=rollout.rollout_id, **streams
            )
        samples.append(sample)
    return samples
