"""Tasks: groups of rollouts, every one with a terminal status, every env and session closed once."""

import asyncio
import sys

import numpy as np
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.envs import FAILURES, BrokenEnv, TalkingEnv, hang, raise_value_error
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.tasks import QUESTION, ListTask, run_group
from tests.fakes.waiting import until
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.ask import scopes
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, UserCodeError
from torchtitan.experiments.rl.loops.group_runner import GroupRequest, LocalRunner
from torchtitan.experiments.rl.loops.groups import SharedExample
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn, Rubric, env_component
from torchtitan.experiments.rl.tasks.task import Task, claim, derive_seed


def assert_all_closed_once(task, policy):
    assert [env.closed for env in task.made] == [1] * len(task.made)
    assert [session.closed for session in policy.sessions] == [1] * len(policy.sessions)


# ---- the way through


async def test_group_is_run_scored_and_given_credit(build, tokenizer):
    task = build()
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: "x" * (1 + int(rollout_id[-1])))
    group = await run_group(task, policy)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert (group.task_name, group.data_sample, group.admitted_version) == ("talk", QUESTION, 3)
    assert group.rollouts[0].reward is None
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [1, 2, 3]
    assert group.rollouts[0].reward_components == {"length": 1.0, "env/steps": 1.0}
    for rollout, advantage in zip(group.rollouts, (-1, 0, 1), strict=True):
        (sample,) = rollout.samples
        assert set(sample.advantages[sample.loss_mask].tolist()) == {advantage}
        assert (
            sample.token_ids[sample.loss_mask].tolist()
            == rollout.turns[0].completion.token_ids.tolist()
        )
        assert set(sample.policy_versions[sample.loss_mask].tolist()) == {3}
    assert_all_closed_once(task, policy)


async def test_sessions_are_open_before_the_first_await(build, tokenizer):
    task, policy = build(), ScriptedPolicy(tokenizer)
    coroutine = run_group(task, policy)
    coroutine.send(None)  # runs to the first await and no further
    assert [session.rollout_id for session in policy.sessions] == [
        "g/0",
        "g/1",
        "g/2",
    ] and task.made == []
    coroutine.close()


async def test_sessions_get_the_sampling_stop_tokens_and_their_own_seeds(
    build, tokenizer, renderer
):
    task, policy = build(sampling=SamplingConfig(max_tokens=7)), ScriptedPolicy(tokenizer)
    await run_group(task, policy, seed=5)
    assert {session.sampling.max_tokens for session in policy.sessions} == {7}
    assert policy.sessions[0].stop_token_ids == renderer.get_stop_token_ids()
    assert [session.seed for session in policy.sessions] == [
        derive_seed(5, "g", index, 0) for index in range(3)
    ]


def test_seeds_are_the_same_in_every_process_and_differ_in_every_part():
    assert derive_seed(0, "g", 0, 0) == 3621192122679304891
    parts = [(s, g, i, a) for s in range(3) for g in ("g", "h") for i in range(3) for a in range(2)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= derive_seed(*part) < 2**63 for part in parts)


async def test_multi_turn_rollouts_are_one_sample_and_env_rewards_count_where_named(
    build, tokenizer
):
    rubric = Rubric.Config(reward_fns=[env_component("steps")])
    task = build(envs=[TalkingEnv(turns=n) for n in (1, 2, 3)], rubric=rubric)
    group = await run_group(task, ScriptedPolicy(tokenizer))
    await task.score_group(group)
    assert [rollout.reward for rollout in group.rollouts] == [1, 2, 3]
    assert [len(rollout.samples) for rollout in group.rollouts] == [1, 1, 1]


async def test_completions_are_limited_by_turn_and_by_rollout(build, tokenizer):
    policy = ScriptedPolicy(tokenizer, "xy" * 20)
    group = await run_group(build(sampling=SamplingConfig(max_tokens=4)), policy)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TRUNCATED_LENGTH}
    assert {rollout.completion_tokens for rollout in group.rollouts} == {4}
    task = build(env=RendererEnvConfig(max_rollout_tokens=len(policy.sessions[0].prompts[0]) + 3))
    assert {rollout.completion_tokens for rollout in (await run_group(task, policy)).rollouts} == {
        3
    }


