"""Where OPSD finds a demonstration."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.rollouts import rewarded_rollout
from tests.unit.demonstrations import check_example
from torchtitan.experiments.rl.algorithms import OPSD
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.rollouts.types import DataSample

EXAMPLE = DataSample(
    sample_id="7",
    env_input="of the input",
    info={"demonstration": "of info", "task_name": "info first"},
)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("demonstration", "of info"),
        ("env_input", "of the input"),
        ("error", "of the rollout"),
        ("task_name", "info first"),
    ],
)
def test_info_comes_before_a_field_of_the_example_and_that_before_a_field_of_the_rollout(
    key, found
):
    ended = rewarded_rollout(0.0)
    ended.data_sample, ended.error = EXAMPLE, "of the rollout"
    assert opsd(key).demonstration(ended) == found


def opsd(key: str) -> OPSD:
    return build_with(OPSD.Config(demonstration_key=key), context_of(None))


def test_a_field_that_holds_no_text_is_no_demonstration():
    ended = rewarded_rollout(0.0)
    ended.data_sample = EXAMPLE
    for key in ("reward", "error", "info", "no_field"):
        with pytest.raises(
            ValueError, match=f"data sample '7' has no text in info.'{key}'.: the dataset must"
        ):
            opsd(key).demonstration(ended)


def test_a_field_of_rollouts_is_not_asked_for_before_there_is_one(renderer):
    check_example(
        OPSD.Config(demonstration_key="error"), DataSample(sample_id="0", env_input=None), renderer
    )
