"""What ``controller.json`` of a checkpoint holds: everything a resumed run needs that is not the trainer's.

Plain records. Each part of the run makes its own (``state``) and continues from it (``restore``). The samples of finished
groups lie beside it (`groups.py`).
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.experiments.rl.errors import RunError

CONTROLLER_FILE = "controller.json"
FORMAT = 3
"""Of the records below. A change that an older file does not meet takes the next number."""


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A field that is missing or unknown is an error: nothing is resumed by guessing."""


class SlotState(Record):
    """A group that the pacer has admitted, and that no step has taken."""

    group_id: str
    admitted_version: int
    frozen: bool
    finished: bool
    parts: int = 1
    """Groups that share the slot."""


class LedgerEntry(Record):
    """A rollout without a column: in flight or buffered."""

    rollout_id: str
    task: str
    dispatched_version: int
    """Policy version the generators held when it was dispatched."""


class LedgerState(Record):
    dispatched: dict[str, int]
    ended: dict[str, dict[str, int]]
    """Rollouts by task and column."""
    open: list[LedgerEntry]
    replayed: dict[str, int] = {}
    """Rollouts trained on again, by task."""


class DropsState(Record):
    """Groups that were dropped since one was kept."""

    groups: Fraction
    """A group may hold a share of a slot."""
    ties: Fraction
    """Those that were dropped because their rewards tie, in tasks that had a signal before."""
    columns: list[tuple[str, int]]
    """Their rollouts by column of the ledger."""
    rewards: list[tuple[float, int]]


class NoSignalState(Record):
    """Groups without a learning signal since the start of the run."""

    signal_seen: bool
    groups: Fraction
    mean_rewards: list[tuple[float, int]]


class MasteryState(Record):
    ties: dict[str, list[float]]
    """Mean rewards of the ties of each task since its last group with a signal."""
    signals: dict[str, tuple[int, float]]
    """Groups with a signal, and the sum of their mean rewards."""


class StallState(Record):
    drops: DropsState
    emptied: DropsState
    """The same after a step had taken them."""
    no_signal: NoSignalState
    mastery: MasteryState


class OpenGroupState(Record):
    """A group that was dispatched and has not left. Its rollouts are run again, unless it has finished."""

    group_id: str
    task: str
    example: Any
    """Its DataSample as JSON; None: the sampler had not given it yet."""
    example_is_json: bool
    """Whether that is the whole example; else only its dataset can give it again."""
    rollout_ids: list[str]
    """Rollouts that are in no column of the ledger."""
    outcomes: dict[str, str]
    """Column of each rollout that has ended."""
    finished: bool
    """Scored: its rollouts are in the file of finished groups."""
    signal: bool


class RolloutLoopState(Record):
    started: int
    """Groups started since the run began: the number of the next."""
    groups: list[OpenGroupState]
    """In the order they were dispatched."""
    slots: list[SlotState]
    """In the order they were admitted."""
    ledger: LedgerState
    stall: StallState | None
    """The alarms' part: who takes the checkpoint fills it in."""
    dropped_groups: int
    filter_matches: dict[str, int]
    filter_tokens: dict[str, int]
    samplers: dict[str, Any]
    """What each task's sampler says of itself."""
    mix: Any
    replay: list[tuple[str, int, int]] = []
    """Stored groups, oldest first: id, oldest version, replays. They are in the file of finished groups."""


class ValidationReport(Record):
    """An evaluation that has ended."""

    step: int
    """Version of the policy it began with."""
    reward: float | None
    """Mean over tasks of their avg@k; None when nothing was scored."""
    metrics: dict[str, int | float]


class ValidatorState(Record):
    begun: int
    """Latest step whose evaluations were begun."""
    running: list[str]
    """Tasks whose evaluation had not ended."""
    left_out: dict[str, int]
    reports: list[ValidationReport]
    """That are in no step's metrics."""


class MismatchState(Record):
    """What the first versions have shown at one age, from which its bound is derived."""

    age: int
    distances: list[float]
    """Nats: the largest over the replicas, of each version."""


class RunState(Record):
    format: int
    """FORMAT of the library that wrote it."""
    step: int
    """Optimizer steps taken: the policy version of the trainer's weights."""
    seed: int
    rollouts: RolloutLoopState
    validator: ValidatorState
    mismatch: list[MismatchState]
    first_validation: float | None
    last_validation: float | None
    offsets: dict[str, int]
    """Size of each file that the run appends to, by its path in the run folder."""


def write_state(folder: Path, state: RunState) -> None:
    # json's encoder: msgspec's refuses half a character, which a user's text may hold.
    (folder / CONTROLLER_FILE).write_text(
        json.dumps(msgspec.to_builtins(state, enc_hook=str), indent=1) + "\n", encoding="ascii"
    )


def read_state(folder: Path) -> RunState:
    """
    Raises:
        RunError: another version of the library wrote it, or it can't be read.
    """
    path = folder / CONTROLLER_FILE
    try:
        data = json.loads(path.read_bytes())
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise RunError(
                f"{path} has format {found!r}, want {FORMAT}: resume with the version of the library that wrote it"
            )
        return msgspec.convert(data, RunState, dec_hook=lambda kind, value: kind(value))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read ({error}): resume from another checkpoint") from error
