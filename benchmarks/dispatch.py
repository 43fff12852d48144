"""A step's batches to the trainer's ranks: how long the controller's event loop stands still, and how many bytes are sent.

    python benchmarks/dispatch.py [--tokens 1600000] [--tensor-parallel 4] [--repeats 5]

1. Random samples of 400 to 4,000 tokens, packed in rows of 8,192 for one data-parallel coordinate of several ranks, which are
   real actors in processes of their own and do nothing with what they get.
2. Ours: `TrainerClient.forward_backward` and `optim_step`. The other side: each rank is called with the batches themselves, as before.
3. A task that wakes up each millisecond notes the longest time that it was not woken.

The sides take turns; each figure is a median.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
from monarch.actor import Actor, concurrent_endpoint, shutdown_context, this_host  # noqa: E402

from torchtitan.experiments.rl.batching.batcher import Batcher, BatchPlan  # noqa: E402
from torchtitan.experiments.rl.compat.monarch import call_actor, ranks_of  # noqa: E402
from torchtitan.experiments.rl.process.lifetime import Lifetime  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.training.client import TrainerClient, pickled  # noqa: E402
from torchtitan.experiments.rl.types import DataParallel, TrainingSample  # noqa: E402

ROW = 8192


class Rank(Actor):
    @concurrent_endpoint
    async def data_parallel(self) -> DataParallel:
        return DataParallel(rank=0, size=1)

    @concurrent_endpoint
    async def forward_backward(self, microbatches: Any, version: int) -> dict[str, float]:
        return {}

    @concurrent_endpoint
    async def optim_step(self) -> dict[str, float]:
        return {}


def plan_of(tokens: int) -> BatchPlan:
    random, samples = np.random.default_rng(0), []
    while tokens > 0:
        length = int(random.integers(400, 4000))
        ids = random.integers(0, 150_000, length).astype(np.int32)
        mask, ones = np.arange(length) > 0, np.ones(length, np.float32)
        streams: dict[str, Any] = dict(
            token_ids=ids,
            loss_mask=mask,
            generator_logprobs=-ones,
            policy_versions=ids,
            advantages=ones,
        )
        streams["rl_weights"] = mask.astype(np.float32)
        samples.append(TrainingSample(**streams, task_name="t", rollout_id="t-0/0"))
        tokens -= length
    return Batcher.Config(row_length=ROW, rows_per_microbatch=1).build().plan(samples, 1)


async def longest_stop(work: Awaitable[Any]) -> tuple[float, float]:
    """Seconds that the event loop stood still at most, and those of the whole."""
    longest, started = 0.0, time.perf_counter()
    task = asyncio.ensure_future(work)
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - before)
    await task
    return longest, time.perf_counter() - started


async def measure(tokens: int, ranks: int, repeats: int) -> None:
    plan = plan_of(tokens)
    mesh = this_host().spawn_procs(per_host={"procs": ranks}, name="ranks")
    actors = mesh.spawn("rank", Rank)
    client = TrainerClient(actors, run_dir=Path(tempfile.gettempdir()), life=Lifetime("trainer"))
    await client.connect()
    each = ranks_of(actors)
    found: dict[str, list[tuple[float, float]]] = {"each rank": [], "first rank, from a thread": []}

    async def to_each() -> None:
        await asyncio.gather(
            *(call_actor(rank.forward_backward, plan.microbatches[0], 0) for rank in each)
        )

    async def to_first() -> None:
        await client.optim_step(await client.forward_backward(plan, 1))

    for _ in range(repeats):
        found["each rank"].append(await longest_stop(to_each()))
        found["first rank, from a thread"].append(await longest_stop(to_first()))
    size = len(pickled(plan.microbatches[0]))
    print(
        f"{plan.tokens:,} tokens, {len(plan.microbatches[0])} microbatches, {ranks} ranks of one coordinate"
    )
    for (name, values), sent in zip(found.items(), (ranks * size, size), strict=True):
        stop, whole = (statistics.median(column) * 1e3 for column in zip(*values, strict=True))
        print(
            f"{name:<28} {sent / 1e6:6.0f} MB   longest stop {stop:6.0f} ms   whole {whole:6.0f} ms"
        )
    await mesh.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_600_000)
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    set_up_process()
    try:
        asyncio.run(measure(arguments.tokens, arguments.tensor_parallel, arguments.repeats))
    finally:
        shutdown_context().get()


if __name__ == "__main__":
    main()