async def test_validation_gets_rewards_without_credit(build, tokenizer):
    class Watching(GRPO):
        async def score_rollout(self, rollout):
            raise AssertionError("the algorithm must not see validation")

    task = build(algorithm=Watching.Config())
    greedy = SamplingConfig(temperature=0.0)
    policy = ScriptedPolicy(tokenizer, "four")
    group = await run_group(task, policy, sampling=greedy, group_size=1, credit=False)
    await task.score_rewards(group)
    (rollout,) = group.rollouts
    assert rollout.reward == 4.0 and rollout.samples[0].advantages is None
    assert policy.sessions[0].sampling is greedy


async def test_turn_loop_can_be_overridden(build, tokenizer):
    class OneTurn(ListTask):
        async def run_rollout(self, env, policy):
            await env.initial_prompt()
            completion = await policy.generate(env.prompt_token_ids, max_tokens=50)
            await env.step_completion(completion)
            if not env.status.is_terminal():
                env.finish(RolloutStatus.TRUNCATED_MAX_TURNS)

    task, policy = (
        build(envs=[TalkingEnv(turns=5) for _ in range(3)], kind=OneTurn),
        ScriptedPolicy(tokenizer),
    )
    group = await run_group(task, policy)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TRUNCATED_MAX_TURNS}
    assert_all_closed_once(task, policy)


@pytest.mark.parametrize(
    ("status", "error", "ends"),
    [
        ("truncated_max_turns", None, ("truncated_max_turns", None)),
        (RolloutStatus.ERROR, ValueError("no way out"), ("error", "ValueError: no way out")),
        ("error", 5, ("error", "5")),
        (
            "lost",
            None,
            ("error", "EndsTheFirst.run_rollout: ValueError: 'lost' is not a valid RolloutStatus"),
        ),
    ],
)
async def test_turn_loop_may_finish_with_a_text_and_fails_alone_with_one_that_is_no_status(
    build, tokenizer, status, error, ends
):
    class EndsTheFirst(ListTask):
        begun = 0

        async def run_rollout(self, env, policy):
            self.begun += 1
            if self.begun == 1:
                env.finish(status, error)
            else:
                await super().run_rollout(env, policy)

    task, policy = build(kind=EndsTheFirst, max_retries=0), ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert [rollout.status for rollout in group.rollouts] == [ends[0], "completed", "completed"]
    assert (group.rollouts[0].error or "").startswith(ends[1] or "")
    assert_all_closed_once(task, policy)


# ---- retries


async def test_failed_rollout_is_run_again_with_a_new_env_session_and_seed(build, tokenizer):
    task = build(envs=[TalkingEnv(), BrokenEnv("reset", raise_value_error), TalkingEnv()])
    policy = ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert group.rollouts[1].error is None and len(group.rollouts[1].turns) == 1
    assert [session.rollout_id for session in policy.sessions] == ["g/0", "g/1", "g/2", "g/1~1"]
    assert policy.sessions[3].seed == derive_seed(0, "g", 1, 1)
    assert_all_closed_once(task, policy)


async def test_a_rollout_is_run_again_max_retries_times_at_most(build, tokenizer):
    for retries in (0, 2):
        task = build(
            envs=[BrokenEnv("reset", raise_value_error) for _ in range(9)],
            max_retries=retries,
            group_size=1,
        )
        group = await run_group(task, ScriptedPolicy(tokenizer))
        assert group.rollouts[0].status is RolloutStatus.ERROR and len(task.made) == 1 + retries


# ---- failures


