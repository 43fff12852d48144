"""Checks a run's config before a process is spawned, and works out the plan of a run."""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any, cast

from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.command.engine_fit import (
    check_cores,
    check_engine_fits,
    check_served_fields,
)
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import MOST_OPEN_ROLLOUTS, RunConfig
from torchtitan.experiments.rl.envs.chat_template import PLAIN
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.generation.references import (
    HostedModel,
    find_references,
    hosted_models,
)
from torchtitan.experiments.rl.losses import check_corrections
from torchtitan.experiments.rl.models.family import DecoderShape
from torchtitan.experiments.rl.models.hub import HubConfig, check_weights, has_config
from torchtitan.experiments.rl.models.lora import adapter_shapes, check_adapter
from torchtitan.experiments.rl.models.policy import (
    FAMILIES,
    ModelConfig,
    adapted_modules,
    decoder_shape,
    folder_spec,
    hub_shapes,
    is_of_transformers,
    model_positions,
    parameter_count,
    parameter_counts,
    policy_spec,
)
from torchtitan.experiments.rl.plan.costs import GIB, ModelSizes, balance, version_bytes
from torchtitan.experiments.rl.plan.placement import (
    place_on_fewest,
    weights_stay_on_devices,
)
from torchtitan.experiments.rl.plan.plan import (
    RunPlan,
    SharedGpu,
    TrainerMemory,
    trainer_memory,
    versions_on_hosts,
)
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage

SLEEP = "generator.engine.sleep"


def checked_plan(config: RunConfig) -> RunPlan:
    """Check everything that can be known before a process is spawned, and work out the plan.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check(config)
    return plan_run(config)


def check(config: RunConfig) -> None:
    """Check what needs no file beside the config itself.

    Raises:
        ConfigError: the first problem, by field, value and cure.
    """
    check_fields(config)
    check_relations(config)
    call_part("generator.engine", config.generator.engine, "validate", field="generator.engine")
    config.trainer.parallelism.validate(field="trainer.parallelism", ranks=config.trainer.ranks)
    check_adapters(config)
    check_loss(config)
    check_goals(config)
    if config.rollout_workers and config.max_offpolicy_steps == 0:
        cure = (
            "synchronous runs repeat bit for bit, which takes one process: set it to 0, or "
            "max_offpolicy_steps to 1 or more"
        )
        raise ConfigError("rollout_workers", config.rollout_workers, cure)
    open_rollouts = (config.max_offpolicy_steps + 1) * config.rollouts_per_step
    if open_rollouts > MOST_OPEN_ROLLOUTS:
        cure = (
            f"with rollouts_per_step = {config.rollouts_per_step} a run would have "
            f"{open_rollouts:,} rollouts open at once, and may have {MOST_OPEN_ROLLOUTS:,}: lower "
            "either"
        )
        raise ConfigError("max_offpolicy_steps", config.max_offpolicy_steps, cure)
    check_sharing(config)
    config.metrics.validate(field="metrics")
    config.provision.validate()
    config.validation.validate(field="validation")
    for name in config.tasks:
        _check_task(config, name)
    for field, entry in config.filters():
        call_part(field, entry, "validate", field=field)
    for field, reference in find_references(config.tasks, field="tasks"):
        reference.validate(field=field)
    hosted_models(config.tasks)
    config.replay.validate(rollouts_per_step=config.rollouts_per_step)


def _check_task(config: RunConfig, name: str) -> None:
    """Check a task by itself, and that the engine and the trainer's rows hold its rollouts.

    Raises:
        ConfigError: the first field at fault.
    """
    task = config.tasks[name]
    engine = config.generator.engine
    field = f"tasks.{name}"
    call_part(field, task, "validate", field=field, policy_path=config.model.hf_assets_path)
    if task.sampling.stop and not engine.stops_at_texts:
        cure = f"{type(engine).__name__} does not look for texts: name sampling.stop_token_ids"
        raise ConfigError(f"{field}.sampling.stop", task.sampling.stop, cure)
    if config.renderer.template == PLAIN and not engine.stops_at_texts:
        cure = f"an answer ends at a text, and {type(engine).__name__} does not look for texts"
        raise ConfigError("renderer.template", PLAIN, cure)
    tokens = task.env.max_rollout_tokens
    limits = {
        "batcher.row_length": config.batcher.row_length,
        "generator.engine.max_model_len": engine.max_model_len,
    }
    for limit_field, limit in limits.items():
        if tokens > limit:
            cure = f"{limit_field} is {limit}; lower this or raise that"
            raise ConfigError(f"{field}.env.max_rollout_tokens", tokens, cure)


def call_part(where: str, part: Any, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of a part that users may have written, or of its config.

    Raises:
        ConfigError: it failed; the error names the part's field, its class and the method.
    """
    with user_code(where, built_class(part).__name__, f"its {method} failed"):
        return getattr(part, method)(*arguments, **named)


