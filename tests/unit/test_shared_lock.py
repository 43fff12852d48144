"""A lock that many share and one has alone: no shared section runs beside an exclusive one, and none waits for ever."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.process.shared_lock import SharedLock

LIMIT_S = 10.0


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_exclusive_section_waits_for_shared_ones_and_later_shared_ones_wait_for_it():
    lock, events, release = SharedLock(), [], asyncio.Event()

    async def share(name: str) -> None:
        async with lock.shared():
            events.append(f"{name} begins")
            await release.wait()
            events.append(f"{name} ends")

    async def exclude() -> None:
        async with lock.exclusive():
            events.append("reads")
            await asyncio.sleep(0)
            events.append("has read")

    work = [asyncio.ensure_future(part) for part in (share("first"), share("second"))]
    await iterations(3)
    work += [asyncio.ensure_future(part) for part in (exclude(), share("third"), exclude())]
    await iterations(10)
    assert events == ["first begins", "second begins"]
    release.set()
    await asyncio.wait_for(asyncio.gather(*work), LIMIT_S)
    assert events[2:4] == ["first ends", "second ends"]
    assert events[4:6] == ["reads", "has read"]
    rest = events[6:]
    third = rest.index("third begins")
    assert rest[third : third + 2] == ["third begins", "third ends"]
    reads = rest.index("reads")
    assert rest[reads : reads + 2] == ["reads", "has read"] and len(rest) == 4


async def test_a_shared_section_begins_at_once_if_no_exclusive_one_waits():
    lock = SharedLock()
    section = lock.shared()
    with pytest.raises(StopIteration):
        section.__aenter__().send(None)  # it does not give way once
    await section.__aexit__(None, None, None)


async def test_a_cancelled_wait_for_an_exclusive_section_lets_shared_ones_begin_again():
    lock = SharedLock()
    lock.begin_shared()
    waiting = asyncio.ensure_future(lock.begin_exclusive())
    await iterations(2)
    assert lock.is_excluding
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(LIMIT_S), lock.shared():
        assert not lock.is_excluding


@given(
    sections=st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, 1, 2, 4])
        ),
        max_size=12,
    )
)
def test_no_section_runs_beside_an_exclusive_one_and_all_end(sections):
    """Each section begins after some iterations, runs for some, and may be cancelled."""
    lock = SharedLock()
    inside = {True: 0, False: 0}

    async def section(is_shared: bool, begins: int, runs: int) -> None:
        await iterations(begins)
        async with lock.shared() if is_shared else lock.exclusive():
            inside[is_shared] += 1
            try:
                for _ in range(runs + 1):
                    assert inside[False] <= 1 and not (inside[True] and inside[False])
                    await asyncio.sleep(0)
            finally:
                inside[is_shared] -= 1

    async def cancelled_section(is_shared: bool, begins: int, runs: int, ends: int | None) -> None:
        task = asyncio.ensure_future(section(is_shared, begins, runs))
        if ends is not None:
            await iterations(ends)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(cancelled_section(*entry) for entry in sections))
        assert inside == {True: 0, False: 0} and not lock.is_excluding

    asyncio.run(run())
