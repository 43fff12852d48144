"""Validation: the same held-out examples each time, and a mean of what was scored."""

import asyncio
import itertools
import re
from dataclasses import dataclass, field

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.envs import BrokenEnv, TalkingEnv, raise_value_error
from tests.fakes.policy import HeldPolicy, ScriptedPolicy
from tests.fakes.rollouts import rewarded_group
from tests.fakes.tasks import length, number_of
from tests.fakes.waiting import LIMIT_S, iterations, until
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.loops.group_runner import LocalRunner
from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.loops.validation import (
    Validator,
    cause_of_failure,
    evaluation_metrics,
    pass_at_k,
)
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    RolloutGroup,
)
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig, derive_seed

FIRST = DataSample(sample_id="0", env_input=0)


class NoCredit(GRPO):
    async def score_rollout(self, rollout):
        raise AssertionError("the algorithm must not see validation")

    def score_group(self, group):
        raise AssertionError("the algorithm must not see validation")


class AskTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=NoCredit.Config)
        dataset: Dataset.Config = field(default_factory=Numbers.Config)
        validation: Dataset.Config | None = field(default_factory=Numbers.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[RewardFn(length, takes="rollout")])
        )
        sampling: SamplingConfig = field(
            default_factory=lambda: SamplingConfig(temperature=0.7, max_tokens=9)
        )
        max_retries: int = 0

    broken: tuple[int, ...] = ()

    def make_env(self, sample):
        self.asked = [*getattr(self, "asked", []), sample.env_input]
        return (
            BrokenEnv("reset", raise_value_error)
            if sample.env_input in self.broken
            else TalkingEnv()
        )


@pytest.fixture
def build(renderer):
    def make(name="ask", *, broken=(), **changes):
        task = AskTask.Config(**changes).build(name=name, context=context_of(renderer))
        task.broken = broken
        return task

    return make


def answers(*lengths: int):
    """Example i is answered with this many letters."""
    return lambda rollout_id, turn: "x" * lengths[number_of(rollout_id.split("/")[0])]


def validator_of(policy, *tasks, seed=0, recorder=None, **config) -> Validator:
    named = {task.name: task for task in tasks}
    return Validator(
        named, LocalRunner(policy, seed=seed), ValidationConfig(**config), recorder=recorder
    )


async def run(policy, *tasks, **config):
    """One evaluation of every task; an empty report where none takes part."""
    validator = validator_of(policy, *tasks, **config)
    validator.start(0)
    await validator.wait()
    return next(iter(validator.take()), ValidationReport(step=0, reward=None, metrics={}))


async def test_reward_is_the_mean_over_the_examples(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer, answers(1, 2, 3, 4)), build())
    assert (
        report.reward
        == report.metrics["validation/reward"]
        == report.metrics["validation/ask/reward"]
        == 2.5
    )
    assert report.metrics["validation/ask/failed"] == 0
    # Letters are one token each, or fewer; the closing token counts too.
    assert 2 <= report.metrics["validation/ask/completion_tokens"] <= 3.5


async def test_only_the_first_examples_are_asked_each_once(build, tokenizer):
    task, policy = build(), ScriptedPolicy(tokenizer, answers(1, 3, 9, 9))
    report = await run(policy, task, examples=2)
    assert sorted(task.asked) == [0, 1] and report.reward == 2.0
    assert [session.rollout_id for session in policy.sessions] == [
        "validation-ask-0/0",
        "validation-ask-1/0",
    ]
    assert all(session.closed == 1 for session in policy.sessions)


async def test_decoding_is_greedy_by_default_with_the_tasks_other_settings(build, tokenizer):
    policy = ScriptedPolicy(tokenizer, answers(1, 1, 1, 1))
    task = build()
    await run(policy, task)
    assert {(s.sampling.temperature, s.sampling.max_tokens) for s in policy.sessions} == {(0.0, 9)}
    await run(policy, task, temperature=0.5)
    assert (
        policy.sessions[-1].sampling.temperature == 0.5 and task.config.sampling.temperature == 0.7
    )


