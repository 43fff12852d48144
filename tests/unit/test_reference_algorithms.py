"""OPD, OPSD, SFT and Echo: the streams they write, worked out by hand, and whom they sample from and ask."""

import asyncio
import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.envs import TalkingEnv
from tests.fakes.policy import TEACHER, Scorer, ScriptedPolicy
from tests.fakes.tasks import DEMONSTRATION, TalkTask
from tests.fakes.waiting import LIMIT_S
from tests.unit.demonstrations import check_example
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, Echo
from torchtitan.experiments.rl.algorithms.echo import tool_names
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, LivePolicy
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import check_sample
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric


@pytest.fixture
def run(renderer):
    async def run(algorithm, policy, *, credit=True, sample=DEMONSTRATION, **changes):
        task = TalkTask.Config(algorithm=algorithm, **changes).build(
            name="talk", context=context_of(renderer)
        )
        await task.setup(policy)
        group = await task.run_group(sample, policy, group_id="g", seed=0, credit=credit)
        if credit:
            assert await task.score_group(group) is None
        return group

    return run


# ------------------------------------------------------------------ OPD


async def test_opd_asks_the_teacher_for_the_sampled_tokens_and_feeds_ref_kl_alone(run, tokenizer):
    teacher = Scorer(tokenizer)
    policy = Scorer(tokenizer, frozen=teacher)
    group = await run(OPD.Config(teacher=TEACHER), policy)
    assert policy.asked_for == [TEACHER] and policy.scored == []
    assert teacher.scored[0] == [0, 1], "before the first rollout, to see that it answers"
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        assert sample.token_ids.tolist() in teacher.scored
        positions = np.arange(len(sample))
        assert sample.ref_logprobs.tolist() == np.where(sample.loss_mask, -positions, 0).tolist()
        assert sample.ref_kl_weights.tolist() == sample.loss_mask.astype(float).tolist()
        assert (
            not sample.rl_weights.any() and sample.ce_weights is None and sample.advantages is None
        )
        assert {
            sample.ref_logprobs.dtype,
            sample.ref_kl_weights.dtype,
            sample.rl_weights.dtype,
        } == {np.dtype(np.float32)}
        assert (
            sample.loss_mask.any()
            and sample.policy_versions[sample.loss_mask].tolist() == [3] * sample.loss_mask.sum()
        )


