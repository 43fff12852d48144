"""Loads versions inside each of vLLM's worker processes, and digests what the worker then holds.

    map_snapshot     open the snapshot: nothing has changed yet, so the engine survives a failure
    load_snapshot    copy it into the model, or its adapters into theirs, and digest every copy

Every digest is of a copy that the model computes with, and never of the snapshot. On CPU vLLM packs
most weights for its kernels, and nothing can read a packed copy back. So a weight is digested just
before it is packed, and the digest is noted on what owns the packed copy (`compat.packing_noted`):
a copy that is left from an older version has its old digest.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.generation.engine import QUANTIZED
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    PartedTensors,
    Shard,
    SnapshotReader,
    digest,
    digest_text,
    of_copies,
    read_together,
)

UNKNOWN = "packed before this version"
"""Text in place of a digest for a packed copy of which no note says what it was made of."""

NOT_HELD = "not held"
"""Text in place of a digest for a tensor of which the engine has no copy."""

BESIDE_BYTES = 2**18
"""Minimum size of a CPU tensor whose digest is worth another thread: 35 us of one core."""

HeldShard = tuple[Shard, int | str]
"""A copy of a tensor, or of a shard of it, that a worker holds: its place in the tensor, and its
share of the tensor's digest, or a text in place of it."""


class _PendingShard(NamedTuple):
    """A `HeldShard` whose digest may still be computed, by a thread or by the device."""

    place: Shard
    digest: torch.Tensor | Future[torch.Tensor] | str


_Copy = dict[str, list[_PendingShard]]
"""Digests of one copy of a weight, by the name of each published tensor that is fused into it. A
worker holds several shards of a tensor that is itself fused of several."""


@dataclass(kw_only=True, slots=True)
class WorkerReport:
    """One worker's report on a version that it loaded."""

    held: dict[str, list[HeldShard]]
    """All copies that the worker holds, by published name. Empty if it was not asked to verify."""
    verify_s: float
    """Seconds that finding the model's weights and taking digests took."""
    reload_s: float
    """Seconds that copying the version into the model took."""


class SnapshotLoader:
    """Methods that `VLLMEngine` calls in every worker, by ``collective_rpc``.

    vLLM mixes this class into its worker (``worker_extension_cls``) and makes the object itself, so
    there is no __init__.
    """

    _mapped: tuple[Manifest, PartedTensors] | None = None
    """Version that `load_snapshot` will load."""
    _routes: compat.RecordedRoutes

    @cached_property
    def _snapshots(self) -> SnapshotReader:
        return SnapshotReader()

    def map_snapshot(self, manifest: Manifest) -> str:
        """Open the version that `load_snapshot` will load.

        Returns:
            The reason why the version can't be read any more; "" if it can. It is not raised: vLLM
            0.32 reads the answers of several workers up to the first error, and would take those
            that are left for the answers to the next call.
        """
        worker: Any = self
        try:
            device = next(worker.get_model().parameters()).device
            self._mapped = manifest, self._snapshots.tensors(manifest, device)
        except PeerGone as error:
            return str(error)
        return ""

    def load_snapshot(self, verify: bool) -> WorkerReport:
        """Copy the version of `map_snapshot` into the running model.

        Args:
            verify: True to digest what the model then holds, where it lies. The snapshot itself is
                neither read again nor verified.
        """
        started = time.perf_counter()
        assert self._mapped is not None, "map_snapshot comes first"
        manifest, tensors = self._mapped
        self._mapped = None  # they may lie in memory of another process, which wants it back
        if compat.adapters_in(tensors):
            in_host_memory = dict(tensors.in_host_memory())  # vLLM takes adapters from there
            return self._load_adapters(in_host_memory, verify=verify, started=started)
        return self._load_model(manifest, tensors, verify=verify, started=started)

    def _load_model(
        self, manifest: Manifest, tensors: PartedTensors, *, verify: bool, started: float
    ) -> WorkerReport:
        worker: Any = self
        model = worker.get_model()
        weights = HeldWeights(model, manifest)
        found = time.perf_counter()
        note = weights.note if verify else _note_nothing
        with (
            trace.span("reload"),
            compat.packing_noted(note, unpacked=compat.packed_for_nothing(model)),
        ):
            compat.reload_weights(worker, tensors)
        noted_s = weights.digest_s
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            held = weights.read() if verify else {}
        ended = time.perf_counter()
        return WorkerReport(
            held=held,
            verify_s=(found - started) + noted_s + (ended - reloaded),
            reload_s=reloaded - found - noted_s,
        )

    def _load_adapters(
        self, tensors: dict[str, torch.Tensor], *, verify: bool, started: float
    ) -> WorkerReport:
        """Replace the adapters, and read them back from where the model computes with them."""
        with trace.span("reload"):
            compat.set_adapters(self, tensors)
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            held = self._held_adapters(tensors) if verify else {}
        return WorkerReport(
            held=held,
            verify_s=time.perf_counter() - reloaded,
            reload_s=reloaded - started,
        )

    def _held_adapters(self, tensors: dict[str, torch.Tensor]) -> dict[str, list[HeldShard]]:
        """Return the shards of adapters that the model computes with."""
        held: dict[str, list[_PendingShard]] = {name: [] for name in tensors}
        for name, copy, original in compat.held_adapters(self, tensors):
            tensor = tensors[name]
            # The original is a view of the tensor: where it begins tells its place.
            offset = int(original.storage_offset() - tensor.storage_offset())
            row, column = divmod(offset, tensor.shape[1])
            rows, columns = original.shape
            place = ((row, row + rows), (column, column + columns))
            share = digest(copy.to(tensor.dtype), place, tuple(tensor.shape))
            held[name].append(_PendingShard(place, share))
        return _read_digests(held)

    def record_routes(self) -> None:
        """Record which experts compute each token from now on. Called before the first request."""
        self._routes = compat.RecordedRoutes(self)

    def routes_of(self, tokens: Mapping[str, tuple[int, int]]) -> dict[str, tuple[np.ndarray, int]]:
        """Return the routes of requests that ended in the last step.

        Args:
            tokens: first token whose route is wanted and end of the tokens, by vLLM's id.

        Returns:
            By vLLM's id: uint8 or uint16 [R, layers, k], and how many of the request's tokens were
            computed again and have the routes of their first computation.
        """
        answer = {}
        for request_id, (start, end) in tokens.items():
            routes = self._routes.read(request_id, end)[start:].numpy()
            answer[request_id] = routes, self._routes.kept_tokens(request_id)
        return answer