@pytest.mark.parametrize("where", ["reset", "step_message"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_failing_env_ends_its_rollout_and_leaves_the_group(build, tokenizer, where, failure):
    what, status, cause = FAILURES[failure]
    task = build(
        envs=[BrokenEnv(where, what), TalkingEnv(), TalkingEnv()],
        max_retries=0,
        env=RendererEnvConfig(step_timeout_s=0.2 if status == "timeout" else 60.0),
    )
    policy = ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert [rollout.status for rollout in group.rollouts] == [status, "completed", "completed"]
    assert cause in group.rollouts[0].error
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [None, 2, 2]
    assert group.rollouts[1].samples[0].advantages is not None
    assert_all_closed_once(task, policy)


@pytest.mark.parametrize(
    ("make_envs", "cause"),
    [
        (lambda self, sample, n: raise_value_error(), "ValueError: bad luck"),
        (lambda self, sample, n: None, "NoneType"),
        (lambda self, sample, n: [TalkingEnv() for _ in range(n + 1)], "want a list of"),
        (lambda self, sample, n: ["env"] * n, "of str, want a list of"),
    ],
)
async def test_make_envs_that_fails_fails_every_rollout(build, tokenizer, make_envs, cause):
    class Failing(ListTask):
        async def make_envs(self, sample, n):
            envs = make_envs(self, sample, n)
            self.made += [env for env in envs or [] if isinstance(env, TalkingEnv)]
            return envs

    task, policy = build(kind=Failing), ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ERROR}
    assert all(
        "Failing.make_envs" in rollout.error and cause in rollout.error
        for rollout in group.rollouts
    )
    assert_all_closed_once(task, policy)


async def test_one_env_for_several_rollouts_is_refused_and_closed_once(build, tokenizer):
    class Sharing(ListTask):
        def make_env(self, sample):
            if not self.made:
                self.made.append(TalkingEnv())
            return self.made[0]

    for group_size in (
        1,
        3,
    ):  # a single rollout's second attempt gets the env that the first has closed
        task, policy = build(kind=Sharing, group_size=group_size), ScriptedPolicy(tokenizer)
        if group_size == 1:
            policy.reply = lambda rollout_id, turn: RuntimeError("no answer")
        group = await run_group(task, policy)
        assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ERROR}
        for rollout in group.rollouts:
            assert (
                "the same TalkingEnv for several rollouts: make a new env"
                if group_size > 1
                else "a TalkingEnv that another rollout has had: make a new env"
            ) in rollout.error
            assert rollout.error.startswith("Sharing.make_envs returned ")
        assert_all_closed_once(task, policy)


async def test_a_call_inside_a_turn_loop_that_is_late_is_named_and_not_the_rollouts_limit(
    build, tokenizer
):
    class Judging(ListTask):
        async def run_rollout(self, env, policy):
            await env.initial_prompt()
            await ask(hang, timeout_s=0.1, owner="Judge.compare")

    task, policy = build(kind=Judging, group_size=1, max_retries=0), ScriptedPolicy(tokenizer)
    (rollout,) = (await run_group(task, policy)).rollouts
    assert rollout.status is RolloutStatus.TIMEOUT
    assert rollout.error.startswith("Judging.run_rollout: Judge.compare: no answer within 0.1 s")
    assert "; it waits in hang (envs.py:" in rollout.error
    assert_all_closed_once(task, policy)


@pytest.mark.parametrize("of_task, of_call, limit", [(4, 9, 4), (9, 4, 4)])
async def test_a_completion_longer_than_was_asked_for_fails_by_the_name_of_the_generator(
    build, tokenizer, of_task, of_call, limit
):
    class Unlimited(ScriptedPolicy):
        def session(self, *, sampling, **options):
            session = super().session(sampling=SamplingConfig(max_tokens=99), **options)
            generate = session.generate

            async def unlimited(prompt_token_ids, *, max_tokens, **options):
                return await generate(prompt_token_ids, max_tokens=99, **options)

            session.generate = unlimited
            return session

    class Asking(ListTask):
        async def run_rollout(self, env, policy):
            await env.initial_prompt()
            await env.step_completion(
                await policy.generate(env.prompt_token_ids, max_tokens=of_call)
            )

    sampling = SamplingConfig(max_tokens=of_task)
    task = build(kind=Asking, group_size=1, max_retries=0, sampling=sampling)
    (rollout,) = (await run_group(task, Unlimited(tokenizer, "xy" * 20))).rollouts
    assert rollout.status is RolloutStatus.ERROR and not rollout.samples
    assert "generator: a completion has " in rollout.error
    assert rollout.error.endswith(f"tokens, and at most {limit} were asked for")


