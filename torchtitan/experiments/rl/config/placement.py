"""Which host, and which of its cores or GPUs, each process of a run gets. It follows from the config, before one is spawned."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import HostedModel, hosted_models
from torchtitan.experiments.rl.hosts.job import contiguous_shares
from torchtitan.experiments.rl.process.host import own_cores, sliced, visible_gpus

LARGE_ON_CPU = 10_000_000
"""Parameters from which trainer and generators have threads for all cores each. Seconds of a step on two busy cores, with a
core each (bound to it, then) and with both for both: 7.6 and 4.6 with 25.6M parameters in a synchronous run, 5.6 and 5.2 in an
asynchronous one; with 0.9M parameters, synchronous, 0.37 and 0.43."""


class Place(NamedTuple):
    """Of one process."""

    host: int
    devices: tuple[int, ...]
    """Indices of the host's GPUs (CUDA). On CPU, cores: the process has a thread for each, and stays on their NUMA nodes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """Where every process runs, by role. Frozen before anything is spawned. The controller runs in the command's process."""

    trainer: tuple[Place, ...]
    """One a trainer rank: the same number on each of its hosts, which follow each other."""
    generators: tuple[Place, ...]
    """One a generator replica; as many GPUs as its tensor parallel degree, all on one host."""
    hosted: tuple[tuple[Place, ...], ...] = ()
    """The same for each hosted model."""
    rollout_workers: tuple[Place, ...] = ()
    """Each has all cores of its host and no GPU. They share the cores, because they wait most of the time."""

    def lines(self, device: Literal["cpu", "cuda"], *, submitted: bool = False) -> list[str]:
        """What stands on each host, for ``--dry-run``. ``submitted``: the run is a job of a scheduler, and not this command."""
        roles = {"trainer": self.trainer, "generator": self.generators}
        roles |= {f"hosted model {number}": places for number, places in enumerate(self.hosted)}
        lines = []
        for host in sorted({place.host for places in (*roles.values(), self.rollout_workers) for place in places}):
            here = []
            for role, places in roles.items():
                here += [f"{role} {has}" for has in _of_host(host, places, device)]
            workers = [index for index, place in enumerate(self.rollout_workers) if place.host == host]
            here += [f"rollout workers {ranges(workers)}"] if workers else []
            lines.append(f"host {host:<10}{'; '.join(here)}")
        if device == "cpu":
            both = {place.host for place in self.trainer} & {place.host for place in self.generators}
            cores = {core for place in self.trainer for core in place.devices if place.host in both}
            shared = any(cores & set(place.devices) for place in self.generators if place.host in both)
            if both:
                threads = f"threads for {'all' if shared else 'half'} of the cores each"
                lines.append(f"cores          trainer and generators have {threads}, and run on any (provision.share_cores)")
        where = "the job's own command, on host 0" if submitted else "this process, on the host of the command"
        return [*lines, f"controller     {where}"]


def plan_placement(
    *,
    device: Literal["cpu", "cuda"],
    trainer_ranks: int,
    replicas: int,
    tensor_parallel_degree: int,
    hosted: Sequence[HostedModel] = (),
    rollout_workers: int = 0,
    available: Sequence[int] | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
    provision: ProvisionConfig | None = None,
    trainer_tensor_parallel_degree: int = 1,
    worker_cores: Sequence[Sequence[int]] | None = None,
    parameters: int = 0,
) -> Placement:
    """Divide the hosts' cores or GPUs.

    GPUs are exclusive: trainer ranks first, then replicas, then hosted models. With ``ProvisionConfig.share_gpus`` replicas
    begin at the trainer's first GPU again. Threads are not: Linux runs them on any core of
    their NUMA nodes. Their number follows from cores, which are shared out among the trainer's ranks of a host, and among its
    engines; the two sides have all of them, or half of them each (``ProvisionConfig.share_cores``). Hosted models share the
    generators': where the policy waits for its reference, they take turns.

    Args:
        parameters: of the model.
        available: cores or GPUs of this host, where that is all there is. None: those that this process sees.
        hosts: cores or GPUs of each host.
        provision: says which hosts a role stands on, where its config does.
        worker_cores: of each of ``hosts``, for rollout workers. None on CUDA: they are not known yet.

    Raises:
        ConfigError: fewer GPUs, or fewer hosts, than the config asks for.
    """
    if hosts is None:
        here: Sequence[int] | None = available
        if here is None:
            here = own_cores() if device == "cpu" else visible_gpus()
        hosts, worker_cores = [here], [sorted(os.sched_getaffinity(0))]
    elif worker_cores is None:
        worker_cores = hosts if device == "cpu" else [()] * len(hosts)  # known when the hosts are there
    roles = provision or ProvisionConfig()
    roles.check_hosts(len(hosts))
    on = roles.rollout_worker_hosts or range(len(hosts))
    workers = tuple(Place(on[i % len(on)], tuple(worker_cores[on[i % len(on)]])) for i in range(rollout_workers))
    if device == "cpu":
        large = parameters >= LARGE_ON_CPU
        share_cores = roles.share_gpus or (large if roles.share_cores is None else roles.share_cores)
        return _on_cores(hosts, roles, trainer_ranks, replicas, hosted, workers, share_cores)
    free = [list(gpus) for gpus in hosts]
    sizes = [tensor_parallel_degree] * replicas
    own = max(trainer_ranks, sum(sizes)) if roles.share_gpus else trainer_ranks + sum(sizes)
    sizes += [model.engine.tensor_parallel_degree for model in hosted for _ in range(model.replicas)]
    needed, there = own + sum(sizes[replicas:]), sum(map(len, free))
    if needed > there:
        others = f" and {len(hosted)} hosted model(s)" if hosted else ""
        has = f"this host has {there}" if len(hosts) == 1 else f"the {len(hosts)} hosts have {there}"
        cure = (
            f"with {replicas} generator replica(s) of {tensor_parallel_degree} GPU(s){others} the run needs {needed} GPUs "
            f"and {has}; lower trainer.ranks, generator.replicas or generator.engine.tensor_parallel_degree"
        )
        raise ConfigError("trainer.ranks", trainer_ranks, cure)
    if sliced() and max(sizes) > 1:
        cure = "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), and a process can use one: choose 1, or whole GPUs"
        raise ConfigError("generator.engine.tensor_parallel_degree", max(sizes), cure)
    trainer_hosts = roles.trainer_hosts or _trainer_hosts(free, trainer_ranks, trainer_tensor_parallel_degree)
    trainer = []
    for host in trainer_hosts:
        own = _ranks_of_a_host(trainer_ranks, trainer_hosts)
        if own > len(free[host]):
            cure = f"host {host} has {len(free[host])} GPUs for {own} trainer ranks: name more hosts"
            raise ConfigError("provision.trainer_hosts", tuple(trainer_hosts), cure)
        trainer += [Place(host, (gpu,)) for gpu in free[host][:own]]
        del free[host][:own]
    if roles.share_gpus:
        left, free = free, [list(gpus) for gpus in hosts]
    generators = tuple(_engine_place(free, size, roles.generator_hosts) for size in sizes[:replicas])
    if roles.share_gpus:
        free = [[gpu for gpu in gpus if gpu in unused] for gpus, unused in zip(free, left, strict=True)]
    engines = iter([_engine_place(free, size, roles.generator_hosts) for size in sizes[replicas:]])
    return Placement(
        trainer=tuple(trainer),
        generators=generators,
        hosted=tuple(tuple(next(engines) for _ in range(model.replicas)) for model in hosted),
        rollout_workers=workers,
    )


def _on_cores(
    hosts: Sequence[Sequence[int]],
    roles: ProvisionConfig,
    trainer_ranks: int,
    replicas: int,
    hosted: Sequence[HostedModel],
    workers: tuple[Place, ...],
    share_cores: bool,
) -> Placement:
    trainer_hosts = roles.trainer_hosts or (0,)
    others = [host for host in range(len(hosts)) if host not in trainer_hosts]
    generator_hosts = roles.generator_hosts or others or list(range(len(hosts)))
    own = _ranks_of_a_host(trainer_ranks, trainer_hosts)
    trainer_cores, generator_cores = [], []
    for host, cores in enumerate(hosts):
        both = host in trainer_hosts and host in generator_hosts and not share_cores
        half = max(1, len(cores) // 2)
        generator_cores.append(list(cores[:half]) if both else list(cores))
        trainer_cores.append(list(cores[half:] or cores) if both else list(cores))

    def share(count: int) -> tuple[Place, ...]:
        """Engines in turn on the generators' hosts."""
        on = [generator_hosts[i % len(generator_hosts)] for i in range(count)]
        shares = {host: _share(generator_cores[host], on.count(host)) for host in set(on)}
        return tuple(Place(host, next(shares[host])) for host in on)

    return Placement(
        trainer=tuple(Place(host, cores) for host in trainer_hosts for cores in _share(trainer_cores[host], own)),
        generators=share(replicas),
        hosted=tuple(share(model.replicas) for model in hosted),
        rollout_workers=workers,
    )


