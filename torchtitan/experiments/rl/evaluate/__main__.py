"""Measures a policy on its tasks, without training: ``python -m torchtitan.experiments.rl.evaluate``."""

from torchtitan.experiments.rl.evaluate.command import main
from torchtitan.experiments.rl.process.setup import run_command

if __name__ == "__main__":
    run_command(main)
