"""What the index has of the lines of a run's files. A run folder may come from anywhere: what is no record is passed over."""

import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE

logger = logging.getLogger(__name__)

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What SQLite holds."""


class _End(msgspec.Struct):
    """Of a rollout: a line of the ledger."""

    rollout_id: str
    task: str
    dispatched_version: Int64
    column: str
    ended_version: Int64


class _Rewarded(msgspec.Struct):
    group_id: str
    task_name: str
    status: str
    reward: float | None = None
    error: str | None = None


class _Example(msgspec.Struct):
    sample_id: Any


class _Line(msgspec.Struct):
    """What the index has of a rollout's record; the decoder passes over the rest."""

    rollout_id: str
    outcome: str | None
    admitted_version: Int64
    turn_count: Int64
    completion_tokens: Int64
    rollout: _Rewarded
    data_sample: _Example | None = None
    kind: str = "training"


_DECODE = msgspec.json.Decoder(_Line).decode


def metrics_rows(line: bytes) -> Iterator[tuple]:
    """Of the table metrics: name, step, value."""
    record = _parsed(line)
    step = record.pop("step", None) if isinstance(record, dict) else None
    if not isinstance(step, int) or abs(step) >= 2**63:
        logger.info("%s: no metrics of a step: %r", METRICS_FILE, line[:80])
        return
    for name, value in record.items():
        if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
            yield _stored(name), step, None if value is None else float(value)


def ledger_rows(line: bytes) -> Iterator[tuple]:
    """Of the table ledger."""
    try:
        end = msgspec.convert(_parsed(line), _End)
    except msgspec.MsgspecError as error:
        logger.info("%s: %s", LEDGER_FILE, error)
        return
    yield _stored(end.rollout_id), _stored(end.task), end.dispatched_version, _stored(end.column), end.ended_version


def rollout_rows(place: int, number: int, line: bytes) -> Iterator[tuple]:
    """Of the table rollouts: line ``number`` of the group at ``place``."""
    try:
        try:
            record = _DECODE(line)
        except msgspec.MsgspecError:  # half a character, which msgspec refuses
            record = msgspec.convert(_parsed(line), _Line)
    except msgspec.MsgspecError as error:
        logger.info("%s at %d, line %d: %s", ROLLOUTS_FILE, place, number, error)
        return
    own = record.rollout
    yield (
        place,
        number,
        _stored(record.rollout_id),
        _stored(own.group_id),
        _stored(own.task_name),
        _stored(own.status),
        None if record.outcome is None else _stored(record.outcome),
        record.admitted_version,
        own.reward,
        record.turn_count,
        record.completion_tokens,
        None if own.error is None else _stored(own.error),
        None if record.data_sample is None else _stored(str(record.data_sample.sample_id)),
        _stored(own.group_id.rpartition("@")[2]) if record.kind == "validation" else None,
    )


def _parsed(line: bytes) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _stored(text: str) -> str:
    """SQLite takes no halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()
