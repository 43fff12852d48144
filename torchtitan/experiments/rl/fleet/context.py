"""What every component of a run is built with."""

from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.fleet.restarts import Restarts
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.plan.plan import RunPlan


@dataclass(eq=False, slots=True)
class RunContext:
    """Plan, folder and services of a run, shared by all that is built for it."""

    plan: RunPlan
    run_dir: Path
    console: Console = field(default_factory=Console)
    hosts: HostPool | None = None
    """Hosts of the run's processes; None for this host alone."""
    ordered: OrderedCalls = field(init=False)
    """Thread that calls samplers, datasets, the task mix and filters, one after another."""
    restarts: Restarts = field(init=False)
    """Counts of restarted processes. A run that is rebuilt goes on with them."""

    def __post_init__(self) -> None:
        self.ordered = OrderedCalls(
            timeout_s=self.config.user_code.call_timeout_s, synchronous=self.synchronous
        )
        self.restarts = Restarts(self.config.supervision)

    @property
    def config(self) -> RunConfig:
        """Checked config of the run."""
        return self.plan.config

    @property
    def synchronous(self) -> bool:
        """True if rollouts start only once the generators hold the newest version.

        Nothing runs between two steps of such a run.
        """
        return self.config.max_offpolicy_steps == 0
