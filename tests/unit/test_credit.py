"""Credit that no loss can compute with is refused where it is given, by task, algorithm, rollout and stream."""

import math
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from tests.fakes.envs import BrokenEnv, hang, raise_value_error
from tests.fakes.policy import TEACHER, Scorer, ScriptedPolicy
from tests.fakes.tasks import run_group
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, Algorithm, Echo
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.costs import add_cost
from torchtitan.experiments.rl.rollouts.samples import check_samples
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.types import TrainingSample

TOKENS = 5


def rollout_with(sampled=(2, 3, 4)) -> Rollout:
    mask = np.zeros(TOKENS, bool)
    mask[list(sampled)] = True
    sample = TrainingSample(
        token_ids=np.arange(TOKENS, dtype=np.int32),
        loss_mask=mask,
        generator_logprobs=np.where(mask, -1, 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        task_name="t",
        rollout_id="g/0",
    )
    return Rollout(group_id="g", index_in_group=0, task_name="t", samples=[sample])


# ------------------------------------------------------------------ assign_advantages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            None,
            "advantages has a NoneType of dtype object: want 3 numbers, one for each token sampled, or one number for all",
        ),
        ("1", "advantages has a str of dtype <U1: want 3 numbers"),
        ([1.0, 2.0], r"advantages has shape \(2,\): want 3 numbers"),
        ([[1.0, 2.0, 3.0]], r"advantages has shape \(1, 3\): want 3 numbers"),
        ([1.0, None, 3.0], "advantages has a list of dtype object: want 3 numbers"),
        ([[1.0], [2.0, 3.0], [4.0]], "advantages is a list that is no array: want 3 numbers"),
        (math.nan, "the advantage nan is not a finite number"),
        (-math.inf, "the advantage -inf is not a finite number"),
        (1e39, r"the advantage 1e\+39 is not a finite number that float32 holds"),
        ([1.0, 1e39, 3.0], r"the advantage 1e\+39 is not a finite number that float32 holds"),
    ],
)
def test_advantages_that_are_no_numbers_are_refused_with_the_rollout(value, message):
    rollout = rollout_with()
    with pytest.raises(ValueError, match=f"rollout g/0: {message}"):
        rollout.assign_advantages(value)
    assert rollout.samples[0].advantages is None


@pytest.mark.parametrize("value", [2, 2.0, True, np.float32(2), np.int64(2), np.array(2.0)])
def test_any_number_is_an_advantage_for_all_sampled_tokens(value):
    rollout = rollout_with()
    rollout.assign_advantages(value)
    assert rollout.samples[0].advantages.tolist() == [0, 0, *[float(value)] * 3]
    assert rollout.samples[0].advantages.dtype == np.float32


# ------------------------------------------------------------------ streams that an algorithm sets


