"""Placement: the host, and the cores or GPUs of it, that each process of a run gets."""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import HostedModel, hosted_models
from torchtitan.experiments.rl.hosts.job import contiguous_shares
from torchtitan.experiments.rl.plan.costs import GPUS_PER_HOST
from torchtitan.experiments.rl.process.host import Device, own_cores, sliced, visible_gpus

LARGE_ON_CPU = 10_000_000
"""Parameters from which trainer and generators have threads for all cores each. Seconds of a step
on two busy cores, with a core each (bound to it, then) and with both for both: 7.6 and 4.6 with
25.6M parameters in a synchronous run, 5.6 and 5.2 in an asynchronous one; with 0.9M parameters,
synchronous, 0.37 and 0.43."""


class Place(NamedTuple):
    """Place of one process."""

    host: int
    devices: tuple[int, ...]
    """Indices of the host's GPUs (CUDA). On CPU, cores: the process has a thread for each, and
    stays on their NUMA nodes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """Places of all processes, by role. The controller runs in the command's process."""

    trainer: tuple[Place, ...]
    """One a trainer rank: the same number on each of its hosts, which follow each other."""
    generators: tuple[Place, ...]
    """One a generator replica; as many GPUs as its tensor parallel degree, all on one host."""
    hosted: tuple[tuple[Place, ...], ...] = ()
    """The same for each hosted model."""
    rollout_workers: tuple[Place, ...] = ()
    """Each has all cores of its host and no GPU. They share the cores, because they wait most of
    the time."""

    def lines(self, device: Device, *, submitted: bool = False) -> list[str]:
        """Return what stands on each host, for ``--dry-run``.

        Args:
            submitted: True if a scheduler runs the command, on the hosts of its job.
        """
        roles = {"trainer": self.trainer, "generator": self.generators}
        roles |= {f"hosted model {number}": places for number, places in enumerate(self.hosted)}
        roles["rollout workers"] = self.rollout_workers
        lines = []
        for host in sorted({place.host for places in roles.values() for place in places}):
            stand = []
            for role, places in roles.items():
                here = {
                    index: place.devices for index, place in enumerate(places) if place.host == host
                }
                has = "" if role == "rollout workers" else _has([*here.values()], device)
                stand += [f"{role} {ranges(here)}{has}"] if here else []
            lines.append(f"host {host:<10}{'; '.join(stand)}")
        if device == "cpu" and {place.host for place in self.trainer} & {
            place.host for place in self.generators
        }:
            lines.append(
                "cores          threads run on any: provision.share_cores says how many trainer "
                "and generators have"
            )
        where = (
            "the job's own command, on host 0"
            if submitted
            else "this process, on the host of the command"
        )
        return [*lines, f"controller     {where}"]


def _has(devices: Sequence[Sequence[int]], device: Device) -> str:
    """Return what processes of a role have on their host, in words."""
    if device == "cuda":
        gpus = sorted(gpu for own in devices for gpu in own)
        return f" on GPU{'s' * (len(gpus) > 1)} {ranges(gpus)}"
    threads = sorted({len(own) for own in devices})
    return f" with {ranges(threads)} thread{'s' * (threads != [1])}{' each' * (len(devices) > 1)}"


def place_on_fewest(
    config: RunConfig, device: Device, *, parameters: int, available: list[int] | None
) -> tuple[list[list[int]] | None, Placement]:
    """Return the placement on as few hosts as the run fits, and the cores or GPUs of each host.

    Args:
        available: cores or GPUs to plan with, instead of those of the config's job.

    Raises:
        ConfigError: the run does not fit.
    """
    for hosts in (
        config.provision.devices(device) if available is None else [hosts_of(available, device)]
    ):
        try:
            return hosts, place(config, device, parameters=parameters, hosts=hosts)
        except ConfigError as error:
            last = error
    raise last