def check_adapters(config: RunConfig) -> None:
    """Check that the adapters that tasks name are trained and can be served.

    Raises:
        ConfigError: the engine can't serve them, nothing trains the one that a task names, or only
            some tasks name one.
    """
    for rank in config.served.values():
        config.generator.engine.check_adapter(rank)
    if config.adapters == ("",):
        return
    named = next(name for name, task in config.tasks.items() if task.adapter)
    unnamed = [name for name, task in config.tasks.items() if not task.adapter]
    if config.trainer.lora is None:
        cure = "nothing trains adapters: set trainer.lora.rank, or leave it out"
        raise ConfigError(f"tasks.{named}.adapter", config.tasks[named].adapter, cure)
    if unnamed:
        cure = (
            f"tasks.{named} trains an adapter of its own: name one for each task, two of which "
            "may have the same"
        )
        raise ConfigError(f"tasks.{unnamed[0]}.adapter", "", cure)
    if not config.served:
        cure = "there would be a whole model for each adapter that tasks name: serve them"
        raise ConfigError("trainer.lora.serve", "merged", cure)


def check_sharing(config: RunConfig) -> None:
    """Check that only the policy's engines sleep, in a synchronous run on the trainer's GPUs.

    Raises:
        ConfigError: an engine would sleep while requests are open, or no trainer would use the
            memory that it frees.
    """
    if config.generator.engine.sleep and config.max_offpolicy_steps:
        cure = (
            f"set it to 0: requests are open while the trainer steps, and {SLEEP} = True "
            "stops the engines then"
        )
        raise ConfigError("max_offpolicy_steps", config.max_offpolicy_steps, cure)
    if config.generator.engine.sleep and not config.provision.share_gpus:
        cure = (
            "frees memory for a trainer on the same GPUs: set provision.share_gpus, or leave it out"
        )
        raise ConfigError(SLEEP, True, cure)
    for field, reference in find_references(config.tasks, field="tasks"):
        if isinstance(reference, HostedModel) and reference.engine.sleep:
            cure = "a hosted model is asked at any time: leave it out"
            raise ConfigError(f"{field}.engine.sleep", True, cure)


def check_relations(config: RunConfig) -> None:
    """Check fields of the run and the trainer that are in bounds each, and may not fit together.

    Raises:
        ConfigError: the first field that does not fit another.
    """
    trainer = config.trainer
    compiled = trainer.compile
    if compiled is not None and compiled.async_tensor_parallel:
        cure = (
            "set it to False: torch exchanges through memory that ranks name by their device's "
            "index, and each trainer process sees one GPU of its host, as index 0"
        )
        raise ConfigError("trainer.compile.async_tensor_parallel", True, cure)
    if compiled is not None and compiled.float8 != "off" and trainer.lora is not None:
        cure = 'is not tried with trainer.lora: set it to "off"'
        raise ConfigError("trainer.compile.float8", compiled.float8, cure)
    if compiled is not None and trainer.parallelism.context_parallel_degree > 1:
        cure = "set it to None: with context_parallel_degree above 1 it is not tried"
        raise ConfigError("trainer.compile", compiled, cure)
    profiled_steps(config.profile_steps)
    first, second = trainer.optimizer.betas
    if first > second:
        cure = f"must be at most betas[1] = {second}: the second moment is the slower average"
        raise ConfigError("trainer.optimizer.betas[0]", first, cure)
    if trainer.optimizer.name == "muon" and trainer.enable_cpu_offload:
        cure = "muon gathers whole matrices on the GPUs: set trainer.enable_cpu_offload to False"
        raise ConfigError("trainer.optimizer.name", "muon", cure)
    total = trainer.lr_scheduler.total_steps
    if total is not None and total < config.steps:
        cure = (
            f"must be at least steps = {config.steps}: after its last step the schedule has no "
            "learning rate"
        )
        raise ConfigError("trainer.lr_scheduler.total_steps", total, cure)


