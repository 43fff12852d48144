"""Takes the optimizer steps of a run.

    groups ──▶ pack ──▶ forward_backward ──▶ optim_step ──▶ publish ──▶ next step ...
                                                                └─ generators load a version
    ... rollouts of the coming steps, their scoring, and evaluations run beside all of it ...

Consumes:  the finished groups of a step, from the rollout loop (`StepGroups`).
Produces:  the next policy version, published to the generators, and a record of the step.
Waits for: finished groups, the trainer, and, before a version is published, the generators'
           receipts that they hold the version before it.
Unblocks:  the rollout loop, which starts groups as each version goes live.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torchtitan.experiments.rl.ask.lag import clock_of_running_loop
from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.groups import StepGroups
from torchtitan.experiments.rl.loops.parts import Parts, Schedule
from torchtitan.experiments.rl.loops.rollout_loop import RolloutLoop, RunStopped
from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import step_record
from torchtitan.experiments.rl.loops.validation import Validator
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.trace import Stopwatch
from torchtitan.experiments.rl.weights.sync import CopiedOut, SyncReport

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Takes one step after another, and publishes the version that each makes."""

    def __init__(
        self,
        schedule: Schedule,
        parts: Parts,
        *,
        rollouts: RolloutLoop,
        validator: Validator,
        watchers: RunEvents,
    ):
        """Make a loop that has taken no step yet."""
        self.steps_done = schedule.first_step - 1
        self._steps = schedule.steps
        self._synchronous = schedule.synchronous
        self._rollouts = rollouts
        self._batcher = parts.batcher
        self._trainer = parts.trainer
        self._weights = parts.weights
        self._validator = validator
        self._runner = parts.runner
        self._watchers = watchers
        self._generated_tokens = parts.generated_tokens
        self._sleep = schedule.sleep
        self._stopwatch = Stopwatch()
        self._updating: asyncio.Task[SyncReport] | None = None
        """Weight update of the version that was published last; None once it was waited for."""
        self._last_sync: SyncReport | None = None
        """Report of the newest update that was waited for."""
        self._stopping = False

    async def run(self) -> None:
        """Take the steps, until the last one, `stop`, or nothing is left to learn."""
        clock = clock_of_running_loop()
        clock.start()
        try:
            if self.steps_done == 0:
                await self._evaluate_first_version()
            elif self._synchronous:
                # The previous run may have ended before this version was evaluated.
                await self._validator.wait()
            self._rollouts.fill()
            await self._take_steps()
        except RunStopped:
            pass
        except NothingLeftToLearn as end:
            self._rollouts.stop()  # no step needs the groups that run beside the last evaluation
            if self.steps_done > 0:
                await self._evaluate_last_version(self.steps_done)
            if not self._stopping:
                self._rollouts.raise_failure()
            reports = self._validator.take()
            self._watchers.ended_early(str(end), reports)
        finally:
            clock.stop()

    def stop(self) -> None:
        """End after the step in progress, or give it up if it still waits for groups.

        Evaluations are not waited for. A resumed run begins them again.
        """
        self._stopping = True
        self._rollouts.stop()
        self._validator.stop()

    async def close(self) -> None:
        """Cancel the evaluation and the weight update that are under way."""
        await self._validator.close()
        if self._updating is not None:
            self._updating.cancel()

    async def _take_steps(self) -> None:
        while self.steps_done < self._steps and not self._stopping:
            step = self.steps_done + 1
            await self._watchers.step_begins(step)
            with trace.lane("step", step=step):
                await self._step(step)
            await self._watchers.step_over(step)
        if not self._stopping:
            self._rollouts.raise_failure()  # of the last evaluation, which no `next_groups` follows

    async def _step(self, step: int) -> None:
        """Take a step's groups, train on them, and publish the version that this makes."""
        started_at = asyncio.get_running_loop().time()
        tokens_before = self._generated_tokens()
        with self._stopwatch.span("wait"):
            taken = await self._rollouts.next_groups(base_version=step - 1)
        with self._stopwatch.span("train"):
            packed = await self._pack(taken)
            if self._sleep:
                await self._weights.sleep()
            # It returns once the rows are sent. The ranks have the optimizer's step queued behind
            # their gradient, so they do not wait for this loop in between.
            gradient = await self._trainer.forward_backward(packed, step)
            metrics = await self._trainer.optim_step(gradient)
        self.steps_done = step

        record = partial(self._record_step, step, taken, packed, metrics, started_at, tokens_before)
        with self._recorded_at_end(step, record):
            self._rollouts.trained(taken)
            self._watchers.step_trained(step, metrics)
            with self._stopwatch.span("sync"):
                # It returns once the weights are copied. The generators load them beside the next
                # step, unless the run is synchronous.
                await self._publish(step)
            await self._wait_for_evaluations(step)
            await self._watchers.step_published(step, metrics)

        # The step is recorded already, so this span is in the record of the next one.
        with self._stopwatch.span("checkpoint"):
            await self._watchers.step_ended(step)
        self._rollouts.fill()

    @contextmanager
    def _recorded_at_end(self, step: int, record: Callable[[], None]) -> Iterator[None]:
        """Record a step at the end of the block, even if the block raises.

        The optimizer step was taken, even if its weights can't be published.
        """
        try:
            yield
        except BaseException:
            try:
                record()
            except Exception:  # the error that ends the run is the first
                logger.exception("step %d can't be recorded", step)
            raise
        record()

    async def _wait_for_evaluations(self, step: int) -> None:
        """Wait for the evaluation of a step's version, if the run waits for it.

        Other evaluations run beside the steps.
        """
        if step == self._steps:
            await self._evaluate_last_version(step)
        elif self._synchronous:
            with self._stopwatch.span("validate"):
                await self._validator.wait()

    async def _pack(self, taken: StepGroups) -> BatchPlan:
        """Pack the samples of a step into rows, split across the trainer's data-parallel ranks."""
        samples = [
            sample
            for group in [*taken.groups, *taken.replayed]
            for rollout in group.rollouts
            for sample in rollout.samples
        ]
        # In a thread: it copies every stream of the step, and would block the event loop.
        with trace.span("pack", samples=len(samples)):
            return await asyncio.to_thread(
                self._batcher.plan, samples, self._trainer.data_parallel_size
            )

    def _record_step(
        self,
        step: int,
        taken: StepGroups,
        packed: BatchPlan,
        metrics: dict[str, float],
        started_at: float,
        tokens_before: int,
    ) -> None:
        """Tell the watchers what the step did, and where its seconds went."""
        own_lag_s, own_blocking_calls = clock_of_running_loop().lap()
        lag_s, blocking_calls = self._runner.lap()
        record = step_record(
            step=step,
            taken=taken,
            packed=packed,
            trained=metrics,
            validations=self._validator.take(),
            seconds=asyncio.get_running_loop().time() - started_at,
            spans=self._stopwatch.lap(),
            last_sync=self._last_sync,
            generated_tokens=self._generated_tokens() - tokens_before,
            event_loop_lag_s=max(own_lag_s, lag_s),
            blocking_calls=own_blocking_calls + blocking_calls,
            ledger=self._rollouts.ledger.counts(),
        )
        self._watchers.step_recorded(record)

    # Publishing a version.

    async def _publish(self, version: int) -> None:
        """Start publishing a version; in a synchronous run, wait until the generators hold it.

        Every step publishes the version that it has made. The generators load one at a time: the
        version before is waited for first.
        """
        await self._wait_for_update()
        copied = await self._weights.copy_out(version)
        self._updating = asyncio.create_task(self._update(copied))
        if self._synchronous:
            await self._wait_for_update()

    async def _update(self, copied: CopiedOut) -> SyncReport:
        """Have the generators load a version, then let evaluations and new groups use it.

        The evaluation of the version is started, not awaited. The places of the groups that the
        version was made from are freed.
        """
        try:
            with trace.lane("weights", version=copied.version):
                report = await self._weights.update(copied)
            if copied.version < self._steps:
                self._validator.start(copied.version)
            # A synchronous run starts no group until its checkpoint is taken (`_step`).
            self._rollouts.live(copied.version, fill=not self._synchronous)
        except Exception as error:
            self._rollouts.fail(error)
            raise
        return report

    async def _wait_for_update(self) -> None:
        """Wait until the generators hold the version that was published last."""
        if self._updating is not None:
            self._last_sync = await self._updating
            self._updating = None

    # Evaluating the first and the last version. Those between are evaluated beside the steps.

    async def _evaluate_first_version(self) -> None:
        """Evaluate version 0. Rollouts run concurrently, unless the run is synchronous.

        Raises:
            RunError: every attempt of a task failed. A later evaluation only warns of that.
        """
        self._validator.start(0)
        if not self._synchronous:
            self._rollouts.fill()
        await self._validator.wait()
        if self._stopping:
            raise RunStopped
        reports = self._validator.take()
        report = reports[0] if reports else ValidationReport(step=0, reward=None, metrics={})
        self._watchers.started(report)
        if report.unmeasured:
            fault = next(iter(report.unmeasured.values()))
            raise RunError(
                f"validation before the first step: {fault} (--validation.every 0 trains without "
                "validation)"
            )

    async def _evaluate_last_version(self, version: int) -> None:
        """Wait for the last update, and run the final evaluation."""
        with self._stopwatch.span("sync"):
            await self._wait_for_update()
        with self._stopwatch.span("validate"):
            await self._validator.wait()
            self._validator.start(version, final=True)
            await self._validator.wait()