def _share(cores: list[int], parts: int) -> Iterator[tuple[int, ...]]:
    return iter([tuple(share) for share in contiguous_shares(cores, parts)])


def _ranks_of_a_host(ranks: int, hosts: Sequence[int]) -> int:
    """
    Raises:
        ConfigError: the hosts do not get the same number of ranks, or do not follow each other.
    """
    if ranks % len(hosts):
        raise ConfigError(
            "provision.trainer_hosts", tuple(hosts), f"must divide trainer.ranks = {ranks}: each gets as many ranks"
        )
    if list(hosts) != list(range(hosts[0], hosts[0] + len(hosts))):
        raise ConfigError("provision.trainer_hosts", tuple(hosts), "must follow each other, such as 1 2 3")
    return ranks // len(hosts)


def _trainer_hosts(free: Sequence[Sequence[int]], ranks: int, tensor_parallel: int) -> Sequence[int]:
    """The first hosts, as few as hold the ranks in equal numbers, and tensor-parallel ranks together.

    Raises:
        ConfigError: there are no such hosts.
    """
    for count in range(1, len(free) + 1):
        own, rest = divmod(ranks, count)
        if not rest and own % tensor_parallel == 0 and all(len(gpus) >= own for gpus in free[:count]):
            return range(count)
    together = (
        f" in whole groups of {tensor_parallel} (trainer.parallelism.tensor_parallel_degree)" if tensor_parallel > 1 else ""
    )
    cure = (
        f"{len(free)} hosts with {', '.join(str(len(gpus)) for gpus in free)} GPUs can't hold them in equal numbers{together}"
    )
    raise ConfigError("trainer.ranks", ranks, cure)


