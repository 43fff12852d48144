"""Which cores and GPUs each process of a run gets. It follows from the config, before a process is spawned."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.process.gpus import sliced, visible_gpus


@dataclass(kw_only=True, slots=True)
class ProvisionConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where torch sees a GPU."""

    def resolve(self) -> Literal["cpu", "cuda"]:
        if self.device == "cuda" and torch.version.cuda is None:
            cure = f"torch {torch.__version__} here is a build without CUDA; install requirements/gpu.txt, or use cpu or auto"
            raise ConfigError("provision.device", "cuda", cure)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("provision.device", "cuda", "torch sees no GPU here; use cpu or auto")
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """Cores (CPU) or GPUs (CUDA) of every process, by role. Frozen before anything is spawned."""

    trainer: tuple[tuple[int, ...], ...]
    """One tuple a trainer rank."""
    generators: tuple[tuple[int, ...], ...]
    """One tuple a generator replica; as many GPUs as its tensor parallel degree."""
    hosted: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The same for each hosted model."""
    rollout_workers: tuple[tuple[int, ...], ...] = ()
    """Cores of each rollout worker, which has no GPU. They share all cores, because they wait most of the time."""


def plan_placement(
    *,
    device: Literal["cpu", "cuda"],
    trainer_ranks: int,
    replicas: int,
    tensor_parallel_degree: int,
    hosted: Sequence[HostedModel] = (),
    rollout_workers: int = 0,
    available: list[int] | None = None,
) -> Placement:
    """Divide this host's cores or GPUs.

    GPUs are exclusive: trainer ranks first, then replicas, then hosted models. Cores are shared out evenly, the trainer's apart
    from the generators' as far as they go: an engine and a trainer on one core halve each other. Hosted models share the
    generators' cores: where the policy waits for its reference, they take turns.

    Raises:
        ConfigError: fewer GPUs than the config asks for.
    """
    workers = (tuple(sorted(os.sched_getaffinity(0))),) * rollout_workers
    if available is None:
        available = sorted(os.sched_getaffinity(0)) if device == "cpu" else visible_gpus()
    if device == "cuda":
        sizes = [tensor_parallel_degree] * replicas
        sizes += [model.engine.tensor_parallel_degree for model in hosted for _ in range(model.replicas)]
        needed = trainer_ranks + sum(sizes)
        if needed > len(available):
            others = f" and {len(hosted)} hosted model(s)" if hosted else ""
            cure = (
                f"with {replicas} generator replica(s) of {tensor_parallel_degree} GPU(s){others} the run needs {needed} GPUs "
                f"and this host has {len(available)}; lower trainer.ranks, generator.replicas or "
                "generator.engine.tensor_parallel_degree"
            )
            raise ConfigError("trainer.ranks", trainer_ranks, cure)
        if sliced() and max(sizes) > 1:
            cure = "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), and a process can use one: choose 1, or whole GPUs"
            raise ConfigError("generator.engine.tensor_parallel_degree", max(sizes), cure)
        ranks = tuple((gpu,) for gpu in available[:trainer_ranks])
        rest = iter(available[trainer_ranks:])
        engines = iter([tuple(islice(rest, size)) for size in sizes])
        generators = tuple(islice(engines, replicas))
        return Placement(
            trainer=ranks,
            generators=generators,
            hosted=tuple(tuple(islice(engines, model.replicas)) for model in hosted),
            rollout_workers=workers,
        )
    half = max(1, len(available) // 2)
    generator_cores, trainer_cores = available[:half], available[half:] or available
    return Placement(
        trainer=_share(trainer_cores, trainer_ranks),
        generators=_share(generator_cores, replicas),
        hosted=tuple(_share(generator_cores, model.replicas) for model in hosted),
        rollout_workers=workers,
    )


def _share(cores: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous, nearly equal shares; with more parts than cores, several parts have the same core."""
    if parts >= len(cores):
        return tuple((cores[i % len(cores)],) for i in range(parts))
    bounds = [round(i * len(cores) / parts) for i in range(parts + 1)]
    return tuple(tuple(cores[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