class AnswersTogether(Scorer):
    """Answers nobody before 8 have asked."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._asked = asyncio.Barrier(8)

    async def score(self, token_ids):
        if len(token_ids) > 2:  # not at setup
            await asyncio.wait_for(self._asked.wait(), LIMIT_S)
        return await super().score(token_ids)


async def test_reference_calls_of_different_rollouts_run_side_by_side(run, tokenizer):
    teacher = AnswersTogether(tokenizer)
    group = await run(OPD.Config(teacher=TEACHER), Scorer(tokenizer, frozen=teacher), group_size=8)
    assert len(group.scored) == 8


class Deaf(Scorer):
    async def score(self, token_ids):
        raise RunError(
            "frozen model 'teacher' at http://localhost:1/v1 failed 6 times, last with ConnectError"
        )


class DeafLater(Deaf):
    async def score(self, token_ids):
        return await (Scorer if len(token_ids) == 2 else Deaf).score(self, token_ids)


async def test_a_teacher_that_does_not_answer_ends_the_run_at_setup(run, tokenizer):
    for algorithm in (OPD.Config(teacher=TEACHER), SFT.Config(teacher=TEACHER)):
        with pytest.raises(RunError, match="'teacher'.*failed 6 times"):
            await run(algorithm, Scorer(tokenizer, frozen=Deaf(tokenizer)))


async def test_a_teacher_that_is_gone_later_ends_the_rollout_with_the_cause(renderer, tokenizer):
    task = TalkTask.Config(algorithm=OPD.Config(teacher=TEACHER)).build(
        name="talk", context=context_of(renderer)
    )
    policy = Scorer(tokenizer, frozen=DeafLater(tokenizer))
    await task.setup(policy)
    group = await task.run_group(DEMONSTRATION, policy, group_id="g", seed=0)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ERROR}
    assert "OPD.score_rollout: frozen model 'teacher'" in await task.score_group(group)


# ------------------------------------------------------------------ OPSD


async def test_opsd_scores_the_sampled_tokens_behind_the_demonstration(run, tokenizer, renderer):
    policy = Scorer(tokenizer, "five")
    group = await run(OPSD.Config(template=" Hint: {demonstration}"), policy)
    hinted = renderer.render_ids(
        [{"role": "user", "content": "start Hint: four"}], add_generation_prompt=True
    )
    plain = renderer.render_ids([{"role": "user", "content": "start"}], add_generation_prompt=True)
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        sampled = sample.token_ids[sample.loss_mask].tolist()
        assert sample.token_ids.tolist() == plain + sampled, (
            "what is trained on has no demonstration in it"
        )
        assert hinted + sampled in policy.scored
        at = len(hinted) + np.arange(len(sampled))
        assert sample.ref_logprobs.tolist() == [0] * len(plain) + (-at).tolist()
        assert sample.ref_kl_weights.tolist() == [0] * len(plain) + [1] * len(sampled)
        assert not sample.rl_weights.any()


async def test_opsd_scores_a_whole_conversation_behind_its_first_prompt(run, tokenizer, renderer):
    policy = Scorer(tokenizer)
    group = await run(OPSD.Config(template="!{demonstration}"), policy, turns=2)
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        first = len(rollout.turns[0].prompt_token_ids)
        hinted = renderer.render_ids(
            [{"role": "user", "content": "start!four"}], add_generation_prompt=True
        )
        assert hinted + sample.token_ids[first:].tolist() in policy.scored
        shift = len(hinted) - first
        assert (
            sample.ref_logprobs.tolist()
            == np.where(sample.loss_mask, -(np.arange(len(sample)) + shift), 0).tolist()
        )


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("retention", ["all", "tool_cycle"])
async def test_opsd_leaves_the_sample_as_it_is_behind_a_system_message(
    tokenizer_path, tokenizer, turns, retention
):
    """Also where a conversation is several samples, because its prompts are rendered anew."""
    renderer = build_renderer(
        RendererConfig(enable_thinking=True, thinking_retention=retention), tokenizer_path
    )
    algorithm = OPSD.Config(place="system", template="\n\nHint: {demonstration}")
    task = TalkTask.Config(algorithm=algorithm, turns=turns).build(
        name="talk", context=context_of(renderer)
    )
    policy = Scorer(tokenizer, "<think>\nhm\n</think>\n\nok")
    await task.setup(policy)
    group = await task.run_group(DEMONSTRATION, policy, group_id="g", seed=0)
    block = tokenizer.encode("<|im_start|>system\nHint: four<|im_end|>\n", add_special_tokens=False)
    for rollout in group.rollouts:
        assert rollout.error is None and len(rollout.samples) == (
            turns if retention == "tool_cycle" else 1
        )
        for sample in rollout.samples:
            assert block + sample.token_ids.tolist() in policy.scored
            positions = np.arange(len(sample)) + len(block)
            assert (
                sample.ref_logprobs.tolist() == np.where(sample.loss_mask, -positions, 0).tolist()
            )
            assert (
                sample.ref_kl_weights.tolist() == sample.loss_mask.astype(float).tolist()
                and sample.loss_mask.any()
            )


@pytest.mark.parametrize("place", ["question", "system"])
async def test_opsd_leaves_scoring_to_the_trainer_in_the_tokens_that_it_would_have_asked_about(
    run, tokenizer, place
):
    asked, left = Scorer(tokenizer), Scorer(tokenizer)
    group = await run(OPSD.Config(place=place), asked, turns=2)
    other = await run(OPSD.Config(place=place, reference="trainer"), left, turns=2)
    assert left.scored == [] and len(asked.scored) == 2
    for rollout, known in zip(other.rollouts, group.rollouts, strict=True):
        (sample,), (scored,) = rollout.samples, known.samples
        assert (
            sample.reference_ids.dtype == np.int32 and sample.reference_ids.tolist() in asked.scored
        )
        assert sample.ref_logprobs is None and np.array_equal(
            sample.ref_kl_weights, scored.ref_kl_weights
        )
        assert not sample.rl_weights.any()
        check_sample(sample)


def test_opsd_counts_the_system_message_against_the_context(renderer, tokenizer):
    config = OPSD.Config(place="system", template="{demonstration}")
    added = len(tokenizer.encode("<|im_start|>system\nfour<|im_end|>\n", add_special_tokens=False))
    check_example(config, DEMONSTRATION, renderer, max_model_len=100 + added + 1)
    with pytest.raises(
        ConfigError, match=rf"tasks.t.env.max_rollout_tokens = 100: .* \({added} tokens\)"
    ):
        check_example(config, DEMONSTRATION, renderer, max_model_len=100 + added)


async def test_opsd_without_a_demonstration_says_which_sample_has_none(renderer, tokenizer):
    task = TalkTask.Config(algorithm=OPSD.Config(demonstration_key="proof")).build(
        name="talk", context=context_of(renderer)
    )
    policy = Scorer(tokenizer)
    await task.setup(policy)
    group = await task.run_group(DEMONSTRATION, policy, group_id="g", seed=0)
    assert "data sample '7' has no text in info['proof']" in group.rollouts[0].error


class TooLong(Scorer):
    async def score(self, token_ids):
        raise RunError(f"{len(token_ids)} tokens to score: give 2 to max_model_len - 1 = 9")


async def test_opsd_names_a_rollout_whose_demonstration_is_too_long_to_score(renderer, tokenizer):
    task = TalkTask.Config(algorithm=OPSD.Config(template=" Hint: {demonstration}")).build(
        name="talk", context=context_of(renderer)
    )
    policy = TooLong(tokenizer)
    await task.setup(policy)
    group = await task.run_group(DEMONSTRATION, policy, group_id="g", seed=0)
    plain, hinted = (
        len(renderer.render_ids([{"role": "user", "content": text}], add_generation_prompt=True))
        for text in ("start", "start Hint: four")
    )
    tokens = hinted + len(group.rollouts[0].turns[0].completion.token_ids)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.ERROR
        assert (
            f"task talk: OPSD.score_rollout: {tokens} tokens, {hinted - plain} of them for the"
            in rollout.error
        )


def test_opsd_refuses_a_first_example_without_a_demonstration_or_with_one_too_long(renderer):
    missing = r"tasks.t.algorithm.demonstration_key = 'proof': data sample '7' has no text in info\['proof'\]"
    with pytest.raises(ConfigError, match=missing):
        check_example(OPSD.Config(demonstration_key="proof"), DEMONSTRATION, renderer)
    half = DataSample(sample_id="8", env_input=None, info={"demonstration": "a\ud800"})
    with pytest.raises(
        ConfigError, match="the demonstration of data sample '8' has '.ud800' at character 1"
    ):
        check_example(OPSD.Config(), half, renderer)

    config = OPSD.Config(template="{demonstration}")
    added = len(
        renderer.render_ids([{"role": "user", "content": "xfour"}], add_generation_prompt=True)
    ) - len(renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True))
    check_example(config, DEMONSTRATION, renderer, max_model_len=100 + added + 1)
    too_long = rf"tasks.t.env.max_rollout_tokens = 100: .*data sample '7' \({added} tokens\) .*max_model_len = {100 + added}"
    with pytest.raises(ConfigError, match=too_long):
        check_example(config, DEMONSTRATION, renderer, max_model_len=100 + added)


def test_opsd_whose_demonstrations_come_from_rollouts_has_none_to_check(renderer):
    class FromRollout(OPSD):
        def demonstration(self, rollout):
            return "four"

    check_example(FromRollout.Config(), DataSample(sample_id="0", env_input=None), renderer)


async def test_opsd_bounds_what_it_asks_at_once(run, tokenizer):
    policy = Scorer(tokenizer)
    await run(OPSD.Config(max_concurrency=3), policy, group_size=8)
    assert policy.most_open == 3 and len(policy.scored) == 8


def test_opsd_adds_to_the_last_user_message_whatever_its_form():
    algorithm = build_with(OPSD.Config(template=" ({demonstration})"), context_of(None))
    system, user, tool = ({"role": role, "content": role} for role in ("system", "user", "tool"))
    said = algorithm.demonstrated([system, user, user, tool], "{d}")
    assert [message["content"] for message in said] == [
        "system",
        "user",
        "user ({d})",
        "tool",
    ] and user["content"] == "user"
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert algorithm.demonstrated([parts], "d")[0]["content"][1:] == [
        {"type": "text", "text": " (d)"}
    ]
    with pytest.raises(ValueError, match="no user message"):
        algorithm.demonstrated([system], "d")


# ------------------------------------------------------------------ SFT


async def test_sft_trains_by_ce_on_what_the_frozen_teacher_said(run, tokenizer):
    teacher = Scorer(tokenizer, "right")
    teacher.version = -1
    policy = Scorer(tokenizer, "wrong", frozen=teacher)
    group = await run(SFT.Config(teacher=TEACHER), policy, sampling=SamplingConfig(temperature=0.5))
    assert policy.sessions == [] and len(teacher.sessions) == 2
    said = tokenizer.encode("right<|im_end|>", add_special_tokens=False)
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        assert sample.token_ids[sample.ce_weights != 0].tolist() == said
        assert set(sample.ce_weights.tolist()) == {0, 1} and not sample.loss_mask.any()
        assert set(sample.policy_versions.tolist()) == {-1} and not sample.generator_logprobs.any()
        assert (
            sample.temperature == 1.0
            and sample.advantages is None
            and sample.ref_kl_weights is None
        )


async def test_validation_measures_the_policy_not_the_teacher(run, tokenizer):
    teacher = Scorer(tokenizer)
    policy = Scorer(tokenizer, frozen=teacher)
    await run(SFT.Config(teacher=TEACHER), policy, credit=False)
    assert len(policy.sessions) == 2 and teacher.sessions == []


# ------------------------------------------------------------------ Echo


async def echo(run, tokenizer, alpha, **options):
    changes = {key: options.pop(key) for key in ("turns", "role") if key in options}
    return await run(
        Echo.Config(alpha=alpha, **options), ScriptedPolicy(tokenizer), **({"turns": 3} | changes)
    )


def weighted(sample, tokenizer) -> list[tuple[str, float]]:
    """Runs of tokens with one ce weight, as text."""
    edges = np.flatnonzero(np.diff(sample.ce_weights, prepend=0, append=0))
    return [
        (tokenizer.decode(sample.token_ids[a:b]), round(float(sample.ce_weights[a]), 6))
        for a, b in zip(edges, edges[1:], strict=False)
        if sample.ce_weights[a]
    ]


async def test_echo_weighs_the_bodies_of_env_messages_after_the_first_sampled_token(run, tokenizer):
    group = await echo(run, tokenizer, {"user": 0.25})
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        # Not the opening "start", not the template around a message, not the last answer: nothing was sampled after it.
        assert weighted(sample, tokenizer) == [("more 1", 0.25), ("more 2", 0.25)]
        assert not (sample.ce_weights != 0)[sample.loss_mask].any() and sample.rl_weights is None


async def test_echo_weighs_by_role_and_any_role_replaces_the_table(run, tokenizer):
    assert Echo.Config().alpha == {"tool": 0.1}
    for role, alpha, expected in (
        ("tool", {"tool": 0.1}, [("more 1", 0.1), ("more 2", 0.1)]),
        ("user", {"tool": 0.1}, []),
        ("tool", {"user": 0.1}, []),
        ("tool", {"user": 0.3, "tool": 0.2}, [("more 1", 0.2), ("more 2", 0.2)]),
    ):
        group = await echo(run, tokenizer, alpha, role=role)
        assert weighted(group.rollouts[0].samples[0], tokenizer) == expected


async def test_echos_filter_leaves_out_turns_or_tokens(run, tokenizer):
    def second_turn(rollout, turn):
        return turn is rollout.turns[1]

    group = await echo(run, tokenizer, {"user": 0.5}, keep=second_turn)
    assert weighted(group.rollouts[0].samples[0], tokenizer) == [("more 1", 0.5)]

    def digits(rollout, turn):
        return np.array(
            [tokenizer.decode([token]).strip().isdigit() for token in turn.prompt_token_ids]
        )

    group = await echo(run, tokenizer, {"user": 0.5}, keep=digits)
    assert [text.strip() for text, _ in weighted(group.rollouts[0].samples[0], tokenizer)] == [
        "1",
        "2",
    ]


class Tools(TalkingEnv):
    """Answers as two tools at once."""

    async def step_message(self, message):
        step = await super().step_message(message)
        answers = [("search", f"found {len(self.received)}"), ("sum", f"is {len(self.received)}")]
        step.env_messages = [
            {"role": "tool", "content": text, "name": name} for name, text in answers
        ]
        return step


class TalkOfTools(TalkTask):
    def make_env(self, sample):
        return Tools(self.config.turns)


@pytest.mark.parametrize(
    ("options", "of_search", "of_sum"),
    [
        ({"tool_names": {"search": 0.3, "sum": 0.05}}, 0.3, 0.05),
        ({"tool_names": {"search": 0.3}}, 0.3, 0.1),
        ({"tool_names": {"search": 0.3}, "alpha": {}}, 0.3, None),
        ({"tool_names": {"other": 0.3}, "alpha": {"user": 0.2}}, None, None),
        ({}, 0.1, 0.1),
    ],
)
async def test_echo_weighs_what_tools_answer_by_their_names(
    renderer, tokenizer, options, of_search, of_sum
):
    algorithm = Echo.Config(**options)
    check_config(algorithm, field="a", group_size=2, temperature=1.0)
    task = TalkOfTools.Config(algorithm=algorithm, turns=3).build(
        name="talk", context=context_of(renderer)
    )
    group = await task.run_group(DEMONSTRATION, ScriptedPolicy(tokenizer), group_id="g", seed=0)
    assert await task.score_group(group) is None
    spoken = [
        (f"found {n}", of_search) if name == "search" else (f"is {n}", of_sum)
        for n in (1, 2)
        for name in ("search", "sum")
    ]
    assert weighted(group.rollouts[0].samples[0], tokenizer) == [
        entry for entry in spoken if entry[1] is not None
    ]


def test_a_tools_name_is_found_by_its_message_its_call_or_the_order_of_calls():
    def calls(*pairs):
        listed = [
            {"type": "function", "function": {"name": name, "arguments": "{}"}} | given
            for name, given in pairs
        ]
        return {"role": "assistant", "content": "", "tool_calls": listed}

    def answer(**given):
        return {"role": "tool", "content": "x", **given}

    assert tool_names([answer(), {"role": "user", "content": "x"}, answer(name="own")]) == [
        None,
        None,
        "own",
    ]
    named = [
        calls(("a", {"id": "1"}), ("b", {"id": "2"})),
        answer(tool_call_id="2"),
        answer(),
        answer(),
    ]
    assert tool_names(named) == [None, "b", "a", None]
    assert tool_names([calls(("a", {}), ("b", {})), answer(), answer()]) == [None, "a", "b"]
    assert tool_names([calls(("a", {}), ("b", {})), answer(name="b"), answer()]) == [None, "b", "a"]
    assert tool_names([calls(("a", {})), calls(("b", {})), answer(), answer(tool_call_id="9")]) == [
        None,
        None,
        "b",
        None,
    ]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            np.ones(3, bool),
            r"keep returned the shape \(3,\), want one bool, or \d+: the tokens of the turn's prompt",
        ),
        (np.ones((1, 1), bool), r"keep returned the shape \(1, 1\)"),
        (0.5, "keep returned float64 values, want one bool"),
        (None, "keep returned object values, want one bool"),
    ],
)
async def test_a_mask_of_another_shape_or_type_fails_the_rollout(
    renderer, tokenizer, mask, message
):
    algorithm = Echo.Config(alpha={"user": 0.5}, keep=lambda rollout, turn: mask)
    task = TalkTask.Config(algorithm=algorithm, turns=2).build(
        name="talk", context=context_of(renderer)
    )
    group = await task.run_group(DEMONSTRATION, ScriptedPolicy(tokenizer), group_id="g", seed=0)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.ERROR and re.search(
            f"Echo.*{message}", rollout.error
        )


def test_what_weighs_tokens_by_role_is_refused_with_a_renderer_that_attributes_none(tokenizer_path):
    default = build_renderer(RendererConfig(name="default"), tokenizer_path)
    cure = "has no effect, because the renderer does not say whose message .* name a renderer of the model's family"
    for algorithm, name in (
        (Echo.Config(alpha={"user": 0.1}), "alpha"),
        (GRPO.Config(length_penalty="tokens"), "tool_token_weight"),
    ):
        with pytest.raises(ConfigError, match=f"algorithm.{name} = .*{cure}"):
            TalkTask.Config(algorithm=algorithm).build(name="talk", context=context_of(default))
    for algorithm in (
        GRPO.Config(),
        GRPO.Config(length_penalty="turns"),
        GRPO.Config(length_penalty="tokens", tool_token_weight=0),
    ):
        TalkTask.Config(algorithm=algorithm).build(name="talk", context=context_of(default))


async def test_echos_credit_is_grpos(run, tokenizer):
    def by_index(rollouts, env_input):
        return [rollout.index_in_group for rollout in rollouts]

    rubric = Rubric.Config(reward_fns=[RewardFn(by_index, group_level=True, takes="rollout")])
    groups = [
        await run(algorithm, ScriptedPolicy(tokenizer), turns=2, rubric=rubric)
        for algorithm in (Echo.Config(alpha={"user": 0.1}), GRPO.Config())
    ]
    advantages = [
        [rollout.samples[0].advantages.tolist() for rollout in group.rollouts] for group in groups
    ]
    assert advantages[0] == advantages[1] and min(map(min, advantages[0])) == -0.5


async def test_a_group_that_only_echo_learns_from_is_not_filtered_as_worthless(run, tokenizer):
    group = await echo(run, tokenizer, {"user": 0.1})
    assert not any(rollout.samples[0].advantages.any() for rollout in group.rollouts)
    assert not any(ZeroAdvantage.Config().build().matches(group))


# ------------------------------------------------------------------ a rubric's judge


class Judged(Rubric):
    """The reward is how likely the judge finds the last token."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        judge: FrozenModel = field(default_factory=lambda: TEACHER)

    async def setup(self, policy):
        self.judge = policy.frozen(self.config.judge)

    def register_funcs(self):
        return [RewardFn(self.likely, takes="rollout")]

    async def likely(self, rollout, env_input):
        return float((await self.judge.score(rollout.samples[0].token_ids))[-1])


