"""One simulated run and what it says, in lines; the same run with a field changed; the best split of N GPUs."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config import checks
from torchtitan.experiments.rl.config.plan import ModelSizes, trainer_memory
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.policy import decoder_config, parameter_count, policy_spec
from torchtitan.experiments.rl.simulation.clock import run_virtually
from torchtitan.experiments.rl.simulation.rates import DEVICES, GIB, Rates, device_rates
from torchtitan.experiments.rl.simulation.run import Failures, Outcome, SimulatedRun
from torchtitan.experiments.rl.simulation.tasks import Lengths

BOUNDS = (0, 1, 2, 4)
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train, of which a sweep of ``replicas`` takes each."""
SHORT = 20
"""Steps of a run that is compared with others."""
CHANGES: dict[str, Callable[[Any], Any]] = {
    "max_offpolicy_steps": lambda value: value + 1,
    "rollouts_per_step": lambda value: None if value is None else 2 * value,
    "groups_per_step": lambda value: 2 * value,
    "generator.engine.max_num_seqs": lambda value: 2 * value,
    "generator.weight_update": lambda value: "drain" if value != "drain" else "keep",
    "batcher.rows_per_microbatch": lambda value: 2 * value,
    "trainer.activation_checkpoint": lambda value: "selective" if value == "full" else "full",
    "trainer.parallelism.data_parallel_replicate_degree": lambda value: 2 * value,
    "generator.engine.enable_prefix_caching": lambda value: not value,
    "rollout_workers": lambda value: 2 * max(1, value),
}
"""Fields that may matter, and another value of each. ``more generators`` is tried beside them."""


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
        spec = policy_spec(config.model, device="cuda", max_seq_len=config.batcher.row_length)
        sizes = ModelSizes.of(decoder_config(spec), parameter_count(spec))
        if (needed := trainer_memory(sizes, config, device="cuda").total / GIB) > device.gib:
            cure = (
                f"a rank needs {needed:.0f} GiB, and {self.device} has {device.gib:.0f}: more ranks, or fewer rows a microbatch"
            )
            raise ConfigError("trainer.ranks", config.trainer.ranks, cure)
        rates = device_rates(config, sizes, device)
        longest = max(task.env.max_rollout_tokens for task in config.tasks.values())
        if rates.engine.cache_tokens < longest:
            degree = config.generator.engine.tensor_parallel_degree
            cure = f"an engine on {self.device} has room for {rates.engine.cache_tokens} tokens: a rollout may take {longest}"
            raise ConfigError("generator.engine.tensor_parallel_degree", degree, cure)
        return rates

    def run(self, run_dir: Path | None = None, *, steps: int | None = None) -> Outcome:
        """Simulate it; ``steps``: fewer than the config's, without evaluations."""
        rates, config = self.rates(), self.config
        if steps is not None:
            config = copy.deepcopy(config)
            config.steps = min(steps, config.steps)
        run = SimulatedRun(config, rates, self.lengths, failures=self.failures, run_dir=run_dir, validate=steps is None)
        return run_virtually(run.run)

    def changed(self, **fields: Any) -> "Setting":
        """With other values of some of the config's fields, by path."""
        config = copy.deepcopy(self.config)
        for path, value in fields.items():
            *parents, name = path.split(".")
            owner: Any = config
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, name, value)
        return Setting(config=config, lengths=self.lengths, device=self.device, failures=self.failures)

    def divided(self, gpus: int, trains: float) -> "Setting":
        """``gpus`` divided between trainer and generators, about ``trains`` of them for the trainer."""
        config = self.config
        parallelism, engine = config.trainer.parallelism, config.generator.engine.tensor_parallel_degree
        step = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
        step *= parallelism.context_parallel_degree * (parallelism.data_parallel_shard_degree or 1)
        ranks = min(max(1, round(gpus * trains / step)), (gpus - engine) // step) * step
        if ranks < 1:
            raise ConfigError("--gpus", gpus, f"trainer ranks come in {step}, engines in {engine}: give more")
        return self.changed(**{"trainer.ranks": ranks, "generator.replicas": (gpus - ranks) // engine})


def described(outcome: Outcome) -> list[str]:
    """What a run has shown, a line each. All of it is simulated."""
    hours, engines = outcome.seconds / 3600, outcome.engines
    per_step = max(1, len(outcome.steps))
    replicas = max(1e-9, outcome.seconds * outcome.replicas)
    idle, loading, down = outcome.generators_idle, engines.loading_s / replicas, outcome.engine_down_s / replicas
    wait, sync = (outcome.mean(f"time/{name}_s") / max(1e-9, outcome.step_s) for name in ("wait", "sync"))
    generate, train = engines.busy_s / outcome.replicas / per_step, outcome.trainer_busy_s / per_step
    ends = {name.partition("/")[2]: 0 for name in outcome.ledger}
    for name, count in outcome.ledger.items():
        ends[name.partition("/")[2]] += count
    dispatched = ends.pop("dispatched", 0)
    lines = [
        f"step           {outcome.step_s:.1f} s on average; busy: generators {generate:.1f} s, trainer {train:.1f} s, so "
        f"{max(generate, train) / max(1e-9, outcome.step_s):.2f} of the ideal max(generate, train)",
        f"generators     idle {idle:.0%}: loading weights {loading:.1%}, gone {down:.1%}, "
        f"nothing to do {idle - loading - down:.0%}",
        f"trainer        idle {outcome.trainer_idle:.0%}: waits for rollouts {wait:.0%}, for weights {sync:.1%}",
        f"age            {outcome.mean('policy/age_mean'):.2f} versions on average, at most "
        f"{max((metrics['policy/age_max'] for metrics in outcome.steps.values()), default=0):.0f}",
        f"tokens         {outcome.trained_tokens / 1e6:,.1f}M trained of {engines.sampled / 1e6:,.1f}M sampled; "
        f"{engines.recomputed_tokens / 1e6:,.2f}M computed again, {outcome.lost_tokens / 1e6:,.2f}M lost with a process; "
        f"{engines.cached_tokens / max(1, engines.prompt_tokens):.0%} of the prompts cached",
        f"rollouts       {dispatched:,}: " + ", ".join(f"{count:,} {name}" for name, count in sorted(ends.items()) if count),
        f"queue          {engines.longest_wait_s:.1f} s at most for a place in an engine; {engines.preemptions:,} preemptions",
        f"cost           {hours:,.2f} h on {outcome.gpus:,} GPUs, "
        f"{outcome.gpu_hours_per_million:.3f} GPU hours a million tokens that are trained on",
    ]
    if outcome.deaths:
        lost = (outcome.down_s + outcome.repeated_s) / outcome.deaths
        lines.append(
            f"failures       {outcome.deaths}: {lost:,.0f} s of the run each ({outcome.repeated_s / outcome.deaths:,.0f} s "
            f"repeated, {outcome.down_s / outcome.deaths:,.0f} s down) = {lost / 3600 * outcome.gpus:,.0f} GPU hours; "
            f"goodput {1 - (outcome.down_s + outcome.repeated_s) / outcome.seconds:.0%}"
        )
    return lines


def sensitivities(setting: Setting, gpus: int) -> list[str]:
    """The five changes of one field that matter most, by what a million tokens cost then. A short run each."""
    base = setting.run(steps=SHORT).gpu_hours_per_million
    found = []
    trains = setting.config.trainer.ranks / gpus
    tried = {"more generators (of the same GPUs)": partial(setting.divided, gpus, trains * 3 / 4)}
    for path, change in CHANGES.items():
        value: Any = setting.config
        for name in path.split("."):
            value = getattr(value, name, None)
        other = None if value is None or (path == "groups_per_step" and setting.config.rollouts_per_step) else change(value)
        if other is not None:
            tried[f"{path} {value} -> {other}"] = partial(setting.changed, **{path: other})
    for name, changed in tried.items():
        try:
            found.append((changed().run(steps=SHORT).gpu_hours_per_million / base, name))
        except ConfigError:  # it can't run so
            continue
    found.sort(key=lambda entry: -max(entry[0], 1 / entry[0]))
    return [
        f"{'sensitivity' if place == 0 else '':<15}{ratio:.2f} of the cost by {name}"
        for place, (ratio, name) in enumerate(found[:5])
    ]


def sweep(setting: Setting, fields: Sequence[str], gpus: int) -> list[str]:
    """Short runs with every combination of the fields' values: a line each, and the best first.

    Raises:
        ConfigError: a field that no sweep knows, or nothing can run.
    """
    values: dict[str, Sequence[Any]] = {"replicas": SPLITS, "max_offpolicy_steps": BOUNDS}
    for field in fields:
        if field not in values:
            raise ConfigError("--sweep", field, f"want some of {', '.join(values)}")
    rows = []
    for chosen in itertools.product(*(values[field] for field in fields)):
        given = dict(zip(fields, chosen, strict=True))
        try:
            tried = setting.divided(gpus, given["replicas"]) if "replicas" in given else setting
            if "max_offpolicy_steps" in given:
                tried = tried.changed(max_offpolicy_steps=given["max_offpolicy_steps"])
            rows.append((tried.config, tried.run(steps=SHORT)))
        except ConfigError as error:
            fault = error
    if not rows:
        raise fault
    rows.sort(key=lambda row: row[1].gpu_hours_per_million)
    lines = ["trainer ranks  replicas  bound   step s  generators idle  trainer idle   age   GPU hours a million tokens"]
    for config, outcome in rows:
        lines.append(
            f"{config.trainer.ranks:13}  {config.generator.replicas:8}  {config.max_offpolicy_steps:5}  {outcome.step_s:7.1f}  "
            f"{outcome.generators_idle:15.0%}  {outcome.trainer_idle:12.0%}  {outcome.mean('policy/age_mean'):4.2f}   "
            f"{outcome.gpu_hours_per_million:.3f}"
        )
    return lines
