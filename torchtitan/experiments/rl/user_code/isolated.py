"""The old place of `ask/child.py`."""

from torchtitan.experiments.rl.ask.child import IsolatedCalls

__all__ = ["IsolatedCalls"]
