"""What can be known to be wrong with a run's config before anything is spawned, and the plan of one that is right."""

import math
from pathlib import Path
from typing import Literal

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.bounds import FieldTypes, NonNegativeInt, PositiveInt, Share, check_fields
from torchtitan.experiments.rl.config.placement import plan_placement
from torchtitan.experiments.rl.config.plan import RunPlan, trainer_memory_gib
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import find_references, hosted_models
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import decoder_config, model_positions, parameter_count, policy_spec

TORCHTITAN_FIELDS: FieldTypes = {
    LRSchedulersContainer.Config: {
        "warmup_steps": NonNegativeInt,
        "total_steps": PositiveInt | None,
        "decay_ratio": Share | None,
        "min_lr_factor": Share,
    }
}
"""Bounds of torchtitan's own config classes, which declare none."""


def checked_plan(config: RunConfig) -> RunPlan:
    """Check everything that can be known before a process is spawned, and work out the plan.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check(config)
    return plan_run(config)


def check(config: RunConfig) -> None:
    """Everything that needs no file beside the config itself.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check_fields(config, field_types=TORCHTITAN_FIELDS)
    config.generator.engine.validate(field="generator.engine")
    if config.trainer.ranks % config.trainer.data_parallel_replicate_degree:
        cure = f"must divide trainer.ranks = {config.trainer.ranks}"
        raise ConfigError("trainer.data_parallel_replicate_degree", config.trainer.data_parallel_replicate_degree, cure)
    if config.rollout_workers and config.max_offpolicy_steps == 0:
        cure = "synchronous runs repeat bit for bit, which takes one process: set it to 0, or max_offpolicy_steps to 1 or more"
        raise ConfigError("rollout_workers", config.rollout_workers, cure)
    config.metrics.validate(field="metrics")
    config.validation.validate(field="validation")
    for name, task in config.tasks.items():
        field = f"tasks.{name}"
        task.validate(field=field, policy_path=config.model.hf_assets_path)
        for limit_field, limit in (
            ("batcher.row_length", config.batcher.row_length),
            ("generator.engine.max_model_len", config.generator.engine.max_model_len),
        ):
            if task.env.max_rollout_tokens > limit:
                cure = f"{limit_field} is {limit}; lower this or raise that"
                raise ConfigError(f"{field}.env.max_rollout_tokens", task.env.max_rollout_tokens, cure)
    for slot in ("pre_batch_filters", "post_batch_filters"):
        for index, entry in enumerate(getattr(config, slot)):
            entry.validate(field=f"{slot}[{index}]")
    for field, reference in find_references(config.tasks, field="tasks"):
        reference.validate(field=field)
    hosted_models(config.tasks)
    groups_per_step(config)


def groups_per_step(config: RunConfig) -> int:
    """Groups of one optimizer step, from whichever of the two fields says it.

    Raises:
        ConfigError: a group_size that does not divide rollouts_per_step.
    """
    if config.rollouts_per_step is None:
        return config.groups_per_step
    sizes = {name: task.group_size for name, task in config.tasks.items()}
    for name, size in sizes.items():
        if config.rollouts_per_step % size or config.rollouts_per_step < size:
            cure = f"must divide rollouts_per_step = {config.rollouts_per_step}"
            raise ConfigError(f"tasks.{name}.group_size", size, cure)
    if len(set(sizes.values())) > 1:
        cure = f"tasks have group sizes {sorted(set(sizes.values()))}; set groups_per_step instead"
        raise ConfigError("rollouts_per_step", config.rollouts_per_step, cure)
    return config.rollouts_per_step // next(iter(sizes.values()))


def check_present(config: RunConfig) -> None:
    """What the run needs of this machine beside the policy: tasks' files and packages, checkpoints to host, keys of servers.

    Raises:
        ConfigError: one is missing.
    """
    for name, task in config.tasks.items():
        task.check_present(field=f"tasks.{name}")
    for field, reference in find_references(config.tasks, field="tasks"):
        reference.check_present(field=field)


def check_model_folder(path: str) -> None:
    """A hub folder with weights and a tokenizer.

    Raises:
        ConfigError: the folder or one of the two is missing.
    """
    HubConfig.read(path)
    for pattern, what in (("*.safetensors", "weights (*.safetensors)"), ("tokenizer*.json", "tokenizer (tokenizer*.json)")):
        if not any(Path(path).glob(pattern)):
            raise ConfigError("model.hf_assets_path", path, f"has no {what}; download the whole model")


def needed_gpus(config: RunConfig) -> int:
    """GPUs of trainer ranks, generator replicas and hosted models."""
    hosted = sum(model.replicas * model.engine.tensor_parallel_degree for model in hosted_models(config.tasks).values())
    return config.trainer.ranks + config.generator.replicas * config.generator.engine.tensor_parallel_degree + hosted


def plan_run(config: RunConfig, *, device: Literal["cpu", "cuda"] | None = None, available: list[int] | None = None) -> RunPlan:
    """Sizes that follow from a checked config.

    Args:
        device: plan for this device instead of the one the run would find.
        available: cores or GPUs to plan with, instead of this host's.

    Raises:
        ConfigError: the model can't be read or is too short, or the host has too few GPUs.
    """
    device = device or config.provision.resolve()
    spec = policy_spec(config.model, device=device, max_seq_len=config.batcher.row_length)
    engine = config.generator.engine
    positions = model_positions(config.model)
    if engine.max_model_len > positions:
        cure = f"the model has {positions} positions; choose at most that"
        raise ConfigError("generator.engine.max_model_len", engine.max_model_len, cure)
    hosted = tuple(hosted_models(config.tasks).values())
    plan_placement(
        device=device,
        trainer_ranks=config.trainer.ranks,
        replicas=config.generator.replicas,
        tensor_parallel_degree=engine.tensor_parallel_degree,
        hosted=hosted,
        available=available,
    )
    groups = groups_per_step(config)
    largest = max(config.tasks.values(), key=lambda task: task.group_size * task.env.max_rollout_tokens)
    rollouts = groups * max(task.group_size for task in config.tasks.values())
    tokens = groups * largest.group_size * largest.env.max_rollout_tokens
    row_length, rows = config.batcher.row_length, config.batcher.rows_per_microbatch
    parameters = parameter_count(spec)
    decoder = decoder_config(spec)
    return RunPlan(
        device=device,
        parameters=parameters,
        steps=config.steps,
        groups_per_step=groups,
        rollouts_per_step=rollouts,
        open_groups=(config.max_offpolicy_steps + 1) * groups,
        max_offpolicy_steps=config.max_offpolicy_steps,
        tokens_per_step=tokens,
        microbatches_per_rank=math.ceil(tokens / (row_length * rows * config.trainer.ranks)),
        trainer_ranks=config.trainer.ranks,
        generator_replicas=config.generator.replicas,
        hosted_processes=sum(model.replicas * model.engine.tensor_parallel_degree for model in hosted),
        tensor_parallel_degree=engine.tensor_parallel_degree,
        trainer_gib=trainer_memory_gib(
            parameters=parameters,
            shards=config.trainer.ranks // config.trainer.data_parallel_replicate_degree,
            dtype=config.trainer.dtype,
            compute_dtype=config.trainer.mixed_precision_param,
            layers=len(decoder.layers),
            dim=decoder.dim,
            microbatch_tokens=row_length * rows,
            activation_checkpoint=config.trainer.activation_checkpoint,
        ),
        generator_gib=engine.process_memory(parameters=parameters, device=device),
    )
