"""Shows what Monarch keeps of each call between two actors: memory of the calling process and of the called one.

    python tests/monarch_memory.py [--calls 10000] [--idle 240]

Both are bare actors of this script. Prints kB per call, over so many calls after as many to warm up. The tables that Monarch
keeps double their size now and then, so the figures of two starts differ by half.

What stays (Monarch 0.7.0, found with a tracer of allocations): an actor numbers the messages that it sends to each port
(``Sequencer`` in hyperactor), and each answer goes to a port that was opened for it, whose number is never forgotten. That is
what the called process keeps. A calling process keeps it too, with an inner port for each answer, where the call goes through
the whole mesh, as those of ``call`` and ``call_one`` do, and not with ``choose``. In "channel" every answer goes to one port.

The last line is of processes that nobody calls: Monarch polls them, by calls of that kind.
"""

import argparse
import asyncio
import ctypes
import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from monarch.actor import Actor, Channel, Port, endpoint, this_host  # noqa: E402

from tests.soak import anonymous_kb  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402

WAYS = ("call_one", "call", "choose", "held slice", "new slice", "broadcast", "channel")


class Called(Actor):
    @endpoint
    async def work(self) -> int:
        return 1

    @endpoint
    async def attach(self, port: Port[int]) -> None:
        self._port = port

    @endpoint
    async def answer(self) -> None:
        self._port.send(1)

    @endpoint
    async def kept_kb(self) -> int:
        return kept_kb()


class Caller(Actor):
    @endpoint
    async def measure(self, called: Called, way: str, calls: int) -> tuple[float, float]:
        """kB per call in this process, and in that of ``called``."""
        await self._call(called, way, calls)
        before = kept_kb(), await called.kept_kb.choose()
        await self._call(called, way, calls)
        after = kept_kb(), await called.kept_kb.choose()
        return (after[0] - before[0]) / calls, (after[1] - before[1]) / calls

    async def _call(self, called: Called, way: str, calls: int) -> None:
        port, receiver = Channel.open()
        await called.attach.choose(port)
        held = called.slice(procs=0)
        for _ in range(calls):
            if way == "broadcast":
                called.work.broadcast()
            elif way == "channel":
                called.answer.broadcast()
                await receiver.recv()
            elif way == "held slice":
                await held.work.choose()
            elif way == "new slice":
                await called.slice(procs=0).work.choose()
            else:
                await getattr(called.work, way)()
        await called.work.choose()  # answered after every broadcast before it
        await asyncio.sleep(1.0)


def kept_kb() -> int:
    """Anonymous memory of this process, without what malloc has free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_kb(Path("/proc/self/smaps").read_text())


async def idle(seconds: float) -> None:
    called = [
        this_host().spawn_procs(per_host={"procs": 1}).spawn(f"idle_{index}", Called)
        for index in range(4)
    ]

    async def kept() -> list[int]:
        return [kept_kb(), *[await each.kept_kb.choose() for each in called]]

    await kept()
    await asyncio.sleep(60)  # what is made once, for the measurement too
    before = await kept()
    await asyncio.sleep(seconds)
    here, *there = ((b - a) / seconds for a, b in zip(before, await kept(), strict=True))
    each = ", ".join(f"{rate:.2f}" for rate in there)
    print(
        f"idle       {here:5.2f} kB a second in the process that spawned four, {each} kB in these",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=240.0, help="seconds")
    arguments = parser.parse_args()
    for way in WAYS:
        caller, called = (
            this_host().spawn_procs(per_host={"procs": 1}).spawn(actor.__name__, actor)
            for actor in (Caller, Called)
        )
        here, there = await caller.measure.call_one(called, way, arguments.calls)
        print(
            f"{way:<10} {here:5.2f} kB a call in the caller, {there:5.2f} kB in the called process",
            flush=True,
        )
    await idle(arguments.idle)


if __name__ == "__main__":
    set_up_process()
    asyncio.run(main())
    os._exit(0)  # Monarch waits for its processes otherwise
