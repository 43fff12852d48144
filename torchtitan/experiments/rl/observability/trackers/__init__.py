"""Places that metrics and sample conversations go to: Weights & Biases, trackio, or a class of your own.

TensorBoard is not one of them, but a file of the run (`metrics.py`): a checkpoint waits until it is on the disk.
"""

from torchtitan.experiments.rl.observability.trackers.tracker import Table, TrackedRun, Tracker

__all__ = ["Table", "TrackedRun", "Tracker"]
