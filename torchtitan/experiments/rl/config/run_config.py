"""The config of a run: its tasks, its model, how it trains, generates, validates and records."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le, MinLen

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.bounds import (
    OF_OTHERS,
    Changeable,
    Cure,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from torchtitan.experiments.rl.checkpointing.folder import CheckpointConfig
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.data.task_mix import TaskMix, WeightedRoundRobin
from torchtitan.experiments.rl.envs.renderer import RendererConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.hosts.jobs import JobConfig, ThisHostJob
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.rollouts.filters import Filter, Gibberish, Repetition, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplayConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig
from torchtitan.experiments.rl.training.config import TrainerConfig

OF_OTHERS[LRSchedulersContainer.Config] = {
    "warmup_steps": NonNegativeInt,
    "total_steps": PositiveInt | None,
    "decay_ratio": Share | None,
    "min_lr_factor": Share,
}
MOST_ROLLOUTS = 1_000_000
"""Maximum number of rollouts of a step."""
MOST_OPEN_ROLLOUTS = 2 * MOST_ROLLOUTS
"""Maximum number of rollouts that are open or wait for a step, all of which are in memory."""
MOST_HOSTS = 256
"""Maximum number of hosts of a job that counts its hosts itself."""


@dataclass(kw_only=True, slots=True)
class ProvisionConfig:
    """Hosts and devices of a run, and which process stands where."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where torch sees a GPU, or where the job's hosts have GPUs."""
    job: JobConfig = field(default_factory=ThisHostJob)
    """Job that gives the run its hosts. The command line names it: this_host, process, slurm,
    kubernetes."""
    trainer_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of the trainer's ranks, counted from 0, the same number on each. Empty: the first, as
    few as hold them."""
    generator_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of generators and hosted models. Empty: where devices are left."""
    rollout_worker_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of the rollout workers, in turn. Empty: all."""
    share_cores: bool | None = None
    """CPU only. True: trainer and generators of a host have as many threads each as it has cores,
    so that none is idle while the other side computes. False: half as many. None: True for models
    of at least 10 million parameters. Smaller ones do not gain by more threads."""
    share_gpus: bool = False
    """Generators stand on the trainer's GPUs, from its first on, so that a run fits one GPU. Either
    both hold their memory all the time, or the engines sleep while the trainer steps
    (``generator.engine.sleep``). On CPU it means ``share_cores``."""

    def resolve(self) -> Device:
        """Return the device that trainer and generators compute on.

        The job knows whether its hosts have GPUs, unless it takes this host: torch is asked then.

        Raises:
            ConfigError: CUDA is wanted, and the hosts, or torch here, have none.
        """
        hosts_have_gpus = self.job.has_gpus
        if self.device == "cuda" and hosts_have_gpus is False:
            raise ConfigError(
                "provision.device",
                "cuda",
                "the job's hosts have no GPUs (provision.job.gpus_per_host = 0)",
            )
        if hosts_have_gpus is not None:
            return "cuda" if hosts_have_gpus and self.device != "cpu" else "cpu"
        if self.device == "cuda" and torch.version.cuda is None:
            cure = (
                f"torch {torch.__version__} here is a build without CUDA; install "
                "requirements/gpu.txt, or use cpu or auto"
            )
            raise ConfigError("provision.device", "cuda", cure)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("provision.device", "cuda", "torch sees no GPU here; use cpu or auto")
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def validate(self) -> None:
        """Check the hosts that roles are to stand on.

        Raises:
            ConfigError: a host named twice, or one that the job has not.
        """
        for name in ("trainer_hosts", "generator_hosts"):
            hosts = getattr(self, name)
            if len(set(hosts)) < len(hosts):
                raise ConfigError(f"provision.{name}", hosts, "names a host twice")
        if self.job.host_count is not None:
            self.check_hosts(self.job.host_count)

    def check_hosts(self, hosts: int) -> None:
        """Check that the job has the hosts that roles are to stand on.

        Raises:
            ConfigError: a role is to stand on a host that the job has not.
        """
        for name in ("trainer_hosts", "generator_hosts", "rollout_worker_hosts"):
            for host in getattr(self, name):
                if host >= hosts:
                    cure = (
                        f"the job has {hosts} host(s), counted from 0: name others, or raise "
                        "provision.job.hosts"
                    )
                    raise ConfigError(f"provision.{name}", getattr(self, name), cure)

    def devices(self, device: Device) -> Iterator[list[list[int]] | None]:
        """Yield the cores or GPUs of all hosts of the job, a list for each host.

        None stands for those of this host. A job with a fixed number of hosts yields once. A job
        that counts its hosts itself yields what it has with one host, then with two, and so on.
        """
        counts = range(1, MOST_HOSTS + 1) if self.job.host_count is None else (self.job.host_count,)
        return (self.job.devices(device, hosts) for hosts in counts)


@dataclass(kw_only=True, slots=True)
class SupervisionConfig:
    """Limits after which a process counts as hung, and of restarts."""

    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts within ``window_s`` seconds of one generator, hosted model or
    rollout worker. Its next death ends the run."""
    window_s: PositiveFloat = 3600.0
    stall_s: Annotated[float, Ge(5)] = 120.0
    """A process that does not answer for so many seconds, or is at one engine step or one
    microbatch for so long, is reported and killed, and then restarted like one that died."""
    slow_work_s: Annotated[float, Ge(5)] = 1800.0
    """``stall_s`` of what may take long: a build, the first steps, which compile, a checkpoint, and
    user code that blocks the event loop of a rollout worker."""


