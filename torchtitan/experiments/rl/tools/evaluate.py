"""Measures models on the validation sets of a config's tasks, as a run measures version 0.

evaluated_config   the config with the tasks to measure, each with its schedule
measure_all        each model in turn: its generators or its server, every task once
task_figures       avg@k and pass@k of a task, with intervals, overall and by slice
paired             two models compared on the examples that both were scored on
result_lines       what a person reads of it
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, shutdown_context, this_proc

from torchtitan.experiments.rl.command import checks
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.teachers import check_servers
from torchtitan.experiments.rl.compat.monarch import (
    MONARCH_OUTPUT,
    original,
    printed_to,
    process_death,
)
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig, StopConfig
from torchtitan.experiments.rl.controller.signals import SIGNAL_POLL_S, Signals, cause
from torchtitan.experiments.rl.data.dataset import count_examples
from torchtitan.experiments.rl.envs.renderer import build_context
from torchtitan.experiments.rl.errors import ConfigError, MissingError, RunError, users_traceback
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.fleet.notes import print_notes
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel, hosted_models
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, LocalRunner, TaskSet
from torchtitan.experiments.rl.loops.validation import (
    Validator,
    cause_of_failure,
    labelled,
    pass_at_k,
)
from torchtitan.experiments.rl.observability.console import Console, write_line
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.actor import reported_endpoint
from torchtitan.experiments.rl.process.host import raise_descriptor_limit
from torchtitan.experiments.rl.process.lifetime import descendants, kill_descendants
from torchtitan.experiments.rl.process.logs import quiet_libraries, set_up_logging
from torchtitan.experiments.rl.process.temporary import TemporaryFolder
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.rounding import are_equal, reaches
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.watch.alarms import FirstFailures

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Candidate:
    """Model that is measured."""

    config: RunConfig
    """Config that ``evaluated_config`` returned, with this model."""
    plan: RunPlan
    endpoint: FrozenModel | None
    """Server of the model. None starts generators on the config's model."""
    run_dir: Path
    """Folder for the records and the logs of this model."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of examples in the validation set of each task."""

    @property
    def label(self) -> str:
        """Name of the model for people."""
        if self.endpoint is None:
            return self.config.model.hf_assets_path
        return f"{self.endpoint.name} at {', '.join(self.endpoint.urls)}"

    @property
    def schedules(self) -> dict[str, ValidationConfig]:
        """Schedule of each task."""
        return {
            name: task.validation_schedule or self.config.validation
            for name, task in self.config.tasks.items()
        }


def evaluated_config(config: RunConfig, *, tasks: Sequence[str], attempts: int | None) -> RunConfig:
    """Return the config with the tasks to measure, each with its schedule, on this host.

    Args:
        tasks: names of the tasks; all that have a validation set if empty.
        attempts: rollouts of each example; None takes the schedule's number. Several attempts of a
            greedy schedule are sampled at the task's training temperature.

    Raises:
        ConfigError: there is no such task, or it has no validation set.
    """
    if attempts is not None and attempts < 1:
        raise ConfigError("--attempts", attempts, "must be at least 1")
    if unknown := set(tasks) - set(config.tasks):
        cure = f"no such task; the config has {', '.join(config.tasks)}"
        raise ConfigError("--tasks", min(unknown), cure)
    chosen = {
        name: task
        for name, task in config.tasks.items()
        if name in tasks or (not tasks and task.validation is not None)
    }
    if not chosen:
        cure = "none has a validation set; set tasks.NAME.validation"
        raise ConfigError("tasks", ", ".join(config.tasks), cure)
    for name, task in chosen.items():
        if task.validation is None:
            cure = "the task has no validation set: set one, or leave it out"
            raise ConfigError(f"tasks.{name}.validation", None, cure)
        schedule = replace(task.validation_schedule or config.validation, every=1)
        if attempts is not None:
            schedule.attempts = attempts
            if attempts > 1 and schedule.temperature == 0:
                schedule.temperature = task.sampling.temperature
        chosen[name] = replace(task, validation_schedule=schedule)
    provision = ProvisionConfig(device=config.provision.device)
    # An evaluation keeps no checkpoint, and has no step to end before.
    checkpoint = replace(config.checkpoint, keep_best=None)
    return replace(
        config, tasks=chosen, provision=provision, checkpoint=checkpoint, stop_at=StopConfig()
    )


