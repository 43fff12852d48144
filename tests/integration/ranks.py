"""Starts the ranks of a test in processes of their own, which share one import of torch."""

import os
from collections.abc import Callable

import torch.multiprocessing

from tests.forkserver import forkserver, measure_for


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


def _be_rank(rank: int, test: str, work: Callable[..., None], args: tuple[object, ...]) -> None:
    measure_for(test)
    work(rank, *args)
