"""Writes a rollout as one line of JSON, and reads the same rollout from it.

The structs of this file are the format. Three rules keep a line exact and short:

1. An array is ``{dtype: base64 of its bytes}``, such as ``{"<f4": "AACAPw=="}``, so each float32 is
   exact, NaN and infinities too. ``np.frombuffer(base64.b64decode(text), dtype)`` reads it, also
   where it has several dimensions: ``{"(4, 2)|u1": ...}``.
2. Nothing is written twice. A turn is written without the beginning of its prompt that the turn
   before it gives, so a line grows with a conversation's length and not with its square. A sample
   is written without the streams that `samples_from_turns` makes of the turns::

       turns      (P1, C1)   (P1+C1+E2, C2)
       written     P1, C1     kept = len(P1+C1), E2, C2

3. A value of user code that JSON can't hold is written as a text (`json_values.py`).
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.rollouts.json_values import is_json, json_text, shown
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
"""Purpose of a rollout. A rollout of a validation is in no ledger and no batch."""

TRAINED = "trained"
"""Outcome of a rollout that an optimizer step was trained on."""
SPARE_BYTES = 1024
"""Room for the text of ``left_out`` in a line that is shortened."""

UserValue = Any
"""Type of a field that holds anything from user code. It is written by `json_text`; read again, it
is what JSON holds of it: tuples are lists, keys are strings, other objects are their ``repr``."""


@dataclass(kw_only=True, slots=True)
class RecordedRollout:
    """One line of a file of rollouts."""

    rollout: Rollout
    """The rollout as it was, but for what JSON changes in values of user code."""
    outcome: str | None
    """Column of the ledger in which the rollout ended, such as "trained" or
    "filtered/pre/zero_advantage"; "validation" for a validation's. None if it has not ended in
    one."""
    admitted_version: int
    """Policy version that the generators held when the rollout's group was admitted."""
    trained_step: int | None = None
    """Optimizer step that trained on the rollout; None if none did. A step that trains on it again
    (``replay``) is not recorded."""
    left_out: str | None = None
    """Columns of the row, or "turns and samples", that a long line lacks, and the reason. None if
    the rollout is whole."""
    kind: RecordKind = "training"


class ExampleFields(msgspec.Struct, kw_only=True):
    """Fields of a DataSample."""

    sample_id: UserValue
    env_input: UserValue
    info: UserValue = {}


class RolloutFields(msgspec.Struct, kw_only=True):
    """Fields of a Rollout but its example, turns and samples."""

    group_id: str
    index_in_group: int
    task_name: str
    status: RolloutStatus
    reward: float | None = None
    reward_components: UserValue = {}
    error: UserValue = None
    traceback: UserValue = ""
    metadata: UserValue = {}
    static: bool = False
    answer: UserValue = None
    calls: dict[str, int] = {}
    refusals: dict[str, int] = {}


class KeptEntries(msgspec.Struct, kw_only=True):
    """Number of entries that a field of a RolloutTurn begins with and that are not written.

    The turn before gives them.
    """

    prompt_messages: int = 0
    tools: int = 0
    prompt_token_ids: int = 0
    prompt_role_ids: int = 0
    prompt_is_content: int = 0
    prompt_message_indices: int = 0


class PromptArrays(msgspec.Struct, kw_only=True):
    """Arrays of a RolloutTurn, without the kept entries."""

    prompt_token_ids: np.ndarray
    prompt_role_ids: np.ndarray
    prompt_is_content: np.ndarray
    prompt_message_indices: np.ndarray | None = None


class TurnFields(msgspec.Struct, kw_only=True):
    """Fields of a RolloutTurn but its arrays and completion, without the kept entries."""

    prompt_messages: UserValue
    assistant_message: UserValue
    tools: UserValue = None
    env_messages: UserValue = []
    reward_components: UserValue = {}
    generate_s: float = 0.0
    env_s: float = 0.0
    untrained: str | None = None
    call: UserValue = None


class TurnRecord(msgspec.Struct, kw_only=True):
    """One turn, as far as the turn before does not give it."""

    kept: KeptEntries
    arrays: PromptArrays
    completion: Completion
    fields: TurnFields


class SampleRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One training sample, as far as the turns do not give it."""

    temperature: float
    streams: dict[str, np.ndarray | None]
    """Streams, by name, that are not those of the sample that the turns give."""
    reference_ids: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    adapter: str = ""


class RolloutRecord(msgspec.Struct, kw_only=True):
    """One line."""

    format: Literal[2] = 2
    kind: RecordKind = "training"
    rollout_id: str
    outcome: str | None
    admitted_version: int
    trained_step: int | None = None
    turn_count: int
    completion_tokens: int
    left_out: str | None = None
    rollout: RolloutFields
    data_sample: ExampleFields | None
    turns: list[TurnRecord] = []
    samples: list[SampleRecord] = []


def encode_rollout(
    rollout: Rollout,
    *,
    outcome: str | None,
    admitted_version: int,
    max_bytes: int,
    kind: RecordKind = "training",
    trained_step: int | None = None,
) -> bytes:
    """Return the rollout's line, with its newline.

    A line of ``max_bytes`` or more is shortened. It loses the largest columns of its row if that is
    enough, else its turns and samples, and then its row too if that alone is too long.
    """
    example = rollout.data_sample
    record = RolloutRecord(
        kind=kind,
        rollout_id=rollout.rollout_id,
        outcome=outcome,
        admitted_version=admitted_version,
        trained_step=trained_step,
        turn_count=len(rollout.turns),
        completion_tokens=rollout.completion_tokens,
        rollout=_written_fields(RolloutFields, rollout),
        data_sample=None if example is None else _written_example(example, example.env_input),
        turns=_turn_records(rollout),
        samples=_sample_records(rollout),
    )
    line = _encode(record)
    if len(line) >= max_bytes:
        line = _shortened(record, example, excess=len(line) - max_bytes, max_bytes=max_bytes)
    return line + b"\n"


def decode_rollout(line: bytes | str) -> RecordedRollout:
    """Return the rollout of a line.

    Raises:
        ValueError: the line is not one of `encode_rollout`, or is of another format.
    """
    # The standard library parses the text: msgspec's parser refuses half of a character, which a
    # model may say.
    record = msgspec.convert(json.loads(line), RolloutRecord, dec_hook=_decode_array)
    rollout = Rollout(**msgspec.structs.asdict(record.rollout))
    if record.data_sample is not None:
        rollout.data_sample = DataSample(**msgspec.structs.asdict(record.data_sample))
    before: RolloutTurn | None = None
    for turn_record in record.turns:
        before = _read_turn(turn_record, before)
        rollout.turns.append(before)
    rollout.samples = _read_samples(record.samples, rollout)
    return RecordedRollout(
        rollout=rollout,
        outcome=record.outcome,
        admitted_version=record.admitted_version,
        trained_step=record.trained_step,
        left_out=record.left_out,
        kind=record.kind,
    )


def plain_example(example: DataSample) -> dict[str, Any]:
    """Return an example's fields as they are read from a record of its rollouts."""
    written = msgspec.structs.asdict(_written_example(example, example.env_input))
    return {name: json.loads(bytes(text)) for name, text in written.items()}


def is_json_example(example: DataSample) -> bool:
    """Return True if JSON can hold the whole example, so that `plain_example` is equal to it."""
    try:
        return all(is_json(getattr(example, field.name)) for field in fields(example))
    except RecursionError:  # it contains itself, and its group fails for that
        return False


# ---- arrays and values of user code: hooks of msgspec


def _encode(record: RolloutRecord) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_numpy)


def _encode_numpy(value: object) -> object:
    if isinstance(value, np.generic):  # such as a reward of a task's own score_group
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} in a record")
    shape = str(value.shape[1:]) if value.ndim > 1 else ""
    return {shape + value.dtype.str: value.tobytes()}


def _decode_array(_: type, value: object) -> np.ndarray:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("want an array as {dtype: base64}")
    ((dtype, text),) = value.items()
    return np.frombuffer(base64.b64decode(text), dtype).copy()


def _raw_json(value: UserValue) -> msgspec.Raw:
    return msgspec.Raw(json_text(value))


Fields = TypeVar("Fields", RolloutFields, TurnFields)

