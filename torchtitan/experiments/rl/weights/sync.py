"""One version from the trainer to every generator, and the proof that it arrived."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

CANARY_TOKENS = 8
"""Enough to tell stale weights from new ones, few enough that scoring them costs a fraction of loading a model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SyncReport:
    version: int
    canary_max_diff: float
    """Largest difference of a canary token's log-probability, trainer to generator, over all replicas."""
    copy_out_s: float
    """Trainer: gather, copy, fingerprint. Training waits for it."""
    publish_s: float
    """Trainer: put into the store, beside its canary and the next forward."""
    load_s: float
    """Generators: get, map, verify, the engine's reload, canary."""
    verify_s: float
    """Part of load_s: the slowest replica's mapping and fingerprint."""
    reload_s: float
    """Part of load_s: the slowest replica's engine."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CopiedOut:
    """A version that lies in its snapshot and is not published yet."""

    version: int
    seconds: float


class Generators(Protocol):
    """Every replica at once: generation/client.py."""

    async def update_weights(self, version: int, canary_token_ids: np.ndarray) -> list[WeightReceipt]: ...

    async def canary(self, token_ids: np.ndarray) -> list[np.ndarray]: ...


class WeightSync:
    """Publishes versions and has the generators load them.

    The canary is a fixed sequence of tokens that trainer and generators both score after every update: a fingerprint says that
    the bytes arrived, the canary that the engine computes with them.
    """

    def __init__(self, trainer: Any, generators: Generators, *, vocab_size: int, remote_readers: bool, tolerance: float):
        self._trainer, self._generators = trainer, generators
        self._remote_readers, self._tolerance = remote_readers, tolerance
        self.canary_token_ids = np.random.default_rng(0).integers(0, vocab_size, CANARY_TOKENS).astype(np.int32)

    async def check_initial(self) -> None:
        """Check that trainer and generators loaded the same checkpoint.

        Raises:
            RunError: they disagree on the canary.
        """
        trainer, generators = await asyncio.gather(
            self._trainer.score.call(self.canary_token_ids), self._generators.canary(self.canary_token_ids)
        )
        self._compare(0, next(iter(trainer.values())), generators)

    async def copy_out(self, version: int) -> CopiedOut:
        """Copy the trainer's weights out as ``version``; training may go on when this returns."""
        started = time.perf_counter()
        await self._trainer.copy_out_weights.call(version, self.canary_token_ids)
        return CopiedOut(version=version, seconds=time.perf_counter() - started)

    async def update(self, copied: CopiedOut) -> SyncReport:
        """Publish a version that was copied out, and return when every generator samples with it.

        Raises:
            RunError: a generator loaded something else, or computes something else with it.
        """
        version, rank0 = copied.version, self._trainer.slice(procs=0)
        started = time.perf_counter()
        await rank0.publish_weights.call_one(version, self._remote_readers)
        published = time.perf_counter()
        receipts = await self._generators.update_weights(version, self.canary_token_ids)
        if len({receipt.fingerprint for receipt in receipts}) > 1:
            raise RunError(f"generators disagree on the bytes of version {version}: {[r.fingerprint for r in receipts]}")
        loaded = time.perf_counter()
        canary = await rank0.canary.call_one()
        return SyncReport(
            version=version,
            canary_max_diff=self._compare(version, canary, [receipt.canary_logprobs for receipt in receipts]),
            copy_out_s=copied.seconds,
            publish_s=published - started,
            load_s=loaded - published,
            verify_s=max(receipt.verify_s for receipt in receipts),
            reload_s=max(receipt.reload_s for receipt in receipts),
        )

    def _compare(self, version: int, trainer: np.ndarray, generators: list[np.ndarray]) -> float:
        worst = 0.0
        for replica, canary in enumerate(generators):
            difference = float(np.abs(trainer - canary).max())
            if not difference <= self._tolerance:
                raise RunError(
                    f"generator {replica} and trainer disagree on version {version}: the canary's log-probabilities differ by "
                    f"{difference:.2g}, more than {self._tolerance:g}; the engine does not compute with the published weights"
                )
            worst = max(worst, difference)
        return worst


def canary_tolerance(generator_dtype: Literal["float32", "bfloat16"]) -> float:
    """float32 agrees to some 1e-5. In bfloat16 kernels differ in the last of 8 bits, and an unlikely token by some tenths."""
    return {"float32": 1e-3, "bfloat16": 1.0}[generator_dtype]
