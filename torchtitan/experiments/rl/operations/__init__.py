"""What keeps and watches a run: its actor and processes, checkpoints, alarms and reports. The loops import none of it."""
