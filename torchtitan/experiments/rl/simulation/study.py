"""One simulated run and what it says, in lines; the best split of N GPUs."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.command import checks
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.plan.costs import DEVICES, GIB
from torchtitan.experiments.rl.plan.plan import trainer_memory
from torchtitan.experiments.rl.simulation.clock import run_virtually
from torchtitan.experiments.rl.simulation.engine import Rates, run_rates
from torchtitan.experiments.rl.simulation.run import Failures, Outcome, SimulatedRun
from torchtitan.experiments.rl.simulation.tasks import Lengths

BOUNDS = (0, 1, 2, 4)
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train, of which a sweep of ``replicas`` takes each."""
SHORT = 20
"""Steps of a run that is compared with others."""


@dataclass(kw_only=True, slots=True)
class Setting:
    """What is simulated, on which device."""

    config: RunConfig
    lengths: Lengths
    device: str
    failures: Failures

    def rates(self) -> Rates:
        """
        Raises:
            ConfigError: the config can't run, or the trainer does not fit its GPUs.
        """
        config, device = self.config, DEVICES[self.device]
        checks.check(config)
        config.trainer.parallelism.validate(field="trainer.parallelism", ranks=config.trainer.ranks)
        sizes = checks.model_sizes(config, "cuda")
        if (needed := trainer_memory(sizes, config, device="cuda").total / GIB) > device.gib:
            cure = f"a rank needs {needed:.0f} GiB, and {self.device} has {device.gib:.0f}: more ranks, or fewer rows a microbatch"
            raise ConfigError("trainer.ranks", config.trainer.ranks, cure)
        rates = run_rates(config, sizes, device)
        longest = max(task.env.max_rollout_tokens for task in config.tasks.values())
        if rates.engine.cache_tokens < longest:
            degree = config.generator.engine.tensor_parallel_degree
            cure = f"an engine on {self.device} has room for {rates.engine.cache_tokens} tokens: a rollout may take {longest}"
            raise ConfigError("generator.engine.tensor_parallel_degree", degree, cure)
        return rates

    def run(self, run_dir: Path | None = None) -> Outcome:
        run = SimulatedRun(
            self.config, self.rates(), self.lengths, failures=self.failures, run_dir=run_dir
        )
        return run_virtually(run.run)

    def tried(self, **fields: Any) -> Outcome:
        """A short run with other values, and without evaluations."""
        short = self.changed(steps=min(SHORT, self.config.steps), **fields)
        for task in short.config.tasks.values():
            task.validation = None
        return short.run()

    def changed(self, **fields: Any) -> "Setting":
        """With other values of some of the config's fields, by path."""
        config = copy.deepcopy(self.config)
        for path, value in fields.items():
            *parents, name = path.split(".")
            setattr(reduce(getattr, parents, config), name, value)
        return replace(self, config=config)

    def divided(self, gpus: int, trains: float) -> "Setting":
        """``gpus`` divided between trainer and generators, about ``trains`` of them for the trainer."""
        config = self.config
        parallelism, engine = (
            config.trainer.parallelism,
            config.generator.engine.tensor_parallel_degree,
        )
        step = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
        step *= parallelism.context_parallel_degree * (parallelism.data_parallel_shard_degree or 1)
        ranks = min(max(1, round(gpus * trains / step)), (gpus - engine) // step) * step
        if ranks < 1:
            raise ConfigError(
                "--gpus", gpus, f"trainer ranks come in {step}, engines in {engine}: give more"
            )
        return self.changed(
            **{"trainer.ranks": ranks, "generator.replicas": (gpus - ranks) // engine}
        )


def described(outcome: Outcome) -> list[str]:
    """What a run has shown, a line each. All of it is simulated."""
    steps, mean, engines = outcome.steps.values(), outcome.mean, outcome.engines
    whole, step_s = max(1e-9, outcome.seconds * outcome.replicas), max(1e-9, outcome.step_s)
    generate, train = (
        engines["busy_s"] / outcome.replicas / len(steps),
        outcome.trainer_busy_s / len(steps),
    )
    lines = [
        f"step           {step_s:.1f} s on average; busy: generators {generate:.1f} s, trainer {train:.1f} s, so "
        f"{max(generate, train) / step_s:.2f} of the ideal max(generate, train)",
        f"generators     idle {outcome.generators_idle:.0%}: loading weights {engines['loading_s'] / whole:.1%}, "
        f"gone {outcome.engine_down_s / whole:.1%}, else nothing to do",
        f"trainer        idle {outcome.trainer_idle:.0%}: waits for rollouts {mean('time/wait_s') / step_s:.0%}, "
        f"for weights {mean('time/sync_s') / step_s:.1%}",
        f"age            {mean('policy/age_mean'):.2f} versions on average, at most "
        f"{max(metrics['policy/age_max'] for metrics in steps):.0f}",
        f"tokens         {outcome.trained_tokens / 1e6:,.1f}M trained of {engines['sampled'] / 1e6:,.1f}M sampled; "
        f"{engines['recomputed'] / 1e6:,.2f}M computed again ({engines['preemptions']:,} preemptions), "
        f"{outcome.lost_tokens / 1e6:,.2f}M lost with a process; "
        f"{engines['cached'] / max(1, engines['prompt']):.0%} of the prompts cached",
        f"rollouts       {', '.join(f'{count:,} {name}' for name, count in sorted(outcome.ledger.items()) if count)}",
        f"cost           {outcome.seconds / 3600:,.2f} h on {outcome.gpus:,} GPUs, "
        f"{outcome.gpu_hours_per_million:.3f} GPU hours a million tokens that are trained on",
    ]
    if outcome.deaths:
        down, repeated = outcome.down_s, outcome.repeated_s
        lines.append(
            f"failures       {outcome.deaths}: {down:,.0f} s down and {repeated:,.0f} s repeated, so each cost "
            f"{(down + repeated) / outcome.deaths / 3600 * outcome.gpus:,.0f} GPU hours; "
            f"goodput {1 - (down + repeated) / outcome.seconds:.0%}"
        )
    return lines


def sweep(setting: Setting, fields: Sequence[str], gpus: int) -> list[str]:
    """Short runs with every combination of the fields' values: a line each, and the best first.

    Raises:
        ConfigError: a field that no sweep knows, or nothing can run.
    """
    if unknown := [field for field in fields if field not in ("replicas", "max_offpolicy_steps")]:
        raise ConfigError(
            "--sweep", unknown[0], "want replicas, max_offpolicy_steps, or both with a comma"
        )
    shares = SPLITS if "replicas" in fields else (setting.config.trainer.ranks / gpus,)
    bounds = BOUNDS if "max_offpolicy_steps" in fields else (setting.config.max_offpolicy_steps,)
    rows, fault = [], None
    for share, bound in itertools.product(shares, bounds):
        try:
            divided = setting.divided(gpus, share).changed(max_offpolicy_steps=bound)
            if not bound:  # such a run has one process for its rollouts
                divided = divided.changed(rollout_workers=0)
            rows.append((divided.tried(), divided.config))
        except ConfigError as error:
            fault = error
    if not rows:
        assert fault is not None, "each was refused"
        raise fault
    rows.sort(key=lambda row: row[0].gpu_hours_per_million)
    lines = [
        "trainer ranks  replicas  bound   step s  generators idle  trainer idle   age   GPU hours a million tokens"
    ]
    for outcome, config in rows:
        lines.append(
            f"{config.trainer.ranks:13}  {config.generator.replicas:8}  {config.max_offpolicy_steps:5}  {outcome.step_s:7.1f}  "
            f"{outcome.generators_idle:15.0%}  {outcome.trainer_idle:12.0%}  {outcome.mean('policy/age_mean'):4.2f}   "
            f"{outcome.gpu_hours_per_million:.3f}"
        )
    return lines if fault is None else [*lines, f"left out       what can't run: {fault}"]
