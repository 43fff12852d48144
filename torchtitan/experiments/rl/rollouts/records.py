"""A rollout as one line of JSON, and the same rollout from that line.

1. An array is ``{dtype: base64 of its bytes}``, such as ``{"<f4": "AACAPw=="}``: each float32 is exact, NaN and infinities too.
   ``np.frombuffer(base64.b64decode(text), dtype)`` gives it again, of several dimensions too: ``{"(4, 2)|u1": ...}``.
2. Nothing is written twice. Of a turn's prompt, only what follows the part that the turn before gives is written, so a record
   grows with a conversation's length and not with its square. Of a sample, only what `samples_from_turns` does not give::

       turns    (P1, C1)  (P1+C1+E2, C2)        written    P1, C1;  kept = len(P1+C1), E2, C2

3. A value of the user's that JSON can't hold is written as its ``repr``.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec
import numpy as np

from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutStatus,
    RolloutTurn,
)
from torchtitan.experiments.rl.types import ROLE_IDS, STREAMS, TrainingSample

RecordKind = Literal["training", "validation"]
"""Why a rollout was run. One of validation is in no ledger and no batch."""
MAX_DEPTH = 20
"""Levels that are kept of a value that JSON can't hold."""
SPARE_BYTES = 1024
"""Room for the text of ``left_out`` in a line that is shortened."""


@dataclass(kw_only=True, slots=True)
class RecordedRollout:
    rollout: Rollout
    """As it was, but for what JSON changes in env_input and info: tuples are lists, keys strings, other objects their repr."""
    outcome: str | None
    """Column of the ledger it ended in, such as "trained" or "filtered/pre/zero_advantage"; "validation": it is in none."""
    admitted_version: int
    """Policy version the generators held when its group was admitted."""
    left_out: str | None = None
    """Columns of the row, or "turns and samples", that are not here, and why; None: the rollout is whole."""
    kind: RecordKind = "training"


class TurnRecord(msgspec.Struct):
    kept: dict[str, int]
    """By field: how many entries at its beginning are those that the turn before gives. The field holds the others."""
    arrays: dict[str, np.ndarray]
    completion: Completion
    fields: Any
    """The turn's others, by name."""


class SampleRecord(msgspec.Struct, omit_defaults=True):
    temperature: float
    streams: dict[str, np.ndarray | None]
    """Those that are not what the turns give."""
    reference_ids: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    adapter: str = ""


class RolloutRecord(msgspec.Struct, kw_only=True):
    format: Literal[2] = 2
    kind: RecordKind = "training"
    rollout_id: str
    outcome: str | None
    admitted_version: int
    turn_count: int
    completion_tokens: int
    left_out: str | None = None
    rollout: Any
    """Its fields by name, but for those below."""
    data_sample: Any
    turns: list[TurnRecord] = []
    samples: list[SampleRecord] = []


_OF_ROLLOUT = tuple(
    field.name for field in fields(Rollout) if field.name not in ("data_sample", "turns", "samples")
)
_OF_TURN = tuple(field.name for field in fields(RolloutTurn))
_OF_RECORD = ("outcome", "admitted_version", "left_out", "kind")
"""Names of fields. ``dataclasses.fields`` takes longer than to read them, for each rollout."""


def encode_rollout(
    rollout: Rollout,
    *,
    outcome: str | None,
    admitted_version: int,
    max_bytes: int,
    kind: RecordKind = "training",
) -> bytes:
    """Return one line, its newline included.

    A line of ``max_bytes`` or more is shortened: by the largest columns of the row if that is enough, else by turns and
    samples, and by the row too only where it is too long by itself.
    """
    data = rollout.data_sample
    given = _given_samples(rollout, len(rollout.samples))
    record = RolloutRecord(
        kind=kind,
        rollout_id=rollout.rollout_id,
        outcome=outcome,
        admitted_version=admitted_version,
        turn_count=len(rollout.turns),
        completion_tokens=rollout.completion_tokens,
        rollout=_json({name: getattr(rollout, name) for name in _OF_ROLLOUT}),
        data_sample=None if data is None else _example_record(data),
        turns=[
            _turn_record(*pair) for pair in zip(rollout.turns, [None, *rollout.turns], strict=False)
        ],
        samples=[_sample_record(*pair) for pair in zip(rollout.samples, given, strict=True)],
    )
    line = _encoded(record)
    if len(line) >= max_bytes:
        line = _shortened(record, data, excess=len(line) - max_bytes, max_bytes=max_bytes)
    return line + b"\n"


