"""Schedule and parts of a run, from which its loops are built."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.loops.group_runner import GroupRunner
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.weights.sync import WeightSync


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Numbers that decide which groups a step trains on, and when the run ends."""

    steps: int
    """Number of the last optimizer step."""
    first_step: int = 1
    """Number of the first step to take; above 1 in a resumed run."""
    rollouts_per_step: int
    """Minimum number of rollouts of a step, replayed ones included."""
    max_offpolicy_steps: int
    """Maximum number of versions that a rollout may be behind when a step trains on it. 0 makes the
    run synchronous."""
    validation: ValidationConfig = field(default_factory=lambda: ValidationConfig(every=0))
    """Schedule of the evaluations of the tasks that have none of their own."""
    sleep: bool = False
    """True if the generators free their memory while the trainer steps, until they load the version
    that it makes. Only in a synchronous run, where no request is open then."""

    @classmethod
    def of_config(cls, config: RunConfig, *, steps_done: int = 0) -> Self:
        """Return the schedule of a run's config.

        Args:
            steps_done: number of steps that were taken before a resume.
        """
        return cls(
            steps=config.steps,
            first_step=steps_done + 1,
            rollouts_per_step=config.rollouts_per_step,
            max_offpolicy_steps=config.max_offpolicy_steps,
            validation=config.validation,
            sleep=config.generator.engine.sleep,
        )

    @property
    def synchronous(self) -> bool:
        """True if rollouts wait for the newest version to go live and be evaluated."""
        return self.max_offpolicy_steps == 0


@dataclass(kw_only=True, slots=True)
class Parts:
    """Components that the loops work with, each built elsewhere."""

    selection: Selection
    """Tasks, task mix and filters of the run."""
    runner: GroupRunner
    """Runs the groups, and reports the lag of the event loops of other processes."""
    policy: PolicyClient
    batcher: Batcher
    trainer: TrainerClient
    weights: WeightSync
    ordered: OrderedCalls
    """Calls the datasets of evaluations. A run gives it to ``selection`` too, so that datasets,
    samplers, task mix and filters are called in one thread."""
    ledger: Ledger
    recorder: RolloutRecorder | None = None
    replay: GroupReplay | None = None
    """Store of groups that steps train on again."""
    generated_tokens: Callable[[], int] = lambda: 0
    """Function that returns the number of tokens sampled since the run began."""