def checked_plan(config: RunConfig, endpoint: FrozenModel | None) -> tuple[RunPlan, dict[str, int]]:
    """Check the config and what this machine has, and plan its generators.

    Returns:
        The plan, and the number of examples in the validation set of each task.

    Raises:
        ConfigError: the first problem.
    """
    if endpoint is not None and not hosted_models(config.tasks):
        config.provision = ProvisionConfig(device="cpu")  # no model computes on this host
        config.rollout_workers = 0
    checks.check(config)
    try:
        checks.check_model_folder(config.model)
    except MissingError:
        if endpoint is None:
            raise
    for lacking in checks.missing(config).values():
        raise lacking
    check_servers(config)
    if endpoint is None:
        config.generator.engine.check_present(field="generator.engine")
    tasks = build_tasks(config, read_policy_tokenizer(config))
    sizes = {
        name: count_examples(task.validation)
        for name, task in tasks.items()
        if task.validation is not None
    }
    return plan_of_generators(config), sizes


def plan_of_generators(config: RunConfig) -> RunPlan:
    """Plan a run of which only the generators and the hosted models are started, on this host."""
    raise_descriptor_limit()
    device = config.provision.resolve()
    if device == "cpu":
        # On the cores that a run's generators have, figures repeat a run's to the last bit.
        return checks.plan_run(config)
    return checks.plan_run(config, device=device, available=without_trainer(config))


def without_trainer(config: RunConfig) -> list[int]:
    """Return the GPUs to plan with if no trainer runs.

    A plan gives the first GPUs to the trainer's ranks. Here they have numbers below 0, so that the
    generators have the GPUs from 0 on.
    """
    ranks = config.trainer.ranks
    return list(range(-ranks, needed_gpus(config) - ranks))


class EndpointPolicy(EndpointClient):
    """Policy that a server samples (``rollouts.policy.PolicyClient``).

    Its tokens have policy version -1, as those of any frozen model.
    """

    version = 0
    """Policy version that is measured."""

    def __init__(self, model: FrozenModel, hosted: PolicyClient):
        """Sample the policy from ``model``, and take the tasks' frozen models from ``hosted``."""
        super().__init__(model)
        self.frozen = hosted.frozen

    def with_adapter(self, name: str) -> "EndpointPolicy":
        """Return this policy: a server has no adapters of the run."""
        return self


class Evaluation:
    """Evaluation of one model: every task once.

    ``run`` stops all that it has started before it returns.
    """

    def __init__(self, model: Candidate):
        self._model = model
        self.console = Console(sys.stderr)
        self._context = RunContext(model.plan, model.run_dir, console=self.console)
        self._failures: list[Exception] = []
        self.fleet = Fleet(self._context, on_failure=self._failures.append)
        self._result = Result(examples={name: [] for name in model.config.tasks})
        self._measuring: asyncio.Task[None] | None = None

    async def run(self) -> "Result":
        """Return the result, without metrics if ``stop`` ended the evaluation early."""
        self._measuring = asyncio.create_task(self._measure())
        (error,) = await asyncio.gather(self._measuring, return_exceptions=True)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error
        return self._result

    def stop(self) -> None:
        """End ``run`` early. The groups that have ended are recorded."""
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        config = self._model.config
        ordered = self._context.ordered
        tasks = TaskSet(config.tasks, ordered=ordered, limits=config.user_code)
        recorder = config.recorder.build(run_dir=self._model.run_dir)
        failures = FirstFailures(_note, log="logs/evaluator.jsonl")
        policy = None
        if self._model.endpoint is not None:
            policy = EndpointPolicy(self._model.endpoint, self.fleet.policy)
        validator: Validator | None = None
        try:
            runner = await self._start_runner(tasks, policy)
            validator = Validator(
                tasks.tasks,
                runner,
                config.validation,
                on_failure=self._failures.append,
                ordered=ordered,
                on_group=partial(self._take_group, recorder, failures),
            )
            validator.start(0)
            await self.fleet.supervisor.unless_failed(validator.wait())
            reports = validator.take()
            if self._failures or not reports:
                raise next(iter(self._failures), RunError("nothing was measured"))
            self._result.metrics = reports[0].metrics
        finally:
            if validator is not None:
                await validator.close()
            for fault in [*await tasks.close(), *await self.fleet.close()]:
                logger.warning("%s", fault)
            if policy is not None:
                await policy.close()
            await asyncio.to_thread(recorder.close)

    async def _start_runner(self, tasks: TaskSet, policy: EndpointPolicy | None) -> GroupRunner:
        """Build the tasks, and start the generators and what runs the tasks' groups."""
        config = self._model.config
        path = config.model.hf_assets_path
        await tasks.build(build_context(config.renderer, path, seed=config.seed))
        starting = self.fleet.start_generators(policy=policy is None)
        await self.fleet.supervisor.unless_failed(starting)
        if policy is None:
            return await self.fleet.start_runner(tasks)
        await tasks.setup(policy)
        return LocalRunner(policy, seed=config.seed)

    def _take_group(
        self, recorder: RolloutRecorder, failures: FirstFailures, group: RolloutGroup
    ) -> None:
        """Keep what a group that has ended was scored, and record it.

        A run records its validation when all groups have ended. An evaluation may be stopped, so
        each group is recorded at once.
        """
        self._result.examples[group.task_name].append(example_of(group))
        failures.group_arrived(group)
        if cause := cause_of_failure(group):
            self._result.causes.setdefault(group.task_name, cause)
        outcomes = {rollout.rollout_id: "validation" for rollout in labelled(group, "0").rollouts}
        recorder.record(group, outcomes, kind="validation")


