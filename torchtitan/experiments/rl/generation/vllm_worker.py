"""What runs inside each vLLM worker process to load a new policy version."""

import time
from functools import cached_property
from typing import Any

from torchtitan.experiments.rl.compat.vllm import packed_for_nothing, packing_noted, reload_weights
from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.generation.engine import LoadReport
from torchtitan.experiments.rl.generation.vllm_held import HeldWeights
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.digests import fingerprint
from torchtitan.experiments.rl.weights.snapshot import Manifest, SnapshotReader


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
        held = HeldWeights(model, manifest, tensors)
        mapped = time.perf_counter()
        with trace.span("reload"), packing_noted(held.note, unpacked=packed_for_nothing(model)):
            reload_weights(worker, tensors.items())
        packed_s = held.seconds
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            digests = held.digests()
        read_back = time.perf_counter()
        return LoadReport(
            fingerprint=fingerprint(digests),
            digests=digests,
            verify_s=(mapped - started) + packed_s + (read_back - reloaded),
            reload_s=reloaded - mapped - packed_s,
        )
