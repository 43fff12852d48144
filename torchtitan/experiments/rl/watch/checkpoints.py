"""Takes the checkpoints of a run between two steps, and writes them while training goes on.

    step 20 ends   captured on the event loop: rollout loop, validator, sizes of the run's files
                   copied on the trainer's compute threads: model, optimizer, schedule
    step 21 ...    meanwhile the trainer writes its copy, and a thread the rest; then the folder
                   is committed

The state of a synchronous run is captured after each step: nothing runs then, so a run that goes on
from it repeats the uninterrupted one bit for bit. If the run stops or fails in the middle of the
next step, this state is the one that is saved. An asynchronous run is captured when it is saved.
"""

import asyncio
import contextlib
import logging
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.experiments.rl.checkpointing.folder import (
    SET_ASIDE_FOLDER,
    TRAINER_FOLDER,
    CheckpointError,
    CheckpointWriter,
    checkpoint_path,
    checkpoints,
    step_of,
    verify,
    write_durably,
)
from torchtitan.experiments.rl.checkpointing.run_files import cut_back, sizes, sync
from torchtitan.experiments.rl.command.run_folder import COMMAND_FILE, CONFIG_FILE
from torchtitan.experiments.rl.compat.monarch import original
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import RunError, cause_of
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.loops.saved_groups import read_saved_groups, write_groups
from torchtitan.experiments.rl.loops.saved_state import (
    FORMAT,
    BestState,
    RunState,
    read_state,
    write_state,
)
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.loops.validation import Validator
from torchtitan.experiments.rl.observability.console import near
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.rollouts.record_file import ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.samples import check_samples
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.watch.alarms import StallDetectors
from torchtitan.experiments.rl.watch.goals import ValidationGoals
from torchtitan.experiments.rl.watch.mismatch import MismatchAlarm
from torchtitan.experiments.rl.watch.reports import RunReports

logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
"""File in a checkpoint that was set aside: the value by which it was the best."""
RECORDER_LIMIT_S = 120.0
"""Seconds that a checkpoint waits for the rollouts that were recorded before it."""


@dataclass(kw_only=True, slots=True)
class _Captured:
    """State of the run after a step, but for the trainer's."""

    state: RunState
    groups: list[RolloutGroup]
    """Groups that are finished and wait for a step, and those stored for replay."""
    recorded: Future[int] | None
    """Size of the file of recorded rollouts, once all that were recorded by then are in it."""


