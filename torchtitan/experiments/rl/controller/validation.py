"""Evaluates the policy on the same held-out examples of each task, on the task's own schedule, beside training.

An evaluation of step s starts when the generators hold version s. Training goes on, so a long evaluation also samples from
later versions: ``validation/<task>/version_max`` is the latest. Only the first evaluation (of version 0) and the last (of the
final policy) sample from one version alone.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from torchtitan.experiments.rl.controller.group_runner import GroupRequest, GroupRunner
from torchtitan.experiments.rl.controller.saved_state import ValidationReport, ValidatorState
from torchtitan.experiments.rl.controller.step_metrics import mean
from torchtitan.experiments.rl.data.dataset import count_examples, read_example
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig
from torchtitan.experiments.rl.user_code.calls import Gate, contained


class Validator:
    """Runs evaluations as asyncio tasks. One that is due while the task's last is still running is left out, and counted."""

    def __init__(
        self,
        tasks: dict[str, Task],
        runner: GroupRunner,
        default: ValidationConfig,
        *,
        on_failure: Callable[[Exception], None] = lambda error: None,
        gate: Gate | None = None,
        recorder: RolloutRecorder | None = None,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ):
        """
        Args:
            default: schedule of tasks that have none of their own.
            on_failure: called with what a dataset or the library's own code raised.
            gate: reads the validation sets.
            recorder: gets the groups of each evaluation that has ended.
            on_group: called with each group as soon as it was measured.
        """
        self._gate, self._recorder, self._on_group = gate or Gate(), recorder, on_group
        self._tasks, self._runner, self._on_failure = tasks, runner, on_failure
        self._configs = {
            name: task.config.validation_schedule or default
            for name, task in tasks.items()
            if task.validation is not None
        }
        self._running: list[str] = []
        """Tasks that are being evaluated."""
        self._rounds: set[asyncio.Task[None]] = set()
        self._reports: list[ValidationReport] = []
        self._left_out: Counter[str] = Counter()
        self._begun = 0

    def due(self, step: int) -> list[str]:
        """Tasks whose schedule names this step."""
        return [
            name
            for name, config in self._configs.items()
            if config.every > 0 and step % config.every == 0
        ]

    def start(self, step: int, *, final: bool = False) -> None:
        """Begin what is due at ``step``: at the first and the final step every task that is ever evaluated."""
        self._begun = step
        names = (
            [name for name, config in self._configs.items() if config.every > 0]
            if final
            else self.due(step)
        )
        self._start(
            names, step, alone=final or step == 0, label=f"{step}.final" if final else str(step)
        )

    def _start(self, names: Sequence[str], step: int, *, alone: bool, label: str) -> None:
        self._left_out.update(name for name in names if name in self._running)
        if begun := [name for name in names if name not in self._running]:
            self._running += begun
            of_all = asyncio.create_task(
                self._evaluate(begun, step, alone=alone, label=label), name=f"validation-{step}"
            )
            self._rounds.add(of_all)
            of_all.add_done_callback(self._rounds.discard)

    async def wait(self) -> None:
        """Until nothing is running."""
        while self._rounds:
            await asyncio.wait(set(self._rounds))

    def take(self) -> list[ValidationReport]:
        """Reports that were finished since the last call, oldest first."""
        reports, self._reports = self._reports, []
        return reports

    async def close(self) -> None:
        rounds = list(self._rounds)
        for of_all in rounds:
            of_all.cancel()
        await asyncio.gather(*rounds, return_exceptions=True)

    def state(self) -> ValidatorState:
        """What a resumed run continues from."""
        return ValidatorState(
            begun=self._begun,
            running=list(self._running),
            left_out=dict(self._left_out),
            reports=list(self._reports),
        )

    def restore(self, state: ValidatorState, step: int) -> None:
        """Continue from a checkpoint of ``step``: begin what is due at it and was not begun, and what had not ended.

        The latter measures version ``step`` now, and says so.
        """
        self._begun, self._left_out = step, Counter(state.left_out)
        self._reports = list(state.reports)
        due = self.due(step) if state.begun < step else []
        names = [name for name in self._configs if name in due or name in state.running]
        self._start(names, step, alone=False, label=str(step))

    async def _evaluate(self, names: Sequence[str], step: int, *, alone: bool, label: str) -> None:
        """Evaluate these tasks side by side, and make one report of it."""
        metrics: dict[str, float] = {}

        async def measure(name: str) -> None:
            try:
                metrics.update(await contained(self._measure(name, alone=alone, label=label)))
            finally:
                self._running.remove(name)

        try:
            async with asyncio.TaskGroup() as evaluations:
                for name in names:
                    evaluations.create_task(measure(name), name=f"validation-{name}-{step}")
        except ExceptionGroup as failed:
            return self._on_failure(failed.exceptions[0])
        rewards = [value for name, value in metrics.items() if name.endswith("/reward")]
        metrics["validation/step"] = step
        metrics |= {f"validation/{name}/left_out": count for name, count in self._left_out.items()}
        reward = mean(rewards) if rewards else None
        metrics |= {} if reward is None else {"validation/reward": reward}
        self._reports.append(ValidationReport(step=step, reward=reward, metrics=metrics))

    async def _measure(self, name: str, *, alone: bool, label: str) -> dict[str, float]:
        task, config = self._tasks[name], self._configs[name]
        sampling = replace(task.config.sampling, temperature=config.temperature)
        assert task.validation is not None
        dataset = task.validation
        owner = f"validation of task {name!r}"
        examples = min(config.examples, await self._gate.call(count_examples, dataset, owner=owner))
        places = asyncio.Semaphore(
            examples if alone else max(1, config.max_concurrency // config.attempts)
        )

        async def one(index: int) -> RolloutGroup:
            async with places:
                example = await self._gate.call(read_example, dataset, index, owner=owner)
                request = GroupRequest(
                    data_sample=example,
                    group_id=f"validation-{name}-{index}",
                    group_size=config.attempts,
                    sampling=sampling,
                    credit=False,
                )
                group = await self._runner.run(task, request)
                self._on_group(group)
                return group

        groups = await asyncio.gather(*(one(index) for index in range(examples)))
        metrics = evaluation_metrics(name, groups, config)
        if self._recorder is not None:
            # At once, when all have ended: a checkpoint has the records of an evaluation, or begins it again.
            for group in groups:
                group = labelled(group, label)
                outcomes = {rollout.rollout_id: "validation" for rollout in group.rollouts}
                self._recorder.record(group, outcomes, kind="validation")
        return metrics


def labelled(group: RolloutGroup, label: str) -> RolloutGroup:
    """The group under an id that no other of the run has: an evaluation's own has the same in each, for its seeds.

    A training group's id ends with a hyphen and a number.
    """
    group.group_id = f"{group.group_id}@{label}"
    for rollout in group.rollouts:
        rollout.group_id = group.group_id
    return group


def evaluation_metrics(
    task: str, groups: Sequence[RolloutGroup], config: ValidationConfig
) -> dict[str, float]:
    """Metrics of one task's evaluation, k attempts at each example.

    ``avg@k`` (``reward`` is the same) is the mean over examples of the mean reward of their attempts, ``pass@k`` the chance
    that one of k attempts passes. An attempt that failed has no reward: it is in neither, and counted.
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
    if scored:
        average = mean([mean(rewards) for rewards in scored])
        metrics |= {f"{prefix}/reward": average, f"{prefix}/avg@{config.attempts}": average}
        for k in sorted(
            {config.attempts, *(2**power for power in range(config.attempts.bit_length()))}
        ):
            passing = [
                pass_at_k(
                    len(rewards),
                    sum(reward >= config.pass_reward for reward in rewards),
                    min(k, len(rewards)),
                )
                for rewards in scored
            ]
            metrics[f"{prefix}/pass@{k}"] = mean(passing)
    return metrics


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased chance that one of k attempts passes, from n of which ``passed`` did: 1 − C(n − c, k) / C(n, k), equation 1 of
    Chen et al., arXiv:2107.03374."""
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
