"""Brings each version of the weights from the trainer to every generator, and proves that it came.

    copy_out   trainer copies its weights into a snapshot; training may go on
    update     hosts fetch the snapshot, generators load it between two of their steps
               trainer and generators each say what they hold, and score the canary; both must agree

The fingerprint of a version says which weights an engine holds. The canary says that the engine
computes with them: it is the beginning of a text that trainer and generators both score.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from torchtitan.experiments.rl.compat.monarch import call_ranks, ranks_of
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.shared_lock import SharedLock
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

if TYPE_CHECKING:  # trainer ranks have no renderer
    from renderers import Message, Renderer

T = TypeVar("T")

CANARY_MESSAGES: "list[Message]" = [
    {"role": "user", "content": "What is 17 + 25? Think first, then give the number."}
]
"""Conversation with whose tokens the canary begins."""
CANARY_TOKENS = 8
"""Number of tokens of the canary: enough to tell stale weights from new ones, and few enough that
scoring them costs a fraction of loading a model."""

FIRST_VERSIONS = 5
"""Number of versions from which the bound in bfloat16 is derived."""


def canary_of(renderer: "Renderer") -> np.ndarray:
    """Return the tokens of a text that trainer and generators score, int32 [L]."""
    return np.array(renderer.render_ids(CANARY_MESSAGES), np.int32)


class CanaryBound:
    """Bound on the difference of a canary token's log-probability, trainer to generator, in nats.

    float32 agrees to some 1e-5, whatever the model. In bfloat16 two stacks of kernels differ by
    what the model's depth makes of the last of 8 bits, so the first versions say what is usual.
    Their weights are proven by digests, as all others are.
    """

    def __init__(self, generator_dtype: Literal["float32", "bfloat16"]):
        self._is_learned = generator_dtype == "bfloat16"
        self._first: dict[int, float] = {}
        """Largest difference of each of the first versions, over all replicas."""

    @property
    def nats(self) -> float:
        """1e-3 in float32.

        In bfloat16 it is 10 for the first versions, then five times the largest of these, and at
        least 1.
        """
        if not self._is_learned:
            return 1e-3
        if len(self._first) < FIRST_VERSIONS:
            return 10.0
        return max(1.0, 5 * max(self._first.values()))

    def passed(self, version: int, difference: float) -> None:
        """Learn from a difference that was within the bound.

        Every replica that joins has one. Those of a version count once, or the replicas that join
        at the start would make the bound out of the first version alone.
        """
        if len(self._first) < FIRST_VERSIONS:
            self._first[version] = max(difference, self._first.get(version, 0.0))


@dataclass(kw_only=True, slots=True, frozen=True)
class SyncReport:
    """Report of one update: its durations, and how well trainer and generators agree."""

    version: int
    canary_max_diff: float
    """Largest difference of a canary token's log-probability, trainer to generator, over all
    replicas."""
    copy_out_s: float
    """Seconds that the trainer took to gather, copy and announce. Training waits for them."""
    load_s: float
    """Seconds that the generators took to get, map, load and verify the version, and to score the
    canary. The trainer takes its digests and scores its canary meanwhile."""
    verify_s: float
    """Part of load_s that the slowest replica took to map the version and take digests."""
    reload_s: float
    """Part of load_s that the slowest replica's engine took."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that each generator host which is not the trainer's has read from other hosts since the
    last report."""
    fetch_s: float = 0.0
    """Part of load_s until the slowest of these hosts had the version in its memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CopiedOut:
    """A version that lies in its snapshot."""

    version: int
    seconds: float
    """Time that the copy took."""


class Generators(Protocol):
    """Every replica that takes requests: generation/client.py."""

    async def update_weights(
        self, version: int, canary_token_ids: np.ndarray
    ) -> dict[int, WeightReceipt]: ...

    async def sleep(self) -> None: ...


class HostCopies(Protocol):
    """Copies of the snapshots on generator hosts that do not share the trainer's memory.

    fleet/weight_readers.py implements it.
    """

    @property
    def lost(self) -> int:
        """Number of times that a host has lost its copies so far."""

    async def fetch(self, version: int) -> None:
        """Return when every such host has a published version in its memory."""

    def take_fetched_bytes(self) -> dict[str, int]:
        """Return the bytes that each host has read since the last call."""


