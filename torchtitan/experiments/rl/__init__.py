"""Reinforcement learning of language models on Monarch actors.

Start with ``types.py``, then ``rollouts/types.py``. docs/architecture.md says what the parts are.
"""
