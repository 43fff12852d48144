"""Processes of a run: how each is set up, where it prints, what it records, and how it ends."""
