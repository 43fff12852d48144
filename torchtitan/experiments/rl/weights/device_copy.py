"""Copies of tensors into shared memory, from a GPU without the CPU's help. Nothing here has been measured on a GPU."""

import logging
from collections.abc import Iterable
from mmap import PAGESIZE

import torch

from torchtitan.experiments.rl.compat.torch import take_cuda_error

logger = logging.getLogger(__name__)


def page_lock(targets: Iterable[torch.Tensor]) -> bool:
    """Keep the pages of CPU tensors where they are, so that a GPU writes them by itself, until this process ends.

    Args:
        targets: views of mapped memory, which begins and ends with whole pages.

    Returns:
        Whether it could. Without it copies wait for the CPU, and nothing else changes: CUDA keeps the refusal and the next
        kernel launch would raise it, so it is taken here.
    """
    for start, nbytes in page_ranges(targets):
        code = int(torch.cuda.cudart().cudaHostRegister(start, nbytes, 0))
        if code:
            take_cuda_error()
            logger.warning("shared memory of the weights can't be page-locked (CUDA error %d): publishing takes longer", code)
            return False
    return True


def page_ranges(targets: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the pages that CPU tensors lie on, gaps in a tensor included. CUDA locks no page twice, so ranges
    that meet are one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(_pages(target) for target in targets if target.numel()):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(end, found.pop()[1])
        found.append((start, end))
    return [(start, end - start) for start, end in found]


def _pages(target: torch.Tensor) -> tuple[int, int]:
    """From the first page of a tensor to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    start = target.data_ptr()
    end = start + (last + 1) * target.element_size()
    return start // PAGESIZE * PAGESIZE, -(-end // PAGESIZE) * PAGESIZE


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into CPU memory, as the target's dtype. From a GPU it may return before the copy is done: ``wait_for_copies``."""
    if source.device.type == "cpu":
        target.copy_(source)
        return
    # torch would move the whole float32 and convert on the CPU.
    converted = source.to(target.dtype)
    # Into a target with gaps torch copies over a buffer of its own.
    target.copy_(converted, non_blocking=target.is_contiguous())


def wait_for_copies(device: torch.device) -> None:
    """Return when every copy from ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