def with_last_group(config: RunConfig, rollouts: int) -> int:
    """Return how many rollouts there may be if groups are added until there are ``rollouts``.

    Groups are whole, so the last one may exceed that number. With groups of 8 and 3, and 64
    rollouts, it is added at 63 at the latest: 71.

    Rollouts that nothing compares are groups of one. An algorithm that compares nothing may still
    have them, or groups.
    """
    sizes = {task.group_size for task in config.tasks.values()}
    algorithms = [built_class(task.algorithm) for task in config.tasks.values()]
    if not all(cast("type[Algorithm]", algorithm).needs_group for algorithm in algorithms):
        sizes.add(1)
    step = math.gcd(*sizes)
    return (rollouts - 1) // step * step + max(sizes)


def missing(config: RunConfig) -> dict[str, MissingError]:
    """Return what this machine lacks beside the policy, by the name of the task that needs it.

    Raises:
        ConfigError: a file is there and can't be used.
    """
    found: dict[str, MissingError] = {}
    for name, task in config.tasks.items():
        field = f"tasks.{name}"
        try:
            call_part(field, task, "check_present", field=field)
            for where, reference in find_references(task, field=field):
                reference.check_present(field=where)
                if isinstance(reference, HostedModel):
                    check_hosted_model(reference, field=where)
        except MissingError as error:
            found[name] = error
    return found


def check_model_folder(model: ModelConfig) -> None:
    """Check that a hub folder holds the model's weights, and a tokenizer.

    Raises:
        MissingError: the folder, or its weights or tokenizer, is not there.
        ConfigError: config.json or the weights can't be read, or the two are of different models.
    """
    path = model.hf_assets_path
    field = "model.hf_assets_path"
    hub = HubConfig.read(path)
    _ = hub.dtype  # raises if there is none: the final policy is saved in it
    check_weights(path, hub_shapes(policy_spec(model, device="cpu", max_seq_len=1)), field=field)
    if not any(Path(path).glob("tokenizer*.json")):
        cure = "has no tokenizer (tokenizer*.json); download the whole model"
        raise MissingError(field, path, cure)


def check_first_adapters(config: RunConfig) -> None:
    """Compare the adapters that training begins with, if the config names some, with the model's.

    Raises:
        ConfigError: the folder has no adapters, or others, or not all of them.
    """
    lora = config.trainer.lora
    if lora is not None and lora.init_from is not None:
        spec = policy_spec(config.model, device="cpu", max_seq_len=1, lora=lora)
        check_adapter(Path(lora.init_from), lora, adapter_shapes(spec, lora))


def check_hosted_model(model: HostedModel, *, field: str) -> None:
    """Check that a folder holds a model that an engine can serve.

    The weights' shapes are compared where the trainer knows the model's family.

    Raises:
        ConfigError: config.json or the weights can't be read, are of different models, or the
            engine can't serve the model.
    """
    path_field = f"{field}.path"
    hub = HubConfig.read(model.path, field=path_field)
    expected = None
    if hub.architecture in FAMILIES:
        expected = hub_shapes(folder_spec(hub))
    check_weights(model.path, expected, field=path_field)
    check_served_fields(model.engine, hub, field=path_field)
    check_engine_fits(model.engine, hub, field=f"{field}.engine")


def check_goals(config: RunConfig) -> None:
    """Check that evaluations give the metrics that ``keep_best`` and ``stop_at`` compare.

    Raises:
        ConfigError: a metric is none of the evaluations', or no evaluation has it when it is asked.
    """
    keep_best, interval = config.checkpoint.keep_best, config.checkpoint.interval
    if keep_best is not None:
        field = "checkpoint.keep_best"
        every = _schedule_of(keep_best, config, field=field)
        if interval == 0:
            cure = "checkpoint.interval is 0: set it to the steps between two checkpoints"
            raise ConfigError(field, keep_best, cure)
        if interval % every:
            cure = (
                f"checkpoint.interval = {interval} is no multiple of the {every} steps between two "
                f"evaluations, so that checkpoints have no value: set it to {every}, or the "
                "schedule's every"
            )
            raise ConfigError(field, keep_best, cure)
    if config.stop_at.is_set:
        _schedule_of(config.stop_at.metric, config, field="stop_at.metric")


