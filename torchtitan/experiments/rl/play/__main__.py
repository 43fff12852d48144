from torchtitan.experiments.rl.play.command import main
from torchtitan.experiments.rl.process.setup import run_command

if __name__ == "__main__":
    run_command(main)
