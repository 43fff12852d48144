"""Another name of the command that trains, ``train.py``. Every algorithm may be trained by it."""

from torchtitan.experiments.rl.process.entry import run_command
from torchtitan.experiments.rl.train import main

if __name__ == "__main__":
    run_command(main)
