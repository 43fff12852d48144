"""One attempt at a run: from its config, or from a checkpoint, to its last step or to what ends it.

    setup      open the metrics
               build the tasks, the task mix and the filters
               spawn and connect every process
               set the tasks up where their rollouts run
               build the loops and their observers, and have them go on from a checkpoint
    train      the training loop, the last checkpoint, the policy as a hub folder
    settle     close the loops, the recorder and the profile; after it the summary can be printed
    close      close tasks, processes and metrics

A run whose trainer dies is attempted again, by another `Run` (`actor.py`).
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtitan.experiments.rl.ask.call import ask, contained, sentence
from torchtitan.experiments.rl.checkpointing.folder import (
    BEST_POLICY,
    TRAINER_FOLDER,
    checkpoint_path,
    set_aside_path,
)
from torchtitan.experiments.rl.command.resume import save_config
from torchtitan.experiments.rl.configurable import BuildContext, build_with
from torchtitan.experiments.rl.controller.closing import CLOSE_TIMEOUT_S, Closing
from torchtitan.experiments.rl.envs.renderer import build_context
from torchtitan.experiments.rl.errors import ConfigError, RunError, UserCodeError, cause_of
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, TaskSet
from torchtitan.experiments.rl.loops.groups import groups_per_pick
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.loop import Loops, build_loop
from torchtitan.experiments.rl.loops.parts import Parts, Schedule
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.models.policy import model_positions
from torchtitan.experiments.rl.observability.console import BestCheckpoint, RunSummary
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.process.logs import ENDS_THE_RUN
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.training.checkpoints import export_checkpoint
from torchtitan.experiments.rl.watch.alarms import SeveralPrompts, StallDetectors
from torchtitan.experiments.rl.watch.checkpoints import Resumed, RunCheckpoints, trainer_start
from torchtitan.experiments.rl.watch.goals import ValidationGoals
from torchtitan.experiments.rl.watch.mismatch import mismatch_alarm
from torchtitan.experiments.rl.watch.profile import StepProfile
from torchtitan.experiments.rl.watch.reports import Evaluated, RunReports
from torchtitan.experiments.rl.weights.sync import canary_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Observers:
    """Observers of the loops' events that the run itself asks for something."""

    profile: StepProfile
    reports: RunReports
    goals: ValidationGoals
    checkpoints: RunCheckpoints
    """Hears of each event last, so that a step that could not be reported is not saved."""


