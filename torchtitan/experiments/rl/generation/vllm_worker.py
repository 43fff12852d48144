"""What runs inside each vLLM worker process to take over a new policy version."""

import time

import torch

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.weights.snapshot import Manifest, SharedBuffer, fingerprint


class SnapshotLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``): ``collective_rpc("load_snapshot", ...)`` reaches every worker."""

    def load_snapshot(self, manifest: Manifest, path: str) -> dict[str, float | str]:
        """Map the snapshot at ``path``, check its fingerprint and copy it into the running model.

        Returns:
            fingerprint, and seconds spent mapping and verifying, and in the engine's own reload.

        Raises:
            RunError: the mapped bytes are not those the trainer published.
        """
        started = time.perf_counter()
        buffers = self.__dict__.setdefault("_snapshot_buffers", {})
        if path not in buffers:
            buffers[path] = SharedBuffer.attach(path)
        buffer = buffers[path]
        seen = fingerprint(buffer.bytes[: manifest.layout.nbytes])
        if seen != manifest.fingerprint:
            raise RunError(
                f"weights of version {manifest.version}: fingerprint {seen} mapped, {manifest.fingerprint} published; "
                "the snapshot was overwritten or truncated while it was read"
            )
        mapped = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=buffer.views(manifest.layout))
        _repack_tied_head(self.model_runner.get_model())
        return {"fingerprint": seen, "verify_s": mapped - started, "reload_s": time.perf_counter() - mapped}


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On CPU a head tied to the embedding keeps the prepacked copy of its old weights after a reload (vLLM 0.32)."""
    head = getattr(model, "lm_head", None)
    if head is None or not model.config.tie_word_embeddings or next(head.parameters()).device.type != "cpu":
        return
    head.quant_method.process_weights_after_loading(head)