async def test_an_example_that_contains_itself_fails_its_group_by_name(build, tokenizer):
    row: dict = {"question": "2 + 2?"}
    row["self"] = row
    request = GroupRequest(
        data_sample=DataSample(sample_id="7", env_input=row), group_id="g", group_size=2
    )
    group = await LocalRunner(ScriptedPolicy(tokenizer), seed=0).run(build(), request)
    cause = "task 'talk': example 7: its env_input or info contains itself, or is nested too deep"
    assert group.failure == cause and [rollout.error for rollout in group.rollouts] == [cause] * 2
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ERROR}
    # A checkpoint may be taken while the group is open.
    assert not SharedExample(request.data_sample).state(build()).example_is_json


async def test_env_that_an_earlier_group_had_is_refused_and_not_closed_again(build, tokenizer):
    class Pooling(ListTask):
        async def make_envs(self, sample, n):
            self.made = self.made or [TalkingEnv() for _ in range(n)]
            return self.made

    task, policy = build(kind=Pooling), ScriptedPolicy(tokenizer)
    first, second = await run_group(task, policy), await run_group(task, policy)
    assert {rollout.status for rollout in first.rollouts} == {RolloutStatus.COMPLETED}
    assert {rollout.status for rollout in second.rollouts} == {RolloutStatus.ERROR}
    assert all(
        "Pooling.make_envs returned a TalkingEnv that another rollout has had" in rollout.error
        for rollout in second.rollouts
    )
    assert len(policy.sessions) == 6, "they are not run again"
    assert_all_closed_once(task, policy)


async def test_env_is_known_by_itself_and_not_by_what_it_says_of_itself():
    class Lying(TalkingEnv):
        def __eq__(self, other):
            return True

        __hash__ = None

    one, two = Lying(), Lying()
    assert claim(one) and claim(two) and not claim(one)
    for _ in range(100):  # ids come again
        assert claim(Lying())


async def test_envs_made_before_one_that_can_not_be_made_are_closed(build, tokenizer):
    class Failing(ListTask):
        def make_env(self, sample):
            if len(self.made) % 3 == 2:
                raise_value_error()
            self.made.append(TalkingEnv())
            return self.made[-1]

    task, policy = build(kind=Failing, max_retries=0), ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert len(task.made) == 2 and {rollout.status for rollout in group.rollouts} == {
        RolloutStatus.ERROR
    }
    assert_all_closed_once(task, policy)


async def test_make_envs_that_hangs_is_a_timeout(build, tokenizer):
    class Slow(ListTask):
        async def make_envs(self, sample, n):
            await hang()

    task = build(kind=Slow, env=RendererEnvConfig(rollout_timeout_s=0.2), max_retries=0)
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TIMEOUT}


async def test_rollout_that_takes_too_long_is_a_timeout_and_keeps_its_turns(build, tokenizer):
    task = build(
        envs=[TalkingEnv(turns=5)],
        group_size=1,
        max_retries=0,
        env=RendererEnvConfig(rollout_timeout_s=0.3, step_timeout_s=5),
    )
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: "ok" if turn == 0 else None)
    (rollout,) = (await run_group(task, policy)).rollouts
    assert rollout.status is RolloutStatus.TIMEOUT
    assert (
        rollout.error
        == "ListTask.run_rollout: the rollout took longer than 0.3 s, waiting for the generator"
    )
    assert len(rollout.turns) == 1 and len(rollout.samples) == 1
    assert_all_closed_once(task, policy)


async def test_failing_policy_and_failing_turn_loop_are_errors(build, tokenizer):
    class Forgetful(ListTask):
        async def run_rollout(self, env, policy):
            await env.initial_prompt()

    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: RuntimeError("generator is gone"))
    group = await run_group(build(max_retries=0), policy)
    assert all("RuntimeError: generator is gone" in rollout.error for rollout in group.rollouts)
    task, policy = build(kind=Forgetful, max_retries=0), ScriptedPolicy(tokenizer)
    group = await run_group(task, policy)
    assert all(
        "returned while the rollout was ongoing" in rollout.error for rollout in group.rollouts
    )
    assert_all_closed_once(task, policy)


async def test_algorithm_that_fails_on_a_rollout_makes_it_an_error(build, tokenizer):
    class Picky(GRPO):
        async def score_rollout(self, rollout):
            if rollout.index_in_group == 1:
                raise ValueError("no teacher")

    task = build(algorithm=Picky.Config())
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert [rollout.status.is_error() for rollout in group.rollouts] == [False, True, False]
    assert "Picky.score_rollout: ValueError: no teacher" in group.rollouts[1].error
    before = group.credit_s
    assert before > 0, "seconds of its calls"
    await task.score_group(group)
    assert group.credit_s > before


