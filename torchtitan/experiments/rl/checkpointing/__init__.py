"""The folders of a run's checkpoints on disk."""
