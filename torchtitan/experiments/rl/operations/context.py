"""What all parts of a run are built with."""

from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.operations.supervision import Restarts


@dataclass(eq=False)
class RunContext:
    plan: RunPlan
    run_dir: Path
    console: Console = field(default_factory=Console)
    hosts: HostPool | None = None
    """Where the run's processes are. None: on this host."""

    def __post_init__(self) -> None:
        config = self.config = self.plan.config
        self.synchronous = config.max_offpolicy_steps == 0
        """Rollouts of a version start only when the generators hold it, and nothing runs between two steps."""
        self.ordered = OrderedCalls(
            timeout_s=config.user_code.call_timeout_s, synchronous=self.synchronous
        )
        """Calls of samplers, datasets, the task mix and filters."""
        self.restarts = Restarts(config.supervision)