@dataclass(kw_only=True, slots=True)
class StopConfig:
    """When evaluations end a run before its last step. By default they never do.

    For example, ``--stop-at.value 0.9 --stop-at.patience 5`` ends a run once its reward in
    evaluations is 0.9, or has not risen in five of them.
    """

    metric: NonEmptyStr = "validation/reward"
    """Metric of the evaluations that is looked at."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Value of ``metric`` that is the best."""
    value: float | None = None
    """Value that ends the run once an evaluation reaches it."""
    patience: PositiveInt | None = None
    """Number of evaluations in a row without a gain that end the run."""
    min_gain: NonNegativeFloat = 0.0
    """Difference above which a better value than all before is a gain."""

    @property
    def is_set(self) -> bool:
        return self.value is not None or self.patience is not None


@dataclass(kw_only=True, slots=True)
class UserCodeLimits:
    """Time limits of user code: a call that takes longer ends the run, by its owner's name.

    Rollouts have limits of their own: ``env`` of each task.
    """

    call_timeout_s: PositiveFloat = 60.0
    """Limit of each call of a sampler, a dataset, the task mix or a filter."""
    setup_timeout_s: PositiveFloat = 1800.0
    """Limit of building a task with its dataset, and of its ``setup``."""
    close_timeout_s: PositiveFloat = 10.0
    """Limit of the ``close`` of a task."""
    preflight_timeout_s: NonNegativeFloat = 10.0
    """Limit of trying each task once before the run (command/preflight.py). A task that takes
    longer is warned of; the run begins. 0: none is tried."""


