"""What all parts of a run are built with."""

import logging
from pathlib import Path

from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import Console, Waits
from torchtitan.experiments.rl.operations.supervision import Restarts
from torchtitan.experiments.rl.user_code.calls import Gate

logger = logging.getLogger(__name__)


class RunContext:
    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        run_dir: Path,
        *,
        console: Console | None = None,
        hosts: HostPool | None = None,
    ):
        """
        Args:
            console: None: on stdout, where it says what the run waits for too. With another the log says that.
            hosts: where the run's processes are. None: on this host.
        """
        self.config, self.plan, self.run_dir, self.hosts = config, plan, run_dir, hosts
        self.console = console or Console()
        self.waits = Waits(logger.info if console else self.console.waiting)
        self.synchronous = config.max_offpolicy_steps == 0
        """Rollouts of a version start only when the generators hold it, and nothing runs between two steps."""
        self.gate = Gate(timeout_s=config.user_code.call_timeout_s, synchronous=self.synchronous)
        """Runs the user code that one thread runs."""
        self.restarts = Restarts(config.supervision)
