"""``--gpus N``: divides GPUs between trainer ranks and generator replicas, by modelled costs."""

import dataclasses

from torchtitan.experiments.rl.command.checks import model_sizes, plan_run
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.plan.costs import GIB, ModelSizes
from torchtitan.experiments.rl.plan.placement import hosted_processes
from torchtitan.experiments.rl.plan.plan import RunPlan, trainer_memory

MAX_RANKS_TRIED = 64
"""Maximum number of trainer ranks that are tried to say how many GPUs a run needs."""
USUAL_GPU_GIB = 80e9 / GIB
"""Memory of a GPU in GiB that is assumed if no GPU can be asked."""


def split_of(config: RunConfig, gpus: int, *, gpu_gib: float) -> list[str]:
    """Return overrides that divide ``gpus`` between trainer ranks and generator replicas.

    The division is the one in which the slower side of a step costs least, by the cost model.
    Degrees of parallelism stay.

    Args:
        gpu_gib: memory of each GPU.

    Raises:
        ConfigError: no division fits.
    """
    if config.provision.share_gpus:
        raise ConfigError(
            "--gpus",
            gpus,
            "divides GPUs, and provision.share_gpus has both sides on the same ones: leave one out",
        )
    engine = config.generator.engine.tensor_parallel_degree
    own = gpus - hosted_processes(config)
    sizes = model_sizes(config, "cuda")
    costs: dict[tuple[int, int], float] = {}
    for ranks in range(1, own - engine + 1):
        replicas = (own - ranks) // engine
        plan = _plan_of_split(config, sizes, ranks, replicas, gpus=gpus, gpu_gib=gpu_gib)
        if plan is not None:
            assert plan.balance is not None
            costs[ranks, replicas] = max(plan.balance.train_s, plan.balance.generate_s)
    if not costs:
        raise ConfigError("--gpus", gpus, _too_few_gpus(config, gpu_gib=gpu_gib))
    ranks, replicas = min(costs, key=lambda split: costs[split])
    return ["--trainer.ranks", str(ranks), "--generator.replicas", str(replicas)]


def _plan_of_split(
    config: RunConfig,
    sizes: ModelSizes,
    ranks: int,
    replicas: int,
    *,
    gpus: int,
    gpu_gib: float,
) -> RunPlan | None:
    """Return the plan of so many ranks and generators on ``gpus`` GPUs; None if they don't fit."""
    trainer = dataclasses.replace(config.trainer, ranks=ranks)
    generator = dataclasses.replace(config.generator, replicas=replicas)
    split = dataclasses.replace(config, trainer=trainer, generator=generator)
    try:
        trainer.parallelism.validate(field="trainer.parallelism", ranks=ranks)
        if trainer_memory(sizes, split, device="cuda").total > gpu_gib * GIB:
            return None  # before the whole plan, which takes long to make
        plan = plan_run(
            split,
            device="cuda",
            available=list(range(gpus)) if config.provision.job.has_gpus is None else None,
        )
    except ConfigError:  # ranks that the mesh or the hosts can't hold
        return None
    return plan if plan.trainer_gib <= gpu_gib else None


def _too_few_gpus(config: RunConfig, *, gpu_gib: float) -> str:
    """Return how many GPUs a run needs at least, in the words of an error about too few."""
    engine = config.generator.engine.tensor_parallel_degree
    hosted = hosted_processes(config)
    sizes = model_sizes(config, "cuda")
    for ranks in range(1, MAX_RANKS_TRIED + 1):
        gpus = ranks + engine + hosted
        if _plan_of_split(config, sizes, ranks, 1, gpus=gpus, gpu_gib=gpu_gib) is None:
            continue
        others = f", hosted models {hosted}" if hosted else ""
        return (
            f"too few: the trainer takes {ranks} of {gpu_gib:.0f} GiB, a generator "
            f"{engine}{others}: at least --gpus {gpus}, or --provision.share-gpus"
        )
    return (
        f"too few: the trainer takes more than {MAX_RANKS_TRIED} of {gpu_gib:.0f} GiB: "
        "lower batcher.row_length, or take a smaller model"
    )
