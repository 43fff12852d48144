"""The weight readers of a run: one process on each generator host that does not share the trainer's memory."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.controller.part import PartProcess
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.weights.reader import Fetched

logger = logging.getLogger(__name__)


def first_generators(trainer_hosts: set[str], generator_hosts: Sequence[str]) -> list[int]:
    """Of each host that needs a reader, the first replica there: not all that the trainer holds is in that host's memory."""
    return [
        index for index, host in enumerate(generator_hosts) if trainer_hosts != {host} and host not in generator_hosts[:index]
    ]


class WeightReaders:
    """Implements weights.sync.HostCopies over parts that may be lost and made again."""

    def __init__(self, hosts: Iterable[str]):
        """``hosts``: their names, as people know them."""
        self._ready = {host: asyncio.Event() for host in hosts}
        self._processes: dict[str, PartProcess] = {}
        self._fetched: Counter[str] = Counter()
        self.lost = 0

    async def admit(self, host: str, process: PartProcess) -> None:
        """``Part.connect`` of a host's reader."""
        self._processes[host] = process
        self._ready[host].set()

    def lose(self, host: str) -> None:
        """``Part.disconnect``. What it held is gone, except for engines that have mapped it."""
        self._ready[host].clear()
        self.lost += 1

    async def fetch(self, version: int) -> None:
        """See HostCopies. Waits for a reader that is being made again, and asks it anew.

        Raises:
            RunError: a trainer host can't be read.
        """
        await asyncio.gather(*(self._fetch(host, version) for host in self._ready))

    def take_fetched_bytes(self) -> dict[str, int]:
        taken, self._fetched = dict.fromkeys(self._ready, 0) | self._fetched, Counter()
        return taken

    async def _fetch(self, host: str, version: int) -> None:
        while True:
            await self._ready[host].wait()
            process = self._processes[host]
            try:
                fetched: Fetched = await process.life.call(ask(process.actor.fetch, version))
            except ProcessLost:
                if self._processes[host] is process:
                    self._ready[host].clear()  # before its supervisor learns of it
                continue
            self._fetched[host] += fetched.nbytes
            if fetched.nbytes:
                logger.info("%s fetched version %d: %d bytes in %.2f s", host, version, fetched.nbytes, fetched.seconds)
            return
