"""What all parts of a run are built with."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.operations.supervision import Restarts
from torchtitan.experiments.rl.user_code.calls import Gate


@dataclass(kw_only=True, slots=True)
class RunContext:
    config: RunConfig
    plan: RunPlan
    run_dir: Path
    console: Console
    gate: Gate
    """Runs the user code that one thread runs."""
    restarts: Restarts
    hosts: HostPool | None = None
    """Where the run's processes are. None: on this host."""

    @property
    def synchronous(self) -> bool:
        """Rollouts of a version start only when the generators hold it, and nothing runs between two steps."""
        return self.config.max_offpolicy_steps == 0


def run_context(
    config: RunConfig, plan: RunPlan, run_dir: Path, *, console: Console | None = None, hosts: HostPool | None = None
) -> RunContext:
    """With a gate and counts of its own."""
    gate = Gate(timeout_s=config.user_code.call_timeout_s, synchronous=config.max_offpolicy_steps == 0)
    return RunContext(
        config=config,
        plan=plan,
        run_dir=run_dir,
        console=console or Console(),
        gate=gate,
        restarts=Restarts(config.supervision),
        hosts=hosts,
    )
