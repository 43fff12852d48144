"""Brings each version of the weights to every host that generates and lacks a part of the trainer.

Such a host has one weight reader, a process that reads a version into the host's memory, from which
its engines load. A host reads from any host that has the version. With one trainer host:

    round 1   the trainer's host                -> 4 hosts
    round 2   these and the trainer's host      -> 4 hosts each
    round 3   all that have it                  -> 4 hosts each; more than 100 are reached
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from torchtitan.experiments.rl.compat.monarch import call_actor, original
from torchtitan.experiments.rl.fleet.role import SpawnedProcess
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.weights.reader import Fetched

logger = logging.getLogger(__name__)

READERS_AT_ONCE = 4
"""Maximum number of readers that read a version from one host at a time, per host of the trainer.

By RDMA they share its network, and more would take as much longer. By TCP a reader is slower than
that: four take no longer than one.
"""
_TRAINER = ""
"""Source of a version where the trainer's own hosts are read."""


def first_generators(trainer_hosts: set[str], generator_hosts: Sequence[str]) -> list[int]:
    """Return the first replica on each host that needs a reader.

    A host needs none if all that the trainer holds is in its memory.

    Args:
        generator_hosts: host of each replica.
    """
    return [
        index
        for index, host in enumerate(generator_hosts)
        if trainer_hosts != {host} and host not in generator_hosts[:index]
    ]


class WeightReaders:
    """Implements weights.sync.HostCopies over reader processes that may die and be restarted."""

    def __init__(self, hosts: Iterable[str], trainer_hosts: int = 1):
        """Expect one reader on each host.

        Args:
            hosts: their names, for people.
            trainer_hosts: number of hosts that divide the trainer. Each reader reads from each.
        """
        self.lost = 0
        """Number of times that a host has lost its copies."""
        self._connected = {host: asyncio.Event() for host in hosts}
        self._processes: dict[str, SpawnedProcess] = {}
        self._fetched_bytes: Counter[str] = Counter()
        self._trainer_seats = READERS_AT_ONCE * trainer_hosts
        """Number of readers that read from the trainer at a time."""
        self._fetching = asyncio.Lock()
        """Held during a fetch: replicas that join side by side each ask for the same version."""

    async def admit(self, host: str, process: SpawnedProcess) -> None:
        """Read by this process on its host from now on."""
        self._processes[host] = process
        self._connected[host].set()

    def lose(self, host: str) -> None:
        """Note that a host's reader died, with all copies that no engine has mapped."""
        self._connected[host].clear()
        self.lost += 1

    async def fetch(self, version: int) -> None:
        """Return when every host has a published version in its memory.

        A reader that dies is asked again once it is restarted. Calls run one after another: a
        reader takes a second request for the end of the first, whose caller must have gone.

        Raises:
            RunError: a trainer host can't be read.
        """
        async with self._fetching:
            # Seats at the sources: each host that has the version, with its lifetime, once for each
            # reader that it may serve. A reader takes a seat, and puts it back when it has read.
            seats: asyncio.Queue[tuple[str, Lifetime]] = asyncio.Queue()
            for _ in range(self._trainer_seats):
                # The trainer's end is seen by its own supervision.
                seats.put_nowait((_TRAINER, Lifetime("trainer")))
            try:
                async with asyncio.TaskGroup() as fetches:
                    for host in self._connected:
                        fetches.create_task(self._fetch(host, version, seats))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    def take_fetched_bytes(self) -> dict[str, int]:
        """Return the bytes that each host has read since the last call."""
        taken = dict.fromkeys(self._connected, 0) | self._fetched_bytes
        self._fetched_bytes = Counter()
        return taken

    async def _fetch(
        self, host: str, version: int, seats: asyncio.Queue[tuple[str, Lifetime]]
    ) -> None:
        """Have one host read the version, and offer its copy to others.

        A read that fails is tried again, by the host's next reader if this one died, or from the
        next source.

        Raises:
            RunError: the trainer can't be read.
        """
        others_read_here = len(self._connected) > self._trainer_seats
        while True:
            await self._connected[host].wait()
            process = self._processes[host]
            source, source_life = await seats.get()
            if source_life.cause is not None:
                continue
            try:
                answer = source_life.during(
                    call_actor(process.actor.fetch, version, source, others_read_here)
                )
                fetched: Fetched = await process.life.call(answer)
            except Exception as error:  # noqa: BLE001 - a reader's RunError comes in an ActorError
                if process.life.cause is not None:
                    seats.put_nowait((source, source_life))
                    if self._processes[host] is process:
                        self._connected[host].clear()  # before its supervisor learns of it
                elif source == _TRAINER:
                    raise original(error) from None
                continue  # a source that can't be read is offered to nobody again
            break
        seats.put_nowait((source, source_life))
        if fetched.source:
            for _ in range(READERS_AT_ONCE):
                seats.put_nowait((fetched.source, process.life))
        self._fetched_bytes[host] += fetched.nbytes
        if fetched.nbytes:
            logger.info(
                "%s fetched version %d: %d bytes in %.2f s from %s",
                host,
                version,
                fetched.nbytes,
                fetched.seconds,
                source or "the trainer",
            )