class Evaluator(Actor):
    """Actor that runs an evaluation: Monarch tells an actor of the death of what it spawned."""

    process_name = ""
    """See ``reported_endpoint``."""

    def __init__(self, model: Candidate):
        self._evaluation = Evaluation(model)
        self._run_dir = model.run_dir

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

    def __supervise__(self, failure: Any) -> bool:  # noqa: ANN401 - Monarch's, without types
        """See Controller.__supervise__."""
        self._loop.call_soon_threadsafe(
            self._evaluation.fleet.supervisor.died, process_death(failure)
        )
        return True


def _note(line: str, traceback: str = "") -> None:
    write_line(sys.stderr, "\n".join(map(printable_line, [line, *traceback.splitlines()])))


def measure_all(models: list[Candidate], temporary: TemporaryFolder) -> tuple[int, list["Result"]]:
    """Measure each model in turn.

    Returns:
        The exit code, and the results of the models that were measured whole.
    """
    signals = Signals()
    results: list[Result] = []
    try:
        for number, model in enumerate(models):
            code, result = _measure(number, model, signals, temporary)
            if result is None:
                return code, results
            results.append(result)
        return 0, results
    finally:
        with quiet_libraries():
            shutdown_context().get()


def _measure(
    number: int, model: Candidate, signals: Signals, temporary: TemporaryFolder
) -> tuple[int, "Result | None"]:
    """Measure a model in an actor of this process, and tell it of signals.

    Returns:
        The exit code, and the result; None if the evaluation failed or was stopped.
    """
    _note(f"measuring   {model.label} on {', '.join(parts_measured(model))}")
    with printed_to(model.run_dir / MONARCH_OUTPUT):
        here = this_proc()
    evaluator = here.spawn(f"evaluator_{number}", Evaluator, model)
    measuring = evaluator.measure.call_one()
    stop_request = None
    while True:
        try:
            result: Result = measuring.get(timeout=SIGNAL_POLL_S)
            break
        except TimeoutError:
            temporary.note_shared_memory(descendants())
            if len(signals.received) > 1:
                _note("stopped at once")
                kill_descendants()
                return 128 + signals.received[0], None
            if signals.received and stop_request is None:
                _note("stopping; once more stops at once")
                stop_request = evaluator.request_stop.call_one()
        except Exception as error:  # noqa: BLE001 - of any kind that Monarch brings from the actor
            line = f"error: {cause(error)} (logs in {model.run_dir}/logs)"
            _note(line, users_traceback(original(error)))
            return 1, None
    if result.metrics is None:
        ended = sum(map(len, result.examples.values()))
        _note(f"stopped: {ended} examples of it were measured, recorded in {model.run_dir}")
        return 128 + signals.received[0], None
    return 0, result


