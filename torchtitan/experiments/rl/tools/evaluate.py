"""What an evaluation takes from a run's config, and every task evaluated once, as a run does of version 0."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, shutdown_context, this_proc

from torchtitan.experiments.rl.compat.monarch import (
    MONARCH_OUTPUT,
    original,
    printed_to,
    process_death,
)
from torchtitan.experiments.rl.config import checks, trial
from torchtitan.experiments.rl.config.placement import needed_gpus
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.controller.group_runner import LocalRunner, TaskSet
from torchtitan.experiments.rl.controller.validation import Validator, labelled, pass_at_k
from torchtitan.experiments.rl.envs.renderer import build_context
from torchtitan.experiments.rl.errors import ConfigError, MissingError, RunError, users_traceback
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel, hosted_models
from torchtitan.experiments.rl.observability.console import Console, write_line
from torchtitan.experiments.rl.operations.alarms import FirstFailures
from torchtitan.experiments.rl.operations.notes import print_notes
from torchtitan.experiments.rl.operations.session import SIGNAL_POLL_S, Signals, cause
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.host import raise_descriptor_limit
from torchtitan.experiments.rl.process.lifetime import descendants, kill_descendants
from torchtitan.experiments.rl.process.setup import quiet_libraries, set_up_logging
from torchtitan.experiments.rl.process.temporary import TemporaryFolder
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Candidate:
    """A model that is measured."""

    config: RunConfig
    """Of ``evaluated_config``."""
    plan: RunPlan
    endpoint: FrozenModel | None
    """The policy is this server's model. None: generators on the config's model."""
    run_dir: Path

    @property
    def label(self) -> str:
        served = self.endpoint
        return (
            f"{served.name} at {', '.join(served.urls)}"
            if served
            else self.config.model.hf_assets_path
        )

    @property
    def schedules(self) -> dict[str, ValidationConfig]:
        """By task."""
        return {
            name: task.validation_schedule or self.config.validation
            for name, task in self.config.tasks.items()
        }


def evaluated_config(config: RunConfig, *, tasks: Sequence[str], attempts: int | None) -> RunConfig:
    """The config with the tasks to measure, each with its schedule, on this host.

    Args:
        tasks: by name; empty: every task that has a validation set.
        attempts: of each example; None: the schedule's. Above 1 where a schedule is greedy, they are sampled at the task's
            training temperature.

    Raises:
        ConfigError: no such task, or one without a validation set.
    """
    if attempts is not None and attempts < 1:
        raise ConfigError("--attempts", attempts, "must be at least 1")
    if unknown := set(tasks) - set(config.tasks):
        raise ConfigError(
            "--tasks", min(unknown), f"no such task; the config has {', '.join(config.tasks)}"
        )
    chosen = {
        name: task
        for name, task in config.tasks.items()
        if name in tasks or (not tasks and task.validation is not None)
    }
    if not chosen:
        raise ConfigError(
            "tasks", ", ".join(config.tasks), "none has a validation set; set tasks.NAME.validation"
        )
    for name, task in chosen.items():
        if task.validation is None:
            raise ConfigError(
                f"tasks.{name}.validation",
                None,
                "the task has no validation set: set one, or leave it out",
            )
        schedule = task.validation_schedule or config.validation
        k, temperature = attempts or schedule.attempts, schedule.temperature
        if attempts is not None and k > 1 and temperature == 0:
            temperature = task.sampling.temperature
        chosen[name] = replace(
            task,
            validation_schedule=replace(schedule, every=1, attempts=k, temperature=temperature),
        )
    provision = ProvisionConfig(device=config.provision.device)
    return replace(config, tasks=chosen, provision=provision)


def checked_plan(config: RunConfig, endpoint: FrozenModel | None) -> RunPlan:
    """Check the config and what this machine has, and plan its generators.

    Raises:
        ConfigError: the first problem.
    """
    if endpoint is not None and not hosted_models(config.tasks):
        config.provision = ProvisionConfig(device="cpu")  # nothing here computes
        config.rollout_workers = 0
    checks.check(config)
    try:
        checks.check_model_folder(config.model)
    except MissingError:
        if endpoint is None:
            raise
    for lacking in checks.missing(config).values():
        raise lacking
    checks.check_servers(config)
    if endpoint is None:
        config.generator.engine.check_present(field="generator.engine")
    trial.build_tasks(config, trial.read_policy_tokenizer(config))
    return plan_of_generators(config)


def plan_of_generators(config: RunConfig) -> RunPlan:
    """Plan a run of which only the generators and the hosted models are started, on this host."""
    raise_descriptor_limit()
    device = config.provision.resolve()
    if device == "cpu":
        return checks.plan_run(config)  # the run's own cores: figures repeat to the last bit
    return checks.plan_run(config, device=device, available=without_trainer(config))


def without_trainer(config: RunConfig) -> list[int]:
    """GPUs to plan with where no trainer runs: those of its ranks, which a plan gives out first, come before GPU 0."""
    ranks = config.trainer.ranks
    return list(range(-ranks, needed_gpus(config) - ranks))


class EndpointPolicy(EndpointClient):
    """Implements rollouts.policy.PolicyClient over a server. Its tokens have policy version -1, as a frozen model's."""

    version = 0

    def __init__(self, model: FrozenModel, hosted: PolicyClient):
        """``hosted``: gives the frozen models that the tasks name."""
        super().__init__(model)
        self.frozen = hosted.frozen


