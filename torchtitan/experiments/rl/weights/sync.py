"""One version from the trainer to every generator, and the proof that it arrived."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from torchtitan.experiments.rl.compat.monarch import ask_each, ranks_of
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

T = TypeVar("T")

CANARY_TOKENS = 8
"""Enough to tell stale weights from new ones, few enough that scoring them costs a fraction of loading a model."""
FIRST_VERSIONS = 5
"""That the bound in bfloat16 is derived from."""


class CanaryBound:
    """How far a canary token's log-probability may differ, trainer to generator, in nats.

    float32 agrees to some 1e-5, whatever the model. In bfloat16 two stacks of kernels differ by what the model's depth makes of
    the last of 8 bits, so the first versions say what is usual. Their weights are proven by digests, as all others are.
    """

    def __init__(self, generator_dtype: Literal["float32", "bfloat16"]):
        self._learned = generator_dtype == "bfloat16"
        self._first: list[float] = []

    @property
    def nats(self) -> float:
        """1e-3 in float32. In bfloat16 10 for the first versions, then five times the largest of these, and at least 1."""
        if not self._learned:
            return 1e-3
        return 10.0 if len(self._first) < FIRST_VERSIONS else max(1.0, 5 * max(self._first))

    def passed(self, difference: float) -> None:
        """The largest difference of a version, which was within the bound."""
        if len(self._first) < FIRST_VERSIONS:
            self._first.append(difference)


@dataclass(kw_only=True, slots=True, frozen=True)
class SyncReport:
    version: int
    canary_max_diff: float
    """Largest difference of a canary token's log-probability, trainer to generator, over all replicas."""
    copy_out_s: float
    """Trainer: gather, copy and announce. Training waits for it."""
    load_s: float
    """Generators: get, map, the engine's reload, verify, canary. Beside them the trainer's digests and canary."""
    verify_s: float
    """Part of load_s: the slowest replica's mapping and digests."""
    reload_s: float
    """Part of load_s: the slowest replica's engine."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    """By generator host that is not the trainer's: what it has read from other hosts since the last report."""
    fetch_s: float = 0.0
    """Part of load_s: until the slowest of these hosts had the version in its memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CopiedOut:
    """A version that lies in its snapshot."""

    version: int
    seconds: float


class Generators(Protocol):
    """Every replica that takes requests: generation/client.py."""

    async def update_weights(
        self, version: int, canary_token_ids: np.ndarray
    ) -> dict[int, WeightReceipt]: ...

    async def sleep(self) -> None: ...


class HostCopies(Protocol):
    """Of each generator host that does not share the trainer's memory: fleet/weight_readers.py."""

    @property
    def lost(self) -> int:
        """How often a host has lost its copies so far."""

    async def fetch(self, version: int) -> None:
        """Return when every such host has a published version in its memory."""

    def take_fetched_bytes(self) -> dict[str, int]:
        """By host, since the last call."""


