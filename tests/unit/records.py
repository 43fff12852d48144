"""Rollouts written to a run's records, and compared with what is read again."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.experiments.rl.frozen import Freezable
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


def assert_same(left: Any, right: Any, path: str = "rollout") -> None:
    """Compare every field of two records, arrays bit for bit with their dtypes."""
    for kind in (dict, list):  # a rollout that has ended has read-only ones
        left = kind(left) if isinstance(left, kind) else left
        right = kind(right) if isinstance(right, kind) else right
    left = left.thawed() if isinstance(left, Freezable) else left
    right = right.thawed() if isinstance(right, Freezable) else right
    assert type(left) is type(right), path
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), path
    elif hasattr(left, "__dataclass_fields__"):
        for field in fields(left):
            assert_same(
                getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}"
            )
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    else:
        assert left == right, path


def write(
    folder: Path, *groups: RolloutGroup, outcome: str = "trained", **config: Any
) -> RolloutRecorder:
    """Record groups in a folder, and return the recorder, which is closed."""
    recorder = RolloutRecorder.Config(**config).build(run_dir=folder)
    for group in groups:
        recorder.record(group, {rollout.rollout_id: outcome for rollout in group.rollouts})
    recorder.close()
    return recorder
