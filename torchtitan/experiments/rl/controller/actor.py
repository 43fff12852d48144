"""The Controller actor: builds the run, owns every part of it, and closes it. `training_loop` takes the steps."""

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from monarch.actor import Actor

from torchtitan.experiments.rl.checkpointing.run_files import LEDGER_FILE
from torchtitan.experiments.rl.compat.monarch import process_death, process_death_behind
from torchtitan.experiments.rl.config.checks import checked_plan
from torchtitan.experiments.rl.config.resolved import resolved_config
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.closing import PART_TIMEOUT_S, Closing
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.mismatch_alarm import mismatch_alarm
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.profile import StepProfile
from torchtitan.experiments.rl.controller.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.controller.run_checkpoints import RunCheckpoints
from torchtitan.experiments.rl.controller.run_start import resume, trainer_start
from torchtitan.experiments.rl.controller.step_metrics import StepRecord
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.controller.training_loop import TrainingLoop
from torchtitan.experiments.rl.controller.validation import ValidationReport, Validator
from torchtitan.experiments.rl.controller.wiring import RunActors
from torchtitan.experiments.rl.envs.renderer import build_renderer
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.observability.console import Console, RunHeader, RunSummary
from torchtitan.experiments.rl.observability.metrics import METRICS_FILE, MetricsLogger
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.rollouts.recorder import ROLLOUTS_FILE, RolloutRecorder
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded, contained
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint
from torchtitan.experiments.rl.user_code.gate import Gate, sentence

logger = logging.getLogger(__name__)

DEATH_REPORTS_S = 15.0
"""Monarch reports its own actors of a dead process too, in any order: how long the controller waits for one of the run's."""
DEATH_POLL_S = 0.1