async def test_algorithm_that_fails_on_the_group_fails_it_with_the_cause(build, tokenizer):
    class Broken(GRPO):
        def score_group(self, group):
            raise ValueError("no credit")

    task = build(algorithm=Broken.Config())
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert "Broken.score_group: ValueError: no credit" in await task.score_group(group)
    assert group.scored == [] and all(rollout.status.is_error() for rollout in group.rollouts)


@pytest.mark.parametrize(
    "answer",
    [
        raise_value_error,
        lambda: None,
        lambda: [],
        lambda: [1.0, 2.0, 3.0],
        lambda: [Reward(1.0), Reward(float("nan")), Reward(1.0)],
        lambda: [Reward(1.0), Reward(-1e39), Reward(1.0)],
        lambda: [Reward(1.0), Reward("1.0"), Reward(1.0)],
        lambda: [Reward(1.0), 1.0, Reward(1.0)],
        lambda: [Reward(1.0), Reward(1.0, ["length"]), Reward(1.0)],
        lambda: [Reward(1.0), Reward(1.0, {"length": "long"}), Reward(1.0)],
        lambda: {Reward: 1.0, "a": 2.0, "b": 3.0},
        lambda: iter([Reward(1.0)] * 3),
    ],
)
async def test_rubric_that_scores_in_its_own_way_and_fails_is_an_error(build, tokenizer, answer):
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            return answer()

    task = build(rubric=Own.Config())
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert "Own.score_group" in await task.score_group(group)
    assert group.scored == [] and all(rollout.status.is_error() for rollout in group.rollouts)
    assert not any(rollout.reward_components for rollout in group.rollouts)


async def test_group_with_too_few_scored_rollouts_is_dropped_with_the_reason(build, tokenizer):
    task = build(envs=[BrokenEnv("reset", raise_value_error) for _ in range(2)], max_retries=0)
    group = await run_group(task, ScriptedPolicy(tokenizer))
    dropped = await task.score_group(group)
    assert dropped.startswith(
        "1 of 3 rollouts scored, 2 needed: BrokenEnv.reset: ValueError: bad luck"
    )
    assert group.rollouts[2].samples[0].advantages is None
    single = build(group_size=1, algorithm=Algorithm.Config())
    assert await single.score_group(await run_group(single, ScriptedPolicy(tokenizer))) is None


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.05])
@pytest.mark.parametrize("where", ["reset", "step_message"])
async def test_cancelled_group_closes_everything_and_raises(build, tokenizer, where, after_s):
    task = build(envs=[BrokenEnv(where, hang) for _ in range(3)], env=RendererEnvConfig())
    policy = ScriptedPolicy(tokenizer)
    running = asyncio.ensure_future(run_group(task, policy))
    await asyncio.sleep(after_s)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(policy.sessions) == 3
    assert_all_closed_once(task, policy)


class SlowToClose(TalkingEnv):
    """Hangs in ``reset``, and is closed ``close_s`` after it was asked to."""

    close_s = 0.3

    async def reset(self):
        await hang()

    async def close(self):
        await asyncio.sleep(self.close_s)
        await super().close()


async def test_envs_that_no_rollout_began_close_side_by_side(build, tokenizer):
    class Generous(ListTask):
        async def make_envs(self, sample, n):
            return [*await super().make_envs(sample, n), TalkingEnv()]

    together = asyncio.Barrier(8)

    class ClosesWithTheOthers(TalkingEnv):
        async def close(self):
            await together.wait()
            await super().close()

    envs = [ClosesWithTheOthers() for _ in range(8)]
    task = build(envs=envs, kind=Generous, group_size=8, max_retries=0)
    await run_group(task, ScriptedPolicy(tokenizer))
    assert [env.closed for env in envs] == [1] * 8


