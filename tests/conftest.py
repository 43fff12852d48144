"""For all tests."""

from hypothesis import settings

# An example's time limit of its own would make a test depend on what else the machine does.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
