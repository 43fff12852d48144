from torchtitan.experiments.rl.process.setup import run_command
from torchtitan.experiments.rl.report.command import main

if __name__ == "__main__":
    run_command(main)
