"""Starts the ranks of a test in processes of their own, which share one import of torch."""

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing

PRELOADED = ["tests.integration.learners", "torchtitan.models.llama3", "torchtitan.models.qwen3"]


def run_ranks(work: Callable[..., None], *args: object, count: int) -> None:
    """Call ``work(rank, *args)`` in each of ``count`` processes, and wait for their ends.

    They are forked from a server that has imported ``PRELOADED`` and started nothing: importing takes 6 s of a core each time.

    Raises:
        ProcessRaisedException, ProcessExitedException: of the first that fails.
    """
    multiprocessing.set_forkserver_preload(
        PRELOADED
    )  # before the server starts; later calls change nothing
    torch.multiprocessing.start_processes(work, args, nprocs=count, start_method="forkserver")
