"""What all parts of a run are built with."""

from pathlib import Path

from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.operations.supervision import Restarts
from torchtitan.experiments.rl.user_code.calls import Gate


class RunContext:
    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        *,
        console: Console | None = None,
        hosts: HostPool | None = None,
    ):
        """
        Args:
            console: None: on stdout.
            hosts: where the run's processes are. None: on this host.
        """
        config = self.config = plan.config
        self.plan, self.run_dir, self.hosts = plan, run_dir, hosts
        self.console = console or Console()
        self.synchronous = config.max_offpolicy_steps == 0
        """Rollouts of a version start only when the generators hold it, and nothing runs between two steps."""
        self.gate = Gate(timeout_s=config.user_code.call_timeout_s, synchronous=self.synchronous)
        """Runs the user code that one thread runs."""
        self.restarts = Restarts(config.supervision)