def _engine_place(free: list[list[int]], size: int, among: Sequence[int]) -> Place:
    """Take the GPUs of one engine, on the first host that has so many left.

    Raises:
        ConfigError: no host has. An engine exchanges activations in every layer, and does not span hosts.
    """
    for host in among or range(len(free)):
        if len(free[host]) >= size:
            place = Place(host, tuple(free[host][:size]))
            del free[host][:size]
            return place
    left = ", ".join(str(len(gpus)) for gpus in free)
    cure = f"no host has so many GPUs left ({left}), and an engine does not span hosts: lower it, or move the trainer"
    raise ConfigError("generator.engine.tensor_parallel_degree", size, cure)


def _of_host(host: int, places: Sequence[Place], device: Literal["cpu", "cuda"]) -> Iterator[str]:
    """Which processes of a role stand on a host, and what they have. Those with as many threads are named together."""
    here = {index: place.devices for index, place in enumerate(places) if place.host == host}
    if device == "cuda" and here:
        gpus = [gpu for devices in here.values() for gpu in devices]
        yield f"{ranges(here)} on GPU{'s' if len(gpus) > 1 else ''} {ranges(sorted(gpus))}"
    for count in {len(devices): None for devices in here.values()} if device == "cpu" else ():
        alike = [index for index, devices in here.items() if len(devices) == count]
        yield f"{ranges(alike)} with {count} thread{'s' if count > 1 else ''}{' each' if len(alike) > 1 else ''}"


def ranges(numbers: Iterable[int]) -> str:
    """For people: "0-3,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


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
