"""Who runs a group: workers are given groups by load, and their answers are the local runner's."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.rollouts import EXAMPLE, group_of, rollout_of, turn_of
from tests.fakes.tasks import TalkTask
from tests.fakes.waiting import iterations, until
from torchtitan.experiments.rl.algorithms import GRPO, Algorithm
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.fleet.rollout_workers import GroupResult, WorkerRunner
from torchtitan.experiments.rl.loops.group_runner import GroupRequest, LocalRunner
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.tasks import scoring


class StubWorkers:
    """Workers that note what they are asked and answer when told."""

    def __init__(self, workers: int):
        self.asked = [[] for _ in range(workers)]
        self.released = asyncio.Event()

    def admit(self, runner: WorkerRunner, index: int) -> Lifetime:
        async def run(task_name, request):
            self.asked[index].append(request)
            await self.released.wait()
            return GroupResult(group=finished(request.group_id), event_loop_lag_s=index / 10)

        life = Lifetime(f"rollout worker {index}")
        runner.admit(index, SimpleNamespace(run=SimpleNamespace(choose=run)), life)
        return life


def runner_of(workers: StubWorkers, policy) -> WorkerRunner:
    runner = WorkerRunner(policy)
    for index in range(len(workers.asked)):
        workers.admit(runner, index)
    return runner


def finished(group_id: str) -> RolloutGroup:
    """Return a group of one rollout that sampled three tokens."""
    return group_of(rollout_of(turn_of([1], [1, 1, 1]), group_id=group_id, task="sums"))


def open_rollouts(runner: WorkerRunner) -> list[int]:
    return [worker.open_rollouts for worker in runner._workers.values()]


def task(group_size: int):
    return SimpleNamespace(
        name="sums", needs_group=True, config=SimpleNamespace(group_size=group_size, adapter="")
    )


def request(group_id: str, **changes) -> GroupRequest:
    return GroupRequest(data_sample=EXAMPLE, group_id=group_id, **changes)


async def test_a_group_goes_to_the_worker_with_the_fewest_open_rollouts():
    mesh, policy = StubWorkers(2), SimpleNamespace(version=7, generated_tokens=0)
    runner = runner_of(mesh, policy)
    sizes = [4, 1, 1, 1, 1, 1]  # after the group of four, the other worker gets the next four
    work = [
        asyncio.create_task(runner.run(task(size), request(str(i)))) for i, size in enumerate(sizes)
    ]
    await iterations(10)
    assert [[request.group_id for request in asked] for asked in mesh.asked] == [
        ["0", "5"],
        ["1", "2", "3", "4"],
    ]
    assert {request.policy_version for asked in mesh.asked for request in asked} == {7}
    mesh.released.set()
    for group in await asyncio.gather(*work):
        assert group.failure is None and len(group.rollouts) == 1
    assert policy.generated_tokens == 18 and open_rollouts(runner) == [0, 0]
    assert runner.lap() == (0.1, 0) and runner.lap() == (0.0, 0)


async def test_cancelled_group_frees_its_place():
    mesh = StubWorkers(1)
    runner = runner_of(mesh, SimpleNamespace(version=0, generated_tokens=0))
    work = asyncio.create_task(runner.run(task(4), request("a")))
    await iterations(10)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert open_rollouts(runner) == [0]


async def test_measured_group_carries_its_sampling_and_size():
    mesh = StubWorkers(1)
    mesh.released.set()
    runner = runner_of(mesh, SimpleNamespace(version=0, generated_tokens=0))
    sampling = SamplingConfig(temperature=0.0)
    group = await runner.run(task(4), request("v", sampling=sampling, group_size=2, credit=False))
    (asked,) = mesh.asked[0]
    assert (group.group_id, asked.sampling, asked.group_size, asked.credit) == (
        "v",
        sampling,
        2,
        False,
    )


async def test_a_task_is_given_what_a_request_sets_and_nothing_else():
    given = []

    async def run_group(sample, policy, *, group_id, seed, **options):
        given.append(options)
        return finished(group_id)

    async def score(group):
        pass

    simple = task(4)
    simple.run_group = run_group
    simple.score_group = score
    simple.score_rewards = score
    runner = LocalRunner(SimpleNamespace(), seed=0)
    settings = [
        {},
        {"group_size": 2},
        {"sampling": SamplingConfig(temperature=0.0)},
        {"credit": False},
    ]
    for options in settings:
        await runner.run(simple, request("a", **options))
    assert given == settings


class ScoresItself(TalkTask):
    """Task that gives reward and credit itself: ``advantages`` to each sampled token."""

    advantages: Any = None
    reason: str | None = None
    """Reason why its groups can't be trained on."""

    async def score_group(self, group):
        for rollout in group.rollouts:
            rollout.amend(reward=1.0)
            for sample in rollout.samples:
                given = self.advantages
                sample.amend(advantages=None if given is None else given(sample))
        group.amend(failure=self.reason)
        return self.reason


