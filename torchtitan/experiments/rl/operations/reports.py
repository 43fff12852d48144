"""Says how a run goes, by the events of its loops: to the metrics, to the console and, at its end, to the summary.

It warns of a run that goes on and learns nothing, or waits for no good reason. ``StepProfile`` says what every process does:
how busy each is, and all of it in one file for some steps (``--profile-steps A:B``; docs/operations.md says how to read it).
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.config.checks import profiled_steps
from torchtitan.experiments.rl.controller.events import RunEvents
from torchtitan.experiments.rl.controller.saved_state import ValidationReport
from torchtitan.experiments.rl.controller.step_metrics import StepRecord
from torchtitan.experiments.rl.observability import IDLE, LAG_S, WAITING
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.operations.context import RunContext
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.trace import Event

FIRST_VALIDATION, FIRST_STEP = "validation before the first step", "the first step"
STEPS = 3
"""In a row, before a warning: one step may be odd."""
BROKEN = 0.05
"""Share of a step's rollouts that a filter of broken text matches. Of a healthy model it is below 0.005."""


class RunReports(RunEvents):
    def __init__(
        self,
        context: RunContext,
        *,
        metrics: MetricsLogger,
        compares_rewards: bool,
        validations: Sequence[float | None] = (),
    ):
        """
        Args:
            compares_rewards: some algorithm learns from the differences in a group.
            validations: rewards of the evaluations that a resumed run has had.
        """
        self._console, self._restarts, self._metrics = context.console, context.restarts, metrics
        self._warnings = StepWarnings(context.console.note, compares_rewards=compares_rewards)
        self._validations = [reward for reward in validations if reward is not None]
        self.validation_examples: int | None = None
        """Number of examples in the last evaluation."""
        self.why_ended_early: str | None = None
        """Why there is nothing left to learn."""

    def begin(self, steps_done: int, total_steps: int) -> None:
        self._console.begin(steps_done, total_steps)
        self._console.waits.begin(FIRST_STEP if steps_done else FIRST_VALIDATION)

    def started(self, report: ValidationReport) -> None:
        """The evaluation before the first step has ended; one of no task has no reward."""
        self._console.waits.begin(FIRST_STEP)
        self._console.waits.end(FIRST_VALIDATION)
        self._metrics.log(report.step, report.metrics)
        self._note(report, "before the first step")

    def step_taken(self, record: StepRecord) -> None:
        """A step was taken.

        Raises:
            OSError: the metrics file can't be written.
        """
        restarts = {f"restarts/{part}": count for part, count in self._restarts.counts.items()}
        self._metrics.log(record.step, record.metrics | restarts)
        self._metrics.log_samples(record.step, record.groups)
        val = None
        if record.validation is not None and record.validation.reward is not None:
            val = record.validation.reward, record.validation.step
            self._count_validation(record.validation)
        self._console.waits.end(FIRST_STEP)
        self._console.step(record.step, record.metrics, val)
        self._warnings.step(record.metrics)

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        """There is nothing left to learn; ``reports`` are of no step's report."""
        self.why_ended_early = why
        for report in reports:
            self._metrics.log_more(report.metrics)
            self._note(report, f"after step {report.step}")

    def _note(self, report: ValidationReport, when: str) -> None:
        if report.reward is not None:
            self._count_validation(report)
            self._console.note(f"validation {when}: reward {report.reward:.3f}")

    def _count_validation(self, report: ValidationReport) -> None:
        assert report.reward is not None
        self._validations.append(report.reward)
        counts = [n for name, n in report.metrics.items() if name.endswith("/examples")]
        self.validation_examples = int(sum(counts))

    def first_and_last_validation(self) -> tuple[float | None, float | None]:
        """Rewards."""
        rewards = self._validations
        return rewards[0] if rewards else None, rewards[-1] if len(rewards) > 1 else None


