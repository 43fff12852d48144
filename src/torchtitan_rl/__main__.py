"""The command ``python -m torchtitan_rl NAME ...``, such as ``python -m torchtitan_rl train``."""

import sys

from torchtitan_rl.commands import main

sys.exit(main())