class Evaluation:
    """``run`` evaluates every task once, as a run does of version 0, and stops everything it has started."""

    def __init__(self, model: Candidate):
        self._model = model
        self.console = Console(sys.stderr)
        self._context = RunContext(model.plan, model.run_dir, console=self.console)
        self._failures: list[Exception] = []
        self.fleet = Fleet(self._context, on_failure=self._failures.append)
        self._result = Result(examples={name: [] for name in model.config.tasks})
        self._measuring: asyncio.Task[None] | None = None

    async def run(self) -> "Result":
        self._measuring = asyncio.create_task(self._measure())
        (error,) = await asyncio.gather(self._measuring, return_exceptions=True)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error
        return self._result

    def stop(self) -> None:
        """End ``run`` early. Groups that have ended are recorded."""
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        config, endpoint, fleet, ordered = (
            self._model.config,
            self._model.endpoint,
            self.fleet,
            self._context.ordered,
        )
        tasks = TaskSet(config.tasks, ordered=ordered, limits=config.user_code)
        recorder = config.recorder.build(run_dir=self._model.run_dir)
        policy = None if endpoint is None else EndpointPolicy(endpoint, fleet.policy)
        validator: Validator | None = None
        failures = FirstFailures(_note, log="logs/evaluator.jsonl")

        def measured(group: RolloutGroup) -> None:
            self._result.examples[group.task_name].append(example_of(group))
            failures.group_arrived(group)
            causes = [
                rollout.error
                for rollout in group.rollouts
                if rollout.reward is None and rollout.error
            ]
            if cause := next(iter(causes), group.failure):
                self._result.causes.setdefault(group.task_name, cause)
            # Now, and not when all have ended as a run does: an evaluation may be stopped.
            outcomes = {
                rollout.rollout_id: "validation" for rollout in labelled(group, "0").rollouts
            }
            recorder.record(group, outcomes, kind="validation")

        try:
            path = config.model.hf_assets_path
            await tasks.build(build_context(config.renderer, path, seed=config.seed))
            await fleet.supervisor.unless_failed(fleet.start_generators(policy=policy is None))
            if policy is None:
                runner = await fleet.start_runner(tasks)
            else:
                await tasks.setup(policy)
                runner = LocalRunner(policy, seed=config.seed)
            on_failure = self._failures.append
            validator = Validator(
                tasks.tasks,
                runner,
                config.validation,
                on_failure=on_failure,
                ordered=ordered,
                on_group=measured,
            )
            validator.start(0)
            await fleet.supervisor.unless_failed(validator.wait())
            reports = validator.take()
            if self._failures or not reports:
                raise next(iter(self._failures), RunError("nothing was measured"))
            self._result.metrics = reports[0].metrics
        finally:
            if validator is not None:
                await validator.close()
            for fault in [*await tasks.close(), *await fleet.close()]:
                logger.warning("%s", fault)
            if policy is not None:
                await policy.close()
            await asyncio.to_thread(recorder.close)


