"""Filters: what is dropped, by whom, and what is only counted."""

import numpy as np
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.filters import Odd, apply_filters
from tests.fakes.rollouts import group_of, rollout_of, turn_of
from tests.unit.command_line import DEBUG
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.config import recipes
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.rollouts.filters import Filter, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.training.reference import ReferenceConfig


def credited_group(*advantages: float | None, **weights: float) -> RolloutGroup:
    """Return a group with one scored rollout an entry; None leaves its advantages unassigned.

    ``weights`` are streams that every sample has.
    """
    rollouts = []
    for index, advantage in enumerate(advantages):
        rollout = rollout_of(turn_of([1, 2], [3, 4]), index=index, reward=0.0)
        if advantage is not None:
            rollout.assign_advantages(advantage)
        for name, value in weights.items():
            setattr(rollout.samples[0], name, np.full(4, value, np.float32))
        rollouts.append(rollout)
    return group_of(*rollouts)


class Everything(Filter):
    def matches(self, group):
        return [True] * len(group.scored)


def filters(*configs):
    return [build_with(config, context_of(None)) for config in configs]


def test_group_of_zero_advantages_is_dropped():
    result = apply_filters(filters(ZeroAdvantage.Config()), credited_group(0.0, 0.0))
    assert result.kept == [] and [name for _, name in result.dropped] == ["zero_advantage"] * 2
    assert result.matched == {"zero_advantage": 2}


def test_tokens_of_matching_rollouts_are_counted_by_filter_also_where_it_only_monitors():
    group = credited_group(0.0, 0.5, 0.0)
    for rollout, sampled in zip(group.rollouts, ([5], [6, 7], [8, 9, 1]), strict=True):
        rollout.turns = [turn_of([1, 2], sampled), turn_of([1, 2], sampled)]
    result = apply_filters(
        filters(ZeroAdvantage.Config(per="rollout", mode="monitor"), Odd.Config()), group
    )
    assert result.tokens == {"zero_advantage": 2 * (1 + 3), "odd": 2 * 2}


def test_single_rollouts_without_a_signal_are_dropped_where_the_config_says_so():
    group = credited_group(0.0, 0.5, None, 0.0)
    group.rollouts[3].samples[0].ce_weights = np.array([0, 0, 0.5, 0], np.float32)
    assert apply_filters(filters(ZeroAdvantage.Config()), group).dropped == []
    result = apply_filters(filters(ZeroAdvantage.Config(per="rollout")), group)
    assert (
        result.dropped == [(group.rollouts[0], "zero_advantage")]
        and result.kept == group.rollouts[1:]
    )
    assert (
        apply_filters(filters(ZeroAdvantage.Config(per="rollout")), credited_group(0.0, 0.0)).kept
        == []
    )


def tied_group(*rewards: float, advantages: np.ndarray) -> RolloutGroup:
    group = credited_group(*advantages.tolist())
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        rollout.reward = reward
    return group


@pytest.mark.parametrize("per", ["group", "rollout"])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_rounding_leaves_of_equal_rewards_is_no_signal(per, normalize):
    """An algorithm of one's own may compute r - mean(r) as numpy does, and divide by std(r)."""
    rewards = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6])
    advantages = rewards - rewards.mean()
    if normalize:
        advantages = advantages / (rewards.std() + 1e-6)
    assert 0 < np.abs(advantages).max() < 1e-9
    group = tied_group(*rewards, advantages=advantages)
    assert apply_filters(filters(ZeroAdvantage.Config(per=per)), group).kept == []


def test_small_advantages_of_small_rewards_are_a_signal():
    group = tied_group(1e-10, 3e-10, advantages=np.array([-1e-10, 1e-10]))
    assert apply_filters(filters(ZeroAdvantage.Config()), group).dropped == []
    group = tied_group(1.0, 1.0 + 1e-8, advantages=np.array([-5e-9, 5e-9]))
    assert apply_filters(filters(ZeroAdvantage.Config()), group).dropped == []


@pytest.mark.parametrize(
    "group",
    [
        credited_group(0.0, 0.5),
        credited_group(None, None),
        credited_group(0.0, 0.0, ce_weights=0.1),
        credited_group(None, None, ref_kl_weights=1.0),
        credited_group(0.0, 0.0, ref_kl_weights=1.0),
    ],
    ids=[
        "one advantage",
        "no advantages",
        "ce weights",
        "ref_kl weights",
        "zero advantages and ref_kl",
    ],
)
def test_group_that_teaches_something_is_kept(group):
    result = apply_filters(filters(ZeroAdvantage.Config()), group)
    assert (
        result.kept == group.rollouts
        and result.dropped == []
        and result.matched == {"zero_advantage": 0}
    )


def test_weights_of_zero_teach_nothing():
    assert (
        apply_filters(filters(ZeroAdvantage.Config()), credited_group(0.0, ce_weights=0.0)).kept
        == []
    )


