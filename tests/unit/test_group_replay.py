"""Replayed groups: their credit and log-probabilities are those of the time they were finished, their age has a bound of its
own, and no rollout is counted as trained twice."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.loops import Loop, resumed, saved
from tests.fakes.rollouts import group_of, rollout_of, turn_of
from tests.fakes.tasks import DatasetTask, StubTask
from tests.unit.demonstrations import CHAT, task_of
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.config_registry import rl_replay_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.loops.step_metrics import _ages, _replay_metrics
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay, GroupReplayConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.types import STREAMS


def taught_group(number: int, *, versions=(0, 0), advantages=(-1.0, 1.0)) -> RolloutGroup:
    """Return a group whose rollouts were sampled at these versions, and have these advantages."""
    sample = DataSample(sample_id=str(number), env_input=[number])
    rollouts = []
    for index, (version, advantage) in enumerate(zip(versions, advantages, strict=True)):
        turn = turn_of([1, 2], [3, number % 7], versions=[version] * 2)
        turn.completion.replica = 1
        rollout = rollout_of(
            turn,
            group_id=f"sums-{number}",
            index=index,
            task="sums",
            data_sample=sample,
            status=RolloutStatus.COMPLETED,
            reward=advantage,
        )
        rollout.assign_advantages(advantage)
        rollouts.append(rollout)
    return group_of(*rollouts)


def store(rollouts_per_step=8, *, seed=0, **config) -> GroupReplay:
    return GroupReplay(
        GroupReplayConfig(**{"fraction": 0.5} | config),
        rollouts_per_step=rollouts_per_step,
        seed=seed,
    )


# ---- the store


@settings(max_examples=80)
@given(
    data=st.data(),
    max_age=st.integers(1, 5),
    capacity=st.integers(1, 12),
    most=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_age_size_and_replays_have_their_bounds(data, max_age, capacity, most, seed):
    replay, replays, number = (
        store(capacity=capacity, max_age=max_age, most_replays=most, seed=seed),
        Counter(),
        0,
    )
    oldest: dict[str, int] = {}
    for version in range(12):
        drawn = replay.draw(version)
        names = [group.group_id for group in drawn]
        assert len(names) == len(set(names)) <= 2
        replays.update(names)
        for group in drawn:
            ages = version - np.concatenate(
                [s.policy_versions[s.loss_mask] for r in group.rollouts for s in r.samples]
            )
            assert ages.max() == version - oldest[group.group_id] <= max_age
        replay.count(drawn)
        for _ in range(data.draw(st.integers(0, 3))):
            versions = data.draw(
                st.tuples(
                    st.integers(max(0, version - 2), version),
                    st.integers(max(0, version - 2), version),
                )
            )
            replay.add([taught_group(number, versions=versions)])
            oldest[f"sums-{number}"] = min(versions)
            number += 1
        assert len(replay) <= capacity
    assert max(replays.values(), default=0) <= most


def test_groups_are_drawn_until_they_have_their_share_of_the_steps_rollouts():
    replay = store(8, max_age=99)
    pair, single = taught_group(0), taught_group(1)
    single.rollouts = single.rollouts[:1]
    replay.add([pair, single, *(taught_group(number) for number in range(2, 5))])
    for version in range(3):
        drawn = [len(group.rollouts) for group in replay.draw(version)]
        # 4 of 8 rollouts: two pairs, or a pair and the single one, which are too few, and another pair.
        assert sum(drawn[:-1]) < 4 <= sum(drawn) or len(replay) == 0


def test_groups_of_a_step_that_fails_are_drawn_again():
    replay = store(8, max_age=99, most_replays=1)
    replay.add(taught_group(number) for number in range(4))
    drawn = replay.draw(1)
    assert [group.group_id for group in replay.draw(1)] == [group.group_id for group in drawn]
    assert len(replay) == 4
    replay.count(drawn)
    assert len(replay) == 4 - len(drawn)


def test_groups_that_teach_nothing_or_were_not_sampled_by_the_policy_are_not_stored():
    replay, taught = store(), taught_group(2)
    for rollout in taught.rollouts:
        for sample in rollout.samples:
            sample.policy_versions = np.full(len(sample), -1, np.int32)
    replay.add([taught_group(0, advantages=(0.0, 0.0)), taught_group(1), taught])
    assert [group.group_id for group in replay.groups()] == ["sums-1"]


def test_a_replayed_group_has_the_streams_it_was_stored_with_and_no_replica():
    replay, group = store(), taught_group(3, versions=(4, 5))
    replay.add([group])
    (again,) = replay.draw(6)
    for rollout, stored in zip(again.rollouts, group.rollouts, strict=True):
        (sample,), (before,) = rollout.samples, stored.samples
        for name in STREAMS:
            expected = None if name == "replicas" else getattr(before, name)
            assert (
                np.array_equal(getattr(sample, name), expected) or getattr(sample, name) is expected
            )
        assert before.replicas is not None, "the stored group is as it was"


def test_the_oldest_leave_a_full_store_and_the_same_seed_draws_the_same():
    draws = []
    for _ in range(2):
        replay = store(16, capacity=6, seed=5, max_age=99)
        replay.add(taught_group(number) for number in range(9))
        assert [group.group_id for group in replay.groups()] == [
            f"sums-{number}" for number in range(3, 9)
        ]
        draws.append([group.group_id for version in range(2) for group in replay.draw(version)])
    assert draws[0] == draws[1] and len(set(draws[0])) == 6


def test_what_another_run_trained_on_is_stored_as_if_version_0_had_sampled_it(tmp_path):
    recorder = RolloutRecorder.Config(fraction=1.0).build(run_dir=tmp_path)
    for number in range(3):
        group = taught_group(number, versions=(40, 41))
        outcomes = {rollout.rollout_id: "trained" for rollout in group.rollouts}
        if number == 1:
            outcomes[group.rollouts[0].rollout_id] = "filtered/pre/truncated"
        recorder.record(group, outcomes)
    recorder.close()
    replay = store(path=str(tmp_path), max_age=3)
    groups = {group.group_id: group for group in replay.groups()}
    assert sorted(groups) == ["recorded/sums-0", "recorded/sums-1", "recorded/sums-2"]
    assert [rollout.rollout_id for rollout in groups["recorded/sums-1"].rollouts] == [
        "recorded/sums-1/1"
    ]
    for group in groups.values():
        for rollout in group.rollouts:
            (sample,) = rollout.samples
            assert (
                set(sample.policy_versions[sample.loss_mask].tolist()) == {0}
                and sample.rollout_id == rollout.rollout_id
            )
            assert sample.generator_logprobs[sample.loss_mask].any() and sample.advantages.any()
    assert 2 <= len(replay.draw(3)) <= 3 and replay.draw(4) == []


def test_a_folder_without_records_to_train_on_is_refused(tmp_path):
    recorder = RolloutRecorder.Config(fraction=1.0).build(run_dir=tmp_path)
    recorder.record(taught_group(0), {})
    recorder.close()
    with pytest.raises(ConfigError, match="no group that was trained on"):
        store(path=str(tmp_path))
    assert (
        len(
            GroupReplay(
                GroupReplayConfig(fraction=0.5, path=str(tmp_path)),
                rollouts_per_step=8,
                seed=0,
                load=False,
            )
        )
        == 0
    )


def test_a_recorded_sample_that_can_not_be_trained_on_is_refused_with_its_rollout(tmp_path):
    recorder = RolloutRecorder.Config(fraction=1.0).build(run_dir=tmp_path)
    group = taught_group(0)
    group.rollouts[1].samples[0].advantages = None
    recorder.record(group, {rollout.rollout_id: "trained" for rollout in group.rollouts})
    recorder.close()
    with pytest.raises(ConfigError) as refused:
        store(path=str(tmp_path))
    assert str(refused.value) == (
        f"replay.path = {str(tmp_path)!r}: can't be used: a sample of rollout 'recorded/sums-0/1' "
        "has tokens with an rl weight and no advantages: its algorithm must assign them"
    )


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"fraction": 0.001}, ConfigError, "replay.fraction"),
        ({"fraction": 0.999}, ConfigError, "replay.fraction"),
        ({"fraction": 1.0}, ConfigError, "replay.fraction"),
        ({"fraction": 0.0, "path": "x"}, ConfigError, "replay.path"),
        ({"path": "/nowhere"}, MissingError, "replay.path"),
        ({"max_age": 0}, ConfigError, "replay.max_age"),
    ],
)
def test_what_can_not_work_is_refused_by_its_field(fields, error, field):
    config = rl_replay_qwen3_debug()
    config.replay = replace(config.replay, **fields)
    with pytest.raises(error) as refused:
        check(config)
    assert refused.value.field == field


# ---- through a run


class AgingTask(StubTask):
    """Its tokens have the version that the generators hold."""

    def rollout(self, group_id, index, entry, version):
        rollout = super().rollout(group_id, index, entry, version)
        for sample in rollout.samples:
            sample.policy_versions = np.where(sample.loss_mask, version, -1).astype(np.int32)
        return rollout


@settings(
    max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(bound=st.integers(0, 2), max_age=st.integers(1, 4), seed=st.integers(0, 99))
async def test_on_policy_replayed_static_and_barrier_free_rollouts_balance_and_keep_their_bounds(
    renderer, bound, max_age, seed
):
    compared = AgingTask(
        lambda number: [0.0, 1.0] if number % 4 else [RolloutStatus.ERROR, 1.0], name="compared"
    )
    free = AgingTask(
        lambda number: [1.0] if number % 5 else [RolloutStatus.TIMEOUT], name="free", group_size=3
    )
    free.needs_group = False
    chats = task_of(renderer, *({"messages": CHAT} for _ in range(4)), group_size=2)
    replay = store(12, max_age=max_age, seed=seed)
    loop = Loop(
        compared,
        free,
        chats,
        rollouts_per_step=6,
        max_offpolicy_steps=bound,
        steps=8,
        max_drops=50,
        row_length=128,
        replay=replay,
    )
    loop.fill()
    trained, replayed = Counter(), Counter()
    for step in range(8):
        batch = await loop.batch()
        assert _ages(batch.groups, step).max(initial=0) <= bound
        if batch.replayed:
            assert _replay_metrics(batch, step)["replay/age_max"] <= max_age
        assert not any(rollout.static for group in batch.replayed for rollout in group.rollouts)
        trained.update(rollout.rollout_id for group in batch.groups for rollout in group.rollouts)
        replayed.update(group.task_name for group in batch.replayed for _ in group.rollouts)
        loop.step_taken(batch)
    await loop.close()
    counts = loop.ledger.counts()
    assert set(trained.values()) == {1} and sum(replayed.values()) > 0
    for name in ("compared", "free", "chats"):
        own = {
            column.removeprefix(f"{name}/"): n
            for column, n in counts.items()
            if column.startswith(f"{name}/")
        }
        assert own.pop("replayed", 0) == replayed[name]
        assert own.pop("dispatched") == sum(own.values()) and own["open"] == 0
        assert own["trained"] == sum(rollout_id.startswith(f"{name}-") for rollout_id in trained)


async def test_a_resumed_run_replays_what_the_uninterrupted_one_does(tmp_path):
    def task():
        return DatasetTask(100, lambda number: [0.0, 1.0])

    sizes = dict(rollouts_per_step=4, max_offpolicy_steps=0)
    loop = Loop(task(), steps=6, replay=store(8, seed=3, max_age=4), **sizes)
    loop.fill()
    ids = []
    for step in range(6):
        batch = await loop.batch()
        ids.append([group.group_id for group in batch.replayed])
        loop.trained(batch)
        loop.version = loop.policy.version = step + 1
        loop.live(step + 1, fill=False)
        if step == 2:
            state, groups = await saved(loop, tmp_path)
        loop.fill()
    await loop.close()
    whole = loop.ledger.counts()
    assert sum(map(len, ids)) > 4

    loop = await resumed(
        task(), state, groups, 3, steps=6, replay=store(8, seed=3, max_age=4), **sizes
    )
    again = []
    for _ in range(3):
        batch = await loop.batch()
        again.append([group.group_id for group in batch.replayed])
        for group in batch.replayed:
            assert all(
                sample.advantages is not None
                for rollout in group.rollouts
                for sample in rollout.samples
            )
        loop.step_taken(batch)
    await loop.close()
    assert again == ids[3:] and loop.ledger.counts() == whole
