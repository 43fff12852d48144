"""The first failure of each kind on the terminal, and the end of a run whose first groups all fail in one way."""

import pytest

from tests.fakes.loops import Loop, train_until
from tests.fakes.rollouts import group_of, rollout_of
from tests.fakes.tasks import StubTask
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.watch.alarms import FEW_GROUPS, StallDetectors


def group(*errors, task="sums", failure="0 of 2 rollouts scored"):
    """Return a group of one rollout an error. None stands for a rollout that was scored."""
    rollouts = [
        rollout_of(index=index, task=task, error=error, reward=None if error else 1.0)
        for index, error in enumerate(errors)
    ]
    return group_of(*rollouts, failure=failure)


def fail(failures, groups):
    for entry in groups:
        failures.group_arrived(entry)
        if entry.failure is not None:
            failures.group_dropped(
                [f"{entry.task_name}/failed/error"], entry, signal=False, taken=False
            )


def detectors(said, limit=100):
    return StallDetectors(
        limit, {"sums": 1, "other": 1}, lambda line, traceback: said.append(line + traceback)
    )


@pytest.fixture
def said():
    return []


def test_each_kind_is_printed_once_where_it_comes_first(said):
    failures = detectors(said)
    fail(
        failures,
        [
            group("Env.reset: no port 8001", None, failure=None),
            group("Env.reset: no port 8002", "late"),
            group("late"),
        ],
    )
    fail(failures, [group("late", task="other")])
    assert [line.split(";")[0] for line in said] == [
        "a rollout failed: Env.reset: no port 8001 (task sums)",
        "a rollout failed: late (task sums)",
        "a rollout failed: late (task other)",
    ]


def test_the_first_of_a_kind_has_the_frames_of_the_users_code(said):
    failed = [group("Env.reset: KeyError: 'a'"), group("Env.reset: KeyError: 'a'")]
    failed[0].rollouts[0].traceback = "\nTraceback: here"
    failed[1].rollouts[0].traceback = "\nTraceback: there"
    fail(detectors(said), failed)
    assert [line.splitlines()[1:] for line in said] == [["Traceback: here"]]


def test_first_groups_that_fail_in_one_way_end_the_run_with_that_cause(said):
    groups = [
        group(f"Env.reset: no port {i}", f"Env.reset: no port {i + 100}") for i in range(FEW_GROUPS)
    ]
    failures = detectors(said)
    fail(failures, groups[:-1])
    with pytest.raises(
        RunError,
        match="^the first 8 groups all failed in the same way: Env.reset: no port 0 .task sums.$",
    ):
        fail(failures, groups[-1:])
    assert len(said) == 1


@pytest.mark.parametrize(
    "others",
    [[group("one"), group("another")], [group("one", None, failure=None)]],
    ids=["two ways", "one that was scored"],
)
def test_first_groups_that_fail_otherwise_do_not(said, others):
    fail(detectors(said), [*others, *[group("one")] * 2 * FEW_GROUPS])


def test_a_lower_limit_of_the_run_and_a_resumed_run_have_no_such_end(said):
    with pytest.raises(RunError, match="^8 groups in a row gave nothing to train on"):
        fail(detectors(said, limit=FEW_GROUPS), [group("one")] * FEW_GROUPS)
    failures = detectors(said)
    failures.restore(failures.state())
    fail(failures, [group("one")] * 2 * FEW_GROUPS)


async def test_a_run_ends_so_and_its_ledger_balances():
    class FailsAlike(StubTask):
        async def score_group(self, group):
            for rollout in group.rollouts:
                rollout.status, rollout.reward = RolloutStatus.ERROR, None
                rollout.error = f"Env.reset: no port {group.group_id.rpartition('-')[2]}"
            group.failure = "0 of 2 rollouts scored"

    loop = Loop(
        FailsAlike(lambda number: [0.0, 1.0]), rollouts_per_step=2, steps=1000, max_drops=100
    )
    said = await train_until(loop, RunError)
    assert said.startswith("the first 8 groups all failed in the same way: Env.reset: no port ")
    counts = loop.ledger.counts()
    assert (
        2 * FEW_GROUPS <= counts["stub/failed/error"] <= 2 * FEW_GROUPS + 4
    )  # two groups may have run beside the last