class WeightSync:
    """Publishes versions, and has replicas load them: those that are there, and those that join."""

    def __init__(
        self,
        trainer: Any,  # noqa: ANN401 - Monarch's
        generators: Generators,
        *,
        text: np.ndarray,
        bound: CanaryBound,
        copies: HostCopies | None = None,
        one_buffer: bool = False,
    ):
        """Start with the weights of the model's hub folder as version 0, which is not published.

        Args:
            trainer: mesh of the trainer's ranks.
            text: int32 [at least 2], a text in the model's own chat format. Tokens that no text has
                next to each other have log-probabilities that rounding moves furthest.
            copies: None if every generator shares the trainer's memory.
            one_buffer: True if the trainer has one buffer, and writes each version over the last.
                `copy_out` then waits until no replica that joins reads the last version, and lets
                none join until the update has ended. With two buffers a version is written over
                that of two versions before, which nobody reads any more: the update between has
                waited for every replica.
        """
        self._trainer = trainer
        self._ranks = ranks_of(trainer)
        self._generators = generators
        self._bound = bound
        self._copies = copies
        self._one_buffer = one_buffer
        self.canary_token_ids = text[:CANARY_TOKENS]
        self._version = 0
        """Last version that the generators were told to load."""
        self._published = False
        """True if a replica that joins has to load that version. A new replica holds the weights of
        the model's hub folder."""
        self._canary: np.ndarray | None = None
        """Trainer's log-probabilities of the canary under that version; None until they are
        needed."""
        self._fingerprint = ""
        """Fingerprint of that version."""
        self._scoring = asyncio.Lock()
        """Held while the trainer scores its first canary."""
        self._joins = SharedLock()
        """Shared by replicas that join, side by side; an update has it alone."""
        self._excludes_joins = False
        """True if no replica may join until the next update has ended."""

    async def admit(
        self,
        replica: int,
        actor: Any,  # noqa: ANN401 - Monarch's
        take_requests: Callable[[], Awaitable[None]],
    ) -> None:
        """Have a new replica load the current version and prove it, and then take requests.

        No update comes between.

        Args:
            actor: the replica, which holds the weights of the model's hub folder.
            take_requests: has the client send the replica requests.

        Raises:
            RunError: the replica loaded something else than the trainer has, or computes something
                else with it.
        """
        async with self._joins.shared():
            if self._published:
                logprobs = await self._load_current(replica, actor)
            else:
                await self._score_first_canary()
                logprobs = await actor.canary.call_one(self.canary_token_ids)
            self._compare(self._version, {replica: logprobs})
            await take_requests()

    async def publish_start(self, version: int) -> None:
        """Publish what the trainer holds as ``version``, for the replicas that join.

        Call it before ``admit``, if the trainer starts with something that the model's hub folder
        lacks: the weights of a checkpoint, or adapters.
        """
        await self.copy_out(version)
        async with self._updating():
            self._fingerprint, self._canary = await self._trainers_proof()
            self._set_version(version)

    async def sleep(self) -> None:
        """Have the generators free their memory until ``update``. No replica joins meanwhile."""
        await self._exclude_joins()
        await self._generators.sleep()

    async def copy_out(self, version: int) -> CopiedOut:
        """Copy the trainer's weights out as ``version``. Training may go on when this returns."""
        clock = asyncio.get_running_loop().time
        started = clock()
        if self._one_buffer:
            await self._exclude_joins()
        await call_ranks(
            self._ranks, "copy_weights", version, self.canary_token_ids, self._copies is not None
        )
        return CopiedOut(version=version, seconds=clock() - started)

    async def update(self, copied: CopiedOut) -> SyncReport:
        """Return when every generator samples with a version that was copied out.

        Raises:
            RunError: a generator loaded something else, or computes something else with it.
        """
        version = copied.version
        clock = asyncio.get_running_loop().time
        async with self._updating():
            started = clock()

            async def load() -> tuple[float, dict[int, WeightReceipt]]:
                began = clock()  # every host has the version
                return began, await self._generators.update_weights(version, self.canary_token_ids)

            with trace.span("generators load"):
                (load_began, receipts), proof = await asyncio.gather(
                    self._with_copies(version, load), self._trainers_proof()
                )
            self._fingerprint, self._canary = proof
            for replica, receipt in receipts.items():
                self._check_receipt(replica, version, receipt)
            loaded = clock()
            self._set_version(version)
        canaries = {replica: receipt.canary_logprobs for replica, receipt in receipts.items()}
        return SyncReport(
            version=version,
            canary_max_diff=self._compare(version, canaries),
            copy_out_s=copied.seconds,
            load_s=loaded - started,
            verify_s=max((receipt.verify_s for receipt in receipts.values()), default=0.0),
            reload_s=max((receipt.reload_s for receipt in receipts.values()), default=0.0),
            fetched_bytes=self._copies.take_fetched_bytes() if self._copies else {},
            fetch_s=load_began - started,
        )

    async def _exclude_joins(self) -> None:
        """Let no replica join from now on, until an update has ended."""
        if not self._excludes_joins:
            await self._joins.begin_exclusive()
            self._excludes_joins = True

    @asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """Exclude replicas that join until the block ends, if they are not excluded already."""
        await self._exclude_joins()
        self._excludes_joins = False
        try:
            yield
        finally:
            self._joins.end_exclusive()

    # ---- loading

    def _set_version(self, version: int) -> None:
        self._version = version
        self._published = True

    async def _load_current(self, replica: int, actor: Any) -> np.ndarray:  # noqa: ANN401 - Monarch's
        """Have a new replica load the current version, and return its canary."""

        async def load() -> WeightReceipt:
            return await actor.update_weights.call_one(self._version, self.canary_token_ids)

        receipt = await self._with_copies(self._version, load)
        self._check_receipt(replica, self._version, receipt)
        return receipt.canary_logprobs

    async def _with_copies(self, version: int, load: Callable[[], Awaitable[T]]) -> T:
        """Return what ``load`` returns, once every host has the version.

        If a host lost the version before its engines mapped it, it is fetched and loaded again.
        """
        if self._copies is None:
            return await load()
        await self._copies.fetch(version)
        while True:
            lost = self._copies.lost
            try:
                return await load()
            except Exception:  # an engine's RunError arrives inside Monarch's ActorError
                # A reader that is dead is noticed now, at the latest.
                await self._copies.fetch(version)
                if self._copies.lost == lost:
                    raise

    # ---- proof

    async def _trainers_proof(self) -> tuple[str, np.ndarray]:
        """Return the fingerprint and the canary of the version that was copied out last.

        Generators wait for its digests, but training does not.
        """
        proof, *_ = await call_ranks(self._ranks, "proof")
        return proof

    async def _score_first_canary(self) -> None:
        """Have the trainer score the canary with the weights of the model's hub folder, once."""
        async with self._scoring:
            if self._canary is None:
                of_ranks = await self._trainer.score.call(self.canary_token_ids)
                self._canary = next(iter(of_ranks.values()))

    def _check_receipt(self, replica: int, version: int, receipt: WeightReceipt) -> None:
        if receipt.version != version:
            raise RunError(
                f"generator {replica} answered version {version} with the weights of version "
                f"{receipt.version}"
            )
        if receipt.fingerprint not in ("", self._fingerprint):
            raise RunError(
                f"generator {replica} holds weights of fingerprint {receipt.fingerprint} as "
                f"version {version}; the trainer published {self._fingerprint}"
            )

    def _compare(self, version: int, canaries: Mapping[int, np.ndarray]) -> float:
        """Return the largest difference between the trainer's canary and those of replicas.

        Raises:
            RunError: a difference is beyond the bound, or not a number.
        """
        assert self._canary is not None, "the trainer scores the canary first"
        worst = 0.0
        bound = self._bound.nats
        for replica, canary in canaries.items():
            difference = float(np.abs(self._canary - canary).max())
            if not difference <= bound:  # also a NaN
                raise RunError(
                    f"generator {replica} and trainer disagree on version {version}: the canary's "
                    f"log-probabilities differ by {difference:.2g}, more than {bound:.3g}; the "
                    "engine does not compute with the published weights"
                )
            worst = max(worst, difference)
        if canaries:
            self._bound.passed(version, worst)
        return worst