def _shortened(
    record: RolloutRecord, data: DataSample | None, *, excess: int, max_bytes: int
) -> bytes:
    """Return the line of a record that is ``excess`` bytes too long, with what it leaves out in ``left_out``."""
    limit = f"more than {max_bytes:,} bytes (recorder.max_rollout_bytes)"
    if data is not None:
        rest, columns = _without_largest(data.env_input, excess + SPARE_BYTES)
        example = _example_record(data) | {"env_input": _json(rest, _shown)}
        line = _encoded(
            msgspec.structs.replace(
                record, data_sample=example, left_out=f"{', '.join(columns)}: {limit}"
            )
        )
        if len(line) < max_bytes:
            return line
    bare = msgspec.structs.replace(
        record, turns=[], samples=[], left_out=f"turns and samples: {limit}"
    )
    line = _encoded(bare)
    if len(line) >= max_bytes and data is not None:
        bare.left_out = f"turns, samples and env_input: {limit}"
        bare.data_sample = {"sample_id": _json(data.sample_id), "env_input": None}
        line = _encoded(bare)
    return line


def _without_largest(env_input: Any, excess: int) -> tuple[Any, list[str]]:
    """Return a row with None for its largest columns, so that it is shorter by ``excess`` bytes, and their paths."""
    if not isinstance(env_input, dict):
        return None, ["env_input"]
    sizes = {column: len(bytes(_json(value, _shown))) for column, value in env_input.items()}
    rest, columns = dict(env_input), []
    for column in sorted(sizes, key=lambda column: -sizes[column]):
        if excess <= 0:
            break
        rest[column] = None
        columns.append(f"env_input.{printable_line(str(column))}")
        excess -= sizes[column]
    return rest, columns


def _encoded(record: RolloutRecord) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encoded_array)


def decode_rollout(line: bytes | str) -> RecordedRollout:
    """
    Raises:
        ValueError: not a line of `encode_rollout`'s.
    """
    # json's decoder: msgspec's refuses half a character, which a model may say.
    record = msgspec.convert(json.loads(line), RolloutRecord, dec_hook=_decoded_array)
    try:
        rollout = Rollout(**record.rollout | {"status": RolloutStatus(record.rollout["status"])})
        rollout.data_sample = (
            None if record.data_sample is None else DataSample(**record.data_sample)
        )
        for turn in record.turns:
            rollout.turns.append(_turn(turn, rollout.turns[-1] if rollout.turns else None))
        of_rollout: dict[str, Any] = {
            "task_name": rollout.task_name,
            "rollout_id": rollout.rollout_id,
        }
        for sample, given in zip(
            record.samples, _given_samples(rollout, len(record.samples)), strict=True
        ):
            others = {
                name: getattr(sample, name)
                for name in ("temperature", "reference_ids", "trainer_logprobs", "adapter")
            }
            streams = {} if given is None else {name: getattr(given, name) for name in STREAMS}
            rollout.samples.append(
                TrainingSample(**of_rollout | streams | sample.streams, **others)
            )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a rollout's record: {type(error).__name__}: {error}") from error
    return RecordedRollout(rollout=rollout, **{name: getattr(record, name) for name in _OF_RECORD})


def plain_example(example: DataSample) -> dict[str, Any]:
    """Its fields as JSON values, as in a record of its rollouts."""
    return {name: json.loads(bytes(value)) for name, value in _example_record(example).items()}


def _example_record(example: DataSample) -> dict[str, msgspec.Raw]:
    return {
        "sample_id": _json(example.sample_id),
        "env_input": _json(example.env_input, _shown),
        "info": _json(example.info),
    }


_GIVEN_AT_THE_START: dict[str, list | np.ndarray] = {
    "prompt_messages": [],
    "tools": [],
    "prompt_token_ids": np.empty(0, np.int32),
    "prompt_role_ids": np.empty(0, np.int8),
    "prompt_is_content": np.empty(0, np.bool_),
    "prompt_message_indices": np.empty(0, np.int16),
}


def _given(turn: RolloutTurn | None) -> Mapping[str, list | np.ndarray]:
    """What the next turn's fields begin with where the conversation goes on."""
    if turn is None:
        return _GIVEN_AT_THE_START
    sampled = len(turn.completion.token_ids)
    indices = (
        np.empty(0, np.int16)
        if turn.prompt_message_indices is None
        else turn.prompt_message_indices
    )
    return {
        "prompt_messages": [*turn.prompt_messages, turn.assistant_message, *turn.env_messages],
        "tools": turn.tools or [],
        "prompt_token_ids": np.append(turn.prompt_token_ids, turn.completion.token_ids),
        "prompt_role_ids": np.append(
            turn.prompt_role_ids, np.full(sampled, ROLE_IDS["assistant"], np.int8)
        ),
        "prompt_is_content": np.append(turn.prompt_is_content, np.ones(sampled, np.bool_)),
        "prompt_message_indices": np.append(
            indices, np.full(sampled, len(turn.prompt_messages), np.int16)
        ),
    }


