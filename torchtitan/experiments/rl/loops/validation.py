"""Evaluates the policy on held-out examples of each task, beside training.

Each task has a schedule of its own, and the same examples in every evaluation. The evaluation of
step s starts when the generators hold version s. A synchronous run waits for its end before the
next step. In any other run training goes on meanwhile, so a long evaluation also samples from later
versions: ``validation/<task>/version_max`` is the latest of them. There, only the first evaluation
(of version 0) and the last (of the final policy) sample from one version alone.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from torchtitan.experiments.rl.ask.call import contained, is_cancelled
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.data.dataset import count_examples, read_example
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.group_runner import GroupRequest, GroupRunner
from torchtitan.experiments.rl.loops.saved_state import ValidationReport, ValidatorState
from torchtitan.experiments.rl.loops.step_metrics import mean
from torchtitan.experiments.rl.printable import one_sentence
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.rounding import reaches
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig


class Validator:
    """Runs evaluations as asyncio tasks.

    An evaluation of a task is left out, and counted, if examples of the task still run for the
    evaluation before.
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
        self._evaluations: set[asyncio.Task[None]] = set()
        """Evaluations under way, each of the tasks that were due at one step."""
        self._running: list[str] = []
        """Names of the tasks whose examples are being run."""
        self._unreported: list[str] = []
        """Names of the tasks of all evaluations under way. An evaluation ends with its slowest
        task: the others are in this list and no longer in `_running`."""
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
            self._start(names, step, all_at_once=True, label=f"{step}.final")
        else:
            self._start(self.due(step), step, all_at_once=step == 0, label=str(step))

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
            running=sorted(set(self._unreported)),
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
        self._start(names, step, all_at_once=False, label=str(step))

    def _start(self, names: Sequence[str], step: int, *, all_at_once: bool, label: str) -> None:
        """Begin an evaluation of the tasks whose examples are not being run already.

        Args:
            all_at_once: True to run all examples side by side, as at the start and the end of a
                run; False to leave training its share of the generators.
            label: name of the evaluation in the records.
        """
        self._left_out.update(name for name in names if name in self._running)
        begun = [name for name in names if name not in self._running]
        if not begun:
            return
        self._running += begun
        self._unreported += begun
        self._begun_of_task |= dict.fromkeys(begun, step)
        evaluation = asyncio.create_task(
            self._evaluate(begun, step, all_at_once=all_at_once, label=label),
            name=f"validation-{step}",
        )
        self._evaluations.add(evaluation)
        evaluation.add_done_callback(self._ended)

    def _ended(self, evaluation: "asyncio.Task[None]") -> None:
        self._evaluations.discard(evaluation)
        self._changed.set()

    async def _evaluate(
        self, names: Sequence[str], step: int, *, all_at_once: bool, label: str
    ) -> None:
        """Evaluate tasks side by side, record their groups, and make one report of them all."""
        groups: dict[str, list[RolloutGroup]] = {}

        async def run(name: str) -> None:
            try:
                groups[name] = await self._run_examples(name, all_at_once=all_at_once)
            finally:
                self._running.remove(name)

        try:
            async with asyncio.TaskGroup() as evaluations:
                for name in names:
                    evaluations.create_task(run(name), name=f"validation-{name}-{step}")
            # Nothing is awaited from here on. So a checkpoint has the report and the records of all
            # tasks, or none of them, and then a resumed run begins the evaluation again.
            report = self._report(step, {name: groups[name] for name in names})
            self._reports.append(report)
            for name in names:
                self._unreported.remove(name)
            if self._recorder is not None:
                ended = [labelled(group, label) for name in names for group in groups[name]]
                self._recorder.record_validation(ended)
        except Exception as error:  # noqa: BLE001 - it ends the run, by `on_failure`
            self._on_failure(_first_error(error))

    def _report(self, step: int, groups: dict[str, list[RolloutGroup]]) -> ValidationReport:
        """Return the report of an evaluation, given the groups of each of its tasks."""
        metrics: dict[str, float] = {}
        for name, of_task in groups.items():
            metrics |= evaluation_metrics(name, of_task, self._configs[name])
        rewards = [value for name, value in metrics.items() if name.endswith("/reward")]
        metrics["validation/step"] = step
        for name, count in self._left_out.items():
            metrics[f"validation/{name}/left_out"] = count
        reward = mean(rewards) if rewards else None
        if reward is not None:
            metrics["validation/reward"] = reward
        return ValidationReport(
            step=step,
            reward=reward,
            metrics=metrics,
            attempts=sum(int(metrics[f"validation/{name}/attempts"]) for name in groups),
            failed=sum(int(metrics[f"validation/{name}/failed"]) for name in groups),
            unmeasured={
                name: _nothing_scored(name, of_task)
                for name, of_task in groups.items()
                if of_task and f"validation/{name}/reward" not in metrics
            },
        )

    async def _run_examples(self, name: str, *, all_at_once: bool) -> list[RolloutGroup]:
        """Run the attempts at each of a task's examples, and return a group for each example."""
        task = self._tasks[name]
        config = self._configs[name]
        sampling = config.sampling(task.config.sampling)
        dataset = task.validation
        assert dataset is not None
        owner = f"validation of task {name!r}"
        size = await self._ordered.call(count_examples, dataset, owner=owner)
        examples = min(config.examples, size)
        beside_training = max(1, config.max_concurrency // config.attempts)
        places = asyncio.Semaphore(examples if all_at_once else beside_training)

        async def run(index: int) -> RolloutGroup:
            async with places:
                request = GroupRequest(
                    data_sample=await self._ordered.call(read_example, dataset, index, owner=owner),
                    group_id=f"validation-{name}-{index}",
                    group_size=config.attempts,
                    sampling=sampling,
                    credit=False,
                    evaluates=True,
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
        return [run.result() for run in runs]


def labelled(group: RolloutGroup, label: str) -> RolloutGroup:
    """Give an evaluation's group the id under which it is recorded, and return it.

    While it ran, its id was the same as in every other evaluation, because seeds follow from the
    id. The label tells them apart. No training group has such an id: theirs end with a hyphen and
    a number.
    """
    group.amend(group_id=f"{group.group_id}@{label}")
    for rollout in group.rollouts:
        rollout.amend(group_id=group.group_id)
    return group


def _first_error(error: Exception) -> Exception:
    """Return the error, or the first of a group's, which may be in a group itself."""
    return _first_error(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def evaluation_metrics(
    task: str, groups: Sequence[RolloutGroup], config: ValidationConfig
) -> dict[str, float]:
    """Return the metrics of one task's evaluation, with k attempts at each example.

    ``avg@k``, which is ``reward`` too, is the mean over examples of the mean reward of their
    attempts. ``pass@k`` is the chance that one of k attempts passes; it is there for each smaller
    k that is a power of two, too. An attempt that failed has no reward: neither metric has it, and
    ``failed`` counts it. An example that has fewer than k scored attempts counts in ``pass@k`` with
    the chance that one of these passes.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_turn = [turn.completion.policy_versions for rollout in rollouts for turn in rollout.turns]
    versions = np.concatenate(by_turn) if by_turn else np.zeros(0, np.int32)
    versions = versions[versions >= 0]  # an agent's turns of a frozen model have -1
    prefix = f"validation/{task}"
    metrics = {
        f"{prefix}/examples": len(groups),
        f"{prefix}/attempts": len(rollouts),
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
    for k in config.passes:
        chances = []
        for rewards in scored:
            passed = sum(reaches(reward, config.pass_reward) for reward in rewards)
            chances.append(pass_at_k(len(rewards), passed, min(k, len(rewards))))
        metrics[f"{prefix}/pass@{k}"] = mean(chances)
    return metrics


def cause_of_failure(group: RolloutGroup) -> str | None:
    """Return why the first attempt without a reward has none; None if every attempt has one."""
    for rollout in group.rollouts:
        if rollout.reward is None:
            ended = f"no reward was given, and it ended as {rollout.status.value}"
            return rollout.error or group.failure or ended
    return None


def _nothing_scored(task: str, groups: Sequence[RolloutGroup]) -> str:
    """Return what to say of a task of which every attempt failed."""
    attempts = sum(len(group.rollouts) for group in groups)
    cause = one_sentence(cause_of_failure(groups[0]) or "")
    return f"all {attempts} attempts of task {task} failed, the first with: {cause}"


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts passes.

        1 - C(n - passed, k) / C(n, k)

    where ``passed`` of n attempts passed: equation 1 of Chen et al., arXiv:2107.03374.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
