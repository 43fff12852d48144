"""Evaluates the policy on held-out examples of each task, beside training.

Each task has a schedule of its own, and the same examples in every evaluation. The evaluation of
step s starts when the generators hold version s. Training goes on meanwhile, so a long evaluation
also samples from later versions: ``validation/<task>/version_max`` is the latest of them. Only the
first evaluation (of version 0) and the last (of the final policy) sample from one version alone.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from torchtitan.experiments.rl.ask.call import contained
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.data.dataset import count_examples, read_example
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.group_runner import GroupRequest, GroupRunner
from torchtitan.experiments.rl.loops.saved_state import ValidationReport, ValidatorState
from torchtitan.experiments.rl.loops.step_metrics import mean
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.session import is_cancelled
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig


class Validator:
    """Runs evaluations as asyncio tasks.

    An evaluation that is due while its task's previous one still runs is left out, and counted.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run, each built elsewhere
        self,
        tasks: dict[str, Task],
        runner: GroupRunner,
        default: ValidationConfig,
        *,
        on_failure: Callable[[Exception], None] = lambda error: None,
        ordered: OrderedCalls | None = None,
        recorder: RolloutRecorder | None = None,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ):
        """Start with no evaluation under way.

        Args:
            default: schedule of the tasks that have none of their own.
            on_failure: called with an error that a dataset or the library's own code raised.
            ordered: calls the datasets.
            recorder: records the groups of each evaluation that has ended.
            on_group: called with each group as soon as it was scored.
        """
        self._tasks = tasks
        self._runner = runner
        self._on_failure = on_failure
        self._ordered = ordered or OrderedCalls()
        self._recorder = recorder
        self._on_group = on_group
        self._configs = {
            name: task.config.validation_schedule or default
            for name, task in tasks.items()
            if task.validation is not None
        }
        self._running: list[str] = []
        """Names of the tasks that are being evaluated."""
        self._evaluations: set[asyncio.Task[None]] = set()
        """Evaluations under way, each of the tasks that were due at one step."""
        self._reports: list[ValidationReport] = []
        """Evaluations that have ended since the last `take`."""
        self._left_out: Counter[str] = Counter()
        """Number of evaluations left out, by task."""
        self._begun = 0
        """Latest step whose evaluations were begun."""
        self._begun_of_task: dict[str, int] = {}
        """Latest step whose evaluation of a task was begun, and not left out."""
        self._stopping = False
        self._changed = asyncio.Event()
        """Wakes `wait`: an evaluation has ended, or `stop` was called."""

    def due(self, step: int) -> list[str]:
        """Return the names of the tasks whose schedule names this step."""
        return [
            name
            for name, config in self._configs.items()
            if config.every > 0 and step % config.every == 0
        ]

    def start(self, step: int, *, final: bool = False) -> None:
        """Begin the evaluations that are due at a step.

        Args:
            final: True to evaluate each task that is ever evaluated, unless its evaluation at this
                step was begun already.
        """
        if self._stopping:
            return
        self._begun = step
        if final:
            names = [
                name
                for name, config in self._configs.items()
                if config.every > 0 and self._begun_of_task.get(name) != step
            ]
            self._start(names, step, alone=True, label=f"{step}.final")
        else:
            self._start(self.due(step), step, alone=step == 0, label=str(step))

    async def wait(self) -> None:
        """Wait until no evaluation is under way, or `stop` was called."""
        while self._evaluations and not self._stopping:
            self._changed.clear()
            await self._changed.wait()

    def stop(self) -> None:
        """Begin no more evaluations, and have `wait` return. Those under way go on until `close`.

        A checkpoint has them as running, so that a resumed run begins them again.
        """
        self._stopping = True
        self._changed.set()

    def take(self) -> list[ValidationReport]:
        """Return the evaluations that have ended since the last call, oldest first."""
        reports = self._reports
        self._reports = []
        return reports

    async def close(self) -> None:
        """Cancel the evaluations under way."""
        evaluations = list(self._evaluations)
        for evaluation in evaluations:
            evaluation.cancel()
        await asyncio.gather(*evaluations, return_exceptions=True)

    def state(self) -> ValidatorState:
        """Return the state that a checkpoint keeps."""
        return ValidatorState(
            begun=self._begun,
            running=list(self._running),
            left_out=dict(self._left_out),
            reports=list(self._reports),
        )

    def restore(self, state: ValidatorState, step: int) -> None:
        """Continue from a checkpoint of ``step``.

        Begins the evaluations that are due at the step and were not begun, and again those that had
        not ended. The latter now measure version ``step``, as their metrics say.
        """
        self._begun = step
        self._left_out = Counter(state.left_out)
        self._reports = list(state.reports)
        due = self.due(step) if state.begun < step else []
        names = [name for name in self._configs if name in due or name in state.running]
        self._start(names, step, alone=False, label=str(step))

    def _start(self, names: Sequence[str], step: int, *, alone: bool, label: str) -> None:
        """Begin an evaluation of the tasks that are not being evaluated already.

        Args:
            alone: True to run all examples at once, as at the start and the end of a run.
            label: name of the evaluation in the records.
        """
        self._left_out.update(name for name in names if name in self._running)
        begun = [name for name in names if name not in self._running]
        if not begun:
            return
        self._running += begun
        self._begun_of_task |= dict.fromkeys(begun, step)
        evaluation = asyncio.create_task(
            self._evaluate(begun, step, alone=alone, label=label), name=f"validation-{step}"
        )
        self._evaluations.add(evaluation)
        evaluation.add_done_callback(self._ended)

    def _ended(self, evaluation: "asyncio.Task[None]") -> None:
        self._evaluations.discard(evaluation)
        self._changed.set()

    async def _evaluate(self, names: Sequence[str], step: int, *, alone: bool, label: str) -> None:
        """Evaluate tasks side by side, and make one report of them all."""
        metrics: dict[str, float] = {}

        async def measure(name: str) -> None:
            try:
                metrics.update(await self._measure(name, alone=alone, label=label))
            finally:
                self._running.remove(name)

        try:
            async with asyncio.TaskGroup() as evaluations:
                for name in names:
                    evaluations.create_task(measure(name), name=f"validation-{name}-{step}")
        except ExceptionGroup as failed:
            self._on_failure(_first_error(failed))
            return

        rewards = [value for name, value in metrics.items() if name.endswith("/reward")]
        metrics["validation/step"] = step
        for name, count in self._left_out.items():
            metrics[f"validation/{name}/left_out"] = count
        reward = mean(rewards) if rewards else None
        if reward is not None:
            metrics["validation/reward"] = reward
        self._reports.append(ValidationReport(step=step, reward=reward, metrics=metrics))

    async def _measure(self, name: str, *, alone: bool, label: str) -> dict[str, float]:
        """Run a task's examples and record their groups. Returns the task's metrics."""
        task = self._tasks[name]
        config = self._configs[name]
        sampling = replace(task.config.sampling, temperature=config.temperature)
        dataset = task.validation
        assert dataset is not None
        owner = f"validation of task {name!r}"
        size = await self._ordered.call(count_examples, dataset, owner=owner)
        examples = min(config.examples, size)
        at_once = examples if alone else max(1, config.max_concurrency // config.attempts)
        places = asyncio.Semaphore(at_once)

        async def run(index: int) -> RolloutGroup:
            async with places:
                request = GroupRequest(
                    data_sample=await self._ordered.call(read_example, dataset, index, owner=owner),
                    group_id=f"validation-{name}-{index}",
                    group_size=config.attempts,
                    sampling=sampling,
                    credit=False,
                )
                try:
                    group = await self._runner.run(task, request)
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise
                    raise RunError(f"{owner} was cancelled, and not by the run") from None
                self._on_group(group)
                return group

        # If one fails, the others are cancelled.
        async with asyncio.TaskGroup() as attempts:
            runs = [attempts.create_task(contained(run(index))) for index in range(examples)]
        groups = [run.result() for run in runs]
        metrics = evaluation_metrics(name, groups, config)
        if self._recorder is not None:
            # Only now that all have ended: a checkpoint has all the records of an evaluation, or
            # begins it again.
            for group in groups:
                group = labelled(group, label)
                outcomes = {rollout.rollout_id: "validation" for rollout in group.rollouts}
                self._recorder.record(group, outcomes, kind="validation")
        return metrics


def labelled(group: RolloutGroup, label: str) -> RolloutGroup:
    """Give an evaluation's group an id that no other group of the run has, and return it.

    Its id is the same in every evaluation, because seeds follow from the id. Ids of training groups
    end with a hyphen and a number.
    """
    group.amend(group_id=f"{group.group_id}@{label}")
    for rollout in group.rollouts:
        rollout.amend(group_id=group.group_id)
    return group


def _first_error(failed: ExceptionGroup) -> Exception:
    """Return the first error of nested groups."""
    first = failed.exceptions[0]
    return _first_error(first) if isinstance(first, ExceptionGroup) else first


def evaluation_metrics(
    task: str, groups: Sequence[RolloutGroup], config: ValidationConfig
) -> dict[str, float]:
    """Return the metrics of one task's evaluation, with k attempts at each example.

    ``avg@k``, which is ``reward`` too, is the mean over examples of the mean reward of their
    attempts. ``pass@k`` is the chance that one of k attempts passes. An attempt that failed has no
    reward: neither metric has it, and ``failed`` counts it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_turn = [turn.completion.policy_versions for rollout in rollouts for turn in rollout.turns]
    versions = np.concatenate(by_turn) if by_turn else np.zeros(0, np.int32)
    prefix = f"validation/{task}"
    metrics = {
        f"{prefix}/examples": len(groups),
        f"{prefix}/failed": sum(rollout.reward is None for rollout in rollouts),
        f"{prefix}/truncated": mean([rollout.status.is_truncated() for rollout in rollouts]),
        f"{prefix}/completion_tokens": mean([rollout.completion_tokens for rollout in rollouts]),
    }
    if len(versions):
        metrics |= {
            f"{prefix}/version_min": int(versions.min()),
            f"{prefix}/version_max": int(versions.max()),
        }
    scored = [group.rewards for group in groups if group.rewards]
    if not scored:
        return metrics
    average = mean([mean(rewards) for rewards in scored])
    metrics |= {f"{prefix}/reward": average, f"{prefix}/avg@{config.attempts}": average}
    powers_of_two = {2**power for power in range(config.attempts.bit_length())}
    for k in sorted({config.attempts, *powers_of_two}):
        chances = []
        for rewards in scored:
            passed = sum(reward >= config.pass_reward for reward in rewards)
            chances.append(pass_at_k(len(rewards), passed, min(k, len(rewards))))
        metrics[f"{prefix}/pass@{k}"] = mean(chances)
    return metrics


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts passes.

    1 - C(n - c, k) / C(n, k), where c of n attempts passed: equation 1 of Chen et al.,
    arXiv:2107.03374.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
