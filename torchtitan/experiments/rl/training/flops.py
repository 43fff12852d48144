"""Model FLOPs: what torchtitan counts for a token, and the share of a GPU's peak that a trainer rank reaches with it."""

import time
from typing import Any

import torch

from torchtitan.experiments.rl.types import TrainingBatch
from torchtitan.tools.utils import get_peak_flops

A100 = 312e12


class ModelFlops:
    """Adds up the model FLOPs of batches, forward and backward; ``lap_utilisation`` is their share of the peak.

    As torchtitan counts them: 6 for each parameter that a token is multiplied with, and attention by the number of places that
    a token sees. Recomputation, padding and what prefix trees spare are no model FLOPs.
    """

    def __init__(self, *, per_token: float, per_place: float, peak: float | None, ranks: int = 1):
        """
        Args:
            per_place: of attention, for a token and one place of a sample of uniform length, as in torchtitan's ``seq_len``.
            peak: FLOPs a second of this rank's device in bfloat16; None where it is not known.
            ranks: that share the work on a batch (tensor parallelism).
        """
        self._per_token, self._per_place, self._peak, self._ranks = per_token, per_place, peak, ranks
        self._done, self._since = 0.0, time.monotonic()

    @classmethod
    def of(cls, config: Any, model: torch.nn.Module, *, peak: float | None, ranks: int) -> "ModelFlops":
        """
        Args:
            config: torchtitan's of ``model``.
        """
        _, none = config.get_nparams_and_flops(model, 0)
        _, one = config.get_nparams_and_flops(model, 1)
        return cls(per_token=none, per_place=one - none, peak=peak, ranks=ranks)

    def add(self, batch: TrainingBatch) -> None:
        """A batch that was computed, forward and backward."""
        self._done += self.of_batch(batch)

    def of_batch(self, batch: TrainingBatch) -> float:
        """By convention each token of a sample of n tokens counts n places. Position p counts 2p + 1: their mean is n."""
        real = batch.task_ids >= 0
        places = batch.positions
        if batch.trees is not None:
            real, places = batch.trees.any_of(real), batch.trees.positions
        tokens, seen = int(real.sum()), int((2 * places[real].long() + 1).sum())
        return self._per_token * tokens + self._per_place * seen

    def lap_utilisation(self) -> float | None:
        """Share of the peak since the last call, waiting included; None where the peak is not known."""
        now, done = time.monotonic(), self._done
        seconds, self._since, self._done = now - self._since, now, 0.0
        return None if self._peak is None or seconds <= 0 else done / self._ranks / seconds / self._peak


def peak_flops(device: torch.device) -> float | None:
    """FLOPs a second of a GPU in bfloat16, as torchtitan knows them; None of one that it does not know, and of a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = get_peak_flops(name)
    # torchtitan gives a device that it does not know the peak of an A100.
    return None if found == A100 and "A100" not in name else found
