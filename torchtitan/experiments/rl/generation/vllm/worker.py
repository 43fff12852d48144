"""What runs inside each vLLM worker process to load a new policy version, and digests of what the worker then holds."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.compat.vllm import reload_weights
from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.generation.engine import QUANTIZED
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    Shard,
    SnapshotReader,
    digest,
    named,
    of_copies,
    read_together,
    whole,
)

UNKNOWN = "packed before this version"
"""In place of a digest: nobody has seen what the copy was made of."""
NOT_HELD = "not held"
"""In place of a digest: the engine has no copy."""

BESIDE_BYTES = 2**18
"""Of a CPU tensor whose digest is worth another thread: 35 us of one core."""

Part = tuple[Shard, torch.Tensor | Future[torch.Tensor] | str]
"""Where it lies in its tensor; its share of that one's digest, or what there is in its place."""


@dataclass(kw_only=True, slots=True)
class LoadedParts:
    """What one worker says of a version that it loaded."""

    parts: dict[str, list[tuple[Shard, int | str]]]
    """By published name: of each copy that it holds, of the whole or a share."""
    verify_s: float
    reload_s: float


def whole_digests(workers: Iterable[Mapping[str, list[tuple[Shard, int | str]]]]) -> dict[str, str]:
    """Digests of the tensors that workers hold together. Those of copies that differ, in one or between them, equal none."""
    found: dict[str, dict[Shard, set[int | str]]] = {}
    for parts in workers:
        for name, own in parts.items():
            places = found.setdefault(name, {})
            for place, value in own:
                places.setdefault(place, set()).add(value)
    digests = {}
    for name, places in found.items():
        values = [value for seen in places.values() for value in seen]
        shares = [value for value in values if isinstance(value, int)]
        if not values:
            digests[name] = NOT_HELD
        elif len(shares) == len(places) == len(values):
            digests |= named([(name, sum(shares))])
        else:
            digests[name] = of_copies(
                value if isinstance(value, str) else f"{value % 2**64:016x}" for value in values
            )
    return digests


class HeldWeights:
    """Of one version: load it within ``compat.packing_noted(held.note)``, then read ``parts``."""

    def __init__(self, model: Any, manifest: Manifest):
        self._shapes, self._dtype = manifest.shapes, manifest.dtype
        self._weights = list(compat.held_weights(model, set(self._shapes)))
        self._packed: dict[int, list[compat.HeldWeight]] = {}
        for held in self._weights:
            if held.packed:
                self._packed.setdefault(id(held.module), []).append(held)
        first = {id(held.parameter): held.module for held in reversed(self._weights)}
        self._tied = {
            id(held.module)
            for held in self._weights
            if first[id(held.parameter)] is not held.module
        }
        self._noted_later: dict[int, dict[str, Part]] = {}
        """By tied module: filled when its weight is read, which comes after the packing and is not done twice."""
        self.seconds = 0.0
        """That the load has waited for digests so far."""

    def note(self, module: Any) -> dict[str, Part] | None:
        """Digests of what is about to be packed."""
        packed, found = self._packed.get(id(module), []), dict[str, Part]()
        if packed and id(module) in self._tied:
            return self._noted_later.setdefault(id(module), {})
        for held in packed:
            found |= self._parts_of(held, getattr(module, held.name))  # another one than it was
        return found or None

    def parts(self) -> dict[str, list[tuple[Shard, int | str]]]:
        """By published name, in the snapshot's order. A model may hold a tensor more than once, as a tied head."""
        found: dict[str, list[Part]] = {name: [] for name in self._shapes}
        read: dict[int, dict[str, Part]] = {}
        for held in self._weights:
            own = id(held.parameter)  # a tied head has the embedding's
            if own not in read and (plain := held.plain) is not None:
                read[own] = self._parts_of(held, plain)
            copies = [read[own]] if own in read else []
            if held.packed:
                self._noted_later.get(id(held.module), {}).update(read.get(own, {}))
                noted = compat.packed_from(held.module, held.name) or dict.fromkeys(
                    held.sources, ((), UNKNOWN)
                )
                copies.append({name: noted[name] for name in held.sources if name in noted})
            for copy in copies:
                for name, part in copy.items():
                    found[name].append(part)
        values = [value for own in found.values() for _, value in own if not isinstance(value, str)]
        taken = [value.result() if isinstance(value, Future) else value for value in values]
        numbers = iter(read_together(taken))
        return {
            name: [
                (place, value if isinstance(value, str) else next(numbers)) for place, value in own
            ]
            for name, own in found.items()
        }

    def _parts_of(self, held: compat.HeldWeight, weight: torch.Tensor) -> dict[str, Part]:
        started = time.perf_counter()
        found: dict[str, Part] = {}
        weight = weight.detach()
        if weight.element_size() < self._dtype.itemsize:
            return dict.fromkeys(held.sources, ((), QUANTIZED))
        for name, own in zip(held.sources, compat.parts_of_sources(held, weight), strict=True):
            shape = self._shapes[name]
            place = whole(shape)
            if own.shape != shape:  # a share, or a vocabulary that is filled up
                region = compat.region(held, shape, own.shape)
                own = own[: region[0].stop - region[0].start]
                place = tuple((part.start, part.stop) for part in region)
            share = own.to(self._dtype), place, shape
            # Nobody writes to it before ``parts`` returns: what is packed is dropped then, and the next is copied meanwhile.
            beside = own.is_cpu and own.nbytes >= BESIDE_BYTES
            found[name] = place, _thread().submit(digest, *share) if beside else digest(*share)
        self.seconds += time.perf_counter() - started
        return found


