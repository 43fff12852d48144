"""The Controller, and what observes its run: checkpoints, alarms and reports."""