class HeldWeights:
    """Weights of a worker's model that are made of a version's tensors.

    Load the version within ``compat.packing_noted(weights.note)``, and then ``read`` the digests of
    what the model holds.
    """

    def __init__(self, model: torch.nn.Module, manifest: Manifest):
        self._shapes = manifest.shapes
        self._dtype = manifest.dtype
        self._weights = list(compat.held_weights(model, set(manifest.shapes)))
        self._packed: dict[int, list[compat.HeldWeight]] = {}
        """Weights that are packed, by the id of their module."""
        for weight in self._weights:
            if weight.packed:
                self._packed.setdefault(id(weight.module), []).append(weight)
        owners: dict[int, Any] = {}
        for weight in self._weights:
            owners.setdefault(id(weight.parameter), weight.module)
        self._tied = {
            id(weight.module)
            for weight in self._weights
            if owners[id(weight.parameter)] is not weight.module
        }
        """Ids of modules whose weight is another module's, as a tied head's is the embedding's."""
        self._tied_notes: dict[int, _Copy] = {}
        """Notes of tied modules, by the id of the module.

        A tied module is packed before its weight is digested where the owner has it. So ``note``
        leaves an empty note, and ``read`` fills in the owner's digest: the weight is digested
        once."""
        self.digest_s = 0.0
        """Seconds that digests have held up the load, or the answer, so far."""

    def note(self, module: torch.nn.Module) -> _Copy | None:
        """Digest the weights of a module that is about to be packed; return None if it has none."""
        packed = self._packed.get(id(module), [])
        if packed and id(module) in self._tied:
            return self._tied_notes.setdefault(id(module), {})
        noted: _Copy = {}
        for weight in packed:
            # A load may have put another tensor in the place of `weight.parameter`.
            noted |= self._digest(weight, getattr(module, weight.name))
        return noted or None

    def read(self) -> dict[str, list[HeldShard]]:
        """Return all copies that the model holds, by published name in the snapshot's order.

        A model may hold a tensor more than once: as it is, packed, and in a tied head.
        """
        held: dict[str, list[_PendingShard]] = {name: [] for name in self._shapes}
        plain: dict[int, _Copy] = {}
        for weight in self._weights:
            for copy in self._copies(weight, plain):
                for name, shards in copy.items():
                    held[name] += shards
        return _read_digests(held)

    def _copies(self, weight: compat.HeldWeight, plain: dict[int, _Copy]) -> list[_Copy]:
        """Return the copies of a weight that the model holds: the weight itself, a packed one.

        Args:
            plain: weights themselves that were digested so far, by the id of their parameter, which
                a tied head shares with the embedding.
        """
        key = id(weight.parameter)
        tensor = weight.plain
        if key not in plain and tensor is not None:
            plain[key] = self._digest(weight, tensor)
        copies = [plain[key]] if key in plain else []
        if weight.packed:
            if id(weight.module) in self._tied_notes:
                self._tied_notes[id(weight.module)].update(plain.get(key, {}))
            noted = compat.packed_from(weight.module, weight.name)
            if not noted:
                noted = {name: [_PendingShard((), UNKNOWN)] for name in weight.sources}
            copies.append({name: noted[name] for name in weight.sources if name in noted})
        return copies

    def _digest(self, weight: compat.HeldWeight, tensor: torch.Tensor) -> _Copy:
        """Digest the shards of each source in a weight that the model holds as ``tensor``."""
        started = time.perf_counter()
        tensor = tensor.detach()
        if tensor.element_size() < self._dtype.itemsize:
            return {name: [_PendingShard((), QUANTIZED)] for name in weight.sources}
        copy: _Copy = {name: [] for name in weight.sources}
        for name, region, shard in compat.shards_of_sources(weight, tensor, self._shapes):
            place = tuple((side.start, side.stop) for side in region)
            digest_of_shard = _start_digest(shard.to(self._dtype), place, self._shapes[name])
            copy[name].append(_PendingShard(place, digest_of_shard))
        self.digest_s += time.perf_counter() - started
        return copy