async def test_every_validation_of_a_run_uses_the_same_seeds(build, tokenizer):
    policy, task = ScriptedPolicy(tokenizer, answers(1, 1, 1, 1)), build()
    await run(policy, task, seed=5)
    await run(policy, task, seed=5)
    first, second = policy.sessions[:4], policy.sessions[4:]
    assert [session.seed for session in first] == [session.seed for session in second]
    assert first[0].seed == derive_seed(5, "validation-ask-0", 0, 0)


async def test_each_evaluations_rollouts_are_recorded_under_ids_of_their_own_and_no_reader_of_training_sees_them(
    build, tokenizer, tmp_path
):
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    validator = validator_of(
        ScriptedPolicy(tokenizer, answers(1, 2)), build(), recorder=recorder, examples=2, every=10
    )
    for step, final in ((0, False), (10, False), (20, True)):
        validator.start(step, final=final)
        await validator.wait()
    trained = rewarded_group(FIRST, None, group_id="ask-0", task="ask")
    recorder.record(trained, {"ask-0/0": "trained"})
    recorder.close()
    assert [(record.rollout.group_id, record.kind) for record in read_rollouts(tmp_path)] == [
        ("ask-0", "training")
    ]
    records = list(read_rollouts(tmp_path, "validation"))
    ids = [
        f"validation-ask-{index}@{label}" for label in ("0", "10", "20.final") for index in (0, 1)
    ]
    assert [record.rollout.group_id for record in records] == ids
    assert [record.rollout.reward for record in records] == [1.0, 2.0] * 3
    assert {(record.kind, record.outcome) for record in records} == {("validation", "validation")}
    assert len(list(read_rollouts(tmp_path, None))) == 7


async def test_the_recorded_share_holds_for_evaluations_too(build, tokenizer, tmp_path):
    recorder = RolloutRecorder.Config(fraction=0.0).build(run_dir=tmp_path)
    validator = validator_of(
        ScriptedPolicy(tokenizer, answers(1, 2)), build(), recorder=recorder, examples=2
    )
    validator.start(0)
    await validator.wait()
    recorder.close()
    assert list(tmp_path.iterdir()) == []


async def test_failed_rollout_is_left_out_of_the_mean_and_counted(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer, answers(1, 2, 3, 4)), build(broken=(3,)))
    assert report.reward == 2.0 and report.metrics["validation/ask/failed"] == 1


async def test_a_report_counts_what_failed_and_names_the_tasks_without_any_reward(build, tokenizer):
    tasks = build("a", broken=(0, 1, 2, 3)), build("b", broken=(3,))
    report = await run(ScriptedPolicy(tokenizer, answers(1, 2, 3, 4)), *tasks)
    assert (report.attempts, report.failed, report.reward) == (8, 5, 2.0)
    (fault,) = report.unmeasured.values()
    assert list(report.unmeasured) == ["a"]
    assert fault.startswith(
        "all 4 attempts of task a failed, the first with: BrokenEnv.reset: Value"
    )


def test_an_attempt_that_was_given_no_reward_says_so_where_nothing_failed():
    assert cause_of_failure(attempts(1.0, None)) == (
        "no reward was given, and it ended as completed"
    )
    assert cause_of_failure(attempts(1.0, 0.0)) is None


async def test_no_reward_is_made_up_when_every_rollout_failed(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer), build(broken=(0, 1, 2, 3)))
    assert report.reward is None and "validation/reward" not in report.metrics
    assert report.metrics["validation/ask/failed"] == 4


async def test_tasks_count_alike_whatever_their_number_of_examples(build, tokenizer):
    tasks = build("a", validation=Numbers.Config(count=1)), build("b")
    report = await run(ScriptedPolicy(tokenizer, answers(8, 4, 4, 4)), *tasks)
    # a: 8. b: (8 + 4 + 4 + 4) / 4 = 5.
    assert (
        report.metrics["validation/a/reward"],
        report.metrics["validation/b/reward"],
        report.reward,
    ) == (8.0, 5.0, 6.5)


async def test_task_without_held_out_examples_takes_no_part(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer), build(validation=None))
    assert (report.reward, report.metrics) == (None, {})


# ---- k attempts


