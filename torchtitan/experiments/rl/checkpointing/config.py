"""When a run takes checkpoints, and how many it keeps."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    interval: NonNegativeInt = 20
    """Optimizer steps between two checkpoints. 0: none but those at a signal, at an error and at the end."""
    keep: PositiveInt = 2
    """Checkpoints that stay; older ones are deleted. With 1, a damaged disk block costs the whole run."""
    grace_s: PositiveFloat = 25.0
    """After SIGTERM or SIGHUP: seconds for the step to end and be saved. Then the run ends with the last checkpoint. Schedulers
    kill 30 s after SIGTERM unless told otherwise."""
