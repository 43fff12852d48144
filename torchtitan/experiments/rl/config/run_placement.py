"""The placement of a config's processes."""

from collections.abc import Sequence
from typing import Literal

from torchtitan.experiments.rl.config.placement import Placement, plan_placement
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.generation.references import hosted_models


def place(
    config: RunConfig,
    device: Literal["cpu", "cuda"],
    *,
    parameters: int,
    hosts: Sequence[Sequence[int]] | None = None,
    worker_cores: Sequence[Sequence[int]] | None = None,
) -> Placement:
    """
    Args:
        parameters, hosts, worker_cores: as ``plan_placement`` takes them. ``hosts`` None: this host alone.

    Raises:
        ConfigError: the hosts have too little.
    """
    return plan_placement(
        device=device,
        trainer_ranks=config.trainer.ranks,
        trainer_tensor_parallel_degree=config.trainer.parallelism.tensor_parallel_degree,
        replicas=config.generator.replicas,
        tensor_parallel_degree=config.generator.engine.tensor_parallel_degree,
        hosted=tuple(hosted_models(config.tasks).values()),
        rollout_workers=config.rollout_workers,
        hosts=hosts,
        provision=config.provision,
        worker_cores=worker_cores,
        parameters=parameters,
    )