_USER_FIELDS = {
    struct: {field.name for field in msgspec.structs.fields(struct) if field.type is UserValue}
    for struct in (RolloutFields, TurnFields)
}


def _written_fields(struct: type[Fields], source: Rollout | RolloutTurn, **changes: list) -> Fields:
    """Return the struct of a record's fields, those of user code as JSON text.

    Args:
        changes: values in place of the record's own, by field.
    """
    values: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value = changes[name] if name in changes else getattr(source, name)
        values[name] = _raw_json(value) if name in _USER_FIELDS[struct] else value
    return struct(**values)


def _written_example(example: DataSample, env_input: UserValue) -> ExampleFields:
    # A row is of use only as a whole: one that JSON can't hold is its repr.
    return ExampleFields(
        sample_id=_raw_json(example.sample_id),
        env_input=msgspec.Raw(json_text(env_input, substitute=shown)),
        info=_raw_json(example.info),
    )


# ---- turns: what follows the turn before


def _turn_records(rollout: Rollout) -> list[TurnRecord]:
    records = []
    before: RolloutTurn | None = None
    for turn in rollout.turns:
        records.append(_turn_record(turn, before))
        before = turn
    return records


def _turn_record(turn: RolloutTurn, before: RolloutTurn | None) -> TurnRecord:
    kept: dict[str, int] = {}
    rest: dict[str, Any] = {}
    for name in KeptEntries.__struct_fields__:
        rest[name] = getattr(turn, name)
    if before is not None:
        for name, given in _continuation(before).items():
            kept[name] = _common_length(rest[name], given)
            if kept[name]:
                rest[name] = rest[name][kept[name] :]
    return TurnRecord(
        kept=KeptEntries(**kept),
        arrays=PromptArrays(**{name: rest[name] for name in PromptArrays.__struct_fields__}),
        completion=turn.completion,
        fields=_written_fields(
            TurnFields, turn, prompt_messages=rest["prompt_messages"], tools=rest["tools"]
        ),
    )


def _read_turn(record: TurnRecord, before: RolloutTurn | None) -> RolloutTurn:
    values = msgspec.structs.asdict(record.fields) | msgspec.structs.asdict(record.arrays)
    if before is not None:
        for name, given in _continuation(before).items():
            count, rest = getattr(record.kept, name), values[name]
            if count and rest is not None:
                start = given[:count]
                values[name] = start + rest if isinstance(rest, list) else np.append(start, rest)
    return RolloutTurn(**values, completion=record.completion)


def _continuation(turn: RolloutTurn) -> Mapping[str, list | np.ndarray]:
    """Return what the next turn's fields begin with if its prompt continues this turn."""
    sampled = len(turn.completion.token_ids)
    indices = turn.prompt_message_indices
    if indices is None:
        indices = np.empty(0, np.int16)
    roles = np.full(sampled, ROLE_IDS["assistant"], np.int8)
    return {
        "prompt_messages": [*turn.prompt_messages, turn.assistant_message, *turn.env_messages],
        "tools": turn.tools or [],
        "prompt_token_ids": np.append(turn.prompt_token_ids, turn.completion.token_ids),
        "prompt_role_ids": np.append(turn.prompt_role_ids, roles),
        "prompt_is_content": np.append(turn.prompt_is_content, np.ones(sampled, np.bool_)),
        "prompt_message_indices": np.append(
            indices, np.full(sampled, len(turn.prompt_messages), np.int16)
        ),
    }


def _common_length(entries: list | np.ndarray | None, given: list | np.ndarray) -> int:
    """Return the length of the common prefix.

    Messages and tools are compared by identity: the turns of a conversation hold the same objects.
    """
    if entries is None or not len(entries) or not len(given):
        return 0
    if isinstance(entries, list):
        differs = [entry is not other for entry, other in zip(entries, given, strict=False)]
    else:
        length = min(len(entries), len(given))
        differs = entries[:length] != given[:length]
    return int(np.argmax(np.append(differs, True)))


# ---- samples: what differs from those that the turns give


