"""Rollout to samples: the trained ids are the sampled ids, each trained once."""

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.rollouts import samples_of, turn_of
from tests.unit.batches import STREAMS, random_sample
from torchtitan.experiments.rl.rollouts.samples import (
    check_completion,
    check_sample,
    checked_completion,
    turn_spans,
)
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout


def test_turns_that_extend_each_other_are_one_sample():
    first = turn_of([1, 2], [3, 4], logprobs=[-1, -2], versions=[5, 5])
    second = turn_of([1, 2, 3, 4, 9], [6], logprobs=[-3], versions=[7])
    (sample,) = samples_of([first, second])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.generator_logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert sample.policy_versions.tolist() == [-1, -1, 5, 5, -1, 7]
    assert sample.role_ids.tolist() == [-1, -1, 3, 3, -1, 3] and sample.role_ids.dtype == np.int8
    assert (sample.temperature, sample.task_name, sample.rollout_id) == (0.7, "t", "g/0")
    assert sample.token_ids.dtype == np.int32 and sample.generator_logprobs.dtype == np.float32
    assert sample.advantages is None


def test_prompt_that_differs_in_one_token_starts_a_new_sample():
    # The second prompt repeats the history with its first sampled token changed, as tokenising text anew may do.
    samples = samples_of([turn_of([1, 2], [3, 4]), turn_of([1, 2, 8, 4, 9], [6])])
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 3, 4], [1, 2, 8, 4, 9, 6]]
    assert [sample.loss_mask.tolist() for sample in samples] == [
        [False] * 2 + [True] * 2,
        [False] * 5 + [True],
    ]


def test_prompt_that_drops_history_starts_a_new_sample_and_repeats_it_as_context():
    samples = samples_of(
        [turn_of([1, 2], [3, 4, 5]), turn_of([1, 2, 5, 9], [6]), turn_of([1, 2, 5, 9, 6, 9], [7])]
    )
    assert [sample.token_ids.tolist() for sample in samples] == [
        [1, 2, 3, 4, 5],
        [1, 2, 5, 9, 6, 9, 7],
    ]
    assert samples[1].loss_mask.tolist() == [False] * 4 + [True, False, True]


def test_each_sampled_token_knows_its_replica_and_no_other_token_has_one():
    first, second = turn_of([1, 2], [3]), turn_of([1, 2, 3, 9, 8], [6, 7])
    second.completion.replica = 4  # the first's is not known
    (sample,) = samples_of([first, second])
    assert (
        sample.replicas.tolist() == [-1, -1, -1, -1, -1, 4, 4] and sample.replicas.dtype == np.int16
    )


def test_turn_that_sampled_nothing_trains_nothing():
    turns = [turn_of([1, 2], [3]), turn_of([1, 2, 3, 9], [])]
    assert [sample.token_ids.tolist() for sample in samples_of(turns)] == [[1, 2, 3]]
    assert [turn is turns[0] for turn, _ in turn_spans(turns)] == [True]
    assert samples_of([turn_of([1, 2], [])]) == [] and samples_of([]) == []


def test_roles_are_those_of_the_last_prompt_and_what_was_sampled_is_the_assistants():
    first, silent, second = (
        turn_of([1, 2], [3]),
        turn_of([1, 2, 3, 9], []),
        turn_of([1, 2, 3, 9, 8], [6]),
    )
    second.prompt_role_ids = np.array([-1, 2, -1, 4, 2], np.int8)
    (sample,) = samples_of([first, silent, second])
    assert sample.role_ids.tolist() == [-1, 2, 3, 4, 2, 3]  # ROLES: user 2, assistant 3, tool 4


def test_uneven_completion_streams_are_refused_with_their_turn():
    with pytest.raises(ValueError, match="g/0, turn 1"):
        samples_of([turn_of([1], [2]), turn_of([1, 2], [3], logprobs=[])])


@st.composite
def conversations(draw):
    """Turns that extend the one before, or start from any prompt: a prefix of the history, other tokens, nothing in common."""
    counter = itertools.count(100)
    turns, broken = [], 0
    history: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        if turns and draw(st.booleans()):
            prompt = history + new
        else:
            prompt = history[: draw(st.integers(0, max(0, len(history) - 1)))] + new
            # What was kept of the history and what is new may spell the history by chance; then it is an extension.
            broken += not turns or prompt[: len(history)] != history
        sampled = [next(counter) for _ in range(draw(st.integers(1, 5)))]
        logprobs = [-token / 1024 for token in sampled]
        turns.append(
            turn_of(prompt, sampled, logprobs=logprobs, versions=[len(turns)] * len(sampled))
        )
        history = prompt + sampled
    return turns, broken


@given(conversations())
def test_every_sampled_token_is_trained_once_with_its_own_streams(conversation):
    turns, broken = conversation
    samples = samples_of(turns)
    trained = np.concatenate([sample.token_ids[sample.loss_mask] for sample in samples])
    assert (
        trained.tolist() == np.concatenate([turn.completion.token_ids for turn in turns]).tolist()
    )
    for name, stream in (
        ("generator_logprobs", "logprobs"),
        ("policy_versions", "policy_versions"),
    ):
        kept = np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in samples])
        assert (
            kept.tolist()
            == np.concatenate([getattr(turn.completion, stream) for turn in turns]).tolist()
        )
    assert len(samples) == broken
    for sample in samples:
        assert {
            len(sample.loss_mask),
            len(sample.generator_logprobs),
            len(sample.policy_versions),
        } == {len(sample)}
        assert not sample.generator_logprobs[~sample.loss_mask].any()
        assert set(sample.policy_versions[~sample.loss_mask].tolist()) <= {-1}