def parts_measured(model: Candidate) -> list[str]:
    """Return for each task which of its examples are measured, and how often."""
    parts = []
    for name, schedule in model.schedules.items():
        size = model.sizes[name]
        which = f"the first {schedule.examples:,} of" if schedule.examples < size else "all"
        attempts = f", {schedule.attempts} attempts each" if schedule.attempts > 1 else ""
        parts.append(f"{name} ({which} {size:,} examples{attempts})")
    return parts


Figures = dict[str, Any]
"""Figures by name, as ``--json`` prints them."""
Interval = tuple[float | None, float | None]
"""Ends of a 95 % interval; None where it is unknown."""
RESAMPLES = 10_000
"""Number of bootstrap samples behind an interval."""
BLOCK = 2**20
"""Number of draws that are in memory at once."""
MOST_SLICES = 12
"""Maximum number of slices by one field of an example's info.

A field with more values labels almost every example differently.
"""


@dataclass(kw_only=True, slots=True)
class ExampleRewards:
    """Rewards of one model for one example."""

    example: str
    """Id of the example's group, which is the same for every model."""
    rewards: list[float]
    """Rewards of the attempts that were scored."""
    attempts: int
    """Number of attempts."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the example's info that may name a slice."""

    @property
    def mean(self) -> float:
        """Mean reward of the attempts that were scored."""
        return float(np.mean(self.rewards))


@dataclass(kw_only=True, slots=True)
class Result:
    """Result of one model's evaluation."""

    metrics: dict[str, float] | None = None
    """Metrics as a run's validation reports them; None if the evaluation was stopped."""
    examples: dict[str, list[ExampleRewards]]
    """Examples of each task."""
    causes: dict[str, str] = field(default_factory=dict)
    """Cause of the first failure of each task."""


def example_of(group: RolloutGroup) -> ExampleRewards:
    """Return what a group was scored, in plain values: those of its example may be of any class."""
    info = group.data_sample.info if isinstance(group.data_sample.info, dict) else {}
    facts = {
        str(name): value for name, value in info.items() if isinstance(value, str | bool | int)
    }
    return ExampleRewards(
        example=group.group_id,
        rewards=list(map(float, group.rewards)),
        attempts=len(group.rollouts),
        facts=facts,
    )