@pytest.mark.parametrize("n, passed", [(n, passed) for n in range(1, 7) for passed in range(n + 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_one_that_passes(n, passed):
    for k in range(1, n + 1):
        choices = list(itertools.combinations([index < passed for index in range(n)], k))
        assert pass_at_k(n, passed, k) == pytest.approx(
            sum(map(any, choices)) / len(choices), abs=1e-12
        )


def attempts(*rewards: float | None) -> RolloutGroup:
    return rewarded_group(FIRST, *rewards, task="ask")


def test_avg_at_k_and_pass_at_k_by_hand():
    groups = [attempts(1.0, 0.0, 0.0, 0.5), attempts(0.0, 0.0, 0.0, 0.0)]
    metrics = evaluation_metrics("ask", groups, ValidationConfig(attempts=4, temperature=1.0))
    # First example: one of four passes. pass@1 = 1/4, pass@2 = 1 - C(3, 2)/C(4, 2) = 1/2, pass@4 = 1; the second: 0.
    assert metrics["validation/ask/avg@4"] == metrics["validation/ask/reward"] == (0.375 + 0) / 2
    assert metrics["validation/ask/pass@1"] == 0.125 and metrics["validation/ask/pass@2"] == 0.25
    assert metrics["validation/ask/pass@4"] == 0.5 and metrics["validation/ask/failed"] == 0
    lenient = evaluation_metrics(
        "ask", groups, ValidationConfig(attempts=4, temperature=1.0, pass_reward=0.5)
    )
    assert lenient["validation/ask/pass@1"] == 0.25


def test_attempts_that_failed_are_left_out_and_a_k_that_is_no_power_of_two_is_reported_too():
    groups = [attempts(1.0, None, 0.0), attempts(None, None, None)]
    metrics = evaluation_metrics("ask", groups, ValidationConfig(attempts=3, temperature=1.0))
    assert metrics["validation/ask/avg@3"] == 0.5 and metrics["validation/ask/failed"] == 4
    # Two attempts are left of three: pass@1 = 1/2; both together pass.
    assert [metrics[f"validation/ask/pass@{k}"] for k in (1, 2, 3)] == [0.5, 1.0, 1.0]


def test_a_reward_that_is_below_pass_reward_by_rounding_alone_passes():
    groups = [attempts(0.9999999999999999, 0.1 + 0.2 + 0.7), attempts(0.999999, 1.0)]
    metrics = evaluation_metrics("ask", groups, ValidationConfig(attempts=2, temperature=1.0))
    assert metrics["validation/ask/pass@1"] == (1 + 0.5) / 2


async def test_each_example_is_tried_k_times_with_seeds_of_its_own(build, tokenizer):
    policy = ScriptedPolicy(tokenizer)
    report = await run(policy, build(), attempts=3, temperature=0.8)
    assert len(policy.sessions) == 12 and len({session.seed for session in policy.sessions}) == 12
    assert "validation/ask/avg@3" in report.metrics


# ---- failures, and an end from outside


class HeldBesideFailures(HeldPolicy):
    """Policy that is held, and can't open a session for the examples in ``failing``."""

    def __init__(self, tokenizer, failing):
        super().__init__(tokenizer)
        self.failing = failing

    def session(self, *, rollout_id, **options):
        number = number_of(rollout_id.split("/")[0])
        if number in self.failing:
            raise self.failing[number]
        return super().session(rollout_id=rollout_id, **options)


@pytest.mark.parametrize(
    "error, said",
    [
        (RunError("no such adapter"), "^no such adapter$"),
        (asyncio.CancelledError(), "^validation of task 'ask' was cancelled, and not by the run$"),
    ],
    ids=["raises", "is cancelled"],
)
async def test_a_group_that_ends_in_an_error_ends_the_evaluation_and_the_groups_beside_it(
    build, tokenizer, error, said
):
    policy, failures = HeldBesideFailures(tokenizer, failing={3: error}), []
    validator = Validator(
        {"ask": build()},
        LocalRunner(policy, seed=0),
        ValidationConfig(),
        on_failure=failures.append,
    )
    validator.start(0)
    await asyncio.wait_for(validator.wait(), LIMIT_S)
    (failure,) = failures
    assert isinstance(failure, RunError) and re.search(said, str(failure))
    assert len(policy.sessions) == 3 and validator.take() == []
    assert all(session.closed == 1 for session in policy.sessions)


async def test_a_stop_ends_the_wait_and_a_checkpoint_has_the_evaluation_as_running(
    build, tokenizer
):
    validator = validator_of(HeldPolicy(tokenizer), build())
    validator.start(0)
    waiting = asyncio.create_task(validator.wait())
    await iterations(20)
    assert not waiting.done()
    validator.stop()
    await asyncio.wait_for(waiting, LIMIT_S)
    validator.start(1, final=True)  # begins nothing
    assert validator.state().running == ["ask"] and validator.state().begun == 0
    await validator.close()


async def test_a_checkpoint_between_the_ends_of_two_tasks_has_their_evaluation_as_running(
    build, tokenizer, tmp_path
):
    tasks = build("quick"), build("slow")
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    policy = HeldPolicy(tokenizer, holds=lambda rollout_id: "-slow-" in rollout_id)
    validator = validator_of(policy, *tasks, recorder=recorder, every=5)
    validator.start(5)
    await until(lambda: validator._running == ["slow"])
    state = validator.state()
    await validator.close()
    recorder.close()
    # "quick" has ended, but its rewards are in no report yet, and its rollouts in no record.
    assert (state.begun, state.running, state.reports) == (5, ["quick", "slow"], [])
    assert list(tmp_path.iterdir()) == []

    resumed = validator_of(ScriptedPolicy(tokenizer), *tasks, every=5)
    resumed.restore(state, 5)
    await resumed.wait()
    (report,) = resumed.take()
    assert {"validation/quick/reward", "validation/slow/reward"} < report.metrics.keys()
    assert resumed.state().running == []


async def test_a_task_is_evaluated_again_while_another_of_its_last_evaluation_still_runs(
    build, tokenizer
):
    policy = HeldPolicy(tokenizer, holds=lambda rollout_id: "-slow-" in rollout_id)
    validator = validator_of(policy, build("quick"), build("slow"), every=1)
    validator.start(1)
    await until(lambda: validator._running == ["slow"])
    validator.start(2)
    await until(lambda: len(validator.take()) == 1)
    assert validator.state().running == ["quick", "slow"]  # of the first evaluation
    policy.released.set()
    await validator.wait()
    (report,) = validator.take()
    assert report.step == 1 and report.metrics["validation/slow/left_out"] == 1
    assert validator.state().running == []


async def test_the_final_policy_is_not_tried_again_where_its_evaluation_was_due(build, tokenizer):
    often, seldom = build("often", validation_schedule=ValidationConfig(every=2)), build("seldom")
    validator = validator_of(ScriptedPolicy(tokenizer), often, seldom, every=3)
    validator.start(4)
    await validator.wait()
    validator.start(4, final=True)
    await validator.wait()
    tried = [
        [name.split("/")[1] for name in report.metrics if name.endswith("/examples")]
        for report in validator.take()
    ]
    assert tried == [["often"], ["seldom"]]


# ---- schedules


async def test_each_task_has_its_own_schedule_and_the_final_policy_is_tried_on_all(
    build, tokenizer
):
    often, seldom = build("often", validation_schedule=ValidationConfig(every=2)), build("seldom")
    never = build("never", validation_schedule=ValidationConfig(every=0))
    validator = validator_of(ScriptedPolicy(tokenizer), often, seldom, never, every=3)
    tried = {}
    for step in range(6):
        validator.start(step, final=step == 5)
        await validator.wait()
        for report in validator.take():
            tried[report.step] = sorted(
                name.split("/")[1] for name in report.metrics if name.endswith("/examples")
            )
    assert tried == {
        0: ["often", "seldom"],
        2: ["often"],
        3: ["seldom"],
        4: ["often"],
        5: ["often", "seldom"],
    }


async def test_evaluation_runs_beside_its_caller_and_one_that_is_still_running_is_not_started_again(
    build, tokenizer
):
    policy = HeldPolicy(tokenizer)
    validator = validator_of(policy, build(), every=1)
    validator.start(1)
    await until(lambda: len(policy.sessions) == 4)
    validator.start(2)
    await iterations()
    assert validator.take() == [] and len(policy.sessions) == 4
    policy.released.set()
    await validator.wait()
    (report,) = validator.take()
    assert report.step == 1 and report.metrics["validation/ask/left_out"] == 1
    assert (
        report.metrics["validation/ask/version_min"]
        == report.metrics["validation/ask/version_max"]
        == 3
    )


async def test_evaluation_that_is_closed_leaves_nothing_open(build, tokenizer):
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: None)
    validator = validator_of(policy, build())
    validator.start(0)
    await until(lambda: len(policy.sessions) == 4)
    await validator.close()
    assert validator.take() == [] and [session.closed for session in policy.sessions] == [1] * 4


async def test_what_our_own_code_raises_reaches_the_run(build, tokenizer):
    failures, task = [], build()
    task.score_rewards = None
    validator = Validator(
        {"ask": task},
        LocalRunner(ScriptedPolicy(tokenizer), seed=0),
        ValidationConfig(),
        on_failure=failures.append,
    )
    validator.start(0)
    await validator.wait()
    assert validator.take() == [] and isinstance(failures[0], TypeError)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(attempts=4),
            "validation.attempts = 4: greedy attempts are all alike: set validation.temperature",
        ),
        (dict(examples=0), "validation.examples = 0: must be at least 1"),
        (dict(every=-1), "validation.every = -1: must be at least 0"),
    ],
)
def test_bad_schedules_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_config(ValidationConfig(**changes), field="validation")


