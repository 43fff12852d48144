"""What a run begins with: nothing, a checkpoint of its own that it goes on from, or the weights of another run."""

import logging
from dataclasses import dataclass
from pathlib import Path

from torchtitan.experiments.rl.checkpointing.folder import TRAINER_FOLDER, CheckpointFolder
from torchtitan.experiments.rl.checkpointing.run_files import cut_back
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.saved_groups import read_finished_groups
from torchtitan.experiments.rl.controller.saved_state import RunState, read_state
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.training.checkpoints import TrainerStart

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Resumed:
    checkpoint: Path
    state: RunState
    groups: dict[str, RolloutGroup]
    """The finished ones, by id."""


def resume(checkpoint: Path, *, run_dir: Path, config: RunConfig) -> Resumed:
    """Read a verified checkpoint, and cut the run's files back to it. Call it before anything writes to them.

    Raises:
        RunError: the checkpoint is of another seed or another version of the library, or the run's files can't be cut back.
    """
    state = read_state(checkpoint)
    if state.seed != config.seed:
        raise RunError(f"seed is {config.seed}, and the checkpoint's is {state.seed}: resume with that")
    groups = read_finished_groups(checkpoint)
    for line in cut_back(run_dir, state.offsets):
        logger.warning("%s", line)
    CheckpointFolder(run_dir, config.checkpoint.keep).drop_after(state.step)
    return Resumed(checkpoint=checkpoint, state=state, groups=groups)


def begin_again(run_dir: Path) -> None:
    """Delete what the run has written so far: it begins at step 0 again.

    Raises:
        CheckpointError: a file can't be deleted.
    """
    cut_back(run_dir, {})


def trainer_start(resumed: Resumed | None, init_from: Path | None) -> TrainerStart | None:
    """What the trainer loads; None: the model's hub folder."""
    if resumed is not None:
        return TrainerStart(folder=resumed.checkpoint / TRAINER_FOLDER, step=resumed.state.step)
    if init_from is not None:
        return TrainerStart(folder=init_from / TRAINER_FOLDER, step=0, weights_only=True)
    return None
