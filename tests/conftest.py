"""For all tests."""

import signal

from hypothesis import settings

from torchtitan.experiments.rl.process.setup import set_up_process

set_up_process()

# A shell without job control has its background jobs ignore SIGINT, and nohup SIGHUP. Tests send both to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example's time limit of its own would make a test depend on what else the machine does.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
