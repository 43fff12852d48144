"""What runs inside each vLLM worker process to load a new policy version, and digests of what the worker then holds."""

import time
from functools import cached_property
from typing import Any

import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.compat.vllm import reload_weights
from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.generation.engine import LoadReport
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.snapshot import Manifest, SnapshotReader, digest, of_copies, tensor_digest

UNKNOWN = "packed before this version"
"""In place of a digest: nobody has seen what the copy was made of."""
NOT_HELD = "not held"
"""In place of a digest: the engine has no copy."""


class HeldWeights:
    """Of one version: load it within ``compat.packing_noted(held.note)``, then read ``digests``.

    A worker that holds a share of a tensor compares it with the same share of the snapshot, and gives the digest of the
    snapshot's whole tensor where they are equal.
    """

    def __init__(self, model: Any, manifest: Manifest, snapshot: dict[str, torch.Tensor]):
        self._snapshot = snapshot
        self._as_snapshot = f"as {manifest.publication} has it"
        """In place of the digest of a share that equals the snapshot's, until that one's is taken. A copy that was packed from
        another publication has another one."""
        self._shards = {entry.name: entry.shards for entry in manifest.layout.entries}
        self._weights = list(compat.held_weights(model, set(snapshot)))
        self._packed = {id(held.module): held for held in self._weights if held.packed}
        first = {id(held.parameter): held.module for held in reversed(self._weights)}
        self._tied = {id(held.module) for held in self._weights if first[id(held.parameter)] is not held.module}
        self._noted_later: dict[int, dict[str, str]] = {}
        """By tied module: filled when its weight is read, which comes after the packing and is not done twice."""
        self.seconds = 0.0
        """Spent on digests so far."""

    def note(self, module: Any) -> dict[str, str] | None:
        """Digests of what is about to be packed."""
        held = self._packed.get(id(module))
        if held is None:
            return None
        if id(module) in self._tied:
            return self._noted_later.setdefault(id(module), {})
        return self._digests_of(held, module.weight)

    def digests(self) -> dict[str, str]:
        """By hub name, in the snapshot's order. A model may hold a tensor more than once, as a tied head: see ``of_copies``."""
        found: dict[str, list[str]] = {name: [] for name in self._snapshot}
        read: dict[int, dict[str, str]] = {}
        for held in self._weights:
            own = id(held.parameter)  # a tied head has the embedding's
            if own not in read and held.parameter.numel():
                read[own] = self._digests_of(held, held.parameter)
            copies = [read[own]] if own in read else []
            if held.packed:
                self._noted_later.get(id(held.module), {}).update(read.get(own, {}))
                copies.append(compat.packed_from(held.module) or dict.fromkeys(held.sources, UNKNOWN))
            for copy in copies:
                for name, value in copy.items():
                    found[name].append(value)
        return {name: of_copies(self._of_whole(name, value) for value in set(found[name])) or NOT_HELD for name in found}

    def _of_whole(self, name: str, found: str) -> str:
        """The snapshot is read last: what was compared with it was compared with this."""
        return tensor_digest(self._snapshot[name], self._shards[name]) if found == self._as_snapshot else found

    def _digests_of(self, held: compat.HeldWeight, weight: torch.Tensor) -> dict[str, str]:
        started = time.perf_counter()
        found, start = {}, 0
        weight = weight.detach()
        for name, rows in zip(held.sources, compat.rows_of_parts(held, len(weight)), strict=True):
            whole = self._snapshot[name]
            own = weight if rows == len(weight) else weight[start : start + rows]
            if own.shape != whole.shape:  # a share, or a vocabulary that is filled up
                region = compat.region(held, rows, tuple(whole.shape), weight.shape)
                own = weight[start : start + region[0].stop - region[0].start]
            own = own.to(whole.dtype)
            if own.shape == whole.shape:
                found[name] = tensor_digest(own, self._shards[name])
            else:
                seen = digest(own)
                found[name] = self._as_snapshot if seen == digest(whole[region]) else seen
            start += rows
        self.seconds += time.perf_counter() - started
        return found


class SnapshotLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``): ``collective_rpc("load_snapshot", ...)`` reaches every worker.

    vLLM makes it: there is no __init__ for the reader.
    """

    @cached_property
    def _snapshots(self) -> SnapshotReader:
        return SnapshotReader()

    def map_snapshot(self, path: str) -> str:
        """Why there is no snapshot at ``path`` any more; "" where it is mapped.

        It is returned, because an engine of several workers can't be called again after one of them has raised: vLLM 0.32 reads
        the answer of the first, and takes those of the others for the answers to the next call.
        """
        try:
            self._snapshots.map(path)
        except PeerGone as error:
            return str(error)
        return ""

    def load_snapshot(self, manifest: Manifest, path: str) -> LoadReport:
        """Copy the snapshot at ``path`` into the running model, and read back what that holds.

        The snapshot itself is not verified before: every digest of the report is of a copy that the model computes with, and
        each is compared with what was published.
        """
        worker: Any = self
        started = time.perf_counter()
        tensors = dict(self._snapshots.map(path).views(manifest.layout))
        model = worker.get_model()
        if compat.is_adapter(tensors):
            return self._load_adapter(manifest, tensors, started)
        held = HeldWeights(model, manifest, tensors)
        mapped = time.perf_counter()
        with trace.span("reload"), compat.packing_noted(held.note, unpacked=compat.packed_for_nothing(model)):
            reload_weights(worker, tensors.items())
        packed_s = held.seconds
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            digests = held.digests()
        read_back = time.perf_counter()
        return LoadReport(
            digests=digests,
            verify_s=(mapped - started) + packed_s + (read_back - reloaded),
            reload_s=reloaded - mapped - packed_s,
        )

    def _load_adapter(self, manifest: Manifest, tensors: dict[str, torch.Tensor], started: float) -> LoadReport:
        """Put the adapter in the place of the one before, and read it back from where the model computes with it."""
        mapped = time.perf_counter()
        with trace.span("reload"):
            compat.set_adapter(self, tensors)
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            digests, shards = {}, {entry.name: entry.shards for entry in manifest.layout.entries}
            for name, held, share in compat.held_adapter(self, tensors):
                whole = held.shape == tensors[name].shape
                same = whole or digest(held) == digest(share)
                digests[name] = tensor_digest(held if whole else tensors[name], shards[name]) if same else digest(held)
        return LoadReport(
            digests={name: digests.get(name, NOT_HELD) for name in tensors},
            verify_s=(mapped - started) + time.perf_counter() - reloaded,
            reload_s=reloaded - mapped,
        )
