"""What an evaluation takes from a run's config, checked before a process is spawned."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.experiments.rl.config import checks, trial_build
from torchtitan.experiments.rl.config.machine import raise_descriptor_limit
from torchtitan.experiments.rl.config.placement import Place, Placement
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.provision import ProvisionConfig
from torchtitan.experiments.rl.config.resolved import resolved_config
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.saved_command import CONFIG_FILE
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.generation.references import FrozenModel, hosted_models


@dataclass(kw_only=True, slots=True)
class Candidate:
    """A model that is measured."""

    label: str
    config: RunConfig
    plan: RunPlan
    endpoint: FrozenModel | None
    """None: generators on the config's model."""
    run_dir: str


def evaluated_config(config: RunConfig, *, tasks: Sequence[str], attempts: int | None) -> RunConfig:
    """The config with the tasks to measure, each with a schedule of its own, on this host.

    Args:
        tasks: by name; empty: every task that has a validation set.
        attempts: of each example; None: the schedule's. Above 1 where a schedule is greedy, they are sampled at the task's
            training temperature.

    Raises:
        ConfigError: no such task, or one without a validation set.
    """
    if attempts is not None and attempts < 1:
        raise ConfigError("--attempts", attempts, "must be at least 1")
    for name in tasks:
        if name not in config.tasks:
            raise ConfigError("--tasks", name, f"no such task; the config has {', '.join(config.tasks)}")
    chosen = {name: config.tasks[name] for name in tasks} or {n: t for n, t in config.tasks.items() if t.validation is not None}
    if not chosen:
        raise ConfigError("tasks", ", ".join(config.tasks), "none has a validation set; set tasks.NAME.validation")
    for name, task in chosen.items():
        if task.validation is None:
            raise ConfigError(f"tasks.{name}.validation", None, "the task has no validation set: set one, or leave it out")
        schedule = task.validation_schedule or config.validation
        k = schedule.attempts if attempts is None else attempts
        greedy = attempts is not None and k > 1 and schedule.temperature == 0
        temperature = task.sampling.temperature if greedy else schedule.temperature
        chosen[name] = replace(task, validation_schedule=replace(schedule, every=1, attempts=k, temperature=temperature))
    provision = ProvisionConfig(device=config.provision.device)
    # Sizes of a step divide by those of the tasks that train; nothing trains here.
    return replace(config, tasks=chosen, provision=provision, rollouts_per_step=None)


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
    if lacking := [*checks.missing(config).values(), *([] if endpoint is not None else checks.missing_engine(config))]:
        raise lacking[0]
    trial_build.build_tasks(config)
    raise_descriptor_limit()
    device = config.provision.resolve()
    if device == "cpu":
        return checks.plan_run(config)  # the run's own cores: figures repeat to the last bit
    plan = checks.plan_run(config, device=device, available=list(range(checks.needed_gpus(config))))
    return replace(plan, placement=_without_trainer(plan.placement))


def candidate(config: RunConfig, plan: RunPlan, endpoint: FrozenModel | None, run_dir: str) -> Candidate:
    """Saves the config in the folder."""
    (Path(run_dir) / CONFIG_FILE).write_text(json.dumps(resolved_config(config), indent=2) + "\n", encoding="utf-8")
    label = config.model.hf_assets_path if endpoint is None else f"{endpoint.name} at {endpoint.base_url}"
    return Candidate(label=label, config=config, plan=plan, endpoint=endpoint, run_dir=run_dir)


def _without_trainer(placement: Placement) -> Placement:
    """GPUs are counted from 0 again."""
    places = [*placement.generators, *(place for places in placement.hosted for place in places)]
    own = {device: number for number, device in enumerate(sorted({d for place in places for d in place.devices}))}

    def moved(place: Place) -> Place:
        return Place(place.host, tuple(own[device] for device in place.devices))

    return replace(
        placement,
        trainer=(),
        generators=tuple(map(moved, placement.generators)),
        hosted=tuple(tuple(map(moved, places)) for places in placement.hosted),
    )
