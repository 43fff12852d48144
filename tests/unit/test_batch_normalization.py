"""REINFORCE++, denominators of other kinds, and Dr. GRPO: what the trainer does with the whole step."""

import statistics

import numpy as np
import pytest
import torch

from tests.unit.advantages import of_rewards
from tests.unit.loss_batches import batch_of, random_batch
from torchtitan.experiments.rl.algorithms import GRPO, ReinforcePP, ReinforcePPBaseline
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.resume import resolved_config
from torchtitan.experiments.rl.config.recipes import dapo, dr_grpo, reinforce_pp
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import (
    CISPO,
    LossConfig,
    PPOClip,
    advantage_sums,
    compute_loss,
    count_denominators,
    step_denominators,
    with_normalized_advantages,
)
from torchtitan.experiments.rl.losses.loss import rl_members
from torchtitan.experiments.rl.rollouts.filters import Truncated, ZeroAdvantage

torch.set_num_threads(1)


def test_reinforce_pp_gives_the_reward_and_with_the_baseline_less_the_groups_mean():
    assert of_rewards(ReinforcePP.Config(), 1.0, None, 0.0, 0.5) == [1.0, None, 0.0, 0.5]
    assert of_rewards(ReinforcePPBaseline.Config(), 1.0, None, 0.0, 0.5) == [0.5, None, -0.5, 0.0]
    assert of_rewards(ReinforcePPBaseline.Config(), None, None) == [None, None]


def test_four_advantages_normalised_on_paper():
    # Members 1, 0, 0, 1: mean 1/2, standard deviation 1/2. A token without a weight or not sampled counts for nothing.
    batch = batch_of(
        (1, 6),
        loss_mask=[[True, True, True, True, True, False]],
        rl_weights=[[1, 2, 1, 1, 0, 1]],
        advantages=[[1, 0, 0, 1, 9, 9]],
    )
    sums = advantage_sums(batch)
    assert sums.tolist() == [4, 2, 2]
    found = with_normalized_advantages(batch, sums).advantages
    assert (
        found[0].tolist() == pytest.approx([1, -1, -1, 1, 0, 0], rel=1e-5)
        and found.dtype == torch.float32
    )
    assert batch.advantages[0].tolist() == [1, 0, 0, 1, 9, 9]  # the batch itself is left as it is


@pytest.mark.parametrize("seed", range(3))
def test_the_steps_statistics_are_of_all_microbatches_together(seed):
    batches = [random_batch(seed)[1], random_batch(seed + 10, rows=1, length=17)[1]]
    values = [a for batch in batches for a in batch.advantages[rl_members(batch)].double().tolist()]
    sums = sum(map(advantage_sums, batches))
    for batch in batches:
        found = (
            with_normalized_advantages(batch, sums).advantages[rl_members(batch)].double().numpy()
        )
        own = batch.advantages[rl_members(batch)].double().numpy()
        assert found == pytest.approx(
            (own - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-6),
            rel=1e-5,
            abs=1e-6,
        )


@pytest.mark.parametrize("advantage", [0.0, 1.0, 0.1])
def test_equal_advantages_and_no_member_at_all_become_zero(advantage):
    batch = batch_of(
        (1, 3), loss_mask=[[True] * 3], rl_weights=[[1.0] * 3], advantages=[[advantage] * 3]
    )
    assert with_normalized_advantages(batch, advantage_sums(batch)).advantages.abs().max() < 1e-6
    empty = batch_of((1, 3))
    assert with_normalized_advantages(empty, advantage_sums(empty)).advantages.tolist() == [
        [0.0] * 3
    ]


# ------------------------------------------------------------------ denominators


def test_denominators_count_members_or_weights_or_are_a_number():
    batch = batch_of(
        (1, 4),
        loss_mask=[[True, True, True, False]],
        rl_weights=[[0.5, -2.0, 0.0, 9.0]],
        ce_weights=[[0.0, 0.25, 0.0, 0.5]],
        ref_kl_weights=[[0.0] * 4],
    )
    for wanted, expected in (
        (("members", "members", "members"), (2, 2, 1)),
        (("weights", "weights", "weights"), (2.5, 0.75, 1)),
        ((100.0, "weights", 0.5), (100, 0.75, 0.5)),
    ):
        found = step_denominators(count_denominators(batch, wanted), wanted)
        assert (found.rl, found.ce, found.ref_kl) == expected


def test_with_the_sum_of_weights_a_component_is_a_weighted_mean():
    logprobs, batch = random_batch(3)
    batch.rl_weights.zero_()
    batch.ref_kl_weights.zero_()
    wanted = LossConfig(ce_denominator="weights").denominators
    found, _ = compute_loss(
        logprobs, batch, step_denominators(count_denominators(batch, wanted), wanted), LossConfig()
    )
    expected = np.average(-logprobs.numpy(), weights=batch.ce_weights.double().numpy())
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_denominators_are_fields_of_the_command_line():
    words = "--trainer.loss.rl-denominator 2048 --trainer.loss.ce-denominator weights"
    config = load_config(parse_command(["--config", "rl_grpo_qwen3_debug", *words.split()]))
    assert config.trainer.loss.denominators == (2048.0, "weights", "members")
    config.trainer.loss.rl_denominator = 0.0
    with pytest.raises(ConfigError, match="trainer.loss.rl_denominator = 0.0: must be"):
        check(config)


# ------------------------------------------------------------------ recipes


@pytest.mark.parametrize("recipe", [dapo, dr_grpo, reinforce_pp])
def test_a_recipe_leaves_the_config_that_it_is_given(recipe):
    config = rl_grpo_qwen3_debug()
    config.pre_batch_filters = [ZeroAdvantage.Config(mode="monitor"), Truncated.Config()]
    config.tasks["sum_digits"].algorithm = GRPO.Config(normalize_std=True)
    before = resolved_config(config)
    assert resolved_config(recipe(config)) != before
    assert resolved_config(config) == before


def test_dr_grpo_divides_by_the_most_tokens_a_step_can_sample():
    config = rl_grpo_qwen3_debug()  # 256 rollouts of one turn of 8 tokens
    config.tasks["sum_digits"].algorithm = GRPO.Config(normalize_std=True)
    config = dr_grpo(config)
    check(config)
    assert config.trainer.loss.rl_denominator == 2048 and config.trainer.loss.rl == PPOClip.Config()
    assert not config.tasks["sum_digits"].algorithm.normalize_std


def test_reinforce_pp_takes_a_normalised_step_and_every_group():
    config = rl_grpo_qwen3_debug()
    config.trainer.loss.rl = CISPO.Config()
    config.pre_batch_filters = [ZeroAdvantage.Config(), Truncated.Config()]
    config = reinforce_pp(config)
    check(config)
    assert config.trainer.loss.normalize_advantages and config.pre_batch_filters == [
        Truncated.Config()
    ]
    config.pre_batch_filters.append(ZeroAdvantage.Config())
    with pytest.raises(
        ConfigError,
        match=r"pre_batch_filters\[1\].mode = 'enforce': drops groups of reward 0.*ReinforcePP",
    ):
        check(config)
    config.tasks["sum_digits"].algorithm = ReinforcePPBaseline.Config()
    check(config)
    config.trainer.loss.normalize_advantages = False
    with pytest.raises(
        ConfigError,
        match="trainer.loss.normalize_advantages = False: ReinforcePPBaseline of tasks.sum_digits",
    ):
        check(config)
