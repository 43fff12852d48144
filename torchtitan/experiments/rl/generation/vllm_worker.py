"""What runs inside each vLLM worker process to load a new policy version."""

import time
from typing import Any

from torchtitan.experiments.rl.compat.vllm import packing_noted, reload_weights
from torchtitan.experiments.rl.generation.engine import LoadReport
from torchtitan.experiments.rl.generation.vllm_held import HeldWeights
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.snapshot import Manifest, SnapshotReader, fingerprint


class SnapshotLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``): ``collective_rpc("load_snapshot", ...)`` reaches every worker."""

    def load_snapshot(self, manifest: Manifest, path: str) -> LoadReport:
        """Map the snapshot at ``path``, check its fingerprint, copy it into the running model, and read back what that holds.

        Raises:
            RunError: the mapped bytes are not those the trainer published.
        """
        started = time.perf_counter()
        worker: Any = self  # vLLM mixes this class into its own, and makes it: there is no __init__ for the reader
        reader = worker.__dict__.setdefault("_snapshot_reader", SnapshotReader())
        with trace.span("verify the snapshot"):
            tensors = reader.tensors(manifest, path)
        mapped = time.perf_counter()
        held = HeldWeights(worker.get_model(), manifest, tensors)
        with trace.span("reload"), packing_noted(held.note):
            reload_weights(worker, tensors.items())
        packed_s = held.seconds
        reloaded = time.perf_counter()
        with trace.span("digests of what is held"):
            digests = held.digests()
        if held.has_shares:
            reader.tensors(manifest, path)  # what shares were compared with is still what was published
        read_back = time.perf_counter()
        return LoadReport(
            fingerprint=fingerprint(digests),
            digests=digests,
            verify_s=(mapped - started) + packed_s + (read_back - reloaded),
            reload_s=reloaded - mapped - packed_s,
        )
