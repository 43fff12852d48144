"""The heart of a run: rollout loop, training loop, groups, pacing, ledger, validation.

Begin with ``rollout_loop``.
"""