async def test_env_that_takes_its_time_to_close_is_waited_for_when_its_group_is_cancelled(
    build, tokenizer, monkeypatch
):
    monkeypatch.setattr(scopes, "CANCEL_GRACE_S", 0.05)
    config = RendererEnvConfig(step_timeout_s=30.0)
    task = build(envs=[SlowToClose() for _ in range(3)], env=config)
    running = asyncio.create_task(run_group(task, policy := ScriptedPolicy(tokenizer)))
    await until(lambda: len(task.made) == 3)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert_all_closed_once(task, policy)


class SlowToUnwind(TalkingEnv):
    """Takes some iterations of the event loop to end its step when it is cancelled."""

    async def step_message(self, message):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            self.closed_within_step = self.closed > 0


async def test_no_env_is_closed_while_the_step_of_another_unwinds(build, tokenizer):
    task = build(envs=[SlowToUnwind() if index else TalkingEnv(turns=9) for index in range(3)])
    running = asyncio.create_task(run_group(task, ScriptedPolicy(tokenizer)))
    await until(lambda: len(task.made) == 3)
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    slow = [env for env in task.made if isinstance(env, SlowToUnwind)]
    assert [env.closed_within_step for env in slow] == [False, False]


async def test_the_session_of_a_rollout_that_has_ended_samples_nothing_more(build, tokenizer):
    class Keeping(ListTask):
        async def run_rollout(self, env, policy):
            sessions.append(policy)
            await super().run_rollout(env, policy)

    sessions = []
    task = build(kind=Keeping, envs=[TalkingEnv(turns=1) for _ in range(2)])
    await run_group(task, ScriptedPolicy(tokenizer))
    with pytest.raises(UserCodeError, match="the rollout has ended: its session samples nothing"):
        await sessions[0].generate(np.arange(3, dtype=np.int32), max_tokens=1)


async def test_group_cancelled_at_any_step_closes_everything(build, tokenizer):
    for steps in range(60):
        task, policy = (
            build(envs=[TalkingEnv(turns=3) for _ in range(3)]),
            ScriptedPolicy(tokenizer),
        )
        running = asyncio.ensure_future(run_group(task, policy))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            pass
        assert_all_closed_once(task, policy)
    assert running.done() and not running.cancelled()  # the last one had the time to finish


# ---- configs


def test_task_without_an_env_is_refused_when_built(renderer):
    class NoEnv(ListTask):
        make_env = Task.make_env

    with pytest.raises(TypeError, match="NoEnv makes no env"):
        NoEnv.Config().build(name="t", context=context_of(renderer))


def test_a_task_is_not_built_from_a_renderer_alone(renderer):
    with pytest.raises(TypeError, match="ListTask is built from a context, which holds renderer"):
        ListTask.Config().build(name="t", renderer=renderer)


@pytest.mark.parametrize("arguments", ["*, context", "**others"])
def test_a_part_is_given_the_context_wherever_its_constructor_takes_it(renderer, arguments):
    class Asks(Algorithm):
        def __init__(self, config, *, context):
            super().__init__(config)
            self.context = context

    class Passes(Asks):
        def __init__(self, config, **others):
            super().__init__(config, **others)

    class Silent(Algorithm):
        def __init__(self, config):
            super().__init__(config)

    context = context_of(renderer)
    part = Asks if arguments == "*, context" else Passes
    assert build_with(part.Config(), context).context is context
    assert type(build_with(Silent.Config(), context)) is Silent


def test_default_config_is_valid():
    ListTask.Config().validate(field="tasks.talk")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "tasks.talk.group_size = 0"),
        ({"max_retries": -1}, "tasks.talk.max_retries = -1"),
        ({"min_group_size": 4}, "tasks.talk.min_group_size = 4: groups have 3"),
        ({"weight": 0}, "tasks.talk.weight = 0"),
        ({"env": RendererEnvConfig(step_timeout_s=0)}, "tasks.talk.env.step_timeout_s = 0"),
        ({"env": RendererEnvConfig(max_turns=0)}, "tasks.talk.env.max_turns = 0"),
        ({"sampling": SamplingConfig(temperature=0)}, "tasks.talk.sampling.temperature = 0"),
        (
            {"sampling": SamplingConfig(temperature=1e-6)},
            "tasks.talk.sampling.temperature = 1e-06: .* none below 0.01",
        ),
        ({"sampling": SamplingConfig(top_p=0.9)}, "tasks.talk.sampling.top_p = 0.9"),
        ({"sampling": SamplingConfig(top_k=5)}, "tasks.talk.sampling.top_k = 5"),
        ({"group_size": 1}, "tasks.talk.algorithm"),
    ],
)
def test_config_errors_name_field_value_and_cure(changes, message):
    with pytest.raises(ConfigError, match=message):
        ListTask.Config(**changes).validate(field="tasks.talk")


