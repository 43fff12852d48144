import sys

from torchtitan.experiments.rl.play.command import main
from torchtitan.experiments.rl.process.setup import restart_with_utf8

if __name__ == "__main__":
    restart_with_utf8()
    sys.exit(main())