class StepWarnings:
    """Each warning is given once a run."""

    def __init__(self, note: Callable[[str], None], *, compares_rewards: bool):
        """
        Args:
            note: prints a line.
            compares_rewards: some task's algorithm learns from differences between rewards.
        """
        self._note, self._compares_rewards = note, compares_rewards
        self._in_a_row: Counter[str] = Counter()
        self._given: set[str] = set()

    def step(self, metrics: Mapping[str, float]) -> None:
        found = dict(self._found(metrics))
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in found})
        for name, text in found.items():
            if self._in_a_row[name] >= STEPS and name not in self._given:
                self._given.add(name)
                self._note(f"warning: {text}")

    def _found(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """What is wrong with this step: names and texts."""
        lag = metrics.get("perf/event_loop_lag_max_s", 0.0)
        if lag > LAG_S:
            yield (
                "lag",
                f"something blocks the event loop of the rollouts, for {lag:.1f} s in this step: make an async function that "
                "computes or waits without await a plain one, or set rollout_workers",
            )
        if self._compares_rewards and metrics.get("rollout/reward_std") == 0:
            yield (
                "rewards",
                f"every reward of the last {STEPS} steps is {metrics['rollout/reward_mean']:.4g}: nothing is learned from it; "
                "the examples are too easy or too hard for this model, or the rubric tells nothing apart",
            )
        truncated = sum(
            share for name, share in metrics.items() if name.startswith("rollout/status/truncated")
        )
        if truncated > 0.999:
            yield (
                "truncated",
                f"every rollout of the last {STEPS} steps was cut off, at {metrics['rollout/completion_tokens_mean']:.0f} "
                "tokens on average: raise the task's sampling.max_tokens, env.max_rollout_tokens or env.max_turns",
            )
        for name in ("gibberish", "repetition"):
            share = metrics.get(f"filter/post/{name}", 0) / max(metrics.get("rollout/count", 0), 1)
            if share > BROKEN:
                yield (
                    name,
                    f"the filter {name} matches {share:.0%} of the rollouts: read some of these (rl-report, or observability."
                    "rollouts); if they are no broken text, --post-batch-filters zero_advantage leaves it out",
                )
        busy = [
            share
            for name, share in metrics.items()
            if name.startswith("perf/generator") and name.endswith("/busy")
        ]
        waiting = metrics.get("time/wait_s", 0.0) / max(metrics.get("time/step_s", 0.0), 1e-9)
        if busy and max(busy) < IDLE and waiting > WAITING:
            yield (
                "idle",
                f"the trainer waits for {waiting:.0%} of the step, and the generators work for {max(busy):.0%} of it: the envs "
                "or reward functions are slow, see env_s of the recorded rollouts, or take a profile (--profile-steps)",
            )


logger = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 30.0
ANSWER_S = 1.0
"""A process that takes longer has no metrics in that step: the next step must not wait for it."""


class StepProfile(RunEvents):
    """``close`` writes what was recorded of a run that ends before the last of the steps."""

    def __init__(
        self, steps: str, *, run_dir: Path, processes: Callable[[], Iterable[tuple[Lifetime, Any]]]
    ):
        """
        Args:
            steps: as in RunConfig.profile_steps.
            processes: the processes that live now, beside this one: their lives and their actors.
        """
        self._steps, self._run_dir, self._processes = profiled_steps(steps), run_dir, processes
        self._recording = False
        self.file: Path | None = None
        """Where the profile was written."""

    async def step_begins(self, step: int) -> None:
        if (
            self._steps is None
            or self._recording
            or self.file is not None
            or step not in self._steps
        ):
            return
        self._recording = True
        trace.start()
        await asyncio.gather(
            *(
                _answer(life, actor.start_trace, COLLECT_TIMEOUT_S)
                for life, actor in self._processes()
            )
        )

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """How busy each process was since the step before."""
        metrics |= await lap_usage(self._processes())

    async def step_over(self, step: int) -> None:
        if self._steps is not None and step >= self._steps[-1]:
            await self.close()

    async def close(self) -> None:
        """Write what was recorded, if anything is."""
        if not self._recording or self._steps is None:
            return
        self._recording = False
        processes = list(self._processes())
        # Those of other processes first: what this one waits for is in its own.
        answers = await asyncio.gather(
            *(_answer(life, actor.stop_trace, COLLECT_TIMEOUT_S) for life, actor in processes)
        )
        events = {
            life.name: answer
            for (life, _), answer in zip(processes, answers, strict=True)
            if answer
        }
        self.file = self._run_dir / f"trace-steps-{self._steps[0]}-{self._steps[-1]}.json"
        await asyncio.to_thread(write_trace, self.file, {"controller": trace.stop(), **events})


async def lap_usage(processes: Iterable[tuple[Lifetime, Any]]) -> dict[str, float]:
    """Metrics of each process since the last call: ``perf/generator_0/busy`` and so on.

    Args:
        processes: the life and the actor (WatchedActor) of each.
    """
    processes = list(processes)
    usages = await asyncio.gather(
        *(_answer(life, actor.usage, ANSWER_S, logging.INFO) for life, actor in processes)
    )
    return {
        f"perf/{'_'.join(life.name.split())}/{what}": value
        for (life, _), usage in zip(processes, usages, strict=True)
        for what, value in (usage or {}).items()
    }


async def _answer(
    life: Lifetime, endpoint: Any, limit_s: float, level: int = logging.WARNING
) -> Any:
    """What a process answers; None, with a line in the log, where it has died or is busy: others see to that."""
    try:
        return await asyncio.wait_for(life.call(ask(endpoint)), limit_s)
    except Exception as error:
        logger.log(level, "%s does not say what it did: %s", life.name, error)
        return None


def write_trace(path: Path, processes: Mapping[str, Sequence[Event]]) -> None:
    """
    Args:
        processes: events by the name of the process. Their process ids are their places here.
    """
    zero = min((event["ts"] for events in processes.values() for event in events), default=0)
    written: list[Event] = []
    for pid, (process, events) in enumerate(processes.items(), start=1):
        name = {"ph": "M", "name": "process_name", "tid": 0, "ts": zero, "args": {"name": process}}
        written += [
            event | {"pid": pid, "ts": (event["ts"] - zero) / 1e3} for event in (name, *events)
        ]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": written}, default=str)
    path.write_text(text + "\n", encoding="utf-8")