def _schedule_of(metric: str, config: RunConfig, *, field: str) -> int:
    """Return the number of steps between two evaluations that have a metric.

    Raises:
        ConfigError: no evaluation has it, or those of several tasks have it at other steps.
    """
    schedules = {
        name: task.validation_schedule or config.validation
        for name, task in config.tasks.items()
        if task.validation is not None
    }
    schedules = {name: schedule for name, schedule in schedules.items() if schedule.every}
    if not schedules:
        cure = "no task is evaluated: give one a validation set, and set validation.every"
        raise ConfigError(field, metric, cure)
    if metric == "validation/reward":
        every = {name: schedule.every for name, schedule in schedules.items()}
        if len(set(every.values())) > 1:
            first = next(iter(every))
            cure = (
                f"it is the mean over tasks that are evaluated at other steps ({every}): name one "
                f"task's, such as validation/{first}/reward"
            )
            raise ConfigError(field, metric, cure)
        return next(iter(every.values()))
    known = [
        f"validation/{name}/{entry}"
        for name, schedule in schedules.items()
        for entry in schedule.metrics
    ]
    if metric not in known:
        cure = f"no evaluation has it; choose among validation/reward, {', '.join(known)}"
        raise ConfigError(field, metric, cure)
    return schedules[metric.split("/")[1]].every


def model_sizes(config: RunConfig, device: Device) -> ModelSizes:
    """Return the sizes of the policy, with the adapters that are trained."""
    lora = config.trainer.lora
    row_length = config.batcher.row_length
    spec = policy_spec(config.model, device=device, max_seq_len=row_length)
    counts = parameter_counts(spec)
    trained, matrices = counts.all, counts.matrices
    if lora is not None:
        adapted = policy_spec(config.model, device=device, max_seq_len=row_length, lora=lora)
        trained = (parameter_count(adapted) - counts.all) * len(config.adapters)
        matrices = trained  # an adapter is two matrices of a layer
    by_muon = matrices if config.trainer.optimizer.name == "muon" else 0
    return ModelSizes.of(decoder_shape(spec), counts.all, trained, by_muon=by_muon)


def plan_run(
    config: RunConfig, *, device: Device | None = None, available: list[int] | None = None
) -> RunPlan:
    """Return the sizes and the placement that follow from a checked config.

    Args:
        device: plan for this device instead of the one the run would find.
        available: cores or GPUs to plan with, instead of this host's.

    Raises:
        ConfigError: the model can't be read, an engine can't serve its model, or the host has too
            few cores or GPUs.
    """
    device = device or config.provision.resolve()
    trainer = config.trainer
    engine = config.generator.engine
    decoder = decoder_shape(
        policy_spec(config.model, device=device, max_seq_len=config.batcher.row_length)
    )
    _check_trainer_fits(config, decoder, device)
    _check_engines_fit(config, decoder)
    sizes = model_sizes(config, device)
    _check_experts(config, sizes, device)
    known, placement = place_on_fewest(
        config, device, parameters=sizes.parameters, available=available
    )
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if known is None else min(map(len, known))
        check_cores(engine, cores, field="generator.engine")
        for model in hosted_models(config.tasks).values():
            check_cores(model.engine, cores, field=f"the hosted model {model.path!r}: engine")
    if trainer.router_replay != "off":
        engine.check_routes()
    memory = trainer_memory(sizes, config, device=device)
    on_devices = weights_stay_on_devices(config, device, placement)
    if on_devices:
        copies = trainer.parallelism.data_parallel_replicate_degree
        published = version_bytes(config, sizes) * copies / trainer.ranks
        memory = dataclasses.replace(memory, published=published)
    on_gpus = device == "cuda"
    shared_gpu = None
    if config.provision.share_gpus and on_gpus:
        shared_gpu = _shared_gpu(config, sizes.parameters, memory)
    longest_rollout = max(task.env.max_rollout_tokens for task in config.tasks.values())
    open_rollouts = (config.max_offpolicy_steps + 1) * config.rollouts_per_step
    return RunPlan(
        config=config,
        device=device,
        sizes=sizes,
        rollouts_per_step=config.rollouts_per_step,
        open_rollouts=with_last_group(config, open_rollouts),
        tokens_per_step=with_last_group(config, config.rollouts_per_step) * longest_rollout,
        hosts=1 if known is None else len(known),
        placement=placement,
        trainer_memory=memory,
        shared_gpu=shared_gpu,
        balance=balance(config, sizes, config.rollouts_per_step) if on_gpus else None,
        generator_gib=engine.process_memory(parameters=sizes.parameters, device=device),
        weights_on_devices=on_devices,
        shared_weights=versions_on_hosts(config, sizes, placement, on_devices=on_devices),
    )


