"""Takes the optimizer steps of a run.

A step consumes a `StepGroups`, produces metrics and the next policy version, and waits for three things: finished groups whose
deadline is due (`rollout_loop.py`), the trainer, and, before it publishes again, the generators' receipts for the version
before. Rollouts, scoring, weight updates and evaluations run at the same time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.controller.group_runner import GroupRunner
from torchtitan.experiments.rl.controller.rollout_loop import RolloutLoop, RunStopped
from torchtitan.experiments.rl.controller.saved_state import ValidationReport
from torchtitan.experiments.rl.controller.step_metrics import step_record
from torchtitan.experiments.rl.controller.validation import Validator
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.setup import freeze_objects, unfreeze_objects
from torchtitan.experiments.rl.process.trace import LoopLag, Stopwatch
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.weights.sync import CopiedOut, SyncReport, WeightSync


class TrainingLoop:
    def __init__(
        self,
        *,
        steps: int,
        synchronous: bool,
        rollouts: RolloutLoop,
        batcher: Batcher,
        trainer: TrainerClient,
        weights: WeightSync,
        validator: Validator,
        runner: GroupRunner,
        watchers: Sequence[RunEvents] = (),
        generated_tokens: Callable[[], int] = lambda: 0,
        first_step: int = 1,
        sleep: bool = False,
    ):
        """
        Args:
            steps: optimizer steps to take.
            synchronous: rollouts of a version start only when the generators hold it and its evaluation has ended.
            generated_tokens: returns the number of tokens sampled since the run began.
            first_step: above 1 in a run that goes on from a checkpoint of the step before.
            sleep: the generators free their memory while the trainer steps. Of a synchronous run: no request is open then.
        """
        self.steps_done = first_step - 1
        self._steps, self._synchronous, self._sleep, self._watchers = (
            steps,
            synchronous,
            sleep,
            watchers,
        )
        self._rollouts, self._batcher, self._trainer, self._weights = (
            rollouts,
            batcher,
            trainer,
            weights,
        )
        self._validator, self._runner, self._generated_tokens = validator, runner, generated_tokens
        self._watch, self._lag = Stopwatch(), LoopLag()
        self._sync: asyncio.Task[SyncReport] | None = None
        self._last_sync: SyncReport | None = None
        self._stopping = False

    async def run(self) -> None:
        """Take the steps, unless stopped."""
        freeze_objects()
        self._lag.start()
        try:
            if not self.steps_done:
                self._validator.start(0)
                if not self._synchronous:
                    self._rollouts.fill()
            if (
                self._synchronous or not self.steps_done
            ):  # a step may have failed before its evaluation
                await self._validator.wait()
            if not self.steps_done:
                report = next(
                    iter(self._validator.take()), ValidationReport(step=0, reward=None, metrics={})
                )
                for watcher in self._watchers:
                    watcher.started(report)
            self._rollouts.fill()
            while self.steps_done < self._steps and not self._stopping:
                step = self.steps_done + 1
                for watcher in self._watchers:
                    await watcher.step_begins(step)
                with trace.lane("step", step=step):
                    await self._step(step)
                for watcher in self._watchers:
                    await watcher.step_over(step)
        except RunStopped:
            pass
        except NothingLeftToLearn as end:
            if self.steps_done:
                await self._evaluate_final(self.steps_done)
            reports = self._validator.take()
            for watcher in self._watchers:
                watcher.ended_early(str(end), reports)
        finally:
            self._lag.stop()
            unfreeze_objects()

    def stop(self) -> None:
        """End after the step that is being taken."""
        self._stopping = True
        self._rollouts.stop()

    async def close(self) -> None:
        """Cancel what runs beside the steps."""
        await self._validator.close()
        if self._sync is not None:
            self._sync.cancel()

    async def _step(self, step: int) -> None:
        """Take groups, train on them, start publishing the new version, and report the step."""
        began, generated_before = time.perf_counter(), self._generated_tokens()
        with self._watch.span("wait"):
            taken = await self._rollouts.next_groups(version=step - 1)
        with self._watch.span("train"):
            samples = [
                sample
                for group in [*taken.groups, *taken.replayed]
                for rollout in group.rollouts
                for sample in rollout.samples
            ]
            # In a thread, because it copies every stream of the step: the event loop keeps running rollouts.
            with trace.span("pack", samples=len(samples)):
                packed = await asyncio.to_thread(
                    self._batcher.plan, samples, self._trainer.data_parallel_size
                )
            if self._sleep:
                await self._weights.sleep()
            trained = await self._trainer.step(packed, step)
        self._rollouts.trained(taken)
        try:
            for watcher in self._watchers:
                watcher.step_trained(step, trained)
            with self._watch.span("sync"):
                await self._publish(step)
            if step == self._steps:
                await self._evaluate_final(step)
            elif self._synchronous:
                with self._watch.span("validate"):
                    await self._validator.wait()
            for watcher in self._watchers:
                await watcher.step_published(step, trained)
        finally:  # the step was taken, also where its weights can't be published
            self.steps_done = step
            lag_s, blocking_calls = self._runner.lap()
            record = step_record(
                step=step,
                taken=taken,
                packed=packed,
                trained=trained,
                validations=self._validator.take(),
                seconds=time.perf_counter() - began,
                spans=self._watch.lap(),
                last_sync=self._last_sync,
                generated_tokens=self._generated_tokens() - generated_before,
                event_loop_lag_s=max(self._lag.lap(), lag_s),
                blocking_calls=blocking_calls,
                ledger=self._rollouts.ledger.counts(),
            )
            for watcher in self._watchers:
                watcher.step_taken(record)
        with self._watch.span("checkpoint"):
            for watcher in self._watchers:
                await watcher.step_ended(step)
        self._rollouts.fill()

    async def _publish(self, version: int) -> None:
        """Start publishing ``version``. In a synchronous run, wait until the generators hold it."""
        await self._synced()
        copied = await self._weights.copy_out(version)
        self._sync = asyncio.create_task(self._update(copied))
        if self._synchronous:
            await self._synced()

    async def _update(self, copied: CopiedOut) -> SyncReport:
        try:
            with trace.lane("weights", version=copied.version):
                report = await self._weights.update(copied)
        except Exception as error:
            self._rollouts.fail(error)
            raise
        if copied.version < self._steps:
            self._validator.start(copied.version)
        # The state of a synchronous run is captured with no rollout open.
        self._rollouts.live(copied.version, fill=not self._synchronous)
        return report

    async def _synced(self) -> None:
        if self._sync is not None:
            self._last_sync = await self._sync
            self._sync = None

    async def _evaluate_final(self, step: int) -> None:
        """Evaluate the final policy. The generators hold it, and no update follows."""
        with self._watch.span("sync"):
            await self._synced()
        with self._watch.span("validate"):
            await self._validator.wait()
            self._validator.start(step, final=True)
            await self._validator.wait()
