"""The experts of each token, from turns to what the model computes: they stay with their tokens, and part samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.rollouts import completed_rollout, group_of, samples_of, turn_of
from tests.unit.records import assert_same, write
from tests.unit.tree_samples import ABSENT, random_routed, routes_of, tree_sample
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.batching.packing import prefix_order, prefix_tokens
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.samples import check_completion, checked_completion
from torchtitan.experiments.rl.types import STREAMS


def routed(turn, routes):
    turn.completion.routes = routes
    return turn


# ---- turns and samples


def test_the_last_token_has_no_route_until_the_next_turn_has_it_as_input():
    first = routed(turn_of([1, 2], [3, 4]), routes_of([1, 2, 3]))
    (alone,) = samples_of([first])
    assert (
        np.array_equal(alone.routes[:3], routes_of([1, 2, 3])) and (alone.routes[3] == ABSENT).all()
    )
    second = routed(
        turn_of([1, 2, 3, 4, 9], [6]), routes_of([1, 2, 3, 4, 9])[3:]
    )  # of what the session did not have yet
    (both,) = samples_of([first, second])
    assert (
        np.array_equal(both.routes[:5], routes_of([1, 2, 3, 4, 9]))
        and (both.routes[5] == ABSENT).all()
    )


def test_a_token_that_a_later_turn_computed_again_keeps_the_route_of_its_first():
    first = routed(turn_of([1, 2], [3, 4]), routes_of([1, 2, 3]))
    again = routed(turn_of([1, 2, 3, 4, 9], [6]), routes_of([1, 2, 3, 4, 9], salt=5))
    (sample,) = samples_of([first, again])
    assert np.array_equal(sample.routes[:3], routes_of([1, 2, 3]))
    assert np.array_equal(sample.routes[3:5], routes_of([1, 2, 3, 4, 9], salt=5)[3:])


def test_what_an_engine_gives_no_routes_of_is_marked_and_a_rollout_without_any_has_none():
    (sample,) = samples_of(
        [turn_of([1, 2], [3, 4]), routed(turn_of([1, 2, 3, 4, 9], [6]), routes_of([4, 9]))]
    )
    assert (sample.routes[[0, 1, 2, 5]] == ABSENT).all() and np.array_equal(
        sample.routes[3:5], routes_of([4, 9])
    )
    assert samples_of([turn_of([1, 2], [3, 4])])[0].routes is None
    # A new sample begins where the history was rewritten: it has the routes of its own turn alone.
    rewritten = routed(turn_of([7, 2], [6, 5]), routes_of([7, 2, 6]))
    _, second = samples_of([routed(turn_of([1], [2]), routes_of([1])), rewritten])
    assert np.array_equal(second.routes[:3], routes_of([7, 2, 6]))


def test_routes_that_can_not_be_the_turns_are_refused():
    with pytest.raises(ValueError, match="routes of 4 tokens, and only 3 were inputs"):
        samples_of([routed(turn_of([1, 2], [3, 4]), routes_of([1, 2, 3, 4]))])
    for wrong in (np.zeros((3, 2), np.uint8), np.zeros((3, 2, 2), np.int64)):
        with pytest.raises(ValueError, match=r"want uint8 or uint16 \[R, layers, k\]"):
            check_completion(routed(turn_of([1, 2], [3, 4]), wrong).completion)
    with pytest.raises(ValueError, match="its routes are a list, want an array"):
        check_completion(routed(turn_of([1, 2], [3, 4]), [[[1]]]).completion)


def test_a_completion_keeps_the_routes_that_an_engine_gave_in_a_buffer_it_uses_again():
    completion = turn_of([1, 2], [3, 4]).completion
    buffer = routes_of([1, 2, 3])
    checked = checked_completion(replace(completion, routes=buffer))
    buffer[:] = 0
    assert np.array_equal(checked.routes, routes_of([1, 2, 3]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_record_has_them_once_and_gives_them_back_with_their_shape(tmp_path, dtype):
    turns = [
        routed(turn_of([1, 2], [3, 4]), routes_of([1, 2, 3]).astype(dtype)),
        turn_of([1, 2, 3, 4, 9], [6]),
    ]
    rollout = completed_rollout(turns=turns)
    write(tmp_path, group_of(rollout))
    (record,) = read_rollouts(tmp_path)
    assert_same(record.rollout, rollout)
    assert record.rollout.samples[0].routes.shape == (6, 3, 2) and record.rollout.turns[
        0
    ].completion.routes.shape == (3, 3, 2)


# ---- batches


def rows_of(samples, **config):
    return (
        Batcher.Config(**{"row_length": 64, "rows_per_microbatch": 4} | config)
        .build()
        .plan(samples, 1)
        .microbatches[0]
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_batch_has_each_tokens_route_and_marks_the_others(dtype):
    tokens = [5, 6, 7]
    with_routes = tree_sample(tokens, routes=routes_of(tokens).astype(dtype))
    (batch,) = rows_of([with_routes, tree_sample([8, 9], 1)], share_prefixes=False)
    absent = np.iinfo(dtype).max
    assert batch.routes.shape == (1, 8, 3, 2) and batch.routes.numpy().dtype == dtype
    start = batch.token_ids[0].tolist().index(5)
    expected = np.full((8, 3, 2), absent, dtype)
    expected[start : start + 3] = routes_of(tokens)
    assert np.array_equal(batch.routes[0].numpy(), expected)
    # A token costs as many bytes as it has choices, times two above 256 experts; without routes none.
    assert batch.routes.numpy().nbytes == 8 * 3 * 2 * np.dtype(dtype).itemsize
    assert rows_of([tree_sample(tokens)])[0].routes.shape == (1, 8, 0, 0)


def naive_common(left, right) -> int:
    """Tokens that two samples begin with alike, by id and by route."""
    count = 0
    for place in range(min(len(left), len(right))):
        if (
            left.token_ids[place] != right.token_ids[place]
            or (left.routes[place] != right.routes[place]).any()
        ):
            break
        count += 1
    return count


routed_trees = st.builds(random_routed, st.integers(0, 2**32), st.integers(1, 10))


@given(routed_trees)
def test_samples_share_exactly_what_they_begin_with_alike_in_tokens_and_routes(samples):
    order, shared = prefix_order([(1.0, prefix_tokens(sample)) for sample in samples])
    assert sorted(order) == list(range(len(samples)))
    for before, after, length in zip(order, order[1:], shared[1:], strict=False):
        assert length == naive_common(samples[before], samples[after])
    # No two samples share more with each other than with their neighbours in between.
    for i in range(len(order)):
        for j in range(i + 1, len(order)):
            assert naive_common(samples[order[i]], samples[order[j]]) == shared[i + 1 : j + 1].min()


@given(routed_trees)
def test_each_token_of_a_tree_has_the_route_of_every_token_that_it_stands_for(samples):
    for batch in rows_of(samples):
        if batch.trees is not None:
            real = batch.task_ids >= 0
            of_trees = batch.trees.values_to_trees(batch.routes, real, ABSENT)
            again = of_trees.flatten(0, 1)[batch.trees.slots]
            assert torch.equal(again[real], batch.routes[real])
            assert (of_trees[~batch.trees.mask_to_trees(real)] == ABSENT).all()


def test_routes_that_part_early_make_the_model_compute_more():
    tokens = [list(range(20)) + [30 + i] for i in range(4)]
    alike = rows_of([tree_sample(t, i, routes=routes_of(t)) for i, t in enumerate(tokens)])[0]
    parted = rows_of(
        [tree_sample(t, i, routes=routes_of(t, salt=i)) for i, t in enumerate(tokens)]
    )[0]
    assert alike.trees is not None and alike.trees.token_ids.numel() == 24 and parted.trees is None
    assert STREAMS["routes"].dims == 2