@cache
def _thread() -> ThreadPoolExecutor:
    """None of those between which ``digest`` divides a large tensor: it waits for them."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="digests-beside")


class SnapshotLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``): ``collective_rpc("load_snapshot", ...)`` reaches every worker.

    vLLM makes it: there is no __init__ for the reader.
    """

    @cached_property
    def _snapshots(self) -> SnapshotReader:
        return SnapshotReader()

    def map_snapshot(self, manifest: Manifest) -> str:
        """Why the version can't be read any more; "" where it is mapped.

        It is returned, because an engine of several workers can't be called again after one of them has raised: vLLM 0.32 reads
        the answer of the first, and takes those of the others for the answers to the next call.
        """
        worker: Any = self
        try:
            device = next(worker.get_model().parameters()).device
            self._mapped = manifest, self._snapshots.tensors(manifest, device)
        except PeerGone as error:
            return str(error)
        return ""

    def record_routes(self) -> None:
        """Once, before the first request."""
        self._routes = compat.RecordedRoutes(self)

    def routes_of(self, tokens: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Any, int]]:
        """uint8 or uint16 [R, layers, k] of requests that ended in the last step, and how many of their tokens have the routes
        of a first computation. ``tokens``: by vLLM's id, the first that is asked for and the end."""
        kept = self._routes.kept
        return {
            own: (self._routes.of(own, end)[start:].numpy(), len(kept.get(own, ())))
            for own, (start, end) in tokens.items()
        }

    def load_snapshot(self, verify: bool) -> LoadedParts:
        """Copy the version of ``map_snapshot`` into the running model, and digest what that holds, where it lies.

        The snapshot itself is neither read again nor verified: every digest is of a copy that the model computes with.
        """
        worker: Any = self
        started = time.perf_counter()
        (manifest, tensors), model = vars(self).pop("_mapped"), worker.get_model()
        if compat.adapters_in(tensors):  # vLLM takes them on the CPU
            return self._load_adapter(dict(tensors.in_host_memory()), started, verify)
        held = HeldWeights(model, manifest)
        mapped = time.perf_counter()
        note = held.note if verify else lambda module: None
        with (
            trace.span("reload"),
            compat.packing_noted(note, unpacked=compat.packed_for_nothing(model)),
        ):
            reload_weights(worker, tensors)
        packed_s = held.seconds
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            parts = held.parts() if verify else {}
        read_back = time.perf_counter()
        return LoadedParts(
            parts=parts,
            verify_s=(mapped - started) + packed_s + (read_back - reloaded),
            reload_s=reloaded - mapped - packed_s,
        )

    def _load_adapter(
        self, tensors: dict[str, torch.Tensor], started: float, verify: bool
    ) -> LoadedParts:
        """Put the adapters in the place of those before, and read them back from where the model computes with them."""
        mapped = time.perf_counter()
        with trace.span("reload"):
            compat.set_adapters(self, tensors)
        reloaded = time.perf_counter()
        parts: dict[str, list[tuple[Shard, int | str]]] = (
            {name: [] for name in tensors} if verify else {}
        )
        with trace.span("digests of what is held"):
            taken: list[tuple[str, Shard, torch.Tensor]] = []
            for name, held, share in compat.held_adapter(self, tensors) if verify else ():
                tensor = tensors[name]
                # The share is a view of the whole.
                row, column = divmod(
                    int(share.storage_offset() - tensor.storage_offset()), tensor.shape[1]
                )
                place = ((row, row + share.shape[0]), (column, column + share.shape[1]))
                own = digest(held.to(tensor.dtype), place, tuple(tensor.shape))
                taken.append((name, place, own))
            numbers = read_together(own for _, _, own in taken)
            for (name, shard, _), number in zip(taken, numbers, strict=True):
                parts[name].append((shard, number))
        return LoadedParts(
            parts=parts,
            verify_s=(mapped - started) + time.perf_counter() - reloaded,
            reload_s=reloaded - mapped,
        )
