"""Orders of examples: up to a limit the table that they have always been, above it computed, each example once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.data.sampler import (
    LARGEST_TABLE,
    ComputedOrder,
    ShuffledCursor,
    random_order,
)
from torchtitan.experiments.rl.rollouts.types import DataSample


class Endless:
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> DataSample:
        assert 0 <= index < self.size
        return DataSample(sample_id=str(index), env_input=index)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_a_computed_order_has_every_example_once(size, seed):
    keys = np.random.default_rng(seed).integers(0, 2**63, 6).tolist()
    order = ComputedOrder(size, keys)
    assert sorted(order[place] for place in range(size)) == list(range(size)) and len(order) == size


def test_a_computed_order_looks_drawn():
    keys = np.random.default_rng(0).integers(0, 2**63, 6).tolist()
    order = np.array([ComputedOrder(100_000, keys)[place] for place in range(100_000)])
    # 100,000 draws in 10 bins by place and 10 by example: 1,000 expected in each, standard deviation about 30.
    counts = np.histogram2d(np.arange(100_000), order, bins=10)[0]
    assert np.abs(counts - 1000).max() < 200
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(order == np.arange(100_000)) < 1e-3


@pytest.mark.parametrize("seed", [0, [7, 3]])
def test_orders_of_ordinary_size_are_the_table_they_have_always_been(seed):
    assert np.array_equal(random_order(1000, seed), np.random.default_rng(seed).permutation(1000))


def test_orders_follow_from_the_seed():
    size = 10**12
    first, again, other = (random_order(size, [seed, 0]) for seed in (1, 1, 2))
    assert (
        [first[i] for i in range(50)]
        == [again[i] for i in range(50)]
        != [other[i] for i in range(50)]
    )
    for place in (-1, size):
        with pytest.raises(IndexError):
            first[place]


def test_a_cursor_over_the_largest_length_there_is_starts_at_once_and_resumes():
    assert LARGEST_TABLE < 10**12
    for size in (LARGEST_TABLE + 1, 10**12, 2**63 - 1):
        assert isinstance(random_order(size, 0), ComputedOrder)  # no table is made
        cursor = ShuffledCursor(ShuffledCursor.Config(), dataset=Endless(size), seed=0)
        drawn = [cursor.next().env_input for _ in range(20)]
        assert len(set(drawn)) == 20
        resumed = ShuffledCursor(ShuffledCursor.Config(), dataset=Endless(size), seed=0)
        resumed.load_state_dict(cursor.state_dict() | {"cursor": 10})
        assert [resumed.next().env_input for _ in range(10)] == drawn[10:]