async def test_validation_leaves_the_training_examples_alone(build, tokenizer):
    task = build()
    before = task.sampler.state_dict()
    await run(ScriptedPolicy(tokenizer), task)
    assert task.sampler.state_dict() == before


@pytest.mark.parametrize("step, final, at_once", [(0, False, 4), (5, False, 2), (5, True, 4)])
async def test_evaluation_beside_training_leaves_room_in_the_generators(
    build, tokenizer, step, final, at_once
):
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: None)
    validator = validator_of(
        policy, build(), every=5, attempts=3, temperature=1.0, max_concurrency=7
    )
    validator.start(step, final=final)
    await until(lambda: len(policy.sessions) >= 3 * at_once)
    await iterations()
    assert len(policy.sessions) == 3 * at_once  # of four examples, three attempts each
    await validator.close()


# ---- sampling and rewards of their own


async def test_attempts_are_sampled_as_the_validation_says_and_else_as_the_task(build, tokenizer):
    policy = ScriptedPolicy(tokenizer)
    await run(policy, build(), temperature=0.6, top_p=0.9, top_k=20, max_tokens=3)
    sampled = {repr(session.sampling) for session in policy.sessions}
    assert sampled == {repr(SamplingConfig(temperature=0.6, max_tokens=3, top_p=0.9, top_k=20))}
    policy = ScriptedPolicy(tokenizer)
    await run(policy, build())
    assert {repr(session.sampling) for session in policy.sessions} == {
        repr(SamplingConfig(temperature=0.0, max_tokens=9))
    }


