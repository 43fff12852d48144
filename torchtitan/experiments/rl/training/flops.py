"""Counts the model FLOPs of a trainer rank, and their share of its device's peak."""

import threading
import time

import torch

from torchtitan.experiments.rl.types import TrainingBatch
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import get_peak_flops

A100 = 312e12
"""Peak of an A100 in FLOPs a second. torchtitan gives it for devices that it does not know, too."""


class ModelFlops:
    """Sum of the model FLOPs of batches, forward and backward.

    They are counted as torchtitan counts them: 6 for each parameter that a token is multiplied
    with, and attention by the number of places that a token sees. Recomputation, padding and what
    prefix trees spare are no model FLOPs.

    The thread that trains adds to the sum, and the actor's event loop takes it.
    """

    def __init__(self, *, per_token: float, per_place: float, peak: float | None, ranks: int = 1):
        """Start at 0.

        Args:
            per_token: FLOPs of a token but its attention.
            per_place: FLOPs of a token's attention for each place of a sample of uniform length, as
                torchtitan's ``seq_len`` means it.
            peak: FLOPs a second of this rank's device in bfloat16; None if not known.
            ranks: number of ranks that share the work on a batch.
        """
        self._per_token = per_token
        self._per_place = per_place
        self._peak = peak
        self._ranks = ranks
        self._lock = threading.Lock()
        """Held while the sum is changed."""
        self._flops = 0.0
        """Sum since the last lap."""
        self._lap_start = time.monotonic()

    @classmethod
    def of(
        cls, config: BaseModel.Config, model: Module, *, peak: float | None, ranks: int
    ) -> "ModelFlops":
        """Return the counter of a model.

        A frozen weight has no gradient of its own, so it counts 4 instead of 6.

        Args:
            config: torchtitan's config of the model.
            model: the model, before it is divided over ranks.
        """
        # Without attention they are 6 for each parameter that a token is multiplied with.
        _, without_attention = config.get_nparams_and_flops(model, 0)
        _, with_one_place = config.get_nparams_and_flops(model, 1)
        parameters = list(model.parameters())
        frozen = 0.0
        if not all(parameter.requires_grad for parameter in parameters):
            trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            frozen = without_attention / 6 - trained
        return cls(
            per_token=without_attention - 2 * frozen,
            per_place=with_one_place - without_attention,
            peak=peak,
            ranks=ranks,
        )

    def add(self, batch: TrainingBatch) -> None:
        """Count a batch that was computed, forward and backward."""
        flops = self.of_batch(batch)
        with self._lock:
            self._flops += flops

    def of_batch(self, batch: TrainingBatch) -> float:
        """Return the model FLOPs of a batch.

        By convention each token of a sample of n tokens counts n places. Position p counts 2p + 1
        here, whose mean over the sample is n.
        """
        real = batch.task_ids >= 0
        positions = batch.positions
        if batch.trees is not None:
            real = batch.trees.mask_to_trees(real)
            positions = batch.trees.positions
        tokens = int(real.sum())
        places = int((2 * positions[real].long() + 1).sum())
        return self._per_token * tokens + self._per_place * places

    def lap_utilisation(self) -> float | None:
        """Return the share of the device's peak since the last call, time without work included.

        None if the peak is not known.
        """
        with self._lock:
            now = time.monotonic()
            seconds = now - self._lap_start
            flops = self._flops
            self._lap_start = now
            self._flops = 0.0
        if self._peak is None or seconds <= 0:
            return None
        return flops / self._ranks / seconds / self._peak


def peak_flops(device: torch.device) -> float | None:
    """Return the FLOPs a second of a GPU in bfloat16.

    None for a CPU, and for a GPU that torchtitan does not know.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = get_peak_flops(name)
    return None if peak == A100 and "A100" not in name else peak
