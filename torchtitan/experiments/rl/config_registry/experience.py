"""Configs of the tiny model that learn from more than what the policy samples now."""

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry.debug import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplayConfig
from torchtitan.experiments.rl.tasks.demonstrations.task import DemonstrationTask
from torchtitan.experiments.rl.tasks.sum_digits.demonstrations import SumDigitsDemonstrations


def rl_demonstrations_qwen3_debug() -> RunConfig:
    """Digit sums from a dataset of right answers and by GRPO, in one run: no teacher."""
    config = rl_grpo_qwen3_debug()
    config.steps = 40
    config.tasks["demonstrations"] = DemonstrationTask.Config(
        dataset=SumDigitsDemonstrations.Config(count=2_000, seed=2),
        group_size=8,
        env=RendererEnvConfig(max_rollout_tokens=128),
    )
    return config


def rl_replay_qwen3_debug() -> RunConfig:
    """As rl_grpo_qwen3_debug, up to half of each step replayed: groups of earlier steps, with the credit they had."""
    config = rl_grpo_qwen3_debug()
    config.steps = 60
    config.replay = GroupReplayConfig(fraction=0.5, capacity=64, max_age=4)
    return config
