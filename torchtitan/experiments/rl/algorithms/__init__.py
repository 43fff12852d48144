"""Algorithms: one module for each. ``base.py`` has the class that yours extends."""

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.dapo import DAPO
from torchtitan.experiments.rl.algorithms.echo import Echo
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.algorithms.max_rl import MaxRL
from torchtitan.experiments.rl.algorithms.opd import OPD
from torchtitan.experiments.rl.algorithms.opsd import OPSD
from torchtitan.experiments.rl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from torchtitan.experiments.rl.algorithms.rloo import RLOO
from torchtitan.experiments.rl.algorithms.sft import SFT, StaticSFT
from torchtitan.experiments.rl.algorithms.turn_credit import TurnCredit

__all__ = [
    "DAPO",
    "GRPO",
    "OPD",
    "OPSD",
    "RLOO",
    "SFT",
    "Algorithm",
    "Echo",
    "MaxRL",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "StaticSFT",
    "TurnCredit",
]
