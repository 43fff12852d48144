"""The Generator actor: an engine in this process, stepped by one thread (``engine_thread.py``). Requests arrive as messages.

The results of one engine step leave in one message.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from monarch.actor import Port, current_rank

from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.engine_thread import EngineThread
from torchtitan.experiments.rl.generation.messages import (
    CLIENT_BITS,
    GeneratorFailed,
    GeneratorMessage,
    Request,
)
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.memory import freeze_objects, keep_imported
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint
from torchtitan.experiments.rl.user_code.watched import WatchedActor
from torchtitan.experiments.rl.weights.reader import local_snapshot
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt
from torchtitan.experiments.rl.weights.store import published

logger = logging.getLogger(__name__)


class Generator(WatchedActor):
    """One replica: ``setup``, ``attach`` a port for each client, then ``submit`` requests and read results from it."""

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        model_path: str,
        device: Literal["cpu", "cuda"],
        run_dir: str,
        role: str = "generator",
        index: int | None = None,
        adapters: Mapping[str, int] | None = None,
    ):
        """
        Args:
            role, index: name of its log; without an index, its rank in its mesh.
            adapters: that each version is, and the rank of each. None: a version is the whole model.
        """
        super().__init__()
        self.config = config
        self._build = partial(config.engine.build, model_path=model_path, device=device)
        if adapters:
            self._build = partial(self._build, adapters=adapters)
        self._ports: dict[int, Port[list[GeneratorMessage]]] = {}
        place = current_rank().rank if index is None else index
        self.part = f"{role} {place}"
        set_up_logging(run_dir, f"{role}-{place}")
        self._thread = EngineThread(self._send, self.heartbeat, tuple(adapters or ("",)))

    @reported_endpoint
    async def setup(self) -> str:
        """Build the engine on the checkpoint's weights, which are version 0. Returns its host's identity."""
        logger.info("building the engine")
        keep_imported()
        await self._thread.start(self._build)
        logger.info("the engine is built")
        freeze_objects()
        return host_identity()

    @reported_endpoint
    async def attach(self, client_id: int, port: Port[list[GeneratorMessage]]) -> None:
        """Send the results of this client's requests to ``port`` from now on."""
        self._ports[client_id] = port

    @reported_endpoint
    async def submit(self, requests: list[Request]) -> None:
        """Queue requests. Each is answered on its client's port by its request_id: a result or a RequestFailed."""
        self._thread.submit(requests)

    @reported_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Forget requests; they are not answered."""
        self._thread.abort(request_ids)

    @reported_endpoint
    async def update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """Load a published version between two engine steps, then score the canary with it.

        Raises:
            RunError: what was mapped is not what was published, or the engine failed.
        """
        manifest = await published(version)
        path = await local_snapshot(manifest)
        verify = not version % self.config.verify_every
        return await self._thread.update_weights(manifest, path, canary_token_ids, self.config.weight_update, verify=verify)

    @reported_endpoint
    async def sleep(self) -> None:
        """Free the engine's memory until the next update."""
        await self._thread.sleep()

    @reported_endpoint
    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [adapters * L] log-probabilities of the canary under the weights this replica holds now."""
        return await self._thread.score_canary(token_ids)

    @reported_endpoint
    async def shutdown(self) -> None:
        """Stop the engine thread and free the engine."""
        await self._thread.stop()

    def _more_usage(self) -> dict[str, float]:
        return self._thread.usage.lap()

    def _send(self, messages: Sequence[GeneratorMessage]) -> None:
        by_client: dict[int, list[GeneratorMessage]] = {}
        for message in messages:
            if isinstance(message, GeneratorFailed):
                for client_id in self._ports:
                    by_client.setdefault(client_id, []).append(message)
            else:
                by_client.setdefault(message.request_id >> CLIENT_BITS, []).append(message)
        for client_id, own in by_client.items():
            if client_id in self._ports:
                self._ports[client_id].send(own)
            else:
                logger.warning("client %d submitted %d requests and attached no port", client_id, len(own))
