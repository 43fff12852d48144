"""Observers of a run: alarms, checkpoints, reports and profiles, each told of the loops' events."""