def default_filters(mode: Literal["enforce", "monitor"]) -> list[Filter.Config]:
    """Return filters of gibberish, repetition (of n-grams too) and rollouts without a signal.

    By default they are in both slots. Before the batch they only count ("monitor"): a rollout that
    matches still takes its place, so examples that are too easy or too hard are not replaced by
    further work. After it they drop ("enforce"), and the rollout is not trained on. The metric
    ``filter/<slot>/<name>`` is the number of rollouts that match, and
    ``filter/<slot>/<name>/tokens`` the number of tokens that were sampled in them.
    """
    return [
        Gibberish.Config(mode=mode),
        Repetition.Config(mode=mode, distinct_ngrams=0.1),
        ZeroAdvantage.Config(
            mode=mode, per="rollout"
        ),  # all of a group where no rollout has a signal
    ]


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A whole run. Plain data: ``command/checks.py`` checks it, ``controller/`` runs it."""

    tasks: Annotated[dict[str, Task.Config], MinLen(1), Cure("name at least one task")]
    model: ModelConfig
    renderer: RendererConfig = field(default_factory=RendererConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    batcher: Batcher.Config = field(default_factory=Batcher.Config)
    steps: Changeable[PositiveInt] = 100
    """Optimizer steps."""
    rollouts_per_step: Annotated[int, Ge(1), Le(MOST_ROLLOUTS)] = 64
    """Rollouts trained on in one optimizer step. Groups are whole, so a step exceeds it by less
    than a group if group sizes do not divide it."""
    max_offpolicy_steps: NonNegativeInt = 1
    """Versions a group may be behind when it is trained on. 0 is synchronous, and on CPU
    deterministic by seed."""
    max_drops_in_a_row: Changeable[PositiveInt] = 100
    """The run ends after so many groups in a row that gave nothing to train on (failed, filtered,
    oversized). It also ends if in each of its first groups, this many, all rewards are equal."""
    seed: NonNegativeInt = 0
    replay: GroupReplayConfig = field(default_factory=GroupReplayConfig)
    """Groups that a step trains on again, with the credit they had."""
    task_mix: TaskMix.Config = field(default_factory=WeightedRoundRobin.Config)
    pre_batch_filters: list[Filter.Config] = field(
        default_factory=lambda: default_filters("monitor")
    )
    """Applied before a rollout takes a place in a batch. Other groups replace those that they
    drop."""
    post_batch_filters: list[Filter.Config] = field(
        default_factory=lambda: default_filters("enforce")
    )
    """Applied when a batch was taken. It becomes smaller by the rollouts that they drop."""
    validation: Changeable[ValidationConfig] = field(default_factory=ValidationConfig)
    """Schedule of tasks that set none of their own."""
    stop_at: Changeable[StopConfig] = field(default_factory=StopConfig)
    """Evaluations that end the run before its last step."""
    metrics: Changeable[MetricsLogger.Config] = field(default_factory=MetricsLogger.Config)
    recorder: Changeable[RolloutRecorder.Config] = field(default_factory=RolloutRecorder.Config)
    checkpoint: Changeable[CheckpointConfig] = field(default_factory=CheckpointConfig)
    rollout_workers: Changeable[Annotated[int, Ge(0), Le(1024)]] = 0
    """Processes that run the rollouts: envs, rubrics, algorithms. 0: they run in the controller's
    process, in one Python thread; perf/event_loop_lag_max_s shows when that is too slow."""
    user_code: Changeable[UserCodeLimits] = field(default_factory=UserCodeLimits)
    """Time limits of tasks, samplers, datasets, the task mix and filters."""
    supervision: Changeable[SupervisionConfig] = field(default_factory=SupervisionConfig)
    """Limits after which a process counts as hung, and of restarts."""
    provision: Changeable[ProvisionConfig] = field(default_factory=ProvisionConfig)
    profile_steps: Changeable[str] = ""
    """First and last optimizer step, such as "3:5", of which one file shows what every process did
    and for how long."""
    output_dir: Changeable[NonEmptyStr] = "outputs"
    """Folder in which the command makes the run folders."""

    def filters(self) -> Iterator[tuple[str, Filter.Config]]:
        """Yield the filters of both slots, each with its path."""
        for slot in ("pre_batch_filters", "post_batch_filters"):
            for index, entry in enumerate(getattr(self, slot)):
                yield f"{slot}[{index}]", entry

    def filters_of(self, slot: str) -> list[Filter.Config]:
        """Return the filters of "pre_batch_filters" or "post_batch_filters" as they act.

        The loss term of ``trainer.reference.kl_coef`` acts on rollouts of advantage 0 too: it holds
        examples that are always or never solved near the reference. So ``ZeroAdvantage`` only
        counts such rollouts after the batch, if there is that term. Before the batch it stays as it
        is: to replace groups without a signal (dynamic sampling) is what it is there for.
        """
        filters: list[Filter.Config] = getattr(self, slot)
        reference = self.trainer.reference
        if slot == "pre_batch_filters" or reference is None or reference.kl_coef == 0:
            return filters
        return [
            replace(entry, mode="monitor") if built_class(entry) is ZeroAdvantage else entry
            for entry in filters
        ]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that tasks train; one empty name where no task names any."""
        return tuple(sorted({task.adapter for task in self.tasks.values()}))

    @property
    def served(self) -> dict[str, int]:
        """Rank of each adapter that the generators serve; empty where they get the whole model."""
        lora = self.trainer.lora
        if lora is None or lora.serve == "merged":
            return {}
        return dict.fromkeys(self.adapters, lora.rank)
