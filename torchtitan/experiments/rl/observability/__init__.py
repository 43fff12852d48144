"""What people see of a run: console, metrics, trackers.

A figure beyond one of the limits below says that something is wrong with a run. Warnings on the
terminal, hints of the report and docs/running.md share the limits. They are here because the report
imports no torch.
"""

LAG_S = 1.0
"""Maximum lag of an event loop in a step, in seconds. Beyond it something blocks the loop."""
IDLE = 0.5
"""Minimum share of its time that a generator works. Below it the generator idles."""
WAITING = 0.5
"""Maximum share of a step that the trainer waits."""
