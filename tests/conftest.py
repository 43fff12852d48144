"""For all tests."""

from hypothesis import settings

from torchtitan.experiments.rl.process.setup import set_up_process

set_up_process()

# An example's time limit of its own would make a test depend on what else the machine does.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
