"""What people see of a run: console, metrics, trackers.

From the figures below on something is wrong with a run. Warnings on the terminal, hints of the report and docs/running.md share
them. They are here because the report imports no torch.
"""

LAG_S = 1.0
"""Something blocks the event loop of the rollouts for so long in a step."""
IDLE = 0.5
"""Share of its time that a generator works, below which it idles."""
WAITING = 0.5
"""Share of the step that the trainer waits."""