class Evaluator(Actor):
    """An evaluation as an actor: the death of a process that it started is told to actors."""

    part = ""
    """See ``reported_endpoint``."""

    def __init__(self, model: Candidate):
        self._evaluation, self._run_dir = Evaluation(model), model.run_dir

    @reported_endpoint
    async def measure(self) -> "Result":
        """See ``Evaluation.run``."""
        self._loop = asyncio.get_running_loop()
        set_up_logging(self._run_dir, "evaluator")
        notes = print_notes(self._evaluation.console)
        try:
            return await self._evaluation.run()
        finally:
            notes.cancel()

    @reported_endpoint
    async def request_stop(self) -> None:
        """See ``Evaluation.stop``."""
        self._evaluation.stop()

    def __supervise__(self, failure: Any) -> bool:
        """See Controller.__supervise__."""
        self._loop.call_soon_threadsafe(
            self._evaluation.fleet.supervisor.died, process_death(failure)
        )
        return True


def _note(line: str, traceback: str = "") -> None:
    write_line(sys.stderr, "\n".join(map(printable_line, [line, *traceback.splitlines()])))


def measure_all(models: list[Candidate], temporary: TemporaryFolder) -> tuple[int, list["Result"]]:
    """Returns the exit code, and the results of the models that were measured whole."""
    signals = Signals()
    results: list[Result] = []
    try:
        for number, model in enumerate(models):
            sizes = [
                f"{name} (at most {plan.examples} x {plan.attempts})"
                for name, plan in model.schedules.items()
            ]
            _note(f"measuring   {model.label} on {', '.join(sizes)}")
            with printed_to(model.run_dir / MONARCH_OUTPUT):
                here = this_proc()
            evaluator = here.spawn(f"evaluator_{number}", Evaluator, model)
            running, asked = evaluator.measure.call_one(), None
            while True:
                try:
                    result: Result = running.get(timeout=SIGNAL_POLL_S)
                    break
                except TimeoutError:
                    temporary.note_shared_memory(descendants())
                    if len(signals.received) > 1:
                        _note("stopped at once")
                        kill_descendants()
                        return 128 + signals.received[0], results
                    if signals.received and asked is None:
                        _note("stopping; once more stops at once")
                        asked = evaluator.request_stop.call_one()
                except Exception as error:
                    _note(
                        f"error: {cause(error)} (logs in {model.run_dir}/logs)",
                        users_traceback(original(error)),
                    )
                    return 1, results
            if result.metrics is None:
                ended = sum(map(len, result.examples.values()))
                _note(f"stopped: {ended} examples of it were measured, recorded in {model.run_dir}")
                return 128 + signals.received[0], results
            results.append(result)
        return 0, results
    finally:
        with quiet_libraries():
            shutdown_context().get()


Figures = dict[str, Any]
"""By name, as ``--json`` prints them."""
Interval = tuple[float | None, float | None]
"""Ends of a 95 % interval; None where it is unknown."""
RESAMPLES = 10_000
"""Number of bootstrap samples behind an interval."""
BLOCK = 2**20
"""Number of draws that are in memory at once."""
MOST_SLICES = 12
"""Of one field of an example's info. A field with more values labels almost every example differently."""


@dataclass(kw_only=True, slots=True)
class Example:
    """What one model got for one example."""

    example: str
    """Its group's id, which is the same for every model."""
    rewards: list[float]
    """Of the attempts that were scored."""
    attempts: int
    facts: dict[str, Any] = field(default_factory=dict)
    """Those fields of its info that may name a slice."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.rewards))


@dataclass(kw_only=True, slots=True)
class Result:
    """Of one model."""

    metrics: dict[str, float] | None = None
    """Those of a run's validation. None: the evaluation was stopped."""
    examples: dict[str, list[Example]]
    """By task."""
    causes: dict[str, str] = field(default_factory=dict)
    """By task, what the first attempt failed of that has no reward."""


def example_of(group: RolloutGroup) -> Example:
    """
    Returns:
        Plain values only: the example's own may be of any class.
    """
    info = group.data_sample.info if isinstance(group.data_sample.info, dict) else {}
    facts = {
        str(name): value for name, value in info.items() if isinstance(value, str | bool | int)
    }
    return Example(
        example=group.group_id,
        rewards=list(map(float, group.rewards)),
        attempts=len(group.rollouts),
        facts=facts,
    )


