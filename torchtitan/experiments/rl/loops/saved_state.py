"""Records of ``controller.json``: the state of a checkpoint that is not the trainer's.

Each component of a run makes a record of its own (``state``) and continues from it (``restore``).
The rollouts of settled groups are in a file beside it (`saved_groups.py`).
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchtitan.experiments.rl.errors import RunError

CONTROLLER_FILE = "controller.json"
FORMAT = 5
"""Version of the records below. Raise it when a change makes older files unreadable."""
BestIs = Literal["highest", "lowest"]
"""Direction in which values of a metric are compared."""


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record that refuses unknown fields, and missing ones without a default.

    Nothing is resumed by guessing.
    """


class PacedGroup(Record):
    """A group that the pacer has admitted, and that holds places (`pacing.py`)."""

    group_id: str
    rollouts: int
    """Number of rollouts that were dispatched, which is the number of places that the group takes.
    """
    admitted_version: int
    """Policy version that the generators held when the group was admitted."""
    frozen: bool
    """True if the group never goes stale, because no version of the policy samples it."""
    finished: bool
    """True if a step may take the group."""


class LedgerEntry(Record):
    """A rollout that has not ended in a column of the ledger."""

    rollout_id: str
    task: str
    dispatched_version: int
    """Policy version that the generators held when the rollout was dispatched."""


class LedgerState(Record):
    """State of the ledger (`ledger.py`)."""

    dispatched: dict[str, int]
    """Number of rollouts by task."""
    ended: dict[str, dict[str, int]]
    """Number of rollouts by task and column."""
    open: list[LedgerEntry]
    replayed: dict[str, int] = {}
    """Number of rollouts that were trained on again, by task."""


class DropsState(Record):
    """Counts of the groups that were dropped since a group was kept (watch/alarms.py)."""

    groups: Fraction
    """Number of groups. Rollouts that are groups of their own count as a share of one."""
    ties: Fraction
    """Number of those whose rewards tie, in tasks that had a learning signal before."""
    columns: list[tuple[str, int]]
    """Number of rollouts by column of the ledger."""
    rewards: list[tuple[float, int]]
    """Number of rollouts by reward."""


class NoSignalState(Record):
    """Counts of the groups without a learning signal since the start of the run."""

    signal_seen: bool
    """True if a group had a learning signal."""
    groups: Fraction
    """Number of groups. Rollouts that are groups of their own count as a share of one."""
    mean_rewards: list[tuple[float, int]]
    """Number of groups by mean reward."""


class MasteryState(Record):
    """Evidence that tasks are mastered: all their groups tie, at a high reward."""

    ties: dict[str, list[float]]
    """Mean rewards of the groups that tied since a task's last group with a learning signal, by
    task."""
    signals: dict[str, tuple[int, float]]
    """Number of groups with a learning signal, and the sum of their mean rewards, by task."""


class StallState(Record):
    """State of the detectors of a run that learns nothing (watch/alarms.py)."""

    drops: DropsState
    emptied: DropsState
    """Counts of the groups that were dropped after a step had taken them."""
    no_signal: NoSignalState
    mastery: MasteryState


class ExampleState(Record, kw_only=True):
    """The example of a group that is open, or of groups that have not started."""

    task: str
    example: Any
    """The DataSample as JSON; None if the sampler had not given it yet."""
    example_is_json: bool
    """True if JSON holds the whole example; else only its dataset can give it again."""
    example_key: str = ""
    """Id of the first group that has the example. Groups of one pick share theirs. "" if no group
    has started, and in older files."""


class PickState(ExampleState, kw_only=True):
    """A task that the mix picked, some of whose groups have not started (`groups.py`)."""

    groups_left: int
    """Number of groups that have not started. All of them have ``example``; if it is None, the
    sampler is still to give it."""


class OpenGroupState(ExampleState, kw_only=True):
    """A group that was dispatched and has not left. It is run again unless it has settled."""

    group_id: str
    rollout_ids: list[str]
    """Ids of the rollouts that have not ended in a column of the ledger."""
    outcomes: dict[str, str]
    """Column of each rollout that has ended, by its id."""
    settled: bool
    """True if the group was scored and filtered: its rollouts are in the file of groups."""
    signal: bool
    """True if the scored group has a learning signal."""
    costs: dict[str, float] = {}
    """Costs of a settled group by name, such as calls of judges."""
    credit_s: float = 0.0
    """Seconds that the algorithm took to give a settled group credit."""


class BufferState(Record, kw_only=True):
    """State of the buffer of groups between two steps (`groups.py`)."""

    started: int
    """Number of groups started since the run began. The next group is named by it."""
    groups: list[OpenGroupState]
    """Open groups, in the order of their dispatch."""
    paced: list[PacedGroup]
    """Groups that no step up to the checkpoint's has trained on, in the order of their
    admission."""
    ledger: LedgerState


