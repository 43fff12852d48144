"""What runs inside each vLLM worker process to load a new policy version."""

import time

from torchtitan.experiments.rl.compat.vllm import reload_weights
from torchtitan.experiments.rl.generation.engine import LoadReport
from torchtitan.experiments.rl.weights.snapshot import Manifest, SnapshotReader


class SnapshotLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``): ``collective_rpc("load_snapshot", ...)`` reaches every worker."""

    def load_snapshot(self, manifest: Manifest, path: str) -> LoadReport:
        """Map the snapshot at ``path``, check its fingerprint and copy it into the running model.

        Raises:
            RunError: the mapped bytes are not those the trainer published.
        """
        started = time.perf_counter()
        # vLLM makes the worker, so there is no __init__ for this.
        reader = self.__dict__.setdefault("_snapshot_reader", SnapshotReader())
        tensors = reader.tensors(manifest, path)
        mapped = time.perf_counter()
        reload_weights(self, tensors.items())
        return LoadReport(fingerprint=manifest.fingerprint, verify_s=mapped - started, reload_s=time.perf_counter() - mapped)