@pytest.mark.parametrize(
    ("advantages", "cause"),
    [
        (None, "has tokens with an rl weight and no advantages: its algorithm must assign them"),
        (lambda sample: np.ones(3, np.float32), "token_ids and 3 advantages: they must be aligned"),
        (lambda sample: np.full(len(sample), np.nan, np.float32), "advantages is nan at token"),
        (lambda sample: "one", "token_ids and 3 advantages: they must be aligned"),
        (lambda sample: np.ones(len(sample), np.float32), None),
    ],
)
async def test_credit_that_a_task_gave_in_a_way_of_its_own_is_checked_before_it_is_trained_on(
    renderer, tokenizer, advantages, cause
):
    talk = ScoresItself.Config(algorithm=GRPO.Config()).build(
        name="talk", context=context_of(renderer)
    )
    talk.advantages = advantages
    group = await LocalRunner(ScriptedPolicy(tokenizer), seed=0).run(talk, request("g"))
    if cause is None:
        assert group.failure is None and len(group.scored) == 2
        return
    assert group.failure.startswith("task talk: rollout g/0: ") and cause in group.failure
    assert group.scored == [] and {r.status for r in group.rollouts} == {RolloutStatus.ERROR}


async def test_the_reason_that_a_task_gives_for_a_groups_failure_stays(renderer, tokenizer):
    talk = ScoresItself.Config(algorithm=GRPO.Config()).build(
        name="talk", context=context_of(renderer)
    )
    talk.reason = "nobody may learn from this"
    group = await LocalRunner(ScriptedPolicy(tokenizer), seed=0).run(talk, request("g"))
    assert group.failure == "nobody may learn from this" and len(group.scored) == 2


class RunsItself(TalkTask):
    async def run_group(self, sample, policy, **options):
        group = await super().run_group(sample, policy, **options)
        for rollout in group.rollouts:
            rollout.samples = samples_from_turns(
                rollout.turns, task_name="talk", rollout_id=rollout.rollout_id, temperature=1.0
            )
        return group


@pytest.mark.parametrize("kind", [TalkTask, RunsItself])
async def test_the_samples_of_a_task_train_its_adapter_or_its_group_fails(
    renderer, tokenizer, kind
):
    config = kind.Config(algorithm=GRPO.Config(), adapter="tutor")
    talk = config.build(name="talk", context=context_of(renderer))
    group = await LocalRunner(ScriptedPolicy(tokenizer), seed=0).run(talk, request("g"))
    if kind is RunsItself:
        assert group.failure == (
            "task talk: rollout g/0: a sample trains the adapter '', and its task 'tutor': give "
            "samples_from_turns adapter=self.config.adapter"
        )
        return
    samples = [sample for rollout in group.scored for sample in rollout.samples]
    assert [sample.adapter for sample in samples] == ["tutor", "tutor"]


async def test_a_group_of_an_algorithm_that_gives_no_credit_is_not_trained_on(renderer, tokenizer):
    talk = TalkTask.Config(algorithm=Algorithm.Config()).build(
        name="talk", context=context_of(renderer)
    )
    runner = LocalRunner(ScriptedPolicy(tokenizer), seed=0)
    measured = await runner.run(talk, request("v", credit=False))
    assert measured.failure is None and len(measured.scored) == 2
    group = await runner.run(talk, request("g"))
    cause = "has tokens with an rl weight and no advantages: its algorithm must assign them"
    assert group.failure.endswith(cause)


async def test_the_credit_of_an_algorithm_is_checked_once(renderer, tokenizer, monkeypatch):
    checked = []
    check = scoring.check_sample
    monkeypatch.setattr(scoring, "check_sample", lambda sample: checked.append(check(sample)))
    talk = TalkTask.Config(algorithm=GRPO.Config()).build(name="talk", context=context_of(renderer))
    group = await LocalRunner(ScriptedPolicy(tokenizer), seed=0).run(talk, request("g"))
    assert group.failure is None
    assert len(checked) == sum(len(rollout.samples) for rollout in group.rollouts) == 2


async def test_groups_of_a_worker_that_dies_are_run_again_under_their_ids_elsewhere_or_when_it_is_back():
    workers, policy = StubWorkers(2), SimpleNamespace(version=3, generated_tokens=0)
    runner = WorkerRunner(policy)
    lives = [workers.admit(runner, index) for index in range(2)]
    work = [asyncio.create_task(runner.run(task(2), request(name))) for name in "abc"]
    await until(lambda: sum(map(len, workers.asked)) == 3)
    assert [[request.group_id for request in asked] for asked in workers.asked] == [
        ["a", "c"],
        ["b"],
    ]
    lives[0].end("killed by SIGKILL")
    await until(lambda: len(workers.asked[1]) == 3)
    assert {request.group_id for request in workers.asked[1]} == {"a", "b", "c"}
    policy.version = 4
    lives[1].end("killed by SIGKILL")  # before the runner is told to lose the first
    await iterations()
    assert not any(group.done() for group in work)
    for index in range(2):
        runner.lose(index)
    workers.admit(runner, 0)
    await until(lambda: len(workers.asked[0]) == 5)
    assert {request.group_id: request.policy_version for request in workers.asked[0][2:]} == {
        "a": 4,
        "b": 4,
        "c": 4,
    }
    workers.released.set()
    assert [group.group_id for group in await asyncio.gather(*work)] == ["a", "b", "c"]
    assert policy.generated_tokens == 9 and open_rollouts(runner) == [0]


def test_workers_of_a_synchronous_run_are_refused():
    from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug

    config = rl_grpo_qwen3_debug()
    config.rollout_workers, config.max_offpolicy_steps = 2, 0
    with pytest.raises(
        ConfigError, match="rollout_workers = 2: synchronous runs repeat bit for bit"
    ):
        checked_plan(config)
