import sys

from torchtitan.experiments.rl.process.setup import restart_with_utf8
from torchtitan.experiments.rl.report.command import main

if __name__ == "__main__":
    restart_with_utf8()
    sys.exit(main())