class Controller(Actor):
    part = ""
    """See ``reported_endpoint``."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: str,
        config_name: str,
        resume_from: Path | None = None,
        init_from: Path | None = None,
    ):
        """
        Args:
            resume_from: a verified checkpoint of the run in ``run_dir``, which goes on from it.
            init_from: a verified checkpoint of another run; this one begins with its weights.
        """
        self.config = config
        self._resume_from, self._init_from = resume_from, init_from
        self._run_dir, self._config_name = Path(run_dir), config_name
        self._plan = checked_plan(config)
        self._console = Console()
        self._failure: Exception | None = None
        self._actors = RunActors(config, self._plan, run_dir=self._run_dir, on_failure=self._fail, on_death=self._console.note)
        self._gate = Gate(timeout_s=config.user_code.call_timeout_s, synchronous=config.max_offpolicy_steps == 0)
        self._tasks = TaskSet(config.tasks, gate=self._gate, limits=config.user_code, seed=config.seed)
        self._metrics: MetricsLogger | None = None
        self._rollouts: RolloutLoop | None = None
        self._training: TrainingLoop | None = None
        self._recorder: RolloutRecorder | None = None
        self._checkpoints: RunCheckpoints | None = None
        self._building: asyncio.Task[TrainingLoop] | None = None
        self._stopped_by: str | None = None
        self._validations: list[float] = []
        self._files = {
            "metrics": self._run_dir / METRICS_FILE,
            "records": self._run_dir / ROLLOUTS_FILE,
            "ledger": self._run_dir / LEDGER_FILE,
            "logs": self._run_dir / "logs",
        }

    @reported_endpoint
    async def run(self) -> RunSummary:
        """Build everything, train, close everything.

        Raises:
            Exception: whatever ended the run early, after the summary was printed and every process stopped.
        """
        started = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        failure: BaseException | None = None
        try:
            unless_failed = self._actors.supervisor.unless_failed
            self._building = asyncio.create_task(contained(unless_failed(self._build())))
            await contained(unless_failed(self._train(await self._building)))
        except asyncio.CancelledError as cancelled:
            failure = cancelled if self._stopped_by is None else None
        except Exception as error:
            logger.exception("the run failed")
            failure = await self._explained(error)
            await self._save_before_end()
        try:
            faults = await self._close()
            failure = failure or next(iter(faults), None)
        finally:
            if failure is not None:
                self._stopped_by = self._stopped_by or f"an error ({type(failure).__name__})"
            summary = self._summary(time.perf_counter() - started)
            self._console.summary(summary)
        if failure is not None:
            raise failure
        return summary

    @reported_endpoint
    async def request_stop(self, reason: str) -> None:
        """End the run after the step it is in, or at once while it is being built."""
        self._stopped_by = reason
        if self._building is not None:
            self._building.cancel()
        if self._training is not None:
            self._training.stop()

    def __supervise__(self, failure: Any) -> bool:
        """Monarch calls this for each actor of a process that died. True: the controller runs on."""
        self._loop.call_soon_threadsafe(self._actors.supervisor.died, process_death(failure))
        return True

    async def _explained(self, error: Exception) -> Exception:
        """``error``, or what names the dead process if ``error`` is of a call to one."""
        death = process_death_behind(error)
        if death is None:
            return RunError(str(error)) if isinstance(error, UserCodeError) else error
        # A call to one of Monarch's own actors in that process may fail before the process is seen to have ended.
        for _ in range(round(DEATH_REPORTS_S / DEATH_POLL_S)):
            if self._actors.supervisor.failure is not None:
                return self._actors.supervisor.failure
            await asyncio.sleep(DEATH_POLL_S)
        return RunError(f"a process of the run died: {death}")

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._rollouts is not None:
            self._rollouts.fail(error)

    async def _build(self) -> TrainingLoop:
        config, plan = self.config, self._plan
        set_up_logging(self._run_dir, "controller")
        resolved = resolved_config(config)
        (self._run_dir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
        resumed = None
        if self._resume_from is not None:
            resumed = resume(self._resume_from, run_dir=self._run_dir, config=config)
            first, last = resumed.state.first_validation, resumed.state.last_validation
            self._validations = [reward for reward in (first, last) if reward is not None]
        step = 0 if resumed is None else resumed.state.step
        metrics = self._metrics = config.metrics.build(
            run_dir=self._run_dir, run_config=resolved, resume_step=None if resumed is None else step
        )
        self._console.header(
            RunHeader(
                run_name=self._run_dir.name,
                config_name=self._config_name,
                model=f"{config.model.hf_assets_path} ({plan.parameters / 1e6:,.1f}M parameters)",
                sizes={
                    "steps": plan.steps,
                    "rollouts a step": plan.rollouts_per_step,
                    "off-policy steps": plan.max_offpolicy_steps,
                    "trainer ranks": plan.trainer_ranks,
                    "generators": plan.generator_replicas,
                },
                run_dir=self._run_dir,
            )
        )
        if resumed is not None:
            self._console.note(f"resumed from step {step}: {resumed.checkpoint}")
        renderer = build_renderer(config.renderer, config.model.hf_assets_path)
        await self._tasks.build(renderer, vocab_size=HubConfig.read(config.model.hf_assets_path).size("vocab_size"))
        tasks = self._tasks.tasks
        mix = await self._built(config.task_mix, "task_mix", weights={name: task.weight for name, task in config.tasks.items()})
        filters = {
            slot: [await self._built(entry, f"{slot}[{i}]") for i, entry in enumerate(getattr(config, slot))]
            for slot in ("pre_batch_filters", "post_batch_filters")
        }
        batcher = config.batcher.build()
        await self._actors.start(trainer_start(resumed, self._init_from))
        runner = await self._actors.start_runner(self._tasks)
        recorder = self._recorder = config.recorder.build(run_dir=self._run_dir)
        rollouts = self._rollouts = RolloutLoop(
            tasks=tasks,
            mix=mix,
            runner=runner,
            policy=self._actors.policy,
            pacer=Pacer(groups_per_step=plan.groups_per_step, max_offpolicy_steps=config.max_offpolicy_steps),
            batcher=batcher,
            **filters,
            total_groups=plan.groups_per_step * max(0, config.steps - step),
            max_drops_in_a_row=config.max_drops_in_a_row,
            ledger=Ledger(self._files["ledger"]),
            recorder=recorder,
            gate=self._gate,
        )
        if self._failure is not None:  # while this was built
            self._rollouts.fail(self._failure)
        validator = Validator(tasks, runner, config.validation, on_failure=self._fail, gate=self._gate)
        checkpoints = self._checkpoints = RunCheckpoints(
            config.checkpoint,
            run_dir=self._run_dir,
            seed=config.seed,
            synchronous=config.max_offpolicy_steps == 0,
            rollouts=rollouts,
            validator=validator,
            trainer=self._actors.trainer,
            metrics=metrics,
            recorder=recorder,
            validations=self._first_and_last_validation,
        )
        if resumed is not None:
            await rollouts.restore(resumed.state.rollouts, resumed.groups, step)
            validator.restore(resumed.state.validator, step)
            checkpoints.resumed(resumed.checkpoint, step)
        self._profile = StepProfile(config.profile_steps, run_dir=self._run_dir, processes=self._actors.supervisor.processes)
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
            alarm=mismatch_alarm(config),
            on_start=functools.partial(self._start_report, metrics),
            on_step=functools.partial(self._step_report, metrics),
            on_early_end=functools.partial(self._early_end_report, metrics),
            on_step_end=checkpoints.step_ended,
            profile=self._profile,
            first_step=step + 1,
        )
        return self._training

    async def _save_before_end(self) -> None:
        """Save what was trained since the last checkpoint, as far as the trainer still answers."""
        if self._checkpoints is not None:
            try:
                await call_bounded(self._checkpoints.finish, timeout_s=PART_TIMEOUT_S)
            except UserCodeError as error:
                logger.warning("the state before the error is not saved: %s", sentence(error))

    async def _built(self, part: Any, field: str, **arguments: Any) -> Any:
        """What a config that users may have written builds; the error of one that fails names its field."""
        build = functools.partial(part.build, **arguments)
        return await self._gate.call(build, owner=f"{field} can't be built", timeout_s=self.config.user_code.setup_timeout_s)

    async def _train(self, training: TrainingLoop) -> None:
        await training.run()
        assert self._checkpoints is not None, "the build made it"
        await self._checkpoints.finish()
        if training.steps_done:
            folder = await self._actors.trainer.save_final(training.steps_done)
            if folder is not None:
                self._files["policy"] = folder

    def _start_report(self, metrics: MetricsLogger, report: ValidationReport) -> None:
        metrics.log(0, report.metrics)
        if report.reward is not None:
            self._validations.append(report.reward)
            self._console.note(f"validation before the first step: reward {report.reward:.3f}")

    def _step_report(self, metrics: MetricsLogger, record: StepRecord) -> None:
        restarts = {f"restarts/{part}": count for part, count in self._actors.supervisor.restarts.items()}
        metrics.log(record.step, record.metrics | restarts)
        if self._checkpoints is not None:
            self._checkpoints.step_taken(record.step)
        if record.validation is not None and record.validation.reward is not None:
            self._validations.append(record.validation.reward)
        self._console.step(record.report())

    def _early_end_report(self, metrics: MetricsLogger, why: str, reports: Sequence[ValidationReport]) -> None:
        self._stopped_by = why
        for report in reports:
            metrics.log(report.step, report.metrics)
            if report.reward is not None:
                self._validations.append(report.reward)
                self._console.note(f"validation after step {report.step}: reward {report.reward:.3f}")

    async def _close(self) -> list[RunError]:
        """Close whatever was built, users of a part before the part itself. Returns what went wrong, in order."""
        closing = Closing()
        if self._checkpoints is not None:
            await closing.close("the checkpoints", self._checkpoints.close)
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

        async def close_user_code(close: Callable[[], Awaitable[list[str]]]) -> None:
            for fault in await close():
                closing.add(fault)

        await closing.close("the tasks", lambda: close_user_code(self._tasks.close))
        await closing.close("the actors", lambda: close_user_code(self._actors.close))
        if self._metrics is not None:
            await closing.close("the metrics", functools.partial(asyncio.to_thread, self._metrics.close))
        return closing.faults

    def _summary(self, wall_time_s: float) -> RunSummary:
        if self._training is not None and self._actors.trainer.failed_batch is not None:
            self._files["batch"] = self._actors.trainer.failed_batch
        if self._training is not None and self._profile.file is not None:
            self._files["profile"] = self._profile.file
        checkpoint = self._checkpoints.newest if self._checkpoints is not None else self._resume_from
        if checkpoint is not None:
            self._files["checkpoint"] = checkpoint
        first, last = self._first_and_last_validation()
        return RunSummary(
            steps=self._training.steps_done if self._training else 0,
            total_steps=self.config.steps,
            wall_time_s=wall_time_s,
            start_val_reward=first,
            final_val_reward=last,
            ledger=self._rollouts.ledger.counts() if self._rollouts else {},
            files=self._files,
            stopped_by=self._stopped_by,
            not_saved=self._checkpoints.failure if self._checkpoints is not None else None,
            resumable=checkpoint is not None and self._stopped_by is not None,
            run_dir=self._run_dir,
        )

    def _first_and_last_validation(self) -> tuple[float | None, float | None]:
        rewards = self._validations
        return rewards[0] if rewards else None, rewards[-1] if len(rewards) > 1 else None
