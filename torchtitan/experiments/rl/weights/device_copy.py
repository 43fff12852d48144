"""Copies of tensors into shared memory, from a GPU without the CPU's help. Nothing here has been measured on a GPU."""

import logging

import torch

logger = logging.getLogger(__name__)


def page_lock(buffer: torch.Tensor) -> bool:
    """Keep the pages of a CPU tensor where they are, so that a GPU writes them by itself, until this process ends.

    Returns:
        Whether it could. Without it copies wait for the CPU, and nothing else changes.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel() * buffer.element_size(), 0))
    if code:
        logger.warning("shared memory of the weights can't be page-locked (CUDA error %d): publishing takes longer", code)
    return not code


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