async def test_a_rubric_reaches_its_judge_through_the_policy(run, tokenizer):
    judge = Scorer(tokenizer)
    policy = Scorer(tokenizer, frozen=judge)
    group = await run(GRPO.Config(), policy, rubric=Judged.Config())
    assert policy.asked_for == [TEACHER]
    assert [rollout.reward for rollout in group.rollouts] == [
        1 - len(rollout.samples[0]) for rollout in group.rollouts
    ]


# ------------------------------------------------------------------ refused at config time

HOSTED = HostedModel(path="teacher")
REFUSED = {
    "OPD from the policy": (
        OPD.Config(),
        "a.teacher = LivePolicy.*KL of zero.*FrozenModel.*HostedModel",
    ),
    "OPD from None": (
        OPD.Config(teacher=None),
        "a.teacher = None: must be a ModelReference; name a FrozenModel .*HostedModel",
    ),
    "OPD from where the policy starts": (
        OPD.Config(teacher=HostedModel(path="policy", engine=VLLMEngineConfig(max_model_len=4096))),
        "a.teacher.path = 'policy': .*the KL is zero: name another model",
    ),
    "SFT without a frozen source": (
        SFT.Config(),
        "a.teacher = LivePolicy.*teach it nothing: name a FrozenModel",
    ),
    "a teacher too short": (
        OPD.Config(teacher=HOSTED),
        "a.teacher.engine.max_model_len = 2048: must be above the task's env.max_rollout_tokens = 2048",
    ),
    "Echo with no role": (Echo.Config(alpha={}), r"a.alpha = \{\}: no role has a weight"),
    "Echo with an unknown role": (
        Echo.Config(alpha={"human": 1.0}),
        "a.alpha = 'human': must be one of 'system', ",
    ),
    "Echo with a weight of 0": (
        Echo.Config(alpha={"tool": 0.0}),
        "a.alpha.tool = 0.0: must be above 0; to leave a role out, don't name it",
    ),
    "OPSD that shows nothing": (
        OPSD.Config(template="hm"),
        r"a.template = 'hm': has no \{demonstration\}",
    ),
    "OPSD that asks nothing": (
        OPSD.Config(max_concurrency=0),
        "a.max_concurrency = 0: must be at least 1",
    ),
}


