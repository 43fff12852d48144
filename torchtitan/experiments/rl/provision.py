"""From a host or a Monarch job to process meshes: who runs where, on which cores and GPUs."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from monarch.actor import HostMesh, ProcMesh, this_host

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.frozen.models import HostedModel
from torchtitan.experiments.rl.weights.store import start_store

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""For each part: a run that ends must end."""


@dataclass(kw_only=True, slots=True)
class ProvisionConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where torch sees a GPU."""

    def resolve(self) -> Literal["cpu", "cuda"]:
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
    """Cores of each rollout worker, which has no GPU. They share all there are: most of the time they wait."""


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
        available = sorted(os.sched_getaffinity(0)) if device == "cpu" else list(range(torch.cuda.device_count()))
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


class RunMeshes:
    """The processes of one run, and the actors in them."""

    def __init__(self, placement: Placement, device: Literal["cpu", "cuda"], *, host: HostMesh | None = None):
        self.trainer_procs = spawn(host, "trainer", placement.trainer, device)
        self.generator_procs = spawn(host, "generator", placement.generators, device)
        self.hosted_procs = [spawn(host, f"hosted_{index}", shares, device) for index, shares in enumerate(placement.hosted)]
        self.rollout_worker_procs = (
            spawn(host, "rollout_worker", placement.rollout_workers, "cpu") if placement.rollout_workers else None
        )
        self._actors: list[Any] = []

    async def start(self, trainer: Any, generators: Any, hosted: Sequence[Any] = ()) -> int:
        """Set up spawned actors side by side: the store, the trainer's process group, the engines.

        Returns:
            Hosts other than the trainer's first that hold a generator: they can't map its shared memory.
        """
        self._actors = [trainer, generators, *hosted]

        async def start_trainer() -> str:
            await start_store(self.trainer_procs.slice(procs=0))
            addresses = list((await trainer.address.call()).values())
            host, port = addresses[0]
            await trainer.setup.call(f"{host}:{port}", len({name for name, _ in addresses}) == 1)
            return host

        async def start_generators() -> set[str]:
            return set((await generators.setup.call()).values())

        async def start_hosted() -> None:
            await asyncio.gather(*(_done(model.setup.call()) for model in hosted))

        trainer_host, generator_hosts, _ = await asyncio.gather(start_trainer(), start_generators(), start_hosted())
        return len(generator_hosts - {trainer_host})

    def add(self, actors: Any) -> None:
        """Actors that ``close`` has to shut down too; before the others, which they use."""
        self._actors.insert(0, actors)

    async def close(self) -> None:
        """Shut the actors down, then stop the processes, whatever state they are in."""
        await asyncio.gather(*(_within_limit(f"shutdown of {actor}", actor.shutdown.call()) for actor in self._actors))
        procs = [self.trainer_procs, self.generator_procs, *self.hosted_procs]
        if self.rollout_worker_procs is not None:
            procs.append(self.rollout_worker_procs)
        await asyncio.gather(*(_within_limit(f"stopping {mesh}", mesh.stop()) for mesh in procs))


async def _done(future: Any) -> None:
    """Monarch's futures can be awaited, and asyncio wants coroutines."""
    await future


async def _within_limit(what: str, future: Any) -> None:
    try:
        await asyncio.wait_for(_done(future), SHUTDOWN_TIMEOUT_S)
    except Exception as error:  # a part that is dead or busy must not keep the others from ending
        logger.info("%s: %s", what, error)


def spawn(host: HostMesh | None, name: str, shares: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"]) -> ProcMesh:
    """One process per share, each seeing only its own cores or GPUs."""
    # Inherited, because torch's C++ side reads it at its first import: it warns of its memory binding at every start.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    bootstrap: Callable[[], None] = partial(_bootstrap, shares, device)
    return (host or this_host()).spawn_procs(per_host={"procs": len(shares)}, bootstrap=bootstrap, name=name)


def _share(cores: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous, nearly equal shares; where there are more parts than cores, they double up."""
    if parts >= len(cores):
        return tuple((cores[i % len(cores)],) for i in range(parts))
    bounds = [round(i * len(cores) / parts) for i in range(parts + 1)]
    return tuple(tuple(cores[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))


def _bootstrap(shares: tuple[tuple[int, ...], ...], device: str) -> None:
    """Runs in the new process before any actor: affinity and visibility must be right before torch starts its threads."""
    from monarch.actor import current_rank

    share = shares[current_rank().rank]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = str(len(share))
        os.sched_setaffinity(0, share)
        torch.set_num_threads(len(share))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, share))