def whole_digests(workers: Iterable[Mapping[str, list[HeldShard]]]) -> dict[str, str]:
    """Return the digests of the tensors that workers hold together.

    If copies of a tensor differ, in one worker or between two, all of theirs are returned, a text
    that equals no digest.

    Args:
        workers: what each of them holds, by published name.
    """
    digests: dict[str, dict[Shard, set[int | str]]] = {}
    for held in workers:
        for name, shards in held.items():
            of_tensor = digests.setdefault(name, {})
            for place, value in shards:
                of_tensor.setdefault(place, set()).add(value)
    return {name: _whole_digest(of_tensor) for name, of_tensor in digests.items()}


def _whole_digest(digests: Mapping[Shard, set[int | str]]) -> str:
    """Return the digest of one tensor, given all digests that were seen at each place in it."""
    values = [value for seen in digests.values() for value in seen]
    if not values:
        return NOT_HELD
    shares = [value for value in values if isinstance(value, int)]
    if len(shares) == len(values) == len(digests):  # one share at each place
        return digest_text(sum(shares))
    return of_copies(value if isinstance(value, str) else digest_text(value) for value in values)


def _note_nothing(module: torch.nn.Module) -> None:
    """Take no note of a module that is about to be packed."""


def _start_digest(
    part: torch.Tensor, place: Shard, shape: tuple[int, ...]
) -> torch.Tensor | Future[torch.Tensor]:
    """Begin the digest of a part of a tensor; a large one on CPU in a thread, beside the load.

    Nobody writes to the part before `HeldWeights.read` returns: what is packed is dropped then, and
    meanwhile the next weight is copied.
    """
    if part.is_cpu and part.nbytes >= BESIDE_BYTES:
        return _digest_thread().submit(digest, part, place, shape)
    return digest(part, place, shape)


@cache
def _digest_thread() -> ThreadPoolExecutor:
    """Return a thread for digests beside the load.

    It is none of the threads among which `digest` divides a large tensor: it waits for those.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="digests-beside")


def _read_digests(held: Mapping[str, list[_PendingShard]]) -> dict[str, list[HeldShard]]:
    """Wait for all digests. The device is asked once for all."""
    digests = [shard.digest for shards in held.values() for shard in shards]
    tensors = [
        value.result() if isinstance(value, Future) else value
        for value in digests
        if not isinstance(value, str)
    ]
    numbers = iter(read_together(tensors))
    return {
        name: [
            (place, value if isinstance(value, str) else next(numbers)) for place, value in shards
        ]
        for name, shards in held.items()
    }