class RolloutLoopState(BufferState, kw_only=True):
    """State of the rollout loop between two steps (`rollout_loop.py`)."""

    pick: PickState | None
    """The task whose groups start next; None if the mix is to pick one."""
    dropped_groups: int
    """Number of groups dropped since the last step."""
    filter_matches: dict[str, int]
    """Number of rollouts that matched since the last step, by ``<slot>/<filter>``."""
    filter_tokens: dict[str, int]
    """Number of sampled tokens of these rollouts."""
    samplers: dict[str, Any]
    """State of each task's sampler, as its ``state_dict`` gave it."""
    mix: Any
    """State of the task mix, as its ``state_dict`` gave it."""
    replay: list[tuple[str, int, int]] = []
    """Groups stored for replay, oldest first: id, oldest version, number of replays. Their rollouts
    are in the file of groups."""


class ValidationReport(Record):
    """An evaluation that has ended."""

    step: int
    """Policy version that the evaluation began with."""
    reward: float | None
    """Mean over tasks of their avg@k, which leave failed attempts out; None if nothing was
    scored."""
    metrics: dict[str, int | float]
    attempts: int = 0
    """Number of rollouts."""
    failed: int = 0
    """Number of rollouts that have no reward."""
    unmeasured: dict[str, str] = {}
    """Tasks of which every attempt failed, each with what to say of it."""


class ValidatorState(Record):
    """State of the evaluations (`validation.py`)."""

    begun: int
    """Latest step whose evaluations were begun."""
    running: list[str]
    """Names of the tasks of evaluations that had not ended, and have no report."""
    left_out: dict[str, int]
    """Number of evaluations by task that were due and left out, because the last still ran."""
    reports: list[ValidationReport]
    """Evaluations that have ended and are in no step's metrics."""


class MismatchState(Record):
    """Distances between trainer and generators that the first steps have shown at one age.

    The bound of later steps is derived from them (watch/mismatch.py).
    """

    age: int
    """Number of versions between the one that sampled the tokens and the one that trained them."""
    distances: list[float]
    """For each step, the largest over the replicas of the mean distance, in nats."""


class BestState(Record):
    """The best value of a metric that evaluations have had, as ``keep_best`` or ``stop_at`` ask."""

    metric: str
    value: float
    step: int
    """Policy version that had the value."""
    best_is: BestIs = "highest"
    """Direction in which values were compared."""
    since: int = 0
    """Number of evaluations since."""
    set_aside: bool = False
    """True if the checkpoint is of a later step than one that the run was resumed from. It lies in
    a folder of its own (watch/checkpoints.py)."""


class GoalsState(Record):
    """What evaluations have shown so far (watch/goals.py)."""

    kept: BestState | None = None
    """The best checkpoint; None if none is kept as such."""
    stop: BestState | None = None
    """The value that later evaluations are compared with, to end the run."""
    late_gain: BestState | None = None
    """The value of an evaluation that gained on ``stop`` once ``stop_at.patience`` had ended the
    run, as that of the last version may; None if none did."""
    reached: BestState | None = None
    """The value that has reached ``stop_at.value``, and ends the run."""
    reported: int = 0
    """Latest step whose evaluation has ended."""


class RunState(Record, kw_only=True):
    """State of the whole run, beside the trainer's."""

    format: int
    """FORMAT of the library that wrote the file."""
    step: int
    """Number of optimizer steps taken, which is the policy version of the trainer's weights."""
    seed: int
    rollouts: RolloutLoopState
    stall: StallState
    validator: ValidatorState
    mismatch: list[MismatchState]
    first_validation: float | None
    last_validation: float | None
    validation_failures: list[tuple[int, int]] = []
    """Number of failed attempts and of all attempts of the first and of the last evaluation, for
    each that there was."""
    offsets: dict[str, int]
    """Size of each file that the run appends to, by its path in the run folder."""
    goals: GoalsState = msgspec.field(default_factory=GoalsState)
    """The best evaluations; empty in files of older versions."""


def write_state(folder: Path, state: RunState) -> None:
    """Write ``controller.json`` into a checkpoint's folder."""
    # json's encoder: msgspec's refuses a lone surrogate, half of a character, which a user's text
    # may hold. ``str`` encodes the Fractions.
    (folder / CONTROLLER_FILE).write_text(
        json.dumps(msgspec.to_builtins(state, enc_hook=str), indent=1) + "\n", encoding="ascii"
    )


def read_state(folder: Path) -> RunState:
    """Read ``controller.json`` of a checkpoint's folder.

    Raises:
        RunError: another version of the library wrote the file, or it can't be read.
    """
    path = folder / CONTROLLER_FILE
    try:
        data = json.loads(path.read_bytes())
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise RunError(
                f"{path} has format {found!r}, want {FORMAT}: "
                "resume with the version of the library that wrote it"
            )
        return msgspec.convert(data, RunState, dec_hook=lambda kind, value: kind(value))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read ({error}): resume from another checkpoint") from error