def _check_trainer_fits(config: RunConfig, decoder: DecoderShape, device: Device) -> None:
    """Check the trainer's rows, parallelism and options against the model and the device.

    Raises:
        ConfigError: the first field that does not fit them.
    """
    trainer = config.trainer
    positions = model_positions(config.model)
    divides_rows = trainer.parallelism.context_parallel_degree > 1
    if config.batcher.row_length > positions and not divides_rows:
        cure = (
            f"the model has {positions} positions; choose at most that, or divide rows by "
            "context_parallel_degree"
        )
        raise ConfigError("batcher.row_length", config.batcher.row_length, cure)
    trainer.parallelism.check_model(decoder, field="trainer.parallelism", ranks=trainer.ranks)
    if is_of_transformers(config.model):
        _check_transformers(config, decoder)
    if device != "cpu":
        return
    if trainer.compile is not None:
        why = "on a CPU each step would compile again, for where its rows' sequences end"
        raise ConfigError("trainer.compile", trainer.compile, f"{why}: set it to None")
    if trainer.enable_cpu_offload:
        cure = "everything is in the host's memory on CPU; set it to False"
        raise ConfigError("trainer.enable_cpu_offload", True, cure)


def _check_transformers(config: RunConfig, decoder: DecoderShape) -> None:
    """Check that nothing is asked for that only torchtitan's models can do.

    Raises:
        ConfigError: the first field that asks for such a thing.
    """
    trainer = config.trainer
    if decoder.experts > 1:
        cure = "engines load no versions of its experts: only torchtitan's mixtures can be trained"
        raise ConfigError("model.hf_assets_path", config.model.hf_assets_path, cure)
    for name in ("tensor_parallel_degree", "expert_parallel_degree"):
        degree = getattr(trainer.parallelism, name)
        if degree > 1:
            cure = (
                "the trainer computes this model with transformers' modules, which FSDP and "
                "context_parallel_degree divide: set it to 1"
            )
            raise ConfigError(f"trainer.parallelism.{name}", degree, cure)
    engine = config.generator.engine
    hub = HubConfig.read(config.model.hf_assets_path)
    check_served_fields(engine, hub, field="model.hf_assets_path")
    window = min(filter(None, decoder.windows), default=engine.max_model_len)
    if hub.architecture in engine.wider_windows and engine.max_model_len > window:
        cure = (
            f"the engine makes this model's sliding window of {window} tokens one token wider than "
            f"the trainer does: choose at most {window}"
        )
        raise ConfigError("generator.engine.max_model_len", engine.max_model_len, cure)
    if config.served and trainer.lora is not None:
        unserved = sorted(
            set(adapted_modules(config.model, trainer.lora))
            - config.generator.engine.adapted_modules
        )
        if unserved:
            cure = (
                f"the engine serves no adapter of {', '.join(unserved)}: set it to merged, or name "
                "other matrices in trainer.lora.targets"
            )
            raise ConfigError("trainer.lora.serve", "served", cure)
    if trainer.compile is not None and trainer.compile.float8 != "off":
        cure = 'only torchtitan\'s models are converted to 8 bits: set it to "off"'
        raise ConfigError("trainer.compile.float8", trainer.compile.float8, cure)


def _check_engines_fit(config: RunConfig, decoder: DecoderShape) -> None:
    """Check the engines' settings against the policy and the hosted models.

    Raises:
        ConfigError: the first field of an engine that does not fit its model.
    """
    check_engine_fits(
        config.generator.engine,
        _as_hub_config(decoder),
        field="generator.engine",
        positions=model_positions(config.model),
    )
    for field, reference in find_references(config.tasks, field="tasks"):
        if isinstance(reference, HostedModel) and has_config(reference.path):
            hub = HubConfig.read(reference.path, field=f"{field}.path")
            check_engine_fits(reference.engine, hub, field=f"{field}.engine")


