"""Figures from which on something is wrong with a run. Terminal warnings, the report's hints and docs/running.md share them."""

LAG_S = 1.0
"""Something blocks the event loop of the rollouts for so long in a step."""
IDLE = 0.5
"""Share of its time that a generator works, below which it idles."""
WAITING = 0.5
"""Share of the step that the trainer waits."""