@pytest.mark.parametrize("config, message", REFUSED.values(), ids=REFUSED)
def test_what_can_not_work_is_refused_with_field_and_cure(config, message):
    with pytest.raises(ConfigError, match=message):
        check_config(
            config,
            field="a",
            group_size=2,
            temperature=1.0,
            max_rollout_tokens=2048,
            policy_path="policy",
        )


@pytest.mark.parametrize("config", [OPD.Config(teacher=HOSTED), OPSD.Config()], ids=["OPD", "OPSD"])
def test_ref_kl_at_another_temperature_is_refused(config):
    config.validate(field="a", group_size=1, temperature=1.0)
    with pytest.raises(ConfigError, match="a: temperature = 0.7: .*sample at 1"):
        config.validate(field="a", group_size=1, temperature=0.7)


def test_a_group_of_one_is_for_algorithms_that_compare_nothing():
    for config in (OPD.Config(teacher=HOSTED), OPSD.Config(), SFT.Config(teacher=TEACHER)):
        config.validate(field="a", group_size=1, temperature=1.0)
    with pytest.raises(ConfigError, match="Echo compares"):
        Echo.Config().validate(field="a", group_size=1, temperature=1.0)


def test_a_frozen_source_may_be_sampled_from_as_one_likes_and_the_policy_may_not():
    greedy = SamplingConfig(temperature=0.0, top_p=0.9, top_k=5)
    TalkTask.Config(algorithm=SFT.Config(teacher=TEACHER), sampling=greedy).validate(field="t")
    for algorithm in (GRPO.Config(), OPD.Config(teacher=TEACHER)):
        with pytest.raises(ConfigError, match="t.sampling.temperature = 0.0"):
            TalkTask.Config(algorithm=algorithm, sampling=greedy).validate(field="t")
        for truncated in (SamplingConfig(top_p=0.9), SamplingConfig(top_k=5)):
            with pytest.raises(ConfigError, match="it biases the ratio"):
                TalkTask.Config(algorithm=algorithm, sampling=truncated).validate(field="t")


def test_the_live_policy_is_no_frozen_source():
    assert (
        SFT.Config(teacher=LivePolicy()).frozen_source() is None
        and GRPO.Config().frozen_source() is None
    )
    assert SFT.Config(teacher=HOSTED).frozen_source() is HOSTED