def _check_experts(config: RunConfig, sizes: ModelSizes, device: Device) -> None:
    """Check what is served and recorded of a mixture of experts.

    Raises:
        ConfigError: adapters of experts would be served on CPU, or the choices of experts replayed
            of a model that has none.
    """
    has_experts = sizes.experts > 1
    if config.served and device == "cpu" and has_experts:
        cure = (
            "set it to merged: with adapters vLLM computes experts by Triton's kernels, which "
            "need a GPU"
        )
        raise ConfigError("trainer.lora.serve", "served", cure)
    replay = config.trainer.router_replay
    if replay != "off" and not has_experts:
        cure = 'the model is no mixture of experts: set it to "off"'
        raise ConfigError("trainer.router_replay", replay, cure)


def _as_hub_config(decoder: DecoderShape) -> HubConfig:
    """Return what config.json says of a model that may not be here yet."""
    return HubConfig(
        "",
        {
            "num_attention_heads": decoder.heads,
            "num_key_value_heads": decoder.kv_heads,
            "intermediate_size": decoder.feed_forward_width,
            "vocab_size": decoder.vocab_size,
        },
    )


def _shared_gpu(config: RunConfig, parameters: int, trainer: TrainerMemory) -> SharedGpu:
    """Return the memory of a GPU that trainer and engine share.

    Raises:
        ConfigError: the engine takes a share of a GPU that the trainer has too.
    """
    engine = config.generator.engine
    awake = engine.gpu_gib(parameters=parameters)
    if awake is None:
        raise ConfigError(
            "generator.engine.kv_cache_gib",
            None,
            "name it: with provision.share_gpus trainer and engine divide a GPU's memory",
        )
    asleep = engine.gpu_gib(parameters=parameters, asleep=True) if engine.sleep else None
    return SharedGpu(
        trainer=trainer, engine=awake * GIB, asleep=None if asleep is None else asleep * GIB
    )


def check_loss(config: RunConfig) -> None:
    """Check that the loss, the algorithms' credit and the filters fit together.

    Refused are corrections that exclude each other, credit to be normalised over the step where
    nothing does it, and a filter that takes part of such credit away.

    Raises:
        ConfigError: by field, value and cure.
    """
    loss = config.trainer.loss
    check_corrections(loss.corrections, field="trainer.loss.corrections")
    for name, task in config.tasks.items():
        wants_reference = getattr(task.algorithm, "reference", None) == "trainer"
        if wants_reference and config.trainer.reference is None:
            cure = "the trainer has no reference: set trainer.reference = ReferenceConfig()"
            raise ConfigError(f"tasks.{name}.algorithm.reference", "trainer", cure)
        algorithm: type[Algorithm] = built_class(task.algorithm)
        if algorithm.batch_normalized:
            _check_normalized_credit(config, name, algorithm)


def _check_normalized_credit(config: RunConfig, name: str, algorithm: type[Algorithm]) -> None:
    """Check that the trainer normalises a task's credit over the step, and no filter takes it away.

    Raises:
        ConfigError: the loss's field, or the filter's.
    """
    kind = algorithm.__name__
    if not config.trainer.loss.normalize_advantages:
        cure = (
            f"{kind} of tasks.{name} gives credit that is normalised over the step: set it to True"
        )
        raise ConfigError("trainer.loss.normalize_advantages", False, cure)
    if algorithm.group_relative:
        return
    for field, entry in config.filters():
        if built_class(entry) is ZeroAdvantage and entry.mode == "enforce":
            cure = (
                f"drops groups of reward 0, from which {kind} of tasks.{name} learns: leave it out"
            )
            raise ConfigError(f"{field}.mode", entry.mode, cure)


def profiled_steps(value: str) -> range | None:
    """Return the optimizer steps that "A:B" names, both included; None for "".

    Raises:
        ConfigError: it is no such pair.
    """
    if not value:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(
            "profile_steps", value, "write the first and the last step to record, such as 3:5"
        )
    return range(int(found[1]), int(found[2]) + 1)