def task_figures(
    examples: Sequence[ExampleRewards], *, attempts: int, pass_reward: float
) -> Figures:
    """Return avg@k and pass@k of a task with 95 % intervals, overall and by slice.

    A slice is the examples with one value of a field of their info. A field makes slices if it
    divides the examples into at least two, and not one by one.
    """
    slices: dict[str, Figures] = {}
    for name in sorted({name for example in examples for name in example.facts}):
        values = {example.facts.get(name) for example in examples}
        if not 2 <= len(values) <= min(MOST_SLICES, len(examples) // 2):
            continue
        slices[name] = {}
        for value in sorted(values, key=lambda value: (str(type(value)), value)):
            chosen = [example for example in examples if example.facts.get(name) == value]
            slices[name][str(value)] = _figures(chosen, attempts, pass_reward)
    return _figures(examples, attempts, pass_reward) | {"slices": slices}


def _figures(examples: Sequence[ExampleRewards], attempts: int, pass_reward: float) -> Figures:
    scored = [example for example in examples if example.rewards]
    figures: Figures = {
        "examples": len(examples),
        "failed": sum(example.attempts - len(example.rewards) for example in examples),
        f"avg@{attempts}": _estimate([example.mean for example in scored]),
    }
    for k in sorted({1, attempts}):
        passes = []
        for example in scored:
            count = len(example.rewards)
            passed = sum(reaches(reward, pass_reward) for reward in example.rewards)
            passes.append(pass_at_k(count, passed, min(k, count)))
        figures[f"pass@{k}"] = _estimate(passes)
    return figures


def _estimate(values: Sequence[float]) -> dict[str, float | None]:
    low, high = interval(values)
    return {"value": float(np.mean(values)) if values else None, "low": low, "high": high}


def interval(values: Sequence[float]) -> Interval:
    """Return the 95 % bootstrap interval of the mean of ``values``, one value for each example.

    The percentile method: the examples are drawn again with replacement, as many as there are, and
    the interval holds the middle 95 % of the means. The generator is seeded, so that the same
    values have the same interval.

    Returns:
        None for both ends if all values are equal: every sample has the same mean then, which says
        nothing about other examples.
    """
    array = np.asarray(values, np.float64)
    size = len(array)
    if not size or array.min() == array.max():
        return None, None
    random = np.random.default_rng(0)
    rows = max(1, BLOCK // size)
    means = []
    for done in range(0, RESAMPLES, rows):
        drawn = random.integers(0, size, (min(rows, RESAMPLES - done), size))
        means.append(array[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def paired(first: Sequence[ExampleRewards], second: Sequence[ExampleRewards]) -> Figures:
    """Compare two models on the examples that both were scored on.

    Returns:
        ``difference``, the mean of the second model's reward less the first's; its bootstrap
        interval over the examples' own differences (``low``, ``high``); and which examples the
        second model has ``won`` and ``lost``.
    """
    before = {example.example: example.mean for example in first if example.rewards}
    after = {example.example: example.mean for example in second if example.rewards}
    changes = {name: after[name] - reward for name, reward in before.items() if name in after}
    changed = [name for name in changes if not are_equal([before[name], after[name]])]
    differences = list(changes.values())
    low, high = interval(differences)
    return {
        "examples": len(changes),
        "difference": float(np.mean(differences)) if differences else None,
        "low": low,
        "high": high,
        "won": [name for name in changed if changes[name] > 0],
        "lost": [name for name in changed if changes[name] < 0],
    }


def result_lines(result: Figures) -> list[str]:
    """Return the lines that a person reads of the result that ``--json`` prints."""
    lines: list[str] = []
    for model in result["models"]:
        lines.append(f"model       {model['model']}")
        for task, figures in model["tasks"].items():
            lines += _task_lines(task, figures)
        lines.append(f"records     {model['folder']}")
    for task, comparison in (result["comparison"] or {}).items():
        lines.append(f"compared    {task}: {_comparison_text(comparison)}")
    return [*lines, "Intervals are of 95 %, by bootstrap over examples."]


def _task_lines(task: str, figures: Figures) -> list[str]:
    settings = f"{figures['attempts']} attempts at temperature {figures['temperature']:g}"
    limits = {name: figures[name] for name in ("top_p", "top_k", "max_tokens") if name in figures}
    settings += "".join(f", {name} {value:g}" for name, value in limits.items())
    failed = f", {figures['failed']} attempts failed" if figures["failed"] else ""
    lines = [f"{task:<12}{figures['examples']} examples, {settings}{failed}"]
    lines += _estimates(figures, " " * 12)
    for name, values in figures["slices"].items():
        for value, part in values.items():
            lines.append(f"{'':<12}{name} = {value} ({part['examples']})")
            lines += _estimates(part, " " * 14)
    return lines


def _comparison_text(comparison: Figures) -> str:
    if comparison["difference"] is None:
        return "no example was scored for both"
    ends = comparison["low"], comparison["high"]
    difference = _with_interval(comparison["difference"], ends, "+.3f", gap=" ")
    won = len(comparison["won"])
    lost = len(comparison["lost"])
    examples = comparison["examples"]
    return f"second less first {difference}; {won} of {examples} examples better, {lost} worse"


def _estimates(figures: Figures, indent: str) -> list[str]:
    """Return a line for each avg@k and pass@k."""
    lines = []
    for name, figure in figures.items():
        if "@" not in name:
            continue
        text = "nothing was scored"
        if figure["value"] is not None:
            text = _with_interval(figure["value"], (figure["low"], figure["high"]), ".3f")
        lines.append(f"{indent}{name:<9}{text}")
    return lines


def _with_interval(value: float, ends: Interval, places: str, *, gap: str = "  ") -> str:
    low, high = ends
    if low is None:
        return f"{value:{places}}"
    return f"{value:{places}}{gap}({low:{places}} to {high:{places}})"
