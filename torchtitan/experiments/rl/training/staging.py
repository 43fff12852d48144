"""Copies a rank's state into its host's memory, from where a checkpoint is written.

    copied     by the thread that trains, between two steps: weights, moments, schedules
    written    by another thread, during the steps that follow

The copy takes as much memory as the rank's part of the checkpoint takes on the disk. It is made at
the first checkpoint and reused by every later one. It lies in memory of the process itself:
containers limit /dev/shm, where torch stages by default, to 64 MB.
"""

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from torchtitan.experiments.rl.compat.torch import take_cuda_error
from torchtitan.experiments.rl.errors import RunError

logger = logging.getLogger(__name__)

_CURE = (
    "raise the limit of the host or container to 'host memory' of --dry-run, or add trainer hosts"
)


class StagingError(RunError):
    """A rank that can't copy its state into its host's memory."""


class HostStager(AsyncStager):
    """Copies the state on the calling thread, and returns when the copy is complete.

    On a GPU the copies are queued behind the thread's own kernels, on the same stream. So the copy
    holds what these kernels wrote, whatever the caller has waited for before.
    """

    def __init__(self, group: dist.ProcessGroup, *, page_locked: bool):
        """Prepare to stage; memory is taken at the first call of ``stage``.

        Args:
            group: The ranks that save together. It needs a backend for CPU tensors.
            page_locked: True if the copies go into page-locked memory, which a GPU writes by
                itself and at the full speed of its bus.
        """
        self._group = group
        self._page_locked = page_locked
        self._stager: DefaultStager | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of this rank's state. Collective.

        Raises:
            StagingError: On every rank, if one of them can't make its copy: the others would wait
                for it while they write.
        """
        staged = None
        fault = None
        try:
            staged = self._copy(state_dict)
        except (MemoryError, OSError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault is not None:
            self.close()  # the run needs the memory, and the next checkpoint tries again
        faults: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(faults, fault, group=self._group)
        for rank, cause in enumerate(faults):
            if cause is not None:
                what = f"rank {rank} can't copy its state into its host's memory"
                raise StagingError(f"{what}: {_CURE} ({cause})")
        assert staged is not None, "a rank without a copy has a fault"
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` returns a copy that is complete."""

    def close(self) -> None:
        """Free the memory of the copy."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, without page-locking where the system refuses that."""
        if not self._page_locked:
            return self._copy_into_kept(state_dict, page_locked=False)
        try:
            return self._copy_into_kept(state_dict, page_locked=True)
        except RuntimeError as error:
            cause = " ".join(str(error).split())
        # Not in the handler: its traceback would keep the part of the copy that was made.
        take_cuda_error()
        self.close()
        staged = self._copy_into_kept(state_dict, page_locked=False)
        self._page_locked = False
        logger.warning("a checkpoint's copy can't be page-locked, so it takes longer: %s", cause)
        return staged

    def _copy_into_kept(self, state_dict: dict[str, Any], *, page_locked: bool) -> dict[str, Any]:
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=page_locked,
                    use_shared_memory=False,
                    # A copy of 24 GB over a GPU's bus takes half a second to a second, in 20 steps.
                    # A thread that saves this would read the state while a reference takes the
                    # policy's place, or an optimizer moves it.
                    use_async_staging=False,
                    use_non_blocking_copy=page_locked,
                )
            )
        staged = self._stager.stage(state_dict)
        assert isinstance(staged, dict), "a stager that copies at once returns no future"
        return staged
