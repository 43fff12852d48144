"""Result of a simulated run, and the lines that are printed of it."""

from dataclasses import dataclass, field
from statistics import fmean

from torchtitan.experiments.rl.simulation.engine import EngineTotals

TINY_S = 1e-9
"""Seconds that a share is taken of at least, so that a run without steps divides by no zero."""


@dataclass(kw_only=True, slots=True)
class SimulationResult:
    """Figures of a simulated run. Seconds are virtual."""

    gpus: int
    replicas: int = 0
    seconds: float = 0.0
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each step. A step that was repeated has those of the last time."""
    ledger: dict[str, int] = field(default_factory=dict)
    """Number of rollouts by the ledger's column."""
    engines: EngineTotals = field(default_factory=EngineTotals)
    """Totals of all replicas together."""
    engine_down_s: float = 0.0
    """Seconds in which replicas had no process, over all replicas."""
    trainer_busy_s: float = 0.0
    deaths: int = 0
    """Number of times that hosts died."""
    down_s: float = 0.0
    """Seconds from the deaths that ended the run until it went on."""
    repeated_s: float = 0.0
    """Seconds of work that was lost by these deaths, because no checkpoint had it."""
    lost_tokens: int = 0
    """Number of tokens that were sampled and gone with a process."""

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the steps that report it; 0.0 if none does.

        The first tenth of the steps is left out, because the pipeline fills meanwhile.
        """
        steps = sorted(self.steps)[len(self.steps) // 10 :]
        values = [self.steps[step][name] for step in steps if name in self.steps[step]]
        return fmean(values) if values else 0.0

    @property
    def trained_tokens(self) -> float:
        """Number of tokens that were sampled and trained on."""
        return sum(metrics["batch/sampled_tokens"] for metrics in self.steps.values())

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean("time/step_s")

    @property
    def generators_idle(self) -> float:
        """Share of the time in which a replica took no engine steps, over all replicas."""
        return 1 - self.engines.busy_s / max(TINY_S, self.seconds * self.replicas)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer neither stepped nor copied weights."""
        return 1 - self.trainer_busy_s / max(TINY_S, self.seconds)

    @property
    def gpu_hours_per_million(self) -> float:
        """GPU hours that a million tokens cost which were sampled and trained on."""
        gpu_hours = self.gpus * self.seconds / 3600
        return gpu_hours / max(1.0, self.trained_tokens) * 1e6


def describe(result: SimulationResult) -> list[str]:
    """Return what a run has shown, a line for each subject. All of it is simulated."""
    lines = [
        f"step           {_step(result)}",
        f"generators     {_generators(result)}",
        f"trainer        {_trainer(result)}",
        f"age            {_age(result)}",
        f"tokens         {_tokens(result)}",
        f"rollouts       {_rollouts(result)}",
        f"cost           {_cost(result)}",
    ]
    if result.deaths:
        lines.append(f"failures       {_failures(result)}")
    return lines


def _step(result: SimulationResult) -> str:
    generate_s = result.engines.busy_s / result.replicas / len(result.steps)
    train_s = result.trainer_busy_s / len(result.steps)
    step_s = max(TINY_S, result.step_s)
    return (
        f"{step_s:.1f} s on average; busy: generators {generate_s:.1f} s, trainer {train_s:.1f} s, "
        f"so {max(generate_s, train_s) / step_s:.2f} of the ideal max(generate, train)"
    )


def _generators(result: SimulationResult) -> str:
    replicas_s = max(TINY_S, result.seconds * result.replicas)
    return (
        f"idle {result.generators_idle:.0%}: "
        f"loading weights {result.engines.loading_s / replicas_s:.1%}, "
        f"gone {result.engine_down_s / replicas_s:.1%}, else nothing to do"
    )


def _trainer(result: SimulationResult) -> str:
    step_s = max(TINY_S, result.step_s)
    return (
        f"idle {result.trainer_idle:.0%}: "
        f"waits for rollouts {result.mean('time/wait_s') / step_s:.0%}, "
        f"for weights {result.mean('time/sync_s') / step_s:.1%}"
    )


def _age(result: SimulationResult) -> str:
    oldest = max(metrics["policy/age_max"] for metrics in result.steps.values())
    return f"{result.mean('policy/age_mean'):.2f} versions on average, at most {oldest:.0f}"


def _tokens(result: SimulationResult) -> str:
    engines = result.engines
    return (
        f"{result.trained_tokens / 1e6:,.1f}M trained of {engines.sampled / 1e6:,.1f}M sampled; "
        f"{engines.recomputed / 1e6:,.2f}M computed again ({engines.preemptions:,} preemptions), "
        f"{result.lost_tokens / 1e6:,.2f}M lost with a process; "
        f"{engines.cached / max(1, engines.prompt):.0%} of the prompts cached"
    )


def _rollouts(result: SimulationResult) -> str:
    counts = sorted(result.ledger.items())
    return ", ".join(f"{count:,} {column}" for column, count in counts if count)


def _cost(result: SimulationResult) -> str:
    return (
        f"{result.seconds / 3600:,.2f} h on {result.gpus:,} GPUs, "
        f"{result.gpu_hours_per_million:.3f} GPU hours a million tokens that are trained on"
    )


def _failures(result: SimulationResult) -> str:
    lost_s = result.down_s + result.repeated_s
    gpu_hours = lost_s / result.deaths / 3600 * result.gpus
    return (
        f"{result.deaths}: {result.down_s:,.0f} s down and {result.repeated_s:,.0f} s repeated, "
        f"so each cost {gpu_hours:,.0f} GPU hours; goodput {1 - lost_s / result.seconds:.0%}"
    )