@dataclass(kw_only=True, eq=False)
class RunCheckpoints(RunEvents):
    """Observer that saves the run: every ``checkpoint.interval`` steps, and at its end."""

    context: RunContext
    rollouts: RolloutLoop
    validator: Validator
    stall: StallDetectors
    alarm: MismatchAlarm
    goals: ValidationGoals
    trainer: TrainerClient
    metrics: MetricsLogger
    recorder: RolloutRecorder
    reports: RunReports
    saved_step: int = 0
    """Step of the newest checkpoint that is complete or being written; 0 if there is none."""
    newest: Path | None = None
    """Newest checkpoint that is complete."""
    failure: str | None = None
    """Reason why the last checkpoint could not be written, or why the last step is not saved."""
    _step: int = 0
    _captured: _Captured | None = None
    _given_up: str | None = None
    """Reason why the last step's state is not saved; None before `give_up`."""
    _writing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._writer = CheckpointWriter(self.context.run_dir, self.context.config.checkpoint.keep)

    async def restore(self, resumed: "Resumed") -> None:
        """Have the loops and the observers go on from a checkpoint of the run."""
        state = resumed.state
        await self.rollouts.restore(state.rollouts, resumed.groups, state.step)
        self.stall.restore(state.stall)
        self.validator.restore(state.validator, state.step)
        self.alarm.restore(state.mismatch)
        on_disk = [step_of(path) for path in checkpoints(self.context.run_dir)]
        self.goals.restore(
            state.goals, checkpoints=on_disk, set_aside=best_set_aside(self.context.run_dir)
        )
        self._step = state.step
        self.saved_step = state.step
        self.newest = resumed.checkpoint

    def step_recorded(self, record: StepRecord) -> None:
        """Note a step whose metrics are logged: what follows in it may fail."""
        self._step = record.step

    async def step_ended(self, step: int) -> None:
        """Take a checkpoint if one is due. Nothing of step ``step`` is left to do.

        Raises:
            RunError: a sampler or the mix can't say its state.
        """
        self._step = step
        interval = self.context.config.checkpoint.interval
        due = bool(interval) and step % interval == 0
        if due or self.context.synchronous:
            self._captured = await self._capture(step)
        if due:
            await self._save()

    async def finish(self) -> None:
        """Save the state after the last step, unless it is saved, and wait until it is written.

        Call it when no step is being taken. A state that can't be saved is logged, and ``failure``
        says why.
        """
        if self._step > self.saved_step:
            try:
                self.goals.add_checkpoint(self._step)
                if not self._is_captured():
                    self._captured = await self._capture(self._step)
                elif self._captured is not None:
                    # The evaluations of a run that ends early come after its last step.
                    evaluated = msgspec.structs.replace(self._captured.state, **self._evaluated())
                    self._captured.state = evaluated
                await self._save()
            except Exception as error:  # noqa: BLE001 - the run has ended, and says what is not saved
                self._failed(self._step, error)
        await self.close()

    def give_up(self, cause: str) -> None:
        """Note why nothing more is saved, unless the last step's state is.

        A checkpoint of that step that is being written may still be completed. It then takes the
        note back.
        """
        if self._step > self.saved_step or self.writing:
            self._given_up = f"the state after step {self._step} is not saved: {cause}"
            self.failure = self._given_up

    @property
    def writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    async def close(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            # A caller that stops waiting does not stop the write: a thread may be at work.
            await asyncio.shield(self._writing)

    def _is_captured(self) -> bool:
        """Return True if the state after the last step of a synchronous run is captured."""
        captured = self._captured
        return (
            self.context.synchronous and captured is not None and captured.state.step == self._step
        )

    async def _capture(self, step: int) -> _Captured:
        rollouts, groups, (rest, recorded) = await self.rollouts.capture(self._capture_the_rest)
        state = RunState(
            format=FORMAT,
            step=step,
            seed=self.context.config.seed,
            rollouts=rollouts,
            stall=self.stall.state(),
            **rest,
        )
        return _Captured(state=state, groups=groups, recorded=recorded)

    def _capture_the_rest(self) -> tuple[dict[str, Any], Future[int] | None]:
        """Return what has to be captured at the same moment as the rollout loop."""
        self.metrics.flush()
        rest = {
            "validator": self.validator.state(),
            "mismatch": self.alarm.state(),
            "offsets": sizes(self.context.run_dir),
        }
        return rest | self._evaluated(), self.recorder.size_by_now()

    def _evaluated(self) -> dict[str, Any]:
        """Return the fields of the state that say what the evaluations so far have shown."""
        validations = self.reports.first_and_last_validation()
        first, last = [*(entry.reward for entry in validations), None, None][:2]
        return {
            "first_validation": first,
            "last_validation": last,
            "validation_failures": [(entry.failed, entry.attempts) for entry in validations],
            "goals": self.goals.state(),
        }

    async def _save(self) -> None:
        """Have the trainer copy its state, and start writing the captured state."""
        captured = self._captured
        assert captured is not None, "a state is captured before it is saved"
        step = captured.state.step
        await self.close()
        try:
            folder = await asyncio.to_thread(self._writer.begin, step)
        except CheckpointError as error:
            self._failed(step, error)
            return
        try:
            await self.trainer.begin_checkpoint(folder / TRAINER_FOLDER, step)
        except BaseException:  # also CancelledError: no half folder is left behind
            self._writer.discard(step)
            raise
        self.saved_step = step
        self._writing = asyncio.create_task(
            self._write(captured, folder), name=f"checkpoint-{step}"
        )

    async def _write(self, captured: _Captured, folder: Path) -> None:
        step = captured.state.step
        try:
            # Both end before the folder is committed or removed, even if one fails.
            writes = (
                self.trainer.finish_checkpoint(),
                asyncio.to_thread(self._write_files, captured, folder),
            )
            for error in await asyncio.gather(*writes, return_exceptions=True):
                if error is not None:
                    raise error
            self.newest = await asyncio.to_thread(self._writer.commit, step, stays=self.goals.stays)
            self.failure = None if step == self._step else self._given_up
        except BaseException as error:  # also CancelledError: no half folder is left behind
            self._writer.discard(step)
            if not isinstance(error, Exception):
                raise
            self._failed(step, error)

    def _write_files(self, captured: _Captured, folder: Path) -> None:
        """Write what the controller has in a checkpoint. Blocks: it runs in a thread."""
        if captured.recorded is not None:
            captured.state.offsets[ROLLOUTS_FILE] = captured.recorded.result(RECORDER_LIMIT_S)
        sync(self.context.run_dir)
        # With its command and its config a checkpoint can be resumed where the run's own are lost.
        for name in (COMMAND_FILE, CONFIG_FILE):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(self.context.run_dir / name, folder)
        write_groups(folder, captured.groups)
        write_state(folder, captured.state)

    def _failed(self, step: int, error: Exception) -> None:
        """Note a checkpoint that could not be written.

        The run goes on: the checkpoints before are intact, and the next is tried again.
        """
        raised = original(error)
        cause = raised if isinstance(raised, RunError) else cause_of(raised)
        self.failure = f"the state after step {step} is not saved: {cause}"
        self.saved_step = min(self.saved_step, step - 1)  # so that `finish` saves the step again
        kept = "there is no checkpoint yet"
        if self.newest is not None:
            kept = f"{self.newest.name} stays the newest checkpoint"
        # The death of the trainer is said by others: the run goes on without it, or ends with it.
        level = logging.INFO if isinstance(error, ProcessLost) else logging.WARNING
        logger.log(level, "%s: %s", kept, self.failure, exc_info=error)


@dataclass(kw_only=True, slots=True)
class Resumed:
    """A checkpoint that was read, for a run to go on from."""

    checkpoint: Path
    state: RunState
    groups: dict[str, RolloutGroup]
    """Groups that were finished and waited for a step, and those stored for replay, by id."""


def resume(checkpoint: Path, *, run_dir: Path, config: RunConfig) -> Resumed:
    """Read a verified checkpoint, and cut the run's files back to it.

    Call it before anything writes to the files.

    Raises:
        RunError: the checkpoint is of another seed or another version of the library, has a sample
            that can't be trained on, or the run's files can't be cut back.
    """
    state = read_state(checkpoint)
    if state.seed != config.seed:
        raise RunError(
            f"seed is {config.seed}, and the checkpoint's is {state.seed}: resume with that"
        )
    groups = read_saved_groups(checkpoint)
    for group in groups.values():
        try:
            check_samples(group.scored)
        except ValueError as error:
            raise RunError(f"{checkpoint}: {error}: resume from another checkpoint") from error
    for line in cut_back(run_dir, state.offsets):
        logger.warning("%s", line)
    writer = CheckpointWriter(run_dir, config.checkpoint.keep)
    if config.checkpoint.keep_best is not None:
        _set_best_aside(writer, run_dir, after=state.step)
    writer.drop_after(state.step)
    return Resumed(checkpoint=checkpoint, state=state, groups=groups)


def _set_best_aside(writer: CheckpointWriter, run_dir: Path, *, after: int) -> None:
    """Move the best checkpoint out of the way of a resume from an earlier step, and say so.

    The resumed run takes the same steps again, and writes checkpoints of the same names.

    Raises:
        CheckpointError: the checkpoint can't be moved.
    """
    best = _best_of_later(run_dir, after)
    if best is None:
        return
    path = checkpoint_path(run_dir, best.step)
    try:
        verify(path)
    except CheckpointError as error:
        logger.warning("the best checkpoint is not kept: %s", error)
        return
    best = msgspec.structs.replace(best, set_aside=True)
    write_durably(path / BEST_FILE, msgspec.json.encode(best).decode())
    moved = writer.set_aside(best.step)
    logger.warning(
        "the best checkpoint (%s %.4g) is of step %d, after the one that the run goes on from: it "
        "stays, as %s",
        best.metric,
        best.value,
        best.step,
        near(moved),
    )


def _best_of_later(run_dir: Path, step: int) -> BestState | None:
    """Return the run's best checkpoint, if it is later than a step."""
    for path in reversed(checkpoints(run_dir)):
        if step_of(path) <= step:
            break
        try:
            best = read_state(path).goals.kept
        except RunError as error:
            logger.warning("%s", error)
            continue
        is_later = best is not None and best.step > step and not best.set_aside
        return best if is_later else None
    return None


def best_set_aside(run_dir: Path) -> list[BestState]:
    """Return the best checkpoints that resumes from earlier steps have set aside.

    Raises:
        RunError: a file that describes one can't be read.
    """
    found = []
    for path in sorted((run_dir / SET_ASIDE_FOLDER).glob(f"step-*/{BEST_FILE}")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=BestState))
        except (OSError, ValueError) as error:
            cure = f"delete {near(path.parent)}, or put the file back"
            raise RunError(f"{path} can't be read ({error}): {cure}") from error
    return found


def trainer_start(resumed: Resumed | None, init_from: Path | None) -> TrainerStart | None:
    """Return the checkpoint that the trainer loads; None if it loads the model's hub folder."""
    if resumed is not None:
        return TrainerStart(folder=resumed.checkpoint / TRAINER_FOLDER, step=resumed.state.step)
    if init_from is not None:
        return TrainerStart(folder=init_from / TRAINER_FOLDER, step=0, weights_only=True)
    return None