@given(conversations())
def test_spans_point_at_each_turn_in_its_sample(conversation):
    turns, _ = conversation
    samples, placed = samples_of(turns), list(turn_spans(turns))
    for turn, (of, span) in zip(turns, placed, strict=True):
        assert of is turn
        ids = samples[span.sample].token_ids
        assert ids[: span.completion].tolist() == turn.prompt_token_ids.tolist()
        assert ids[span.completion : span.end].tolist() == turn.completion.token_ids.tolist()
    for (_, before), (_, after) in itertools.pairwise(placed):
        assert after.new == (before.end if after.sample == before.sample else 0)


@given(conversations(), st.data())
def test_advantages_land_on_the_tokens_they_were_given_for(conversation, data):
    turns, _ = conversation
    rollout = Rollout(
        group_id="g", index_in_group=0, task_name="t", turns=turns, samples=samples_of(turns)
    )
    given_values = data.draw(
        st.lists(
            st.floats(-2, 2, width=32),
            min_size=rollout.completion_tokens,
            max_size=rollout.completion_tokens,
        )
    )
    rollout.assign_advantages(given_values)
    landed = [
        value
        for sample in rollout.samples
        for value in sample.advantages[sample.loss_mask].tolist()
    ]
    assert landed == given_values
    assert all(not sample.advantages[~sample.loss_mask].any() for sample in rollout.samples)


@given(
    tokens=st.lists(
        st.tuples(
            st.integers(-2, 5),
            st.sampled_from([-30.0, -0.5, 0.0, 0.009, 0.02, np.nan, np.inf, -np.inf]),
        )
    ),
    finish_reason=st.sampled_from(["stop", "length", "abort", "done"]),
    cut=st.integers(0, 2),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_completion_is_refused_exactly_if_a_token_of_it_can_not_be_trained_on(
    tokens, finish_reason, cut, dtype
):
    completion = Completion(
        token_ids=np.array([token for token, _ in tokens], np.int32),
        logprobs=np.array([logprob for _, logprob in tokens], dtype),
        policy_versions=np.zeros(max(0, len(tokens) - cut), np.int32),
        finish_reason=finish_reason,
    )
    good = all(token >= 0 and -math.inf < logprob <= 0.01 for token, logprob in tokens)
    good &= finish_reason != "done" and len(completion.policy_versions) == len(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy has nothing to say beside the error
        if good:
            check_completion(completion)
        else:
            with pytest.raises(ValueError, match="^bad completion: "):
                check_completion(completion)


@pytest.mark.parametrize(
    "streams",
    [
        {"policy_versions": [2**31]},
        {"policy_versions": np.array([2**31])},
        {"policy_versions": [-2]},
        {"logprobs": np.array([-1e300])},
    ],
    ids=["a list above int32", "an array above int32", "below -1", "below float32"],
)
def test_completion_whose_numbers_its_dtypes_do_not_hold_is_refused(streams):
    good = {"token_ids": [1], "logprobs": [-0.5], "policy_versions": [0]}
    with pytest.raises(ValueError, match="^bad completion: a (policy version|log-prob)"):
        checked_completion(Completion(**(good | streams), finish_reason="stop"))


# ---- samples with credit


def first_only(length: int) -> np.ndarray:
    return np.arange(length) == 0


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(advantages=None), "has tokens with an rl weight and no advantages"),
        (dict(advantages=None, rl_weights=None), "has tokens with an rl weight and no advantages"),
        (
            dict(
                ref_logprobs=None,
                loss_mask=np.arange(6) > 3,
                ref_kl_weights=(np.arange(6) > 3).astype(np.float32),
            ),
            "has tokens with a ref_kl weight and no ref_logprobs",
        ),
        (
            dict(
                reference_ids=np.array([1, 2, 9, 9]),
                token_ids=np.array([0, 3, 5, 5, 9, 8]),
                loss_mask=np.arange(6) > 3,
            ),
            "has reference_ids that do not end as it does, from its first sampled token on",
        ),
        (
            dict(
                reference_ids=np.array([9, 8]),
                token_ids=np.array([0, 3, 5, 5, 9, 8]),
                loss_mask=np.arange(6) > 3,
            ),
            "has reference_ids that do not end as it does",
        ),
        (dict(advantages=np.zeros(5, np.float32)), "has 6 token_ids and 5 advantages"),
        (dict(loss_mask=np.ones(7, bool)), "has 6 token_ids and 7 loss_mask"),
        (dict(loss_mask=np.ones(6, bool), rl_weights=None), "trains its first token"),
        (dict(ce_weights=first_only(6).astype(np.float32)), "trains its first token"),
        (dict(ref_kl_weights=first_only(6).astype(np.float32)), "trains its first token"),
        (
            dict(loss_mask=np.arange(6) > 3, ref_kl_weights=(np.arange(6) > 2).astype(np.float32)),
            "has a ref_kl weight on a token the policy did not sample.*weigh only sampled tokens",
        ),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused_with_its_rollout(fields, message):
    with pytest.raises(ValueError, match=f"a sample of rollout 'group7/0' {message}"):
        check_sample(random_sample(6, 7, **fields))


def test_a_sampled_first_token_without_weight_and_a_sample_without_rl_tokens_are_fine():
    check_sample(random_sample(6, 7, loss_mask=np.ones(6, bool)))
    check_sample(random_sample(6, 7, advantages=None, rl_weights=np.zeros(6, np.float32)))


def test_an_empty_sample_is_refused():
    with pytest.raises(ValueError, match="rollout 'group0/0' has no tokens"):
        check_sample(random_sample(1, **{name: np.zeros(0) for name in STREAMS}))