def _samples_given(rollout: Rollout, count: int) -> list[TrainingSample | None]:
    """Return ``count`` samples, those that the turns give and then None."""
    if count == 0:  # as of turns whose streams are not aligned: no sample can be made of them
        return []
    samples = samples_from_turns(
        rollout.turns, task_name=rollout.task_name, rollout_id=rollout.rollout_id, temperature=1.0
    )
    return ([*samples] + [None] * count)[:count]


def _sample_records(rollout: Rollout) -> list[SampleRecord]:
    given = _samples_given(rollout, len(rollout.samples))
    return [
        SampleRecord(
            temperature=sample.temperature,
            streams=_changed_streams(sample, usual),
            reference_ids=sample.reference_ids,
            trainer_logprobs=sample.trainer_logprobs,
            adapter=sample.adapter,
        )
        for sample, usual in zip(rollout.samples, given, strict=True)
    ]


def _changed_streams(
    sample: TrainingSample, given: TrainingSample | None
) -> dict[str, np.ndarray | None]:
    """Return the streams of a sample that are not those of the sample that the turns give."""
    changed = {}
    for name, declared in STREAMS.items():
        value = getattr(sample, name)
        if value is not None:
            value = np.asarray(value, None if declared.dims else declared.dtype)
        if given is None or not _same_bits(value, getattr(given, name)):
            changed[name] = value
    return changed


def _same_bits(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    """Return True if two streams have the same bits. A NaN is itself, and 0.0 is not -0.0."""
    if left is None or right is None:
        return left is right
    return left is right or left.tobytes() == right.tobytes()


def _read_samples(records: list[SampleRecord], rollout: Rollout) -> list[TrainingSample]:
    samples = []
    for record, given in zip(records, _samples_given(rollout, len(records)), strict=True):
        streams = {} if given is None else {name: getattr(given, name) for name in STREAMS}
        unknown = record.streams.keys() - STREAMS.keys()
        missing = {"token_ids", "loss_mask"} - streams.keys() - record.streams.keys()
        if unknown or missing:
            names = ", ".join(sorted(unknown | missing))
            raise ValueError(f"a recorded sample whose streams lack or do not know {names}")
        samples.append(
            TrainingSample(
                **streams | record.streams,
                task_name=rollout.task_name,
                rollout_id=rollout.rollout_id,
                temperature=record.temperature,
                reference_ids=record.reference_ids,
                trainer_logprobs=record.trainer_logprobs,
                adapter=record.adapter,
            )
        )
    return samples


# ---- lines that are too long


def _shortened(
    record: RolloutRecord, example: DataSample | None, *, excess: int, max_bytes: int
) -> bytes:
    """Return the line of a record that is ``excess`` bytes too long.

    ``left_out`` of the line says what it lacks.
    """
    limit = f"more than {max_bytes:,} bytes (recorder.max_rollout_bytes)"
    if example is not None:
        row, columns = _without_largest(example.env_input, excess + SPARE_BYTES)
        without_columns = msgspec.structs.replace(
            record,
            data_sample=_written_example(example, row),
            left_out=f"{', '.join(columns)}: {limit}",
        )
        line = _encode(without_columns)
        if len(line) < max_bytes:
            return line

    without_turns = msgspec.structs.replace(
        record, turns=[], samples=[], left_out=f"turns and samples: {limit}"
    )
    line = _encode(without_turns)
    if len(line) < max_bytes or example is None:
        return line

    bare = msgspec.structs.replace(
        without_turns,
        data_sample=ExampleFields(sample_id=_raw_json(example.sample_id), env_input=None),
        left_out=f"turns, samples and env_input: {limit}",
    )
    return _encode(bare)


def _without_largest(row: UserValue, excess: int) -> tuple[UserValue, list[str]]:
    """Return a row with None for its largest columns, ``excess`` bytes shorter, and their names."""
    if not isinstance(row, dict):
        return None, ["env_input"]
    sizes = {column: len(json_text(value, substitute=shown)) for column, value in row.items()}
    shorter = dict(row)
    columns = []
    for column in sorted(sizes, key=lambda column: -sizes[column]):
        if excess <= 0:
            break
        shorter[column] = None
        columns.append(f"env_input.{printable_line(str(column))}")
        excess -= sizes[column]
    return shorter, columns
