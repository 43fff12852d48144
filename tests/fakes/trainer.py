"""The trainer's ranks as the Controller sees them, without processes and without a model."""

import pickle
from typing import Any

import numpy as np

from tests.fakes.replicas import Endpoint
from torchtitan.experiments.rl.types import DataParallel


class TrainerMesh:
    """Mesh of trainer ranks that have the given data-parallel coordinates; of one rank by default.

    Its canary's log-probabilities are a tenth of the version that it published last.
    """

    def __init__(
        self,
        *coordinates: int,
        size: int = 1,
        broken: int | None = None,
        broken_optimizer: int | None = None,
    ):
        self.coordinates = [DataParallel(rank=rank, size=size) for rank in coordinates or (0,)]
        self.broken = broken
        """Rank whose gradients fail."""
        self.broken_optimizer = broken_optimizer
        """Rank whose optimizer steps fail."""
        self.stepped: list[int] = []
        """Ranks that were asked for an optimizer step, in order."""
        self.sent: dict[int, tuple[Any, int]] = {}
        """Microbatches and version of the last training step of each rank."""
        self.published = 0
        """Version of the weights that were copied out last."""
        self.has_remote_readers = False
        """True if another host was to read them."""
        self.data_parallel = Endpoint(lambda: dict(enumerate(self.coordinates)))
        self.score = Endpoint(lambda token_ids: {0: np.zeros(2, np.float32)})

    def size(self, dim: str) -> int:
        return len(self.coordinates)

    def slice(self, *, procs: int) -> "TrainerRank":
        return TrainerRank(self, procs)


class TrainerRank:
    """Rank of a TrainerMesh. The mesh notes what the rank is sent."""

    def __init__(self, mesh: TrainerMesh, rank: int):
        self._mesh = mesh
        self._rank = rank
        self.forward_backward = Endpoint(self._forward_backward)
        self.optim_step = Endpoint(self._optim_step)
        self.copy_weights = Endpoint(self._copy_weights)
        self.proof = Endpoint(lambda: ("f", np.full(2, mesh.published / 10, np.float32)))

    def _forward_backward(self, microbatches: bytes | None, version: int) -> dict[str, float]:
        rows = pickle.loads(microbatches) if microbatches else None
        self._mesh.sent[self._rank] = (rows, version)
        if self._rank == self._mesh.broken:
            raise RuntimeError(f"rank {self._rank} is broken")
        return {"loss/total": 0.5}

    def _optim_step(self) -> dict[str, float | None]:
        self._mesh.stepped.append(self._rank)
        if self._rank == self._mesh.broken_optimizer:
            raise RuntimeError(f"the optimizer of rank {self._rank} is broken")
        return {"train/lr": 0.3 if self._rank == 0 else None}

    def _copy_weights(self, version: int, canary_token_ids: Any, remote_readers: bool) -> None:
        self._mesh.published = version
        self._mesh.has_remote_readers = remote_readers
