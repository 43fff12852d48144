"""Comparisons of rewards: rounding makes no difference, anything larger does."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.rollouts.rounding import are_equal, reaches


@pytest.mark.parametrize(
    "terms", [(0.1, 0.2, 0.3), (0.1, 0.2, -0.3), (1e6, 0.1, 0.2), (0.7, 0.1, 0.3)]
)
def test_sums_of_the_same_terms_are_equal_in_any_order(terms):
    # From Python 3.12 on sum() makes up for what rounding loses.
    sums = [first + second + third for first, second, third in itertools.permutations(terms)]
    assert len(set(sums)) > 1
    assert are_equal(sums)
    assert all(reaches(low, high) for low, high in itertools.permutations(sums, 2))


@pytest.mark.parametrize(
    "low, high", [(0.0, 1e-9), (1.0, 1.0 + 1e-8), (-1.0, 1.0), (1e6, 1e6 + 0.01), (-0.5, -0.499)]
)
def test_any_larger_difference_is_one(low, high):
    assert not are_equal([low, high, low])
    assert not reaches(low, high) and reaches(high, low)


def test_values_may_be_an_array():
    assert are_equal(np.array([0.1 + 0.2 + 0.3, 0.6])) and not are_equal(np.array([0.5, 0.6]))


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_of_two_values_one_reaches_the_other_and_both_do_only_if_they_are_equal(first, second):
    both = reaches(first, second) and reaches(second, first)
    assert reaches(first, second) or reaches(second, first)
    assert both == math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
