"""Algorithms, a module each."""

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.algorithms.max_rl import MaxRL

__all__ = ["GRPO", "Algorithm", "MaxRL"]
