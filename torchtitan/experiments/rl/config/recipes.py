"""Published combinations of algorithm, loss and filters: functions that set all of one in a config of yours.

config = dapo(rl_grpo_qwen3_4b())
"""

from torchtitan.experiments.rl.algorithms import DAPO, GRPO
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.losses import PPOClip
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage


def dapo(config: RunConfig) -> RunConfig:
    """DAPO (Yu et al., arXiv:2503.14476), for every task that learns by GRPO: its credit, clip-higher, and dynamic sampling.

    The penalty on overlong answers is off; it needs the limit of each task: ``DAPO.Config(overlong_limit=...)``.
    """
    config.trainer.loss.rl = PPOClip.Config(clip_low=0.2, clip_high=0.28)
    others = [entry for entry in config.pre_batch_filters if built_class(entry) is not ZeroAdvantage]
    config.pre_batch_filters = [ZeroAdvantage.Config(), *others]
    for task in config.tasks.values():
        if built_class(task.algorithm) is GRPO:
            task.algorithm = DAPO.Config()
    return config