class Run:
    """Call `run`, then `settle`, after which `summary` says how it ended, then `close`."""

    def __init__(self, context: RunContext, *, resumed: Resumed | None, init_from: Path | None):
        """Start nothing yet.

        Args:
            resumed: the run's own checkpoint, which it goes on from.
            init_from: checkpoint of another run, with whose weights this one begins.
        """
        config = context.config
        self.fleet = Fleet(context, on_failure=self._end_rollouts)
        self._context = context
        self._resumed = resumed
        self._init_from = init_from
        self._tasks = TaskSet(config.tasks, ordered=context.ordered, limits=config.user_code)
        self._loops: Loops | None = None
        self._observers: Observers | None = None
        """Set, with the loops, when the set-up has succeeded."""
        self._setting_up: asyncio.Task[None] | None = None
        self._is_stopped = False
        """True once `stop` was called."""
        self._client_failure: Exception | None = None
        """First error of a client of generators."""
        self._writers = Closing()
        """Loops, recorder and profile, which write the run's files and count its rollouts. `settle`
        closes them."""
        self._resources = Closing()
        """Metrics, processes and tasks, in this order. Those behind may use those before until they
        are closed, and so may the writers. `close` closes them, the last first."""
        self._files = {
            "metrics": context.run_dir / METRICS_FILE,
            "records": context.run_dir / ROLLOUTS_FILE,
            "ledger": context.run_dir / LEDGER_FILE,
            "logs": context.run_dir / "logs",
        }

    # ---- for the Controller

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps since the run began, in all its attempts."""
        if self._loops is not None:
            return self._loops.training.steps_done
        return 0 if self._resumed is None else self._resumed.state.step

    @property
    def ended_early(self) -> str | None:
        """Reason why nothing is left to learn; None if something is."""
        if self._observers is None or self._observers.reports.why_ended_early is None:
            return None
        return self._observers.goals.with_late_gain(self._observers.reports.why_ended_early)

    @property
    def writes_checkpoint(self) -> bool:
        """True while a checkpoint is being written."""
        return self._observers is not None and self._observers.checkpoints.writing

    async def run(self) -> None:
        """Set everything up, and train.

        Raises:
            ProcessLost: the trainer died.
            Exception: whatever else ended the run early. What could be saved is saved.
            CancelledError: `stop` was called during the set-up.
        """
        unless_failed = self.fleet.supervisor.unless_failed
        try:
            self._setting_up = asyncio.create_task(contained(unless_failed(self._setup())))
            await self._setting_up
            await contained(unless_failed(self._train()))
        except Exception as error:  # noqa: BLE001 - whatever ended the run is explained and raised
            explained = await self.fleet.supervisor.explained(error)
            await self._save_what_can_be(explained, error)
            if isinstance(explained, UserCodeError):
                explained = RunError(str(explained))
            raise explained from None

    def stop(self) -> None:
        """End after the step that is being taken, or at once during the set-up."""
        self._is_stopped = True
        if self._setting_up is not None:
            self._setting_up.cancel()
        if self._loops is not None:
            self._loops.training.stop()

    async def settle(self) -> list[RunError]:
        """Close the loops, and what writes down what they did.

        Returns:
            Errors of what could not be closed, in order.
        """
        self._context.console.waits.close()
        if self._observers is not None:
            # Without its trainer the run is attempted again: the checkpoint that is being written
            # must not appear once the next attempt has begun from the one before.
            trainer_lost = self.fleet.supervisor.lost is not None
            timeout_s = CLOSE_TIMEOUT_S
            if trainer_lost:
                timeout_s = self._context.config.supervision.slow_work_s
            await self._writers.close_now(
                "the checkpoints", self._observers.checkpoints.close, timeout_s=timeout_s
            )
        await self._writers.close()
        return self._writers.faults

    async def close(self) -> list[RunError]:
        """Close tasks, processes and metrics. A second call does nothing.

        Returns:
            Errors of what could not be closed, by `settle` and here, in order.
        """
        await self._resources.close()
        return [*self._writers.faults, *self._resources.faults]

    # ---- set-up

    async def _setup(self) -> None:
        context = self._context
        config = context.config
        metrics = config.metrics.build(
            run_dir=context.run_dir,
            run_config=save_config(context.run_dir, config),
            resume_step=None if self._resumed is None else self._resumed.state.step,
        )
        self._resources.push("the metrics", partial(asyncio.to_thread, metrics.close))
        self._resources.push("the actors", self.fleet.close)

        known = build_context(config.renderer, config.model.hf_assets_path, seed=config.seed)
        await self._tasks.build(known)
        self._resources.push("the tasks", self._tasks.close, timeout_s=None)
        selection = await self._build_selection(known)

        canary = canary_of(known.renderer)
        await self.fleet.start(canary, trainer_start(self._resumed, self._init_from))
        with context.console.waits.wait("the tasks to be set up"):
            runner = await self.fleet.start_runner(self._tasks)

        loops = await self._build_loops(selection, runner, metrics)
        if self._client_failure is not None:  # it came before there were loops to tell
            loops.rollouts.fail(self._client_failure)

    async def _build_selection(self, known: BuildContext) -> Selection:
        """Build the task mix and the filters."""
        context = self._context
        config = context.config
        weights = {name: task.weight for name, task in config.tasks.items()}
        selection = Selection(
            context.ordered,
            mix=await self._build_user_part(
                partial(config.task_mix.build, weights=weights), "task_mix"
            ),
            tasks=self._tasks.tasks,
            pre_batch_filters=await self._build_filters("pre_batch_filters", known),
            post_batch_filters=await self._build_filters("post_batch_filters", known),
        )
        for line in selection.without_state():
            context.console.note(line)
        return selection

    async def _build_filters(self, field: str, known: BuildContext) -> list[Filter]:
        return [
            await self._build_user_part(partial(build_with, config, known), f"{field}[{index}]")
            for index, config in enumerate(self._context.config.filters_of(field))
        ]

    async def _build_user_part(self, build: Callable[[], T], field: str) -> T:
        """Build a part that a user may have written. An error names the field of its config."""
        return await self._context.ordered.call(
            build,
            owner=f"{field} can't be built",
            timeout_s=self._context.config.user_code.setup_timeout_s,
        )

    async def _build_loops(
        self, selection: Selection, runner: GroupRunner, metrics: MetricsLogger
    ) -> Loops:
        """Build the loops and their observers, and have them go on from a checkpoint."""
        context = self._context
        config = context.config
        resumed = self._resumed
        recorder = config.recorder.build(run_dir=context.run_dir)
        self._writers.push("the recorder", partial(self._close_recorder, recorder))
        ledger = Ledger(self._files["ledger"])
        replay = GroupReplay(
            config.replay,
            rollouts_per_step=config.rollouts_per_step,
            seed=config.seed,
            load=resumed is None,  # a resumed run's groups of other runs are in its checkpoint
        )
        tasks = self._tasks.tasks.values()
        reports = RunReports(
            context,
            metrics=metrics,
            compares_rewards=any(task.algorithm.group_relative for task in tasks),
            validations=evaluations_before(resumed),
        )
        picks = {task.name: groups_per_pick(task) for task in tasks}
        stall = StallDetectors(config.max_drops_in_a_row, picks, context.console.note)
        alarm = mismatch_alarm(config)
        profile = StepProfile(
            config.profile_steps,
            run_dir=context.run_dir,
            processes=self.fleet.supervisor.processes,
        )
        prompts = SeveralPrompts(context.console.note)
        goals = ValidationGoals(config)
        loops = build_loop(
            Schedule.of_config(config, steps_done=self.steps_done),
            Parts(
                selection=selection,
                runner=runner,
                policy=self.fleet.policy,
                batcher=config.batcher.build(positions=model_positions(config.model)),
                trainer=self.fleet.trainer,
                weights=self.fleet.weights,
                ordered=context.ordered,
                ledger=ledger,
                recorder=recorder,
                replay=replay,
                generated_tokens=lambda: self.fleet.policy.generated_tokens,
            ),
            watchers=[stall, prompts, alarm, profile, reports, goals],
            on_failure=self._end_rollouts,
        )
        self._writers.push("the rollout loop", loops.rollouts.close)
        checkpoints = RunCheckpoints(
            context=context,
            rollouts=loops.rollouts,
            validator=loops.validator,
            stall=stall,
            alarm=alarm,
            goals=goals,
            trainer=self.fleet.trainer,
            metrics=metrics,
            recorder=recorder,
            reports=reports,
        )
        loops.watchers.add(checkpoints)
        if resumed is not None:
            await checkpoints.restore(resumed)
        self._writers.push("the training loop", loops.training.close)
        self._writers.push("the profile", profile.close)
        self._loops = loops
        self._observers = Observers(
            profile=profile, reports=reports, goals=goals, checkpoints=checkpoints
        )
        return loops

    # ---- training, and its end

    async def _train(self) -> None:
        assert self._loops is not None and self._observers is not None, "the set-up comes first"
        training = self._loops.training
        waits = self._context.console.waits
        self._observers.reports.begin(training.steps_done, self._context.config.steps)
        await training.run()
        waits.close()
        with waits.wait("the checkpoint to be written"):
            await self._observers.checkpoints.finish()
        if training.steps_done:
            with waits.wait("the policy to be written as a hub folder"):
                folder = await self.fleet.trainer.save_final(training.steps_done)
            if folder is not None:
                self._files["policy"] = folder
                await self._export_best(folder)

    async def _export_best(self, final: Path) -> None:
        """Write the policy of the best checkpoint as a hub folder, beside that of the last step.

        A run that was stopped is resumed, and does so at its end. A failure is a warning: the
        checkpoint is there, and `rl-export` takes it.

        Args:
            final: hub folder of the last step's policy.
        """
        target = final.with_name(BEST_POLICY)
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)  # an earlier run's end
        best = self._best()
        last = checkpoint_path(self._context.run_dir, self.steps_done)
        if best is None or best.path == last or self._is_stopped:
            return
        config = self._context.config
        export = partial(
            export_checkpoint,
            best.path / TRAINER_FOLDER,
            config.model,
            target,
            lora=config.trainer.lora,
            names=config.adapters,
        )
        with self._context.console.waits.wait("the best policy to be written as a hub folder"):
            try:
                await asyncio.to_thread(export)
            except (RunError, ConfigError, OSError) as error:
                logger.warning("the best policy is not written: %s", cause_of(error))
            else:
                self._files["best policy"] = target

    def _end_rollouts(self, error: Exception) -> None:
        """End the rollouts with the error of a client that can't go on."""
        if self._client_failure is None:
            self._client_failure = error
        if self._loops is not None:
            self._loops.rollouts.fail(error)

    async def _save_what_can_be(self, explained: Exception, error: Exception) -> None:
        """Save the steps since the last checkpoint after an error, or note that they are lost.

        Args:
            explained: what ended the run.
            error: the error by which that was noticed.
        """
        supervisor = self.fleet.supervisor
        trainer_died = explained is supervisor.lost  # the run is attempted again
        if not trainer_died:
            logger.error("the run failed", exc_info=error, extra=ENDS_THE_RUN)
        if self._observers is None:
            return
        checkpoints = self._observers.checkpoints
        if trainer_died or self.fleet.trainer_unreachable:
            checkpoints.give_up(cause_of(explained))
            return
        try:
            await ask(checkpoints.finish, timeout_s=CLOSE_TIMEOUT_S)
        except UserCodeError as unsaved:
            logger.warning("the state before the error is not saved: %s", sentence(unsaved))
            checkpoints.give_up(sentence(unsaved))

    async def _close_recorder(self, recorder: RolloutRecorder) -> None:
        await asyncio.to_thread(recorder.close)
        if recorder.not_recorded:
            records = self._files["records"]
            logger.warning("%d rollouts are not in %s", recorder.not_recorded, records)

    def summary(
        self, *, wall_time_s: float, stopped_by: str | None, checkpoint: Path | None
    ) -> RunSummary:
        """Return how the run went. Call it once the run is settled.

        Args:
            checkpoint: checkpoint that the run can go on from, unless it has taken another since.
        """
        files: dict[str, Path | None] = dict(self._files)
        summary = RunSummary(
            steps=self.steps_done,
            total_steps=self._context.config.steps,
            wall_time_s=wall_time_s,
            start_val_reward=None,
            final_val_reward=None,
            ledger={},
            files={},
            stopped_by=stopped_by,
            ended_early=self.ended_early is not None,
            run_dir=self._context.run_dir,
        )
        if self._loops is not None and self._observers is not None:
            reports = self._observers.reports
            checkpoints = self._observers.checkpoints
            validations = reports.first_and_last_validation()
            for entry in validations[:1]:
                summary.start_val_reward = entry.reward
                summary.start_val_failures = entry.failed, entry.attempts
            for entry in validations[1:]:
                summary.final_val_reward = entry.reward
                summary.final_val_failures = entry.failed, entry.attempts
            summary.val_examples = reports.validation_examples
            summary.course = reports.course
            summary.ledger = self._loops.rollouts.ledger.counts()
            summary.not_saved = checkpoints.failure
            summary.best = self._best()
            summary.more_patience = self._observers.goals.more_patience
            files["batch"] = self.fleet.trainer.failed_batch
            files["profile"] = self._observers.profile.file
            checkpoint = checkpoints.newest or checkpoint
        files["checkpoint"] = checkpoint
        summary.files = {name: path for name, path in files.items() if path is not None}
        return summary

    def _best(self) -> BestCheckpoint | None:
        """Return the best checkpoint; None if none is kept, or it could not be written."""
        best = None if self._observers is None else self._observers.goals.best
        if best is None:
            return None
        folder_of = set_aside_path if best.set_aside else checkpoint_path
        path = folder_of(self._context.run_dir, best.step)
        if not path.is_dir():
            return None
        return BestCheckpoint(path=path, metric=best.metric, value=best.value, step=best.step)


def evaluations_before(resumed: Resumed | None) -> list[Evaluated]:
    """Return the first and the last evaluation that a resumed run has had."""
    if resumed is None:
        return []
    state = resumed.state
    rewards = [state.first_validation, state.last_validation]
    if state.validation_failures:
        return [
            Evaluated(reward, failed, attempts)
            for reward, (failed, attempts) in zip(rewards, state.validation_failures, strict=False)
        ]
    # A checkpoint of an earlier version of the library did not count failures.
    return [Evaluated(reward) for reward in rewards if reward is not None]
