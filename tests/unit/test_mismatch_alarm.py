"""The alarm on what trainer and generators say of the same tokens: silent while they differ by rounding and learning."""

import json

import msgspec
import numpy as np
import pytest

from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.saved_state import MismatchState
from torchtitan.experiments.rl.watch.mismatch import (
    FIRST_VERSIONS,
    MismatchAlarm,
    mismatch_alarm,
)


def step(*distances: float, age: int = 0) -> dict[str, float]:
    """Metrics of a step: the distance of each replica's tokens."""
    return {f"mismatch/replica/{r}/age/{age}": distance for r, distance in enumerate(distances)} | {
        "loss/total": 1e6
    }


def seen(
    alarm: MismatchAlarm, *distances: float, age: int = 0, versions: int = FIRST_VERSIONS
) -> MismatchAlarm:
    for version in range(versions):
        alarm.check(version, step(*distances, age=age))
    return alarm


def test_a_stale_head_in_bfloat16_stops_the_run_by_replica_and_version():
    alarm = seen(MismatchAlarm("bfloat16", exact=True), 0.02, 0.03)
    assert alarm.bound(0) == pytest.approx(0.3)
    alarm.check(25, step(0.02, 0.29))
    expected = "generator 1 and trainer disagree on tokens of version 25: .* differ by 3.2 nats on average .* more than 0.3;"
    with pytest.raises(RunError, match=expected):
        alarm.check(25, step(0.02, 3.2))


def test_older_tokens_name_the_version_that_sampled_them():
    alarm = seen(MismatchAlarm("float32", exact=True), 0.01, age=3)
    alarm.check(9, step(3.9, age=3))  # 1 nat for each version from 6 to 9
    with pytest.raises(
        RunError,
        match="generator 0 and trainer disagree on tokens of version 6: .* in the step on version 9",
    ):
        alarm.check(9, step(4.1, age=3))


def test_bounds_follow_what_the_first_versions_show_and_nothing_later():
    alarm = MismatchAlarm("float32", exact=True)
    for version, distance in enumerate([0.001, 0.004, 0.002, 0.001, 0.003]):
        assert alarm.bound(0) == 1.0, "not derived yet"
        alarm.check(version, step(distance))
    assert alarm.bound(0) == pytest.approx(0.04)
    alarm.check(5, step(0.039))
    assert alarm.bound(0) == pytest.approx(0.04)
    with pytest.raises(RunError):
        alarm.check(6, step(0.041))


def test_a_resumed_run_goes_on_with_the_bounds_it_had():
    before = seen(seen(MismatchAlarm("float32", exact=True), 0.004), 0.3, age=1, versions=2)
    kept = MismatchAlarm("float32", exact=True)
    kept.restore(
        msgspec.convert(
            json.loads(json.dumps(msgspec.to_builtins(before.state()))), list[MismatchState]
        )
    )
    assert kept.bound(0) == pytest.approx(0.04), "10 times 0.004"
    assert kept.bound(1) == 2.0, "two versions of five: not derived yet"
    # A generator that went wrong while the run was away does not become the measure.
    with pytest.raises(RunError, match="differ by 0.5 nats on average .* more than 0.04"):
        kept.check(9, step(0.5))
    seen(kept, 0.5, age=1, versions=3)
    assert kept.bound(1) == pytest.approx(5.0) and len(before.state()[1].distances) == 2


def test_keys_and_values_of_older_weights_are_allowed_for():
    assert seen(MismatchAlarm("float32", exact=False), 1e-5).bound(0) == 1.0
    assert seen(MismatchAlarm("float32", exact=True), 1e-5).bound(0) == 0.01
    # Ten times what sampling with top_p has shown.
    assert seen(MismatchAlarm("float32", exact=False), 0.4, age=1).bound(1) == pytest.approx(4.0)


def test_a_distance_that_is_no_number_is_above_every_bound():
    with pytest.raises(RunError, match="differ by nan"):
        MismatchAlarm("float32", exact=True).check(0, step(float("nan")))


def test_metrics_say_how_near_the_bound_is():
    alarm = MismatchAlarm("float32", exact=True)
    assert alarm.check(0, {"loss/total": 1.0}) == {}
    assert alarm.check(0, step(0.5, 0.75)) == {
        "mismatch/bound/age/0": 1.0,
        "mismatch/share_of_bound_max": 0.75,
    }


def test_an_honest_run_of_200_versions_is_not_stopped():
    rng = np.random.default_rng(0)
    for dtype, rounding in (("float32", 1e-5), ("bfloat16", 0.03)):
        alarm = MismatchAlarm(dtype, exact=True)
        for version in range(200):
            ages = {0: rounding, 1: 0.05, 2: 0.1}
            learned = min(1.0, version / 50)  # the learning rate warms up
            for age, scale in ages.items():
                distances = scale * rng.uniform(0.3, 3.0, 2) * (learned if age else 1)
                alarm.check(version, step(*distances.tolist(), age=age))


@pytest.mark.parametrize(
    "changes, rounding",
    [
        ({}, 1.0),
        ({"max_offpolicy_steps": 0}, 0.01),
        ({"generator.weight_update": "recompute"}, 0.01),
        ({"generator.weight_update": "drain", "generator.engine.dtype": "bfloat16"}, 0.3),
        ({"max_offpolicy_steps": 0, "trainer.mixed_precision_param": "bfloat16"}, 0.3),
    ],
)
def test_bounds_are_those_of_the_coarsest_precision_and_of_the_way_to_update(changes, rounding):
    config = rl_grpo_qwen3_debug()
    for path, value in changes.items():
        *parents, field = path.split(".")
        part = config
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, field, value)
    assert seen(mismatch_alarm(config), 1e-6).bound(0) == rounding
