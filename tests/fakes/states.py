"""States of a run as a checkpoint holds them."""

import json
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from torchtitan.experiments.rl.loops.groups import ClaimedGroup, Pick, SharedExample
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.saved_state import (
    FORMAT,
    MismatchState,
    RolloutLoopState,
    RunState,
    ValidatorState,
)
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.watch.alarms import StallDetectors

Record = TypeVar("Record")


def through_json(record: Any, kind: type[Record]) -> Record:
    """Return a record as it is read again after it was written as JSON."""
    plain = json.loads(json.dumps(msgspec.to_builtins(record, enc_hook=str)))
    return msgspec.convert(plain, kind, dec_hook=lambda of, value: of(value))


def open_group(example: DataSample | None) -> Any:
    """Return the saved state of a group of one rollout that runs."""
    task: Any = SimpleNamespace(name="a")
    group = ClaimedGroup(
        group_id="a-0",
        task=task,
        rollout_ids={"a-0/0"},
        example=SharedExample(example),
    )
    state = group.state()
    return through_json(state, type(state))


def run_state() -> RunState:
    """Return the state of a run after two steps, with a group that runs and one evaluation."""
    task: Any = SimpleNamespace(name="a")
    pick = Pick(
        task=task,
        groups_left=2,
        example=SharedExample(DataSample(sample_id="7", env_input=[1.5])),
    )
    rollouts = RolloutLoopState(
        started=3,
        groups=[open_group(DataSample(sample_id="\ud800", env_input=[1.5]))],
        paced=[],
        pick=pick.state(),
        ledger=Ledger().state(),
        dropped_groups=1,
        filter_matches={"pre/x": 2},
        filter_tokens={"pre/x": 31},
        samplers={"a": {"cursor": 3}},
        mix=None,
    )
    return RunState(
        format=FORMAT,
        step=2,
        seed=7,
        rollouts=rollouts,
        stall=StallDetectors(4, {"a": 1}).state(),
        validator=ValidatorState(begun=2, running=[], left_out={}, reports=[]),
        mismatch=[MismatchState(age=1, distances=[0.25])],
        first_validation=0.1,
        last_validation=None,
        offsets={"metrics.jsonl": 10},
    )
