"""The config of a run: which tasks, which model, how it trains, generates, validates and records."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.bounds import Cure, NonEmptyStr, NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.checkpointing.config import CheckpointConfig
from torchtitan.experiments.rl.config.provision import ProvisionConfig
from torchtitan.experiments.rl.config.supervision_config import SupervisionConfig
from torchtitan.experiments.rl.config.user_code_limits import UserCodeLimits
from torchtitan.experiments.rl.data.task_mix import TaskMix, WeightedRoundRobin
from torchtitan.experiments.rl.envs.renderer import RendererConfig
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplayConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.tasks.validation_config import ValidationConfig
from torchtitan.experiments.rl.training.config import TrainerConfig

MOST_GROUPS = 1_000_000
"""Of a step."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A whole run. Plain data: ``config/checks.py`` checks it, ``controller/`` runs it."""

    tasks: Annotated[dict[str, Task.Config], MinLen(1), Cure("name at least one task")]
    model: ModelConfig
    renderer: RendererConfig = field(default_factory=RendererConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    batcher: Batcher.Config = field(default_factory=Batcher.Config)
    steps: PositiveInt = 100
    """Optimizer steps."""
    groups_per_step: Annotated[int, Ge(1), Le(MOST_GROUPS)] = 8
    """Groups trained on in one optimizer step."""
    rollouts_per_step: Annotated[int, Ge(1), Le(MOST_GROUPS)] | None = None
    """The same number in rollouts, if all tasks have one group_size that divides it; overrides groups_per_step."""
    max_offpolicy_steps: NonNegativeInt = 1
    """Versions a group may be behind when it is trained on. 0 is synchronous, and on CPU deterministic by seed."""
    max_drops_in_a_row: PositiveInt = 100
    """The run ends after so many groups in a row that gave nothing to train on (failed, filtered, oversized). It also ends
    if in each of its first groups, this many, all rewards are equal."""
    seed: NonNegativeInt = 0
    replay: GroupReplayConfig = field(default_factory=GroupReplayConfig)
    """Groups that a step trains on again, with the credit they had."""
    task_mix: TaskMix.Config = field(default_factory=WeightedRoundRobin.Config)
    pre_batch_filters: list[Filter.Config] = field(default_factory=list)
    """Applied before a rollout takes a place in a batch. Other groups replace those that they drop."""
    post_batch_filters: list[Filter.Config] = field(default_factory=list)
    """Applied when a batch was taken. It becomes smaller by the rollouts that they drop."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Schedule of tasks that set none of their own."""
    metrics: MetricsLogger.Config = field(default_factory=MetricsLogger.Config)
    recorder: RolloutRecorder.Config = field(default_factory=RolloutRecorder.Config)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rollout_workers: NonNegativeInt = 0
    """Processes that run the rollouts: envs, rubrics, algorithms. 0: they run in the controller's process, in one Python
    thread; perf/event_loop_lag_max_s shows when that is too slow."""
    user_code: UserCodeLimits = field(default_factory=UserCodeLimits)
    """How long tasks, samplers, datasets, the task mix and filters may take."""
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    """When processes that have died are made again."""
    provision: ProvisionConfig = field(default_factory=ProvisionConfig)
    profile_steps: str = ""
    """First and last optimizer step, such as "3:5", of which one file shows what every process did and for how long."""
    output_dir: NonEmptyStr = "outputs"
    """Folder in which the command makes the run folders."""
