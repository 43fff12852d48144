"""Starts the ranks of a test in processes of their own, which share one import of torch."""

from collections.abc import Callable

import torch.multiprocessing

from tests.forkserver import forkserver


def run_ranks(work: Callable[..., None], *args: object, count: int) -> None:
    """Call ``work(rank, *args)`` in each of ``count`` processes, and wait for their ends.

    Raises:
        ProcessRaisedException, ProcessExitedException: of the first that fails.
    """
    forkserver()
    torch.multiprocessing.start_processes(work, args, nprocs=count, start_method="forkserver")