class Setting(GRPO):
    """GRPO that then sets a stream of its second rollout's sample."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        stream: str = "advantages"
        value: object = None
        early: bool = False
        """Set it in score_rollout."""

    async def score_rollout(self, rollout):
        if self.config.early:
            self.set_stream(rollout)

    def score_group(self, group):
        super().score_group(group)
        if not self.config.early:
            self.set_stream(group.rollouts[1])

    def set_stream(self, rollout):
        if rollout.index_in_group == 1:
            (sample,) = rollout.samples
            value = self.config.value
            setattr(sample, self.config.stream, value(sample) if callable(value) else value)


def all_but_the_first(value):
    return lambda sample: np.where(np.arange(len(sample)) > 0, value, 0)


BAD_STREAMS = {
    "a scalar": (1.0, "has shape ()"),
    "a text": ("one", "has a str of dtype"),
    "two dimensions": (lambda sample: np.ones((len(sample), 1)), ", 1): want"),
    "too few": (lambda sample: np.ones(len(sample) - 1, np.float32), "want"),
    "texts": (lambda sample: ["1"] * len(sample), "has a list of dtype <U1"),
    "nothing": (lambda sample: [None] * len(sample), "has a list of dtype object"),
    "nan": (all_but_the_first(np.nan), "is nan at token"),
    "infinite": (all_but_the_first(-np.inf), "is -inf at token"),
    "more than float32 holds": (all_but_the_first(1e39), "is inf at token"),
}


@pytest.mark.parametrize("stream", ["advantages", "rl_weights", "ce_weights", "ref_kl_weights"])
@pytest.mark.parametrize("kind", BAD_STREAMS)
async def test_bad_stream_fails_the_group_by_task_algorithm_rollout_and_stream(
    build, tokenizer, stream, kind
):
    value, cause = BAD_STREAMS[kind]
    task = build(algorithm=Setting.Config(stream=stream, value=value))
    group = await run_group(task, ScriptedPolicy(tokenizer))
    failure = await task.score_group(group)
    assert (
        failure.startswith(f"task talk: Setting.score_group: rollout g/1: {stream} ")
        and cause in failure
    ), failure
    assert group.scored == [] and {rollout.status for rollout in group.rollouts} == {
        RolloutStatus.ERROR
    }


@pytest.mark.parametrize("kind", BAD_STREAMS)
async def test_bad_stream_set_for_one_rollout_fails_that_rollout(build, tokenizer, kind):  # noqa: F811
    value, cause = BAD_STREAMS[kind]
    task = build(algorithm=Setting.Config(stream="ce_weights", value=value, early=True))
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
    error = group.rollouts[1].error
    assert error.startswith("task talk: Setting.score_rollout: ce_weights ") and cause in error, (
        error
    )
    assert await task.score_group(group) is None and len(group.scored) == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_value_that_no_loss_reads_may_be_anything(build, tokenizer, value):  # noqa: F811
    task = build(
        algorithm=Setting.Config(
            stream="advantages", value=lambda sample: np.where(sample.loss_mask, 1, value)
        )
    )
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert await task.score_group(group) is None


async def test_lists_and_other_dtypes_become_the_declared_one(build, tokenizer):  # noqa: F811
    task = build(
        algorithm=Setting.Config(
            stream="ce_weights", value=lambda sample: [0] + [1] * (len(sample) - 1)
        )
    )
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert await task.score_group(group) is None
    weights = group.rollouts[1].samples[0].ce_weights
    assert weights.dtype == np.float32 and weights[:2].tolist() == [0, 1]


class Freezing(Algorithm):
    """Writes what it may not, and makes its draft read-only by itself."""

    async def score_rollout(self, rollout):
        (sample,) = rollout.samples
        sample.loss_mask = ~sample.loss_mask
        sample.freeze()


async def test_draft_that_was_refused_is_not_kept(build, tokenizer):  # noqa: F811
    task = build(algorithm=Freezing.Config(), group_size=1, min_group_size=1, max_retries=0)
    (rollout,) = (await run_group(task, ScriptedPolicy(tokenizer))).rollouts
    assert rollout.error == (
        "task talk: Freezing.score_rollout: changed samples[0].loss_mask of a rollout that has "
        "ended"
    )
    (sample,) = rollout.samples
    prompt, sampled = rollout.turns[0].prompt_token_ids, rollout.turns[0].completion.token_ids
    assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * len(sampled)


class Late(Algorithm):
    """Exceeds its limit in ``score_rollout``, and writes to the rollout while it is scored."""

    needs_group = True

    def __init__(self, config):
        self.is_scored, self.has_written = threading.Event(), threading.Event()

    def score_rollout(self, rollout):
        self.is_scored.wait(60)
        try:
            rollout.samples[0].ce_weights = np.ones(len(rollout.samples[0]), np.float32)
        finally:
            self.has_written.set()

    def score_group(self, group):
        for rollout in group.rollouts:
            rollout.assign_advantages(1.0)
        self.is_scored.set()
        assert self.has_written.wait(60)


async def test_score_rollout_that_goes_on_after_its_limit_gives_no_credit(build, tokenizer):  # noqa: F811
    task = build(
        algorithm=Late.Config(),
        env=RendererEnvConfig(rollout_timeout_s=1.0),
        rubric=Rubric.Config(error_reward=0.0),
        group_size=1,
        min_group_size=1,
        max_retries=0,
    )
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert group.rollouts[0].error.startswith(
        "task talk: Late.score_rollout: no answer within 1 s; it waits in Late.score_rollout (test_credit.py:"
    )
    assert await task.score_group(group) is None
    (sample,) = group.rollouts[0].samples
    assert sample.ce_weights is None and set(sample.advantages) == {0.0, 1.0}


class Slow(GRPO):
    """Waits for a server that never answers."""

    async def score_group(self, group):
        await hang()


async def test_late_algorithm_says_where_it_waits(build, tokenizer):  # noqa: F811
    task = build(
        algorithm=Slow.Config(),
        env=RendererEnvConfig(rollout_timeout_s=1.0),
        group_size=1,
        min_group_size=1,
    )
    group = await run_group(task, ScriptedPolicy(tokenizer))
    cause = await task.score_group(group)
    assert cause.startswith(
        "task talk: Slow.score_group: no answer within 1 s; it waits in hang (envs.py:"
    )


class Failing(Algorithm):
    async def score_rollout(self, rollout):
        rollout.fail("no credit for it")


async def test_rollout_that_score_rollout_fails_has_failed(build, tokenizer):  # noqa: F811
    task = build(algorithm=Failing.Config(), group_size=1, min_group_size=1)
    (rollout,) = (await run_group(task, ScriptedPolicy(tokenizer))).rollouts
    assert rollout.status is RolloutStatus.ERROR and rollout.error == "no credit for it"


class Paying(GRPO):
    """GRPO that asks a judge, which costs something."""

    async def score_group(self, group):
        add_cost("judge/calls", 2.0)
        super().score_group(group)


async def test_what_an_algorithm_costs_is_a_cost_of_its_group(build, tokenizer):  # noqa: F811
    task = build(algorithm=Paying.Config())
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert await task.score_group(group) is None
    assert group.costs == {"judge/calls": 2.0}


class OneBuffer(Algorithm):
    """Writes the weights and the mask of each rollout to the same two arrays."""

    replaces = ("loss_mask",)
    weights = np.zeros(4096, np.float32)
    mask = np.zeros(4096, np.int64)
    calls = 0

    async def score_rollout(self, rollout):
        self.calls += 1
        (sample,) = rollout.samples
        count = len(sample)
        self.weights[1:count] = self.calls
        self.mask[:count] = np.arange(count) > self.calls
        sample.ce_weights = self.weights[:count]
        sample.loss_mask = self.mask[:count]


async def test_arrays_that_an_algorithm_writes_again_stay_as_they_were_in_a_credited_rollout(
    build,  # noqa: F811
    tokenizer,
):
    task = build(algorithm=OneBuffer.Config(), group_size=1, min_group_size=1)
    samples = []
    for _ in range(2):
        (rollout,) = (await run_group(task, ScriptedPolicy(tokenizer))).rollouts
        samples += rollout.samples
    assert [set(sample.ce_weights[1:]) for sample in samples] == [{1}, {2}]
    assert [np.count_nonzero(~sample.loss_mask) for sample in samples] == [2, 3]
    assert {sample.loss_mask.dtype for sample in samples} == {np.dtype(bool)}


async def test_credit_that_can_not_be_trained_on_fails_the_group_and_not_the_run(build, tokenizer):
    for stream, value, cause in (
        ("advantages", None, "has tokens with an rl weight and no advantages"),
        (
            "ref_kl_weights",
            lambda sample: sample.loss_mask,
            "has tokens with a ref_kl weight and no ref_logprobs",
        ),
        ("ce_weights", lambda sample: np.ones(len(sample)), "trains its first token"),
    ):
        task = build(algorithm=Setting.Config(stream=stream, value=value))
        failure = await task.score_group(await run_group(task, ScriptedPolicy(tokenizer)))
        assert "task talk: Setting.score_group: rollout g/1: " in failure and cause in failure


# ------------------------------------------------------------------ references


class Answering(Scorer):
    """Scores with ``answer(token_ids)``, but for the first two tokens that `setup` asks about."""

    def __init__(self, tokenizer, answer):
        super().__init__(tokenizer)
        self.answer = answer

    async def score(self, token_ids):
        return await super().score(token_ids) if len(token_ids) == 2 else self.answer(token_ids)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (
            lambda ids: np.full(len(ids), -np.inf, np.float32),
            "OPD.score_rollout: ref_logprobs is -inf at token",
        ),
        (
            lambda ids: np.full(len(ids), np.nan, np.float32),
            "OPD.score_rollout: ref_logprobs is nan at token",
        ),
        (
            lambda ids: np.zeros(len(ids) - 1, np.float32),
            "OPD.score_rollout: ValueError: ref_logprobs has shape",
        ),
        (
            lambda ids: np.float32(-1),
            "OPD.score_rollout: ValueError: ref_logprobs has a float32 of dtype",
        ),
    ],
)
async def test_reference_that_can_not_be_trained_on_fails_its_rollout(
    build, tokenizer, answer, cause
):
    policy = Scorer(tokenizer, frozen=Answering(tokenizer, answer))
    task = build(algorithm=OPD.Config(teacher=TEACHER))
    await task.setup(policy)
    group = await run_group(task, policy)
    assert all(
        cause.replace("has a float32 of dtype", "has shape ()") in rollout.error
        for rollout in group.rollouts
    )
    assert "0 of 3 rollouts scored" in await task.score_group(group)


# ------------------------------------------------------------------ error_reward


def failing_env():
    return BrokenEnv("step_message", raise_value_error)


@pytest.mark.parametrize("kind", ["OPD", "OPSD", "SFT", "Echo", "GRPO"])
async def test_failed_rollout_with_an_error_reward_is_trained_on_only_with_credit(
    build, tokenizer, kind
):
    config = {
        "OPD": OPD.Config(teacher=TEACHER),
        "OPSD": OPSD.Config(),
        "SFT": SFT.Config(teacher=TEACHER),
        "Echo": Echo.Config(),
        "GRPO": GRPO.Config(),
    }[kind]

    class Shown(OPSD):
        def demonstration(self, rollout):
            return "four"

    if kind == "OPSD":
        config = Shown.Config()
    policy = Scorer(tokenizer, frozen=Scorer(tokenizer))
    rubric = Rubric.Config(
        reward_fns=[RewardFn(lambda r, e: 1.0, name="one", takes="rollout")], error_reward=-1.0
    )
    task = build(algorithm=config, envs=[failing_env()], max_retries=0, rubric=rubric)
    await task.setup(policy)
    group = await run_group(task, policy)
    assert group.rollouts[0].status is RolloutStatus.ERROR and group.rollouts[0].samples
    assert await task.score_group(group) is None
    # GRPO and Echo give it an advantage; the others score no rollout that failed.
    assert [rollout.reward for rollout in group.rollouts] == [
        -1.0 if kind in ("Echo", "GRPO") else None,
        1.0,
        1.0,
    ]
    check_samples(group.scored)


async def test_group_without_a_rollout_that_got_credit_is_dropped(build, tokenizer):  # noqa: F811
    policy = Scorer(tokenizer, frozen=Scorer(tokenizer))
    envs = [failing_env() for _ in range(2)]
    task = build(
        algorithm=OPD.Config(teacher=TEACHER),
        envs=envs,
        max_retries=0,
        rubric=Rubric.Config(error_reward=0.0),
    )
    await task.setup(policy)
    failure = await task.score_group(await run_group(task, policy))
    assert failure.startswith(
        "1 of 3 rollouts scored, 2 needed: BrokenEnv.step_message: ValueError: bad luck"
    )


async def test_algorithm_without_methods_gives_no_credit_and_is_left_alone(build, tokenizer):  # noqa: F811
    task = build(algorithm=Algorithm.Config())
    assert await task.score_group(await run_group(task, ScriptedPolicy(tokenizer))) is None


# ------------------------------------------------------------------ rewards that float32 does not hold


async def test_reward_that_float32_does_not_hold_fails_by_the_functions_name(build, tokenizer):  # noqa: F811
    task = build(
        rubric=Rubric.Config(
            reward_fns=[RewardFn(lambda r, e: 1e300, name="huge", takes="rollout")]
        )
    )
    group = await run_group(task, ScriptedPolicy(tokenizer))
    assert "reward function 'huge': returned 1e+300 (float)" in await task.score_group(group)


async def test_difference_of_rewards_that_overflows_fails_the_group_by_the_algorithms_name(
    build, tokenizer
):
    def by_index(rollouts, env_input):
        return [3e38, -3e38, -3e38]  # each is within float32, but not 3e38 less their mean of -1e38

    task = build(
        rubric=Rubric.Config(reward_fns=[RewardFn(by_index, group_level=True, takes="rollout")])
    )
    failure = await task.score_group(await run_group(task, ScriptedPolicy(tokenizer)))
    assert (
        "task talk: GRPO.score_group: ValueError: rollout g/0: the advantage 4e+38 is not a finite number"
        in failure
    )
