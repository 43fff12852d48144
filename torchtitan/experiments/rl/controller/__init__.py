"""The Controller: it makes a run, and ends it."""