def always_half(completion, example):
    return 0.5


async def test_a_rubric_of_the_validation_measures_and_the_tasks_own_trains(build, tokenizer):
    task = build(validation_rubric=Rubric.Config(reward_fns=[always_half]))
    report = await run(ScriptedPolicy(tokenizer, "four"), task)
    assert report.metrics["validation/ask/reward"] == 0.5
    own = await run(ScriptedPolicy(tokenizer, "four"), build())
    assert own.metrics["validation/ask/reward"] == 4.0
    assert task.rubric.names == ["length"]


def test_an_override_of_score_rewards_that_takes_no_rubric_is_refused(renderer):
    class Changed(AskTask):
        async def score_rewards(self, group):
            await super().score_rewards(group)

    config = Changed.Config(validation_rubric=Rubric.Config(reward_fns=[always_half]))
    with pytest.raises(ConfigError, match="validation_rubric.*Changed.score_rewards takes none"):
        config.build(name="ask", context=context_of(renderer))


async def test_reward_functions_of_an_evaluation_know_the_version_that_is_evaluated(
    build, tokenizer
):
    def version(completion, example, policy_version):
        return float(policy_version)

    policy = ScriptedPolicy(tokenizer)
    policy.version = 7
    report = await run(policy, build(rubric=Rubric.Config(reward_fns=[version])))
    assert report.metrics["validation/ask/reward"] == 7.0
