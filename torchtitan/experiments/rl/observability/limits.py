"""Figures from which on something is wrong with a run: the terminal warns by them, and the report hints; docs/running.md names them."""

LAG_S = 1.0
"""Something blocks the event loop of the rollouts for so long in a step."""
IDLE = 0.5
"""Share of its time that a generator works, below which it idles."""
WAITING = 0.5
"""Share of the step that the trainer waits."""