def hosts_of(devices: Sequence[int], device: Device) -> list[list[int]]:
    """Return the devices of each host.

    More GPUs than this host could have are those of several hosts, GPUS_PER_HOST on each.
    """
    if device == "cpu" or len(devices) <= max(GPUS_PER_HOST, len(visible_gpus())):
        return [list(devices)]
    counts = [GPUS_PER_HOST] * (len(devices) // GPUS_PER_HOST)
    rest = len(devices) % GPUS_PER_HOST
    return [list(range(count)) for count in (counts + [rest] if rest else counts)]


def place(
    config: RunConfig,
    device: Device,
    *,
    parameters: int = 0,
    hosts: Sequence[Sequence[int]] | None = None,
    worker_cores: Sequence[Sequence[int]] | None = None,
) -> Placement:
    """Divide the hosts' cores or GPUs.

    GPUs are exclusive: trainer ranks first, then replicas, then hosted models. With
    ``ProvisionConfig.share_gpus`` replicas begin at the trainer's first GPU again. Threads are not:
    Linux runs them on any core of their NUMA nodes. Their number follows from cores, which are
    shared out among the trainer's ranks of a host, and among its engines; the two sides have all of
    them, or half of them each (``ProvisionConfig.share_cores``). Hosted models share the
    generators': where the policy waits for its reference, they take turns.

    Args:
        parameters: of the model.
        hosts: cores or GPUs of each host. None: those that this process sees, on this host alone.
        worker_cores: of each of ``hosts``, for rollout workers. None on CUDA: they are not known
            yet.

    Raises:
        ConfigError: fewer GPUs, or fewer hosts, than the config asks for.
    """
    if hosts is None:
        hosts, worker_cores = (
            [own_cores() if device == "cpu" else visible_gpus()],
            [sorted(os.sched_getaffinity(0))],
        )
    elif worker_cores is None:
        worker_cores = (
            hosts if device == "cpu" else [()] * len(hosts)
        )  # known when the hosts are there
    roles, hosted = config.provision, list(hosted_models(config.tasks).values())
    roles.check_hosts(len(hosts))
    on = itertools.cycle(roles.rollout_worker_hosts or range(len(hosts)))
    workers = tuple(
        Place(host, tuple(worker_cores[host]))
        for host in itertools.islice(on, config.rollout_workers)
    )
    divide = _on_cores if device == "cpu" else _on_gpus
    trainer, generators, models = divide(config, hosts, hosted, parameters)
    return Placement(trainer=trainer, generators=generators, hosted=models, rollout_workers=workers)


def weights_stay_on_devices(config: RunConfig, device: Device, placement: Placement) -> bool:
    """Return whether engines read versions of the policy from the trainer's devices.

    Raises:
        ConfigError: they can't, and are to.
    """
    asked, engine = config.generator.weights, config.generator.engine
    hosts = sorted({place.host for place in (*placement.trainer, *placement.generators)})
    cause = ""
    if len(hosts) > 1:
        cause = (
            f"trainer and generators are on hosts {ranges(hosts)}, and a device's memory is "
            "shared within one"
        )
    elif device == "cuda" and sliced():
        cause = "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), and these share no memory"
    elif not engine.reads_devices:
        cause = f"{type(engine).__name__} reads the host's memory only"
    if asked == "device" and cause:
        raise ConfigError("generator.weights", asked, f'{cause}: set it to "host"')
    return asked == "device" or (asked == "auto" and device == "cuda" and not cause)


def engine_processes(config: RunConfig) -> int:
    """Return the number of processes of the policy's generators."""
    return config.generator.replicas * config.generator.engine.tensor_parallel_degree


def hosted_processes(config: RunConfig) -> int:
    """Return the number of processes of the frozen models that the run serves itself."""
    return sum(
        model.replicas * model.engine.tensor_parallel_degree
        for model in hosted_models(config.tasks).values()
    )


def needed_gpus(config: RunConfig) -> int:
    """GPUs of trainer ranks, generator replicas and hosted models."""
    both = (config.trainer.ranks, engine_processes(config))
    return (max(both) if config.provision.share_gpus else sum(both)) + hosted_processes(config)


Divided = tuple[tuple[Place, ...], tuple[Place, ...], tuple[tuple[Place, ...], ...]]
"""Places of the trainer's ranks, of the generators, and of each hosted model."""


def _on_gpus(
    config: RunConfig,
    hosts: Sequence[Sequence[int]],
    hosted: Sequence[HostedModel],
    parameters: int,
) -> Divided:
    roles, ranks, replicas = config.provision, config.trainer.ranks, config.generator.replicas
    degree, engines = (
        config.generator.engine.tensor_parallel_degree,
        [model.engine.tensor_parallel_degree for model in hosted],
    )
    free = [list(gpus) for gpus in hosts]
    if (needed := needed_gpus(config)) > (there := sum(map(len, free))):
        others = f" and {len(hosted)} hosted model(s)" if hosted else ""
        has = (
            f"this host has {there}" if len(hosts) == 1 else f"the {len(hosts)} hosts have {there}"
        )
        cure = (
            f"with {replicas} generator replica(s) of {degree} GPU(s){others} the run needs "
            f"{needed} GPUs "
            f"and {has}; lower trainer.ranks, generator.replicas or "
            "generator.engine.tensor_parallel_degree"
        )
        raise ConfigError("trainer.ranks", ranks, cure)
    if sliced() and (most := max(degree, *engines, 1)) > 1:
        cure = (
            "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), and a process can use one: choose "
            "1, or whole GPUs"
        )
        raise ConfigError("generator.engine.tensor_parallel_degree", most, cure)
    trainer: list[Place] = []
    trainer_hosts = roles.trainer_hosts or _trainer_hosts(
        free, ranks, config.trainer.parallelism.tensor_parallel_degree
    )
    share = _ranks_of_a_host(ranks, trainer_hosts)
    for host in trainer_hosts:
        if share > len(free[host]):
            cure = (
                f"host {host} has {len(free[host])} GPUs for {share} trainer ranks: name more hosts"
            )
            raise ConfigError("provision.trainer_hosts", tuple(trainer_hosts), cure)
        trainer += [Place(host, (gpu,)) for gpu in free[host][:share]]
        del free[host][:share]
    unused = free
    if roles.share_gpus:
        free = [list(gpus) for gpus in hosts]
    generators = tuple(_engine_place(free, degree, roles.generator_hosts) for _ in range(replicas))
    free = [[gpu for gpu in gpus if gpu in left] for gpus, left in zip(free, unused, strict=True)]
    models = tuple(
        tuple(_engine_place(free, size, roles.generator_hosts) for _ in range(model.replicas))
        for model, size in zip(hosted, engines, strict=True)
    )
    return tuple(trainer), generators, models


def _on_cores(
    config: RunConfig,
    hosts: Sequence[Sequence[int]],
    hosted: Sequence[HostedModel],
    parameters: int,
) -> Divided:
    roles = config.provision
    large = parameters >= LARGE_ON_CPU if roles.share_cores is None else roles.share_cores
    trainer_hosts = roles.trainer_hosts or (0,)
    others = [host for host in range(len(hosts)) if host not in trainer_hosts]
    generator_hosts = roles.generator_hosts or others or list(range(len(hosts)))
    ours, theirs = [], []
    for host, cores in enumerate(hosts):
        apart = (
            host in trainer_hosts and host in generator_hosts and not (roles.share_gpus or large)
        )
        half = max(1, len(cores) // 2)
        theirs.append(list(cores[:half] if apart else cores))
        ours.append(list(cores[half:] or cores) if apart else list(cores))

    def share(count: int) -> tuple[Place, ...]:
        """Engines in turn on the generators' hosts."""
        on = [generator_hosts[i % len(generator_hosts)] for i in range(count)]
        shares = {host: iter(contiguous_shares(theirs[host], on.count(host))) for host in set(on)}
        return tuple(Place(host, tuple(next(shares[host]))) for host in on)

    own = _ranks_of_a_host(config.trainer.ranks, trainer_hosts)
    trainer = tuple(
        Place(host, tuple(cores))
        for host in trainer_hosts
        for cores in contiguous_shares(ours[host], own)
    )
    return (
        trainer,
        share(config.generator.replicas),
        tuple(share(model.replicas) for model in hosted),
    )


def _ranks_of_a_host(ranks: int, hosts: Sequence[int]) -> int:
    """Return the number of ranks that each host gets.

    Raises:
        ConfigError: the hosts do not get the same number of ranks, or do not follow each other.
    """
    if ranks % len(hosts):
        raise ConfigError(
            "provision.trainer_hosts",
            tuple(hosts),
            f"must divide trainer.ranks = {ranks}: each gets as many ranks",
        )
    if list(hosts) != list(range(hosts[0], hosts[0] + len(hosts))):
        raise ConfigError(
            "provision.trainer_hosts", tuple(hosts), "must follow each other, such as 1 2 3"
        )
    return ranks // len(hosts)


def _trainer_hosts(
    free: Sequence[Sequence[int]], ranks: int, tensor_parallel: int
) -> Sequence[int]:
    """Return the first hosts, as few as hold the ranks in equal numbers.

    Tensor-parallel ranks stand together.

    Raises:
        ConfigError: there are no such hosts.
    """
    for count in range(1, len(free) + 1):
        own, rest = divmod(ranks, count)
        if (
            not rest
            and own % tensor_parallel == 0
            and all(len(gpus) >= own for gpus in free[:count])
        ):
            return range(count)
    together = (
        f" in whole groups of {tensor_parallel} (trainer.parallelism.tensor_parallel_degree)"
        if tensor_parallel > 1
        else ""
    )
    cure = (
        f"{len(free)} hosts with {', '.join(str(len(gpus)) for gpus in free)} GPUs can't hold "
        f"them in equal numbers{together}"
    )
    raise ConfigError("trainer.ranks", ranks, cure)


def _engine_place(free: list[list[int]], size: int, among: Sequence[int]) -> Place:
    """Take the GPUs of one engine, on the first host that has so many left.

    Raises:
        ConfigError: no host has. An engine exchanges activations in every layer, and does not span
            hosts.
    """
    for host in among or range(len(free)):
        if len(free[host]) >= size:
            place = Place(host, tuple(free[host][:size]))
            del free[host][:size]
            return place
    left = ", ".join(str(len(gpus)) for gpus in free)
    cure = (
        f"no host has so many GPUs left ({left}), and an engine does not span hosts: lower it, or "
        "move the trainer"
    )
    raise ConfigError("generator.engine.tensor_parallel_degree", size, cure)


def ranges(numbers: Iterable[int]) -> str:
    """For people: "0-3,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
