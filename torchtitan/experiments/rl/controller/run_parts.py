"""Every part of a run, built from its start or from a checkpoint: trains, saves and closes what was built.

A run whose trainer died is built again, as other RunParts (`actor.py`).
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.resume import save_config
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.closing import PART_TIMEOUT_S, Closing
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.mismatch_alarm import mismatch_alarm
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.process_usage import lap_usage
from torchtitan.experiments.rl.controller.profile import StepProfile
from torchtitan.experiments.rl.controller.restarts import Restarts
from torchtitan.experiments.rl.controller.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.controller.run_checkpoints import RunCheckpoints
from torchtitan.experiments.rl.controller.run_reports import RunReports
from torchtitan.experiments.rl.controller.run_start import Resumed, trainer_start
from torchtitan.experiments.rl.controller.supervision import Supervisor
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.controller.training_loop import TrainingLoop
from torchtitan.experiments.rl.controller.user_parts import parts_without_state
from torchtitan.experiments.rl.controller.validation import Validator
from torchtitan.experiments.rl.controller.wiring import RunActors
from torchtitan.experiments.rl.envs.renderer import build_renderer
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.observability.console import Console, RunSummary
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.observability.waits import Waits
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded, contained
from torchtitan.experiments.rl.user_code.gate import Gate, sentence

logger = logging.getLogger(__name__)

CANARY_MESSAGES = [{"role": "user", "content": "What is 17 + 25? Think first, then give the number."}]


class RunParts:
    """``run``, then ``settle``, after which ``summary`` says how it ended, then ``close``."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        *,
        run_dir: Path,
        hosts: HostPool | None = None,
        console: Console,
        restarts: Restarts,
        gate: Gate,
        resumed: Resumed | None,
        init_from: Path | None,
    ):
        """
        Args:
            hosts: where the processes are. None: on this host.
            gate: runs the user code that one thread runs.
            resumed: the run's own checkpoint that it goes on from.
            init_from: a checkpoint of another run, with whose weights this one begins.
        """
        self.config, self._plan, self._run_dir, self._console = config, plan, run_dir, console
        self._failure: Exception | None = None
        self.waits = Waits(console.waiting)
        self._actors = RunActors(
            config,
            plan,
            run_dir=run_dir,
            hosts=hosts,
            restarts=restarts,
            on_failure=self._fail,
            on_death=console.note,
            waits=self.waits,
        )
        self._closing, self._closed = Closing(), False
        self._gate = gate
        self._tasks = TaskSet(config.tasks, gate=gate, limits=config.user_code, seed=config.seed)
        self._resumed, self._init_from = resumed, init_from
        self._metrics: MetricsLogger | None = None
        self._rollouts: RolloutLoop | None = None
        self._training: TrainingLoop | None = None
        self._recorder: RolloutRecorder | None = None
        self._checkpoints: RunCheckpoints | None = None
        self._building: asyncio.Task[TrainingLoop] | None = None
        self._reports: RunReports | None = None
        self._files = {
            "metrics": run_dir / METRICS_FILE,
            "records": run_dir / ROLLOUTS_FILE,
            "ledger": run_dir / LEDGER_FILE,
            "logs": run_dir / "logs",
        }

    @property
    def supervisor(self) -> Supervisor:
        return self._actors.supervisor

    @property
    def ended_early(self) -> str | None:
        """Why there is nothing left to learn."""
        return self._reports.ended_early if self._reports is not None else None

    @property
    def steps_done(self) -> int:
        """Optimizer steps since the run began."""
        if self._training is not None:
            return self._training.steps_done
        return self._resumed.state.step if self._resumed is not None else 0

    @property
    def writes_checkpoint(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._checkpoints is not None and self._checkpoints.writing

    async def run(self) -> None:
        """Build everything, and train.

        Raises:
            ProcessLost: the trainer died.
            Exception: whatever else ended the run early. What could be saved is saved.
            CancelledError: it was stopped while it was built.
        """
        unless_failed = self.supervisor.unless_failed
        try:
            self._building = asyncio.create_task(contained(unless_failed(self._build())))
            await contained(unless_failed(self._train(await self._building)))
        except Exception as error:
            explained = await self.supervisor.explained(error)
            if explained is self.supervisor.lost:
                if self._checkpoints is not None:
                    self._checkpoints.trainer_lost(explained)
                raise explained from None
            logger.exception("the run failed")
            await self._save_before_end()
            raise (RunError(str(explained)) if isinstance(explained, UserCodeError) else explained) from None

    def stop(self) -> None:
        """End after the step that is being taken, or at once while it is being built."""
        if self._building is not None:
            self._building.cancel()
        if self._training is not None:
            self._training.stop()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._rollouts is not None:
            self._rollouts.fail(error)

    async def _build(self) -> TrainingLoop:
        config, plan, resumed = self.config, self._plan, self._resumed
        resolved = save_config(self._run_dir, config)
        step = 0 if resumed is None else resumed.state.step
        metrics = self._metrics = config.metrics.build(
            run_dir=self._run_dir, run_config=resolved, resume_step=None if resumed is None else step
        )
        renderer = build_renderer(config.renderer, config.model.hf_assets_path)
        vocab_size = HubConfig.read(config.model.hf_assets_path).size("vocab_size")
        await self._tasks.build(renderer, vocab_size=vocab_size)
        tasks, batcher = self._tasks.tasks, config.batcher.build()
        mix = await self._built(config.task_mix, "task_mix", weights={name: task.weight for name, task in config.tasks.items()})
        for line in parts_without_state(mix, tasks):
            self._console.note(line)
        filters = {
            slot: [await self._built(entry, f"{slot}[{i}]") for i, entry in enumerate(getattr(config, slot))]
            for slot in ("pre_batch_filters", "post_batch_filters")
        }
        for entry in itertools.chain(*filters.values()):
            entry.vocab_size = vocab_size
        text = np.array(renderer.render_ids(CANARY_MESSAGES), np.int32)
        await self._actors.start(text, trainer_start(resumed, self._init_from))
        with self.waits.wait("the tasks to be set up"):
            runner = await self._actors.start_runner(self._tasks)
        replay = GroupReplay(config.replay, groups_per_step=plan.groups_per_step, seed=config.seed, load=resumed is None)
        recorder = self._recorder = config.recorder.build(run_dir=self._run_dir)
        rollouts = self._rollouts = RolloutLoop(
            tasks=tasks,
            mix=mix,
            runner=runner,
            policy=self._actors.policy,
            pacer=Pacer(groups_per_step=replay.fresh_groups, max_offpolicy_steps=config.max_offpolicy_steps),
            batcher=batcher,
            **filters,
            total_groups=replay.fresh_groups * max(0, config.steps - step),
            max_drops_in_a_row=config.max_drops_in_a_row,
            ledger=Ledger(self._files["ledger"]),
            recorder=recorder,
            replay=replay,
            gate=self._gate,
            note=self._console.note,
        )
        reports = self._reports = RunReports(
            console=self._console,
            metrics=metrics,
            waits=self.waits,
            compares_rewards=any(task.algorithm.group_relative for task in tasks.values()),
            restarts=self.supervisor.restarts.counts,
            step_taken=self._step_taken,
            validations=(resumed.state.first_validation, resumed.state.last_validation) if resumed is not None else (),
        )
        if self._failure is not None:  # while this was built
            self._rollouts.fail(self._failure)
        validator = Validator(tasks, runner, config.validation, on_failure=self._fail, gate=self._gate, recorder=recorder)
        alarm = mismatch_alarm(config)
        checkpoints = self._checkpoints = RunCheckpoints(
            config.checkpoint,
            run_dir=self._run_dir,
            seed=config.seed,
            synchronous=config.max_offpolicy_steps == 0,
            rollouts=rollouts,
            validator=validator,
            alarm=alarm,
            trainer=self._actors.trainer,
            metrics=metrics,
            recorder=recorder,
            validations=reports.first_and_last_validation,
        )
        if resumed is not None:
            await rollouts.restore(resumed.state.rollouts, resumed.groups, step)
            validator.restore(resumed.state.validator, step)
            alarm.restore(resumed.state.mismatch)
            checkpoints.resumed(resumed.checkpoint, step)
        self._profile = StepProfile(config.profile_steps, run_dir=self._run_dir, processes=self.supervisor.processes)
        self._training = TrainingLoop(
            steps=config.steps,
            data_parallel_size=self._actors.trainer.data_parallel_size,
            synchronous=config.max_offpolicy_steps == 0,
            rollouts=rollouts,
            batcher=batcher,
            trainer=self._actors.trainer,
            weights=self._actors.weights,
            validator=validator,
            runner=runner,
            generated_tokens=lambda: self._actors.policy.generated_tokens,
            alarm=alarm,
            on_start=reports.start,
            on_step=reports.step,
            on_early_end=reports.early_end,
            on_step_end=checkpoints.step_ended,
            profile=self._profile,
            usage=lambda: lap_usage(self.supervisor.processes()),
            first_step=step + 1,
            sleep=config.generator.engine.sleep,
        )
        return self._training

    async def _save_before_end(self) -> None:
        """Save what was trained since the last checkpoint, as far as the trainer still answers."""
        if self._checkpoints is not None and not self._actors.trainer_lost:
            try:
                await call_bounded(self._checkpoints.finish, timeout_s=PART_TIMEOUT_S)
            except UserCodeError as error:
                logger.warning("the state before the error is not saved: %s", sentence(error))

    async def _built(self, part: Any, field: str, **arguments: Any) -> Any:
        """What a config that users may have written builds; the error of one that fails names its field."""
        build = functools.partial(part.build, **arguments)
        return await self._gate.call(build, owner=f"{field} can't be built", timeout_s=self.config.user_code.setup_timeout_s)

    async def _train(self, training: TrainingLoop) -> None:
        assert self._checkpoints is not None and self._reports is not None, "the build made them"
        self._reports.begin(training.steps_done, self.config.steps)
        await training.run()
        self.waits.close()
        with self.waits.wait("the checkpoint to be written"):
            await self._checkpoints.finish()
        if training.steps_done:
            with self.waits.wait("the policy to be written as a hub folder"):
                folder = await self._actors.trainer.save_final(training.steps_done)
            if folder is not None:
                self._files["policy"] = folder

    def _step_taken(self, step: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.step_taken(step)

    async def settle(self) -> list[RunError]:
        """Close what writes the run's files and counts its rollouts. Returns what went wrong, in order."""
        closing = self._closing
        self.waits.close()
        if self._checkpoints is not None:
            # One that is being written must not appear when the run is built again from the one before.
            limit_s = self.config.supervision.slow_work_s if self.supervisor.lost is not None else PART_TIMEOUT_S
            await closing.close("the checkpoints", self._checkpoints.close, timeout_s=limit_s)
        if self._training is not None:
            await closing.close("the profile", self._profile.close)
            await closing.close("the training loop", self._training.close)
        if self._rollouts is not None:
            await closing.close("the rollout loop", self._rollouts.close)
        if self._recorder is not None:
            recorder = self._recorder
            await closing.close("the recorder", lambda: asyncio.to_thread(recorder.close))
            if recorder.not_recorded:
                logger.warning("%d rollouts are not in %s", recorder.not_recorded, self._files["records"])
        return closing.faults

    async def close(self) -> list[RunError]:
        """Close what was built and ``settle`` has left, users of a part before the part itself. A second call does nothing.

        Returns:
            What went wrong since the parts ended, in order.
        """
        closing = self._closing
        if self._closed:
            return closing.faults
        self._closed = True

        async def close_user_code(close: Callable[[], Awaitable[list[str]]]) -> None:
            for fault in await close():
                closing.add(fault)

        metrics = self._metrics
        await closing.close("the tasks", lambda: close_user_code(self._tasks.close))
        await asyncio.gather(
            closing.close("the actors", lambda: close_user_code(self._actors.close)),
            *([closing.close("the metrics", lambda: asyncio.to_thread(metrics.close))] if metrics is not None else []),
        )
        return closing.faults

    def summary(self, *, wall_time_s: float, stopped_by: str | None, checkpoint: Path | None) -> RunSummary:
        """
        Args:
            checkpoint: what the run can go on from, unless it has taken another since.
        """
        if self._training is not None and self._actors.trainer.failed_batch is not None:
            self._files["batch"] = self._actors.trainer.failed_batch
        if self._training is not None and self._profile.file is not None:
            self._files["profile"] = self._profile.file
        if self._checkpoints is not None:
            checkpoint = self._checkpoints.newest
        if checkpoint is not None:
            self._files["checkpoint"] = checkpoint
        first, last = self._reports.first_and_last_validation() if self._reports is not None else (None, None)
        return RunSummary(
            steps=self.steps_done,
            total_steps=self.config.steps,
            wall_time_s=wall_time_s,
            start_val_reward=first,
            final_val_reward=last,
            ledger=self._rollouts.ledger.counts() if self._rollouts else {},
            files=self._files,
            stopped_by=stopped_by,
            not_saved=self._checkpoints.failure if self._checkpoints is not None else None,
            run_dir=self._run_dir,
        )