def task_figures(examples: Sequence[Example], *, attempts: int, pass_reward: float) -> Figures:
    """avg@k and pass@k of a task with 95 % intervals, overall and by slice: examples by each value of each field of their info
    that divides them into at least two parts, and not one by one."""

    def figures(part: Sequence[Example]) -> Figures:
        scored = [example for example in part if example.rewards]
        passed = [
            (len(e.rewards), sum(reward >= pass_reward for reward in e.rewards)) for e in scored
        ]
        return {
            "examples": len(part),
            "failed": sum(example.attempts - len(example.rewards) for example in part),
            f"avg@{attempts}": _estimate([example.mean for example in scored]),
        } | {
            f"pass@{k}": _estimate([pass_at_k(n, right, min(k, n)) for n, right in passed])
            for k in sorted({1, attempts})
        }

    slices: dict[str, Figures] = {}
    for name in sorted({name for example in examples for name in example.facts}):
        values = {example.facts.get(name) for example in examples}
        if 2 <= len(values) <= min(MOST_SLICES, len(examples) // 2):
            slices[name] = {
                str(value): figures(
                    [example for example in examples if example.facts.get(name) == value]
                )
                for value in sorted(values, key=lambda value: (str(type(value)), value))
            }
    return figures(examples) | {"slices": slices}


def _estimate(values: Sequence[float]) -> dict[str, float | None]:
    low, high = interval(values)
    return {"value": float(np.mean(values)) if values else None, "low": low, "high": high}


def interval(values: Sequence[float]) -> Interval:
    """Return the 95 % bootstrap interval of the mean of ``values``, one value for each example.

    The percentile method: the examples are drawn again with replacement, as many as there are, and
    the interval holds the middle 95 % of the means. The generator is seeded, so that the same
    values have the same interval.

    Returns:
        None for both ends where all values are equal: every sample has the same mean then, which
        says nothing about other examples.
    """
    x = np.asarray(values, np.float64)
    if not len(x) or x.min() == x.max():
        return None, None
    random = np.random.default_rng(0)
    rows = max(1, BLOCK // len(x))
    means = [
        x[random.integers(0, len(x), (min(rows, RESAMPLES - done), len(x)))].mean(axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def paired(first: Sequence[Example], second: Sequence[Example]) -> Figures:
    """Compare two models on the examples that both were scored on.

    Returns:
        ``difference``, the mean of the second model's reward less the first's; its bootstrap
        interval over the examples' own differences (``low``, ``high``); and which examples the
        second model has ``won`` and ``lost``.
    """
    before, after = (
        {e.example: e.mean for e in examples if e.rewards} for examples in (first, second)
    )
    changes = {
        example: after[example] - reward for example, reward in before.items() if example in after
    }
    differences = list(changes.values())
    low, high = interval(differences)
    return {
        "examples": len(changes),
        "difference": float(np.mean(differences)) if differences else None,
        "low": low,
        "high": high,
        "won": [example for example, change in changes.items() if change > 0],
        "lost": [example for example, change in changes.items() if change < 0],
    }


def result_lines(result: Figures) -> list[str]:
    """Of what ``--json`` prints."""
    lines: list[str] = []
    for model in result["models"]:
        lines.append(f"model       {model['model']}")
        for task, figures in model["tasks"].items():
            failed = f", {figures['failed']} attempts failed" if figures["failed"] else ""
            told = (
                f"{figures['attempts']} attempts at temperature {figures['temperature']:g}{failed}"
            )
            lines += [
                f"{task:<12}{figures['examples']} examples, {told}",
                *_estimates(figures, " " * 12),
            ]
            for sliced_by, parts in figures["slices"].items():
                for value, part in parts.items():
                    lines += [
                        f"{'':<12}{sliced_by} = {value} ({part['examples']})",
                        *_estimates(part, " " * 14),
                    ]
        lines.append(f"records     {model['folder']}")
    for task, compared in (result["comparison"] or {}).items():
        told = "no example was scored for both"
        if compared["difference"] is not None:
            told = (
                f"second less first {_shown(compared, '+.3f', of='difference', gap=' ')}; "
                f"{len(compared['won'])} of {compared['examples']} examples better, {len(compared['lost'])} worse"
            )
        lines.append(f"compared    {task}: {told}")
    return [*lines, "Intervals are of 95 %, by bootstrap over examples."]


def _estimates(figures: Figures, indent: str) -> list[str]:
    return [
        f"{indent}{name:<9}{_shown(figure, '.3f')}"
        for name, figure in figures.items()
        if "@" in name
    ]


def _shown(figure: Figures, places: str, *, of: str = "value", gap: str = "  ") -> str:
    """A figure with its interval, where there is one."""
    value, low, high = figure[of], figure["low"], figure["high"]
    if value is None:
        return "nothing was scored"
    return f"{value:{places}}" + (
        "" if low is None else f"{gap}({low:{places}} to {high:{places}})"
    )