# ---- what an env says of its rollout at its end


def nested(depth):
    """Return a list within a list: JSON holds more levels of it than can be made read-only."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Sandbox(TalkingEnv):
    says: object = None

    async def metadata(self):
        assert self.closed == 0
        return {"files": ["a.txt"]} if self.says is None else self.says


async def test_rewards_and_records_see_what_an_env_says_of_its_rollout_before_it_is_closed(
    build, tokenizer
):
    def files(rollout, env_input):
        return len([*rollout.metadata["files"], "b.txt"])

    task = build(
        envs=[Sandbox() for _ in range(3)],
        rubric=Rubric.Config(reward_fns=[RewardFn(files, takes="rollout")]),
    )
    group = await run_group(task, policy := ScriptedPolicy(tokenizer))
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [2.0] * 3
    assert [rollout.metadata for rollout in group.rollouts] == [{"files": ["a.txt"]}] * 3
    assert_all_closed_once(task, policy)
    line = encode_rollout(group.rollouts[0], outcome=None, admitted_version=0, max_bytes=10**6)
    assert decode_rollout(line).rollout.metadata == {"files": ["a.txt"]}


async def test_env_is_closed_where_its_rollout_ends_while_it_is_asked_for_metadata(
    build, tokenizer
):
    class Slow(TalkingEnv):
        async def metadata(self):
            await asyncio.Event().wait()

    config = RendererEnvConfig(rollout_timeout_s=0.2)
    task = build(envs=[Slow() for _ in range(3)], env=config, max_retries=0)
    group = await run_group(task, policy := ScriptedPolicy(tokenizer))
    assert {rollout.status for rollout in group.rollouts} <= {
        RolloutStatus.TIMEOUT,
        RolloutStatus.COMPLETED,
        RolloutStatus.ERROR,
    }
    assert_all_closed_once(task, policy)


async def test_metadata_that_takes_too_long_is_a_timeout_as_a_step_is(build, tokenizer):
    class Slow(TalkingEnv):
        async def metadata(self):
            await asyncio.Event().wait()

    task = build(
        envs=[Slow()],
        env=RendererEnvConfig(step_timeout_s=0.1),
        group_size=1,
        min_group_size=1,
        max_retries=0,
    )
    (rollout,) = (await run_group(task, policy := ScriptedPolicy(tokenizer))).rollouts
    assert rollout.status is RolloutStatus.TIMEOUT and "Slow.metadata" in rollout.error
    assert_all_closed_once(task, policy)


async def test_session_that_can_not_be_closed_does_not_end_the_run(build, tokenizer, caplog):
    policy = ScriptedPolicy(tokenizer)
    open_session = policy.session

    def session(**options):
        opened = open_session(**options)
        opened.close = raise_value_error
        return opened

    policy.session = session
    task = build()
    group = await run_group(task, policy)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert "a session's close failed: ValueError" in caplog.text


@pytest.mark.parametrize(
    "says, cause",
    [
        (["a"], "returned list, want dict"),
        ({"a": object()}, "not JSON serializable"),
        ("deep", "RecursionError"),
    ],
)
async def test_metadata_that_no_record_holds_fails_the_rollout_and_names_the_env(
    build, tokenizer, says, cause
):
    made = Sandbox()
    # The limit is read here, because an import may have raised it.
    made.says = {"a": nested(sys.getrecursionlimit() + 100)} if says == "deep" else says
    task = build(envs=[made], group_size=1, min_group_size=1, max_retries=0)
    (rollout,) = (await run_group(task, policy := ScriptedPolicy(tokenizer))).rollouts
    assert (
        rollout.status is RolloutStatus.ERROR
        and "Sandbox.metadata" in rollout.error
        and cause in rollout.error
    )
    assert_all_closed_once(task, policy)
