"""Starts the ranks of a test in processes of their own, which share one import of torch."""

import os
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
import torch.multiprocessing

from tests.forkserver import forkserver, measure_for
from torchtitan.experiments.rl.training.trainer import init_process_group


def run_ranks(work: Callable[..., None], *args: object, count: int) -> None:
    """Call ``work(rank, *args)`` in each of ``count`` processes, and wait for their ends.

    Raises:
        ProcessRaisedException, ProcessExitedException: of the first that fails.
    """
    forkserver()
    arguments = (os.environ.get("PYTEST_CURRENT_TEST", ""), work, args)
    torch.multiprocessing.start_processes(
        _be_rank, arguments, nprocs=count, start_method="forkserver"
    )


def process_groups(rank: int, sizes: Sequence[int], folder: str) -> Iterator[int]:
    """Join process groups of these sizes, the largest first, one after the other.

    A rank that a group has no place for is done, because smaller ones have none either.

    Yields:
        The size of the group that this rank has joined; it is left when the caller goes on.
    """
    for size in sizes:
        if rank >= size:
            return
        url = f"file://{folder}/store-{size}"
        init_process_group(device="cpu", rank=rank, world_size=size, url=url)
        yield size
        dist.destroy_process_group()


def _be_rank(rank: int, test: str, work: Callable[..., None], args: tuple[object, ...]) -> None:
    measure_for(test)
    work(rank, *args)
