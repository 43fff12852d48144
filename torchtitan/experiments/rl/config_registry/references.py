"""Configs whose policy is compared with a copy that follows it."""

from torchtitan.experiments.rl.algorithms import OPSD
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry.debug import rl_opsd_qwen3_debug
from torchtitan.experiments.rl.training.reference import ReferenceConfig


def rl_opsd_ema_qwen3_debug() -> RunConfig:
    """As rl_opsd_qwen3_debug, for longer: an exponential mean of the policy scores the samples, seeing the right answer."""
    config = rl_opsd_qwen3_debug()
    config.steps = 150
    config.tasks["sum_digits"].algorithm = OPSD.Config(reference="trainer")
    # Slow: a mean over 50 steps is pulled along by its student, and at step 150 both have lost what they had learned.
    config.trainer.reference = ReferenceConfig(kind="ema", decay=0.998)
    return config