def _shared(entries: list | np.ndarray, given: list | np.ndarray) -> int:
    """Length of the common prefix; of messages and tools by identity: turns of a conversation hold the same ones."""
    if not len(entries) or not len(given):
        return 0
    if isinstance(entries, list):
        differ = [entry is not other for entry, other in zip(entries, given, strict=False)]
    else:
        differ = entries[: len(given)] != given[: len(entries)]
    return int(np.argmax(np.append(differ, True)))


def _turn_record(turn: RolloutTurn, before: RolloutTurn | None) -> TurnRecord:
    values = {name: getattr(turn, name) for name in _OF_TURN}
    given = {name: entries for name, entries in _given(before).items() if values[name] is not None}
    kept = {name: _shared(values[name], entries) for name, entries in given.items()}
    values |= {name: values[name][count:] for name, count in kept.items() if count}
    completion = values.pop("completion")
    arrays = {name: values.pop(name) for name in kept if isinstance(values[name], np.ndarray)}
    return TurnRecord(kept, arrays, completion, _json(values))


def _turn(record: TurnRecord, before: RolloutTurn | None) -> RolloutTurn:
    values, given = record.fields | record.arrays, _given(before)
    for name, count in record.kept.items():
        start, rest = given[name][:count], values[name]
        values[name] = start + rest if isinstance(rest, list) else np.append(start, rest)
    return RolloutTurn(**values, completion=record.completion)


def _given_samples(rollout: Rollout, count: int) -> list[TrainingSample | None]:
    """The first ``count`` samples that the turns give; None in place of each that they don't."""
    if not count:  # as of turns whose completions are not aligned, of which no sample can be made
        return []
    samples = samples_from_turns(
        rollout.turns, task_name=rollout.task_name, rollout_id=rollout.rollout_id, temperature=1.0
    )
    return ([*samples] + [None] * count)[:count]


def _sample_record(sample: TrainingSample, given: TrainingSample | None) -> SampleRecord:
    changed = {}
    for name, declared in STREAMS.items():
        value, usual = getattr(sample, name), getattr(given, name, None)
        if value is not None:
            value = np.asarray(value, None if declared.dims else declared.dtype)
        # By their bits: a NaN is itself, and 0.0 is not -0.0.
        if given is None or (
            value is not usual
            and (value is None or usual is None or value.tobytes() != usual.tobytes())
        ):
            changed[name] = value
    return SampleRecord(
        sample.temperature, changed, sample.reference_ids, sample.trainer_logprobs, sample.adapter
    )


def _encoded_array(array: np.ndarray) -> dict[str, bytes]:
    return {f"{array.shape[1:] if array.ndim > 1 else ''}{array.dtype.str}": array.tobytes()}


def _decoded_array(_: type, value: dict[str, str]) -> np.ndarray:
    ((dtype, data),) = value.items()
    return np.frombuffer(base64.b64decode(data), dtype).copy()


def _json(value: Any, otherwise: Callable[[Any], Any] | None = None) -> msgspec.Raw:
    """JSON of a user's value, or of ``otherwise(value)`` if JSON can't hold it. In ASCII: a text may hold half a character."""
    try:
        return msgspec.Raw(_DUMPS(value))
    except (TypeError, ValueError, RecursionError):
        return msgspec.Raw(_DUMPS((otherwise or _shown_in_parts)(value)))


def json_value(value: Any) -> Any:
    """A user's value as JSON holds it: a text in place of each part that it can't hold. Any process can be sent it."""
    return json.loads(bytes(_json(value)))


def _python_value(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_DUMPS = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_python_value).encode


def _shown_in_parts(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """A text in place of each part that JSON can't hold. ``inside``: ids of what the value lies in, which may be itself."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    ends = id(value) in inside or len(inside) == MAX_DEPTH
    if isinstance(value, dict) and not ends:
        return {
            str(key): _shown_in_parts(entry, (*inside, id(value))) for key, entry in value.items()
        }
    if isinstance(value, list | tuple) and not ends:
        return [_shown_in_parts(entry, (*inside, id(value))) for entry in value]
    return _shown(value)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # a user's class
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