def test_monitor_counts_and_drops_nothing():
    group = credited_group(0.0, 0.0)
    result = apply_filters(filters(ZeroAdvantage.Config(mode="monitor")), group)
    assert result.kept == group.rollouts and result.matched == {"zero_advantage": 2}


def test_monitor_does_not_hide_an_enforcer_and_the_first_enforcer_is_named():
    group = credited_group(1.0, 1.0, 1.0)
    result = apply_filters(
        filters(Everything.Config(mode="monitor"), Odd.Config(), Everything.Config()), group
    )
    assert [(rollout.index_in_group, name) for rollout, name in result.dropped] == [
        (0, "everything"),
        (1, "odd"),
        (2, "everything"),
    ]
    assert result.matched == {"everything": 6, "odd": 1}


def test_rollouts_without_a_reward_are_not_filtered():
    group = credited_group(0.0, 0.0)
    group.rollouts[0].reward = None
    assert [
        rollout.index_in_group
        for rollout, _ in apply_filters(filters(Everything.Config()), group).dropped
    ] == [1]


def test_no_filters_keep_everything():
    group = credited_group(0.0)
    assert apply_filters([], group).kept == group.rollouts


def test_a_config_of_ones_own_counts_before_the_batch_and_drops_from_it():
    debug = rl_grpo_qwen3_debug()
    config = RunConfig(tasks=debug.tasks, model=debug.model)
    for slot, mode in (
        (config.pre_batch_filters, "monitor"),
        (config.post_batch_filters, "enforce"),
    ):
        assert [entry.name for entry in filters(*slot)] == [
            "gibberish",
            "repetition",
            "zero_advantage",
        ]
        assert {entry.mode for entry in slot} == {mode}
        assert slot[1].distinct_ngrams > 0 and slot[2].per == "rollout"
    assert (
        RunConfig(tasks=debug.tasks, model=debug.model, post_batch_filters=[]).post_batch_filters
        == []
    )


@pytest.mark.parametrize("kl_coef, mode", [(0.0, "enforce"), (0.01, "monitor")])
def test_with_a_kl_term_rollouts_of_advantage_0_are_counted_after_the_batch_and_not_dropped(
    kl_coef, mode
):
    config = rl_grpo_qwen3_debug()
    config.trainer.reference = ReferenceConfig(kind="lagged", kl_coef=kl_coef)
    acting = config.filters_of("post_batch_filters")
    assert [entry.mode for entry in acting] == ["enforce", "enforce", mode]
    result = apply_filters(filters(*acting[2:]), credited_group(0.0, 0.5))
    assert [rollout.index_in_group for rollout in result.kept] == ([0, 1] if kl_coef else [1])
    assert result.matched == {"zero_advantage": 1}
    # The config keeps what the user wrote, and dynamic sampling stays.
    assert [entry.mode for entry in config.post_batch_filters] == ["enforce"] * 3
    dynamic = recipes.dapo(config).filters_of("pre_batch_filters")
    assert [entry.mode for entry in dynamic if isinstance(entry, ZeroAdvantage.Config)] == [
        "enforce"
    ]


@pytest.mark.parametrize(
    "words, loss",
    [
        ([], "DPPO, no KL to a reference"),
        (
            ["--trainer.reference.kl-coef", "0.01"],
            "DPPO, KL to the reference x 0.01 (also on rollouts of advantage 0)",
        ),
        (
            ["--trainer.reference.kl-coef", "0.01", "--pre-batch-filters", "zero_advantage"],
            "DPPO, KL to the reference x 0.01 (not on those of advantage 0 that pre_batch_filters[0] drops)",
        ),
    ],
)
def test_a_dry_run_says_where_the_kl_term_acts(command, words, loss):
    code, out, _ = command(*DEBUG, "--dry-run", *words)
    assert code == 0 and f"loss           {loss}\n" in out


def test_filters_act_as_the_config_says_where_there_is_no_kl_term():
    config = rl_grpo_qwen3_debug()
    for slot in ("pre_batch_filters", "post_batch_filters"):
        assert config.filters_of(slot) is getattr(config, slot)


@pytest.mark.parametrize(
    "name", [name for name in config_registry.__all__ if name.startswith("rl_")]
)
def test_every_shipped_config_has_the_default_filters(name):
    config = getattr(config_registry, name)()
    names = ["gibberish", "repetition", "zero_advantage"]
    if config.trainer.loss.normalize_advantages:  # over the step: groups of equal rewards teach too
        names.remove("zero_advantage")
    for slot, mode in (
        (config.pre_batch_filters, "monitor"),
        (config.post_batch_filters, "enforce"),
    ):
        assert [entry.name for entry in filters(*slot)] == names and {
            entry.mode for entry in slot
        } == {mode}
