"""The loops of a run: which groups are run and when, and what each step trains on.

Nothing here has a process, a terminal or a clock of its own.
"""
