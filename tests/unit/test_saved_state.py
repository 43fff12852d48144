"""A checkpoint keeps the controller's state: each part goes on from its record as if nothing had happened."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.rollouts import EXAMPLE, rewarded_group
from tests.fakes.states import open_group, run_state, through_json
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.loops.saved_groups import (
    GROUPS_FILE,
    example_of,
    read_saved_groups,
    write_groups,
)
from torchtitan.experiments.rl.loops.saved_state import (
    FORMAT,
    LedgerState,
    PacedGroup,
    StallState,
    read_state,
    write_state,
)
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.types import STREAMS, TrainingSample
from torchtitan.experiments.rl.watch.alarms import StallDetectors


def of_json(records):
    return [through_json(record, type(record)) for record in records]


# ---- pacer


@given(
    per_step=st.integers(1, 6),
    bound=st.integers(0, 3),
    moves=st.lists(
        st.tuples(st.sampled_from(["admit", "finish", "drop", "step"]), st.integers(0, 99)),
        max_size=60,
    ),
    later=st.lists(st.integers(0, 99), max_size=30),
)
def test_a_restored_pacer_gives_the_same_groups_to_the_same_steps(per_step, bound, moves, later):
    pacer = Pacer(rollouts_per_step=per_step, max_offpolicy_steps=bound)
    version, running, number = 0, [], 0
    for move, choice in moves:
        if move == "admit" and pacer.free_places:
            pacer.admit(f"g{number}", version, rollouts=1 + choice % 4, frozen=choice % 5 == 0)
            running.append(f"g{number}")
            number += 1
        elif move == "finish" and running:
            pacer.finish(running.pop(choice % len(running)))
        elif move == "drop" and running:
            pacer.drop(running.pop(choice % len(running)))
        elif move == "step" and pacer.take_groups(version) is not None:
            version += 1
            pacer.live(version)
    other = Pacer(rollouts_per_step=per_step, max_offpolicy_steps=bound)
    assert other.restore(of_json(pacer.state(version)), version) == []
    assert (other.free_places, other.untaken_rollouts) == (
        pacer.free_places,
        pacer.untaken_rollouts,
    )
    for choice in later:
        if running and choice % 3:
            group = running.pop(choice % len(running))
            pacer.finish(group)
            other.finish(group)
        taken = pacer.take_groups(version)
        assert other.take_groups(version) == taken
        if taken is not None:
            version += 1
            pacer.live(version)
            other.live(version)
    assert of_json(other.state(version)) == of_json(pacer.state(version))


def test_places_of_groups_that_led_to_the_checkpoints_version_are_free():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    pacer.admit("a", 0, rollouts=1)
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"] and pacer.free_places == 1
    assert pacer.state(1) == []


def test_groups_too_old_for_a_smaller_bound_are_not_admitted():
    slots = [
        PacedGroup(
            rollouts=1,
            group_id=f"g{version}",
            admitted_version=version,
            frozen=False,
            finished=True,
        )
        for version in (3, 4, 5)
    ]
    frozen = PacedGroup(rollouts=1, group_id="f", admitted_version=0, frozen=True, finished=True)
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=0)
    # At version 5 with a bound of 0 only what was sampled at 5 may be trained, and tokens of a frozen model.
    assert pacer.restore([*slots, frozen], 5) == ["g3", "g4"]
    assert pacer.free_places == 0 and pacer.take_groups(5) == ["g5"]


def test_more_groups_than_the_coming_steps_can_train_are_not_admitted():
    slots = [
        PacedGroup(rollouts=1, group_id=f"g{i}", admitted_version=5, frozen=False, finished=True)
        for i in range(3)
    ]
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    # Due at 6 at the latest: the steps at 5 and 6 take one each.
    assert pacer.restore(slots, 5) == ["g2"]


# ---- ledger


@given(
    ends=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([None, "trained", "failed/error"])),
        max_size=30,
    )
)
def test_a_restored_ledger_has_the_same_counts_and_ends_what_was_open(ends):
    ledger, open_ids = Ledger(), []
    for number, (task, column) in enumerate(ends):
        rollout_id = f"{task}-{number}/0"
        ledger.dispatch(task, {rollout_id}, version=number)
        if column is None:
            open_ids.append(rollout_id)
        else:
            ledger.end(rollout_id, column, version=number)
    restored = Ledger()
    restored.restore(through_json(ledger.state(), LedgerState))
    restored.check(open_ids)
    assert restored.counts() == ledger.counts()
    for rollout_id in open_ids:
        restored.end(rollout_id, "lost", version=99)
    restored.check([])
    assert sum(count for key, count in restored.counts().items() if key.endswith("/lost")) == len(
        open_ids
    )


# ---- stall detectors


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["scored", "dropped", "emptied", "kept", "taken"]),
        st.sampled_from("ab"),
        st.booleans(),
        st.booleans(),
    ),
    max_size=25,
)


def outcome(detectors: StallDetectors, event) -> str | None:
    """What the detectors raise at an event."""
    kind, task, signal, failed = event
    group = rewarded_group(EXAMPLE, *([0.0, 1.0] if signal else [0.5, 0.5]), task=task)
    columns = ["failed/error"] * 2 if failed else ["filtered/pre/zero_advantage"] * 2
    try:
        if kind == "scored":
            detectors.group_scored(group, signal=signal)
        elif kind in ("dropped", "emptied"):
            detectors.group_dropped(columns, group, signal=signal, taken=kind == "emptied")
        else:
            (detectors.group_kept if kind == "kept" else detectors.groups_taken)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@given(before=EVENTS, after=EVENTS)
def test_restored_stall_detectors_raise_where_the_others_do(before, after):
    detectors = StallDetectors(4, {"a": 1, "b": 8})
    for event in before:
        if outcome(detectors, event) is not None:
            return
    restored = StallDetectors(4, {"a": 1, "b": 8})
    restored.restore(through_json(detectors.state(), StallState))
    assert [outcome(restored, event) for event in after] == [
        outcome(detectors, event) for event in after
    ]


# ---- finished groups

FLOATS = st.floats(width=32)


@st.composite
def samples(draw) -> TrainingSample:
    length = draw(st.integers(1, 6))
    streams = {}
    for name, declared in STREAMS.items():
        optional = name not in ("token_ids", "loss_mask", "generator_logprobs", "policy_versions")
        values = FLOATS if np.issubdtype(declared.dtype, np.floating) else st.integers(0, 1)
        array = np.array(draw(st.lists(values, min_size=length, max_size=length)), declared.dtype)
        streams[name] = None if optional and draw(st.booleans()) else array
    return TrainingSample(
        **streams, temperature=draw(st.floats(0.1, 2)), task_name="a", rollout_id="a-0/0"
    )


@given(
    kept=st.lists(samples(), max_size=3),
    reward=st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_a_finished_group_comes_back_with_every_bit_of_its_samples(tmp_path_factory, kept, reward):
    folder = tmp_path_factory.mktemp("groups")
    group = rewarded_group(EXAMPLE, 1.0, 0.0, task="a", group_id="a-7")
    group.admitted_version = 5
    for rollout in group.rollouts:
        rollout.data_sample = DataSample(sample_id="3", env_input=(1, 2), info={"x": 1})
    group.rollouts[0].samples, group.rollouts[0].reward = kept, reward
    write_groups(folder, [group])
    (back,) = read_saved_groups(folder).values()
    assert (back.group_id, back.task_name, back.admitted_version) == ("a-7", "a", 5)
    assert [rollout.reward for rollout in back.rollouts] == [reward, 0.0]
    assert len(back.rollouts[0].samples) == len(kept)
    for theirs, ours in zip(back.rollouts[0].samples, kept, strict=True):
        assert theirs.temperature == ours.temperature
        for name in STREAMS:
            left, right = getattr(theirs, name), getattr(ours, name)
            assert (left is None) == (right is None)
            assert right is None or (
                left.dtype == right.dtype and left.tobytes() == right.tobytes()
            )


def test_a_torn_file_of_groups_is_not_taken_for_fewer_groups(tmp_path):
    group = rewarded_group(EXAMPLE, 1.0, 0.0, task="a", group_id="a-0")
    for rollout in group.rollouts:
        rollout.data_sample = group.data_sample
    write_groups(tmp_path, [group])
    path = tmp_path / GROUPS_FILE
    path.write_bytes(path.read_bytes()[:-4])
    assert read_saved_groups(tmp_path) == {}  # the open group that names it is refused then


# ---- examples of open groups


def recovered(example: DataSample | None, *dataset: DataSample) -> DataSample | None:
    """The example of a group that is run again."""
    return example_of(
        open_group(example), {own.sample_id: own for own in dataset}, copy_is_enough=False
    )


def test_the_example_of_a_running_group_is_the_datasets_own():
    own = DataSample(sample_id="4", env_input=(1, 2))
    assert recovered(DataSample(sample_id="4", env_input=(1, 2)), own) is own


def test_an_example_that_its_sampler_changed_is_kept_as_it_was_changed():
    changed = DataSample(sample_id="4", env_input={"hint": True})
    assert recovered(changed, DataSample(sample_id="4", env_input={})) == changed


def test_an_example_that_neither_json_nor_the_dataset_gives_again_is_none():
    example = DataSample(sample_id="4", env_input={1, 2})
    assert not open_group(example).example_is_json and recovered(example) is None
    assert recovered(None) is None


@pytest.mark.parametrize(
    "env_input",
    [
        np.arange(3),
        {"image": np.zeros((2, 2), np.uint8)},
        [np.array([5])],
        {"lock": threading.Lock()},
        float("nan"),
        {1: "a"},
    ],
    ids=["an array", "an array in a dict", "an array of one", "a lock", "NaN", "a key"],
)
def test_an_example_that_json_does_not_hold_is_saved_and_is_the_datasets_own_again(env_input):
    own = DataSample(sample_id="4", env_input=env_input)
    assert not open_group(own).example_is_json
    assert recovered(DataSample(sample_id="4", env_input=env_input), own) is own


@pytest.mark.parametrize(
    "env_input", [{"a": [1, None, True, "x", 0.5]}, np.int64(3), [np.float32(0.5)], []]
)
def test_an_example_that_json_holds_comes_back_without_its_dataset(env_input):
    example = DataSample(sample_id="4", env_input=env_input, info={"level": 2})
    assert open_group(example).example_is_json and recovered(example) == example


# ---- the file


def test_the_state_comes_back_from_its_file(tmp_path):
    write_state(tmp_path, run_state())
    assert read_state(tmp_path) == run_state()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "can't be read"),
        ("[]", "format None"),
        ('{"format": 99}', f"format 99, want {FORMAT}"),
        (f'{{"format": {FORMAT}, "step": 1}}', "missing required field"),
    ],
)
def test_a_file_that_is_not_of_this_format_is_refused(tmp_path, text, said):
    (tmp_path / "controller.json").write_text(text)
    with pytest.raises(RunError, match=said):
        read_state(tmp_path)


def test_a_file_with_an_unknown_field_is_refused(tmp_path):
    write_state(tmp_path, run_state())
    state = json.loads((tmp_path / "controller.json").read_text())
    (tmp_path / "controller.json").write_text(json.dumps(state | {"more": 1}))
    with pytest.raises(RunError, match="unknown field `more`"):
        read_state(tmp_path)
