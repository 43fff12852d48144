"""Simulates one run, or many short ones to find the best split of the GPUs."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from torchtitan.experiments.rl.command import checks
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.plan.costs import DEVICES, GIB, Gpu, ModelSizes
from torchtitan.experiments.rl.plan.plan import trainer_memory
from torchtitan.experiments.rl.simulation.clock import run_virtually
from torchtitan.experiments.rl.simulation.lengths import Lengths
from torchtitan.experiments.rl.simulation.rates import Rates, run_rates
from torchtitan.experiments.rl.simulation.result import SimulationResult
from torchtitan.experiments.rl.simulation.run import Failures, SimulatedRun

BOUNDS = (0, 1, 2, 4)
"""Values of max_offpolicy_steps that a sweep tries."""
TRAINER_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train, of which a sweep of ``replicas`` tries each."""
SWEEP_STEPS = 20
"""Maximum number of steps of a run that is compared with others."""
SWEEP_FIELDS = ("replicas", "max_offpolicy_steps")
SWEEP_HEADER = (
    "trainer ranks  replicas  bound   step s  generators idle  trainer idle   age   "
    "GPU hours a million tokens"
)


@dataclass(kw_only=True, slots=True)
class Setting:
    """Config to simulate, and the world that it runs in."""

    config: RunConfig
    lengths: Lengths
    device: str
    """Kind of GPU: a key of `DEVICES`."""
    failures: Failures

    def rates(self) -> Rates:
        """Return the seconds that the actors of the config take on the device.

        Raises:
            ConfigError: the config can't run, or does not fit its GPUs.
        """
        config = self.config
        device = DEVICES[self.device]
        checks.check(config)
        config.trainer.parallelism.validate(field="trainer.parallelism", ranks=config.trainer.ranks)
        sizes = checks.model_sizes(config, "cuda")
        self._check_trainer_fits(sizes, device)
        rates = run_rates(config, sizes, device)
        self._check_rollouts_fit(rates)
        return rates

    def _check_trainer_fits(self, sizes: ModelSizes, device: Gpu) -> None:
        needed_gib = trainer_memory(sizes, self.config, device="cuda").total / GIB
        if needed_gib > device.gib:
            cure = (
                f"a rank needs {needed_gib:.0f} GiB, and {self.device} has {device.gib:.0f}: more "
                "ranks, or fewer rows a microbatch"
            )
            raise ConfigError("trainer.ranks", self.config.trainer.ranks, cure)

    def _check_rollouts_fit(self, rates: Rates) -> None:
        longest = max(task.env.max_rollout_tokens for task in self.config.tasks.values())
        room = rates.engine.cache_tokens
        if room < longest:
            field = "generator.engine.tensor_parallel_degree"
            degree = self.config.generator.engine.tensor_parallel_degree
            cure = (
                f"an engine on {self.device} has room for {room} tokens: a rollout may take "
                f"{longest}"
            )
            raise ConfigError(field, degree, cure)

    def run(self, run_dir: Path | None = None) -> SimulationResult:
        """Simulate the run.

        Args:
            run_dir: folder for metrics, ledger and events; None writes none.

        Raises:
            ConfigError: the config can't run, or does not fit its GPUs.
            RunError: an invariant of the run does not hold, or a replica died too often.
        """
        simulation = SimulatedRun(
            self.config, self.rates(), self.lengths, failures=self.failures, run_dir=run_dir
        )
        return run_virtually(simulation.run)

    def run_briefly(self) -> SimulationResult:
        """Simulate a few steps of the run, without evaluations."""
        short = self.changed({"steps": min(SWEEP_STEPS, self.config.steps)})
        for task in short.config.tasks.values():
            task.validation = None
        return short.run()

    def changed(self, values: Mapping[str, object]) -> "Setting":
        """Return the setting with other values of the config's fields, by their paths."""
        config = copy.deepcopy(self.config)
        for path, value in values.items():
            *parents, name = path.split(".")
            setattr(reduce(getattr, parents, config), name, value)
        return replace(self, config=config)

    def divided(self, gpus: int, trainer_share: float) -> "Setting":
        """Return the setting with ``gpus`` divided between the trainer and the generators.

        Args:
            trainer_share: share of the GPUs for the trainer, which gets about so many.

        Raises:
            ConfigError: there are too few GPUs for a trainer and a replica.
        """
        engine_gpus = self.config.generator.engine.tensor_parallel_degree
        parallelism = self.config.trainer.parallelism
        unit = (
            parallelism.data_parallel_replicate_degree
            * parallelism.tensor_parallel_degree
            * parallelism.context_parallel_degree
            * (parallelism.data_parallel_shard_degree or 1)
        )
        wanted_units = max(1, round(gpus * trainer_share / unit))
        most_units = (gpus - engine_gpus) // unit
        ranks = min(wanted_units, most_units) * unit
        if ranks < 1:
            raise ConfigError(
                "--gpus",
                gpus,
                f"trainer ranks come in {unit}, engines in {engine_gpus}: give more",
            )
        replicas = (gpus - ranks) // engine_gpus
        return self.changed({"trainer.ranks": ranks, "generator.replicas": replicas})


def sweep(setting: Setting, fields: Sequence[str], gpus: int) -> list[str]:
    """Simulate a short run with every combination of the fields' values.

    Returns:
        A line for each run, the best one first.

    Raises:
        ConfigError: a field is not one of `SWEEP_FIELDS`, or no combination can run.
    """
    unknown = [field for field in fields if field not in SWEEP_FIELDS]
    if unknown:
        cure = f"want {', '.join(SWEEP_FIELDS)}, or both with a comma"
        raise ConfigError("--sweep", unknown[0], cure)
    shares: Sequence[float] = (setting.config.trainer.ranks / gpus,)
    if "replicas" in fields:
        shares = TRAINER_SHARES
    bounds: Sequence[int] = (setting.config.max_offpolicy_steps,)
    if "max_offpolicy_steps" in fields:
        bounds = BOUNDS
    runs: list[tuple[SimulationResult, RunConfig]] = []
    refusals: list[ConfigError] = []
    for share, bound in itertools.product(shares, bounds):
        try:
            candidate = _candidate(setting, gpus, share, bound)
            runs.append((candidate.run_briefly(), candidate.config))
        except ConfigError as error:
            refusals.append(error)
    if not runs:
        raise refusals[-1]
    runs.sort(key=lambda run: run[0].gpu_hours_per_million)
    lines = [SWEEP_HEADER, *(_sweep_row(result, config) for result, config in runs)]
    if refusals:
        lines.append(f"left out       what can't run: {refusals[-1]}")
    return lines


def _candidate(setting: Setting, gpus: int, trainer_share: float, bound: int) -> Setting:
    """Return the setting of one run of a sweep.

    Raises:
        ConfigError: there are too few GPUs.
    """
    candidate = setting.divided(gpus, trainer_share).changed({"max_offpolicy_steps": bound})
    if bound == 0:  # a synchronous run has one process for its rollouts
        candidate = candidate.changed({"rollout_workers": 0})
    return candidate


def _sweep_row(result: SimulationResult, config: RunConfig) -> str:
    return (
        f"{config.trainer.ranks:13}  {config.generator.replicas:8}  "
        f"{config.max_offpolicy_steps:5}  {result.step_s:7.1f}  "
        f"{result.generators_idle:15.0%}  {result.trainer_idle:12.0%}  "
        f"{result.mean('policy/age_mean'):4.2f}   {result.gpu_hours_per_million:.3f}"
    )
