"""Takes the checkpoints of a run: captures its state between two steps, and writes it while training goes on.

    step 20 ends   captured on the event loop: rollout loop, validator, sizes of the run's files
                   copied on the trainer's compute threads: model, optimizer, schedule
    step 21 ...    meanwhile the trainer writes its copy, and a thread the rest; then the folder is committed

The state of a synchronous run is captured after each step: nothing runs then, so a run that goes on from it repeats the
uninterrupted one bit for bit. Where the run stops or fails in the middle of the next step, this state is the one that is saved.
An asynchronous run is captured when it is saved. ``resume`` reads what a run goes on with.

A checkpoint has the size of each file that the run appends to, taken between two records: ``cut_back`` cuts them there. What
follows was written by steps that are taken again.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.checkpointing.folder import (
    TRAINER_FOLDER,
    CheckpointError,
    CheckpointFolder,
)
from torchtitan.experiments.rl.compat.monarch import original
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.run_folder import COMMAND_FILE, CONFIG_FILE
from torchtitan.experiments.rl.controller.events import RunEvents
from torchtitan.experiments.rl.controller.groups import read_saved_groups, write_groups
from torchtitan.experiments.rl.controller.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.controller.saved_state import (
    FORMAT,
    RunState,
    read_state,
    write_state,
)
from torchtitan.experiments.rl.controller.step_metrics import StepRecord
from torchtitan.experiments.rl.controller.validation import Validator
from torchtitan.experiments.rl.errors import RunError, cause_of
from torchtitan.experiments.rl.observability.metrics import TENSORBOARD_FOLDER, MetricsLogger
from torchtitan.experiments.rl.operations.alarms import MismatchAlarm, StallDetectors
from torchtitan.experiments.rl.operations.context import RunContext
from torchtitan.experiments.rl.operations.reports import RunReports
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.rollouts.record_file import (
    LEDGER_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    end_of_last_member,
)
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.client import TrainerClient

_LINES = (METRICS_FILE, LEDGER_FILE)
"""A run can't do without them: a resumed run's metrics and ledger have no gap."""


def sizes(run_dir: Path) -> dict[str, int]:
    """Size in bytes of each file that the run appends to, by its path in the run folder; a torn last line is left out.

    Call it when the writers have flushed, which leaves whole members and events.
    """
    return {
        str(path.relative_to(run_dir)): _end_of_last_line(path)
        if path.name in _LINES
        else path.stat().st_size
        for path in _files(Path(run_dir))
    }


def sync(run_dir: Path) -> None:
    """Fsync those files: a checkpoint that is on the disk must not be ahead of them."""
    for path in _files(Path(run_dir)):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def cut_back(run_dir: Path, offsets: Mapping[str, int]) -> list[str]:
    """Cut each file back to what it was at the checkpoint. Files that were made later are deleted. May be repeated.
    ``offsets`` {} is the beginning of the run.

    Call it before the writers open them.

    Returns:
        What is lost, a line each: recorded rollouts and TensorBoard events may be missing, as when a run folder was moved
        without them.

    Raises:
        CheckpointError: metrics or ledger are shorter than at the checkpoint, so that the run would have a gap; or a file can't
            be written. Nothing is changed if a file is too short.
    """
    run_dir = Path(run_dir)
    sizes = {str(path.relative_to(run_dir)): path.stat().st_size for path in _files(run_dir)}
    short = {name: offset for name, offset in offsets.items() if sizes.get(name, 0) < offset}
    for name, offset in short.items():
        if name in _LINES:
            now = f"has {sizes[name]:,} bytes" if name in sizes else "is missing"
            cure = "put the file back, or resume an older checkpoint of the run"
            raise CheckpointError(
                f"{run_dir / name} {now}, and had {offset:,} at the checkpoint: {cure}"
            )
    for name, size in sizes.items():
        path, end = run_dir / name, offsets.get(name, 0)
        try:
            if name not in offsets:
                path.unlink()
                continue
            if size > end:
                os.truncate(path, end)
            if name == ROLLOUTS_FILE and name in short:
                os.truncate(path, end_of_last_member(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} can't be cut back to the checkpoint ({error.strerror}): make it writable, and resume again"
            ) from error
    return [
        f"{run_dir / name} lacks records from before the checkpoint; the run goes on without them"
        for name in short
    ]


def _files(run_dir: Path) -> list[Path]:
    named = [run_dir / name for name in (*_LINES, ROLLOUTS_FILE)]
    return [
        path
        for path in (*named, *sorted((run_dir / TENSORBOARD_FOLDER).glob("*tfevents*")))
        if path.is_file()
    ]


def _end_of_last_line(path: Path) -> int:
    if not path.stat().st_size:  # which can't be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(b"\n") + 1


logger = logging.getLogger(__name__)

RECORDER_LIMIT_S = 120.0
"""How long a checkpoint waits for the rollouts that were recorded before it."""


@dataclass(kw_only=True, slots=True)
class _Captured:
    state: RunState
    groups: list[RolloutGroup]
    """The finished ones."""
    recorded: Future[int] | None
    """Size of the file of recorded rollouts, once all that were recorded by then are in it."""


@dataclass(kw_only=True, eq=False)
class RunCheckpoints(RunEvents):
    context: RunContext
    rollouts: RolloutLoop
    validator: Validator
    stall: StallDetectors
    alarm: MismatchAlarm
    trainer: TrainerClient
    metrics: MetricsLogger
    recorder: RolloutRecorder
    reports: RunReports
    saved_step: int = 0
    """Step of the newest checkpoint that is complete, or being written; 0: none."""
    newest: Path | None = None
    """The newest checkpoint that is complete."""
    failure: str | None = None
    """Why the last one could not be written."""
    _step: int = 0
    _captured: _Captured | None = None
    _writing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._folder = CheckpointFolder(self.context.run_dir, self.context.config.checkpoint.keep)

    def resumed(self, checkpoint: Path, step: int) -> None:
        """The run goes on from this checkpoint."""
        self._step = self.saved_step = step
        self.newest = checkpoint

    def step_taken(self, record: StepRecord) -> None:
        """The metrics of the step are logged; what follows may fail."""
        self._step = record.step

    async def step_ended(self, step: int) -> None:
        """Nothing of step ``step`` is left to do. Takes a checkpoint if one is due.

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
        """Save the state after the last step, unless it is saved. Returns when it is written.

        Call it when no step is being taken. A state that can't be saved is logged; ``failure`` says why.
        """
        if self._step > self.saved_step:
            try:
                captured = self._captured
                if (
                    not self.context.synchronous
                    or captured is None
                    or captured.state.step != self._step
                ):
                    self._captured = await self._capture(self._step)
                await self._save()
            except Exception as error:
                self._failed(self._step, error)
        await self.close()

    def trainer_lost(self, lost: RunError) -> None:
        """Nothing can be saved any more: the trainer's state is gone."""
        if self._step > self.saved_step:
            self.failure = f"the state after step {self._step} is not saved: {lost}"

    @property
    def writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def close(self) -> None:
        """Return when nothing is being written."""
        if self._writing is not None:
            await asyncio.shield(
                self._writing
            )  # who stops waiting for it does not stop it: a thread may be at work

    async def _capture(self, step: int) -> _Captured:
        rollouts, groups, (rest, recorded) = await self.rollouts.capture(self._moment)
        return _Captured(
            state=RunState(
                format=FORMAT,
                step=step,
                seed=self.context.config.seed,
                rollouts=rollouts,
                stall=self.stall.state(),
                **rest,
            ),
            groups=groups,
            recorded=recorded,
        )

    def _moment(self) -> tuple[dict[str, Any], Future[int] | None]:
        """What is captured at the same moment as the rollout loop."""
        self.metrics.flush()
        first, last = self.reports.first_and_last_validation()
        rest = {
            "validator": self.validator.state(),
            "mismatch": self.alarm.state(),
            "first_validation": first,
            "last_validation": last,
            "offsets": sizes(self.context.run_dir),
        }
        return rest, self.recorder.size_by_now()

    async def _save(self) -> None:
        """Have the trainer copy its state, and write everything beside what follows."""
        captured = self._captured
        assert captured is not None, "a state is captured before it is saved"
        step = captured.state.step
        await self.close()
        try:
            folder = await asyncio.to_thread(self._folder.begin, step)
        except CheckpointError as error:
            return self._failed(step, error)
        try:
            await self.trainer.begin_checkpoint(folder / TRAINER_FOLDER, step)
        except BaseException:
            self._folder.discard(step)
            raise
        self.saved_step = step
        self._writing = asyncio.create_task(
            self._write(captured, folder), name=f"checkpoint-{step}"
        )

    async def _write(self, captured: _Captured, folder: Path) -> None:
        step = captured.state.step
        try:
            # Both end before the folder is committed or removed, also where one fails.
            parts = (
                self.trainer.finish_checkpoint(),
                asyncio.to_thread(self._write_files, captured, folder),
            )
            for error in await asyncio.gather(*parts, return_exceptions=True):
                if error is not None:
                    raise error
            self.newest = await asyncio.to_thread(self._folder.commit, step)
            self.failure = None
        except BaseException as error:
            self._folder.discard(step)
            if not isinstance(error, Exception):
                raise
            self._failed(step, error)

    def _write_files(self, captured: _Captured, folder: Path) -> None:
        if captured.recorded is not None:
            captured.state.offsets[ROLLOUTS_FILE] = captured.recorded.result(RECORDER_LIMIT_S)
        sync(self.context.run_dir)  # a checkpoint must not be ahead of the run's files
        for name in (
            COMMAND_FILE,
            CONFIG_FILE,
        ):  # with them the checkpoint can be resumed where the run's own are lost
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(self.context.run_dir / name, folder)
        write_groups(folder, captured.groups)
        write_state(folder, captured.state)

    def _failed(self, step: int, error: Exception) -> None:
        """The run goes on: the checkpoints before are intact, and the next is tried again."""
        raised = original(error)
        cause = raised if isinstance(raised, RunError) else cause_of(raised)
        self.failure = f"the state after step {step} is not saved: {cause}"
        self.saved_step = min(self.saved_step, step - 1)
        kept = (
            "there is no checkpoint yet"
            if self.newest is None
            else f"{self.newest.name} stays the newest checkpoint"
        )
        # A trainer that died is said by others: the run goes on without it, or ends with that.
        level = logging.INFO if isinstance(error, ProcessLost) else logging.WARNING
        logger.log(level, "%s: %s", kept, self.failure, exc_info=error)


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
        raise RunError(
            f"seed is {config.seed}, and the checkpoint's is {state.seed}: resume with that"
        )
    groups = read_saved_groups(checkpoint)
    for line in cut_back(run_dir, state.offsets):
        logger.warning("%s", line)
    CheckpointFolder(run_dir, config.checkpoint.keep).drop_after(state.step)
    return Resumed(checkpoint=checkpoint, state=state, groups=groups)


def trainer_start(resumed: Resumed | None, init_from: Path | None) -> TrainerStart | None:
    """What the trainer loads; None: the model's hub folder."""
    if resumed is not None:
        return TrainerStart(folder=resumed.checkpoint / TRAINER_FOLDER, step=resumed.state.step)
    if init_from is not None:
        return TrainerStart(folder=init_from / TRAINER_FOLDER, step=0, weights_only=True)
    return None
