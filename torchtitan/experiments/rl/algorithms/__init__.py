"""Algorithms, a module each."""

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.echo import Echo
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.algorithms.max_rl import MaxRL
from torchtitan.experiments.rl.algorithms.opd import OPD
from torchtitan.experiments.rl.algorithms.opsd import OPSD
from torchtitan.experiments.rl.algorithms.sft import SFT

__all__ = ["GRPO", "OPD", "OPSD", "SFT", "Algorithm", "Echo", "MaxRL"]
