"""Published combinations of algorithm, loss and filters, each set in a config by one function.

config = dapo(rl_grpo_qwen3_4b())
"""

from torchtitan.experiments.rl.algorithms import DAPO, GRPO, ReinforcePP
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.losses import PPOClip
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage


def dapo(config: RunConfig) -> RunConfig:
    """Set DAPO (Yu et al., arXiv:2503.14476) for every task that learns by GRPO.

    That is its credit, clip-higher and dynamic sampling.

    The penalty on overlong answers is off; it needs the limit of each task:
    ``DAPO.Config(overlong_limit=...)``.
    """
    config.trainer.loss.rl = PPOClip.Config(clip_low=0.2, clip_high=0.28)
    others = [
        entry for entry in config.pre_batch_filters if built_class(entry) is not ZeroAdvantage
    ]
    config.pre_batch_filters = [ZeroAdvantage.Config(), *others]
    for task in config.tasks.values():
        if built_class(task.algorithm) is GRPO:
            task.algorithm = DAPO.Config()
    return config


def dr_grpo(config: RunConfig) -> RunConfig:
    """Set Dr. GRPO (Liu et al., arXiv:2503.20783) for every task that learns by GRPO.

    There is no division by the standard deviation, and the sum over tokens is divided by a
    constant, so that neither a group's spread nor an answer's length changes a token's weight.

    The constant is the most tokens that a step can sample: rollouts of a step · turns ·
    ``sampling.max_tokens``.
    """
    tasks = config.tasks.values()
    for task in tasks:
        if isinstance(task.algorithm, GRPO.Config) and built_class(task.algorithm) is GRPO:
            task.algorithm.normalize_std = False
    longest = max(task.sampling.max_tokens * task.env.max_turns for task in tasks)
    config.trainer.loss.rl = PPOClip.Config()
    config.trainer.loss.rl_denominator = float(config.rollouts_per_step * longest)
    return config


def reinforce_pp(config: RunConfig) -> RunConfig:
    """Set REINFORCE++ (Hu et al., arXiv:2501.03262) for every task that learns by GRPO.

    Rewards are normalised over the whole step, so a group of equal rewards teaches too. Filters
    that drop such groups are taken out of the config.
    """
    config.trainer.loss.normalize_advantages = True
    config.trainer.loss.rl = PPOClip.Config()
    for filters in (config.pre_batch_filters, config.post_batch_filters):
        filters[:] = [entry for entry in filters if built_class(entry) is not ZeroAdvantage]
    for task in config.tasks.values():
        if built_class(task.algorithm) is GRPO:
            task.algorithm = ReinforcePP.Config()
    return config
