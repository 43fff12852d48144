"""Published combinations of algorithm, loss and filters.

    config = dapo(rl_grpo_qwen3_4b())

Each function returns a new config, which shares with the given one what it does not change. The
given config stays as it was.
"""

from collections.abc import Callable
from dataclasses import replace

from torchtitan.experiments.rl.algorithms import DAPO, GRPO, Algorithm, ReinforcePP
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.losses import LossConfig, PPOClip
from torchtitan.experiments.rl.rollouts.filters import Filter, ZeroAdvantage


def dapo(config: RunConfig) -> RunConfig:
    """Return the config with DAPO (Yu et al., arXiv:2503.14476) for every task that learns by GRPO.

    That is its credit, clip-higher and dynamic sampling.

    The penalty on overlong answers is off; it needs the limit of each task:
    ``DAPO.Config(overlong_limit=...)``.
    """
    clip_higher = PPOClip.Config(clip_low=0.2, clip_high=0.28)
    loss = replace(config.trainer.loss, rl=clip_higher)
    dynamic_sampling = ZeroAdvantage.Config()
    others = _without_zero_advantage(config.pre_batch_filters)
    config = replace(config, pre_batch_filters=[dynamic_sampling, *others])
    return _with_credit(config, loss, lambda grpo: DAPO.Config())


def dr_grpo(config: RunConfig) -> RunConfig:
    """Return the config with Dr. GRPO (Liu et al., arXiv:2503.20783) for the tasks of GRPO.

    There is no division by the standard deviation, and the sum over tokens is divided by a
    constant, so that neither a group's spread nor an answer's length changes a token's weight.

    The constant is the most tokens that a step can sample: rollouts of a step · turns ·
    ``sampling.max_tokens``.
    """
    longest = max(task.sampling.max_tokens * task.env.max_turns for task in config.tasks.values())
    most_tokens = float(config.rollouts_per_step * longest)
    loss = replace(config.trainer.loss, rl=PPOClip.Config(), rl_denominator=most_tokens)
    return _with_credit(config, loss, lambda grpo: replace(grpo, normalize_std=False))


def reinforce_pp(config: RunConfig) -> RunConfig:
    """Return the config with REINFORCE++ (Hu et al., arXiv:2501.03262) for the tasks of GRPO.

    Rewards are normalised over the whole step, so a group of equal rewards teaches too. Filters
    that drop such groups are taken out of the config.
    """
    loss = replace(config.trainer.loss, rl=PPOClip.Config(), normalize_advantages=True)
    config = replace(
        config,
        pre_batch_filters=_without_zero_advantage(config.pre_batch_filters),
        post_batch_filters=_without_zero_advantage(config.post_batch_filters),
    )
    return _with_credit(config, loss, lambda grpo: ReinforcePP.Config())


def _with_credit(
    config: RunConfig, loss: LossConfig, algorithm: Callable[[GRPO.Config], Algorithm.Config]
) -> RunConfig:
    """Return the config with another loss, and another algorithm for each task that learns by GRPO.

    Args:
        algorithm: returns the algorithm that takes the place of a task's GRPO.
    """
    tasks = dict(config.tasks)
    for name, task in config.tasks.items():
        grpo = task.algorithm
        if isinstance(grpo, GRPO.Config) and built_class(grpo) is GRPO:
            tasks[name] = replace(task, algorithm=algorithm(grpo))
    return replace(config, trainer=replace(config.trainer, loss=loss), tasks=tasks)


def _without_zero_advantage(filters: list[Filter.Config]) -> list[Filter.Config]:
    return [entry for entry in filters if built_class(entry) is not ZeroAdvantage]
