"""Reinforcement learning of language models on Monarch actors.

Start with ``types.py``, then ``rollouts/types.py``. docs/architecture.md walks through the rest.
"""