class WeightSync:
    """Publishes versions and has the generators load them, those that were there before and those that come later.

    The canary is the beginning of a text that trainer and generators both score after every update: a fingerprint says which
    weights the engine holds, the canary that it computes with them.
    """

    def __init__(
        self,
        trainer: Any,
        generators: Generators,
        *,
        text: np.ndarray,
        bound: CanaryBound,
        copies: HostCopies | None = None,
        one_buffer: bool = False,
    ):
        """
        Args:
            text: int32 [at least 2], a text in the model's own chat format. Tokens that no text has next to each other have
                log-probabilities that rounding moves furthest.
            copies: None where every generator shares the trainer's memory.
            one_buffer: the trainer writes a version where the one before is, so it waits for the replicas that load that.
        """
        self._trainer, self._generators, self._bound = trainer, generators, bound
        self._ranks = ranks_of(trainer)
        self._copies, self._one_buffer = copies, one_buffer
        self.canary_token_ids = text[:CANARY_TOKENS]
        self._version = 0
        """The last that the generators were told to load."""
        self._published = False
        """Whether replicas load it; a new one holds the weights of the model's hub folder."""
        self._canary: np.ndarray | None = None
        """The trainer's, of that version."""
        self._fingerprint = ""
        """Of that version."""
        self._scoring = asyncio.Lock()
        """Held while the trainer scores its first canary."""
        self._updating = asyncio.Lock()
        """Held while replicas load: by an update, or for all replicas that are admitted side by side. Of two buffers the
        trainer writes over one two versions later, and so after the update between."""
        self._admissions, self._joining = 0, asyncio.Lock()
        self._held = False
        """``_updating`` is, until the next update: a replica that is made again waits for it."""

    async def admit(
        self, replica: int, actor: Any, take_requests: Callable[[], Awaitable[None]]
    ) -> None:
        """Have a new replica load the current version and prove it, and then call ``take_requests``. No update comes between.

        Args:
            actor: holds the weights of the model's hub folder.

        Raises:
            RunError: it loaded something else than the trainer has, or computes something else with it.
        """
        async with self._no_update():
            if not self._published:
                async with self._scoring:
                    if self._canary is None:
                        self._canary = next(
                            iter((await self._trainer.score.call(self.canary_token_ids)).values())
                        )
                logprobs = await actor.canary.call_one(self.canary_token_ids)
            else:

                async def load() -> WeightReceipt:
                    return await actor.update_weights.call_one(self._version, self.canary_token_ids)

                receipt = await self._with_copies(self._version, load)
                self._check_receipt(replica, self._version, receipt)
                logprobs = receipt.canary_logprobs
            self._compare(self._version, self._canary, {replica: logprobs})
            await take_requests()

    async def publish_start(self, version: int) -> None:
        """Have replicas load what the trainer holds, as ``version``: it starts from other weights than the model's hub folder.

        Call it before ``admit``.
        """
        await self.copy_out(version)
        async with self._the_update():
            self._fingerprint, self._canary = await self._trainers_proof()
            self._version, self._published = version, True

    async def sleep(self) -> None:
        """Have the generators free their memory until ``update``."""
        await self._hold()
        await self._generators.sleep()

    async def copy_out(self, version: int) -> CopiedOut:
        """Copy the trainer's weights out as ``version``; training may go on when this returns."""
        started = asyncio.get_running_loop().time()
        if self._one_buffer:
            await self._hold()
        await ask_each(
            self._ranks, "copy_weights", version, self.canary_token_ids, self._copies is not None
        )
        return CopiedOut(version=version, seconds=asyncio.get_running_loop().time() - started)

    async def update(self, copied: CopiedOut) -> SyncReport:
        """Return when every generator samples with a version that was copied out.

        Raises:
            RunError: a generator loaded something else, or computes something else with it.
        """
        version = copied.version
        async with self._the_update():
            started, fetched = asyncio.get_running_loop().time(), 0.0

            async def load() -> dict[int, WeightReceipt]:
                nonlocal fetched
                fetched = asyncio.get_running_loop().time()
                return await self._generators.update_weights(version, self.canary_token_ids)

            with trace.span(
                "generators load"
            ):  # the trainer takes digests and scores its canary meanwhile
                receipts, proof = await asyncio.gather(
                    self._with_copies(version, load), self._trainers_proof()
                )
            self._fingerprint, self._canary = proof
            for replica, receipt in receipts.items():
                self._check_receipt(replica, version, receipt)
            loaded = asyncio.get_running_loop().time()
            self._version, self._published = version, True
        canaries = {replica: receipt.canary_logprobs for replica, receipt in receipts.items()}
        return SyncReport(
            version=version,
            canary_max_diff=self._compare(version, self._canary, canaries),
            copy_out_s=copied.seconds,
            load_s=loaded - started,
            verify_s=max((receipt.verify_s for receipt in receipts.values()), default=0.0),
            reload_s=max((receipt.reload_s for receipt in receipts.values()), default=0.0),
            fetched_bytes=self._copies.take_fetched_bytes() if self._copies else {},
            fetch_s=fetched - started,
        )

    @asynccontextmanager
    async def _no_update(self) -> AsyncIterator[None]:
        """Shared by the replicas that are admitted: no update begins until the last of them has left."""
        async with self._joining:
            if not self._admissions:
                await self._updating.acquire()
            self._admissions += 1
        try:
            yield
        finally:
            self._admissions -= 1
            if not self._admissions:
                self._updating.release()

    async def _hold(self) -> None:
        """Nobody is admitted from now on until an update has ended."""
        if not self._held:
            await self._updating.acquire()
            self._held = True

    @asynccontextmanager
    async def _the_update(self) -> AsyncIterator[None]:
        """Nobody is admitted meanwhile, nor was since ``_hold``."""
        await self._hold()
        self._held = False
        try:
            yield
        finally:
            self._updating.release()

    async def _trainers_proof(self) -> tuple[str, np.ndarray]:
        """Fingerprint and canary of the version that was copied out last. Generators wait for its digests, and training not."""
        proof, *_ = await ask_each(self._ranks, "proof")
        return proof

    async def _with_copies(self, version: int, load: Callable[[], Awaitable[T]]) -> T:
        """What ``load`` returns, once every host has the version; again where a host lost it before its engines mapped it."""
        if self._copies is None:
            return await load()
        await self._copies.fetch(version)
        while True:
            lost = self._copies.lost
            try:
                return await load()
            except RunError:
                await self._copies.fetch(
                    version
                )  # a reader that is dead is noticed now, at the latest
                if self._copies.lost == lost:
                    raise

    def _check_receipt(self, replica: int, version: int, receipt: WeightReceipt) -> None:
        if receipt.version != version:
            raise RunError(
                f"generator {replica} answered version {version} with the weights of version {receipt.version}"
            )
        if receipt.fingerprint not in ("", self._fingerprint):
            raise RunError(
                f"generator {replica} holds weights of fingerprint {receipt.fingerprint} as version {version}; the trainer "
                f"published {self._fingerprint}"
            )

    def _compare(
        self, version: int, trainer: np.ndarray | None, generators: Mapping[int, np.ndarray]
    ) -> float:
        worst, bound = 0.0, self._bound.nats
        for replica, canary in generators.items():
            difference = float(np.abs(trainer - canary).max())
            if not difference <= bound:
                raise RunError(
                    f"generator {replica} and trainer disagree on version {version}: the canary's log-probabilities differ by "
                    f"{difference:.2g}, more than {bound:.3g}; the engine does not compute with the published weights"
                )
            worst = max(worst, difference)
        if generators:
            self._bound.passed(worst)
        return worst
