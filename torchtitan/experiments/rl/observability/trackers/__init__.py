"""Places that metrics and sample conversations go to: TensorBoard, Weights & Biases, trackio, or a class of your own."""

from torchtitan.experiments.rl.observability.trackers.tracker import Table, TrackedRun, Tracker

__all__ = ["Table", "TrackedRun", "Tracker"]
