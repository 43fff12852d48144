"""The Generator actor: a vLLM engine in this process, fed by messages, stepped by one thread (``engine_thread.py``).

Finished requests of one engine step go back in one message.
"""

import logging
import socket
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torchstore
from monarch.actor import Actor, Port, concurrent_endpoint, current_rank

from torchtitan.config import Configurable
from torchtitan.experiments.rl.actors.engine import Engine
from torchtitan.experiments.rl.actors.engine_thread import EngineThread
from torchtitan.experiments.rl.actors.messages import CLIENT_BITS, GeneratorFailed, Request, Result, WeightReceipt
from torchtitan.experiments.rl.engine_config import EngineConfig, WeightUpdate
from torchtitan.experiments.rl.observability.logs import setup_process_logging
from torchtitan.experiments.rl.weights.snapshot import Manifest
from torchtitan.experiments.rl.weights.store import local_copy, manifest_key, use_torchstore

logger = logging.getLogger(__name__)


class Generator(Actor, Configurable):
    """One replica: ``setup``, ``attach`` a port for each client, then ``submit`` requests and read results from it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        engine: EngineConfig = field(default_factory=EngineConfig)
        replicas: int = 1
        """Independent engines. Requests go to the least loaded; a conversation stays where its prefix is cached."""
        weight_update: WeightUpdate = "keep"
        """What becomes of completions under way when a new version arrives. Whatever has no token yet starts under the new one,
        every token carries the version it was sampled with, and no prompt is answered from another version's cache.

        keep: they go on at once, on the keys and values they have. Nothing stops and nothing is computed twice; a later token's
        log-probability is that of the new weights given a prefix which older ones have read.
        recompute: their keys and values are computed anew, prompt and tokens so far: every token's log-probability is exactly
        that of its version. An update costs a prefill of all that is under way.
        drain: they end first, while the others wait: a completion has one version, and a turn of a conversation too. An update
        waits for the longest completion."""

    def __init__(
        self, config: Config, *, model_path: str, device: Literal["cpu", "cuda"], run_dir: str, role: str = "generator"
    ):
        self.config = config
        self._model_path = model_path
        self._device = device
        self._ports: dict[int, Port[list[Result]]] = {}
        setup_process_logging(run_dir, f"{role}-{current_rank().rank}")
        self._thread = EngineThread(self._send)

    @concurrent_endpoint
    async def setup(self) -> str:
        """Build the engine on the checkpoint's weights, which are version 0. Returns this process's host name."""
        use_torchstore()
        await self._thread.start(lambda: Engine(self.config.engine, model_path=self._model_path, device=self._device))
        return socket.gethostname()

    @concurrent_endpoint
    async def attach(self, client_id: int, port: Port[list[Result]]) -> None:
        """Send the results of this client's requests to ``port`` from now on."""
        self._ports[client_id] = port

    @concurrent_endpoint
    async def submit(self, requests: list[Request]) -> None:
        """Queue requests. Each is answered on its client's port by its request_id: a result or a RequestFailed."""
        self._thread.submit(requests)

    @concurrent_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Forget requests; they are not answered."""
        self._thread.abort(request_ids)

    @concurrent_endpoint
    async def update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """Load a published version between two engine steps, then score the canary with it.

        Raises:
            RunError: what was mapped is not what was published, or the engine failed.
        """
        manifest: Manifest = await torchstore.get(manifest_key(version))
        path = await local_copy(manifest)
        return await self._thread.update_weights(manifest, path, canary_token_ids, self.config.weight_update)

    @concurrent_endpoint
    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [L] log-probabilities of the canary under the weights this replica holds now."""
        return await self._thread.score_canary(token_ids)

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """Stop the engine thread and free the engine."""
        await self._thread.stop()

    def _send(self, results: list[Result]) -> None:
        if any(isinstance(result, GeneratorFailed) for result in results):
            for port in self._ports.values():
                port.send(results)
            return
        by_client: dict[int, list[Result]] = {}
        for result in results:
            by_client.setdefault(result.request_id >> CLIENT_BITS, []).append(result)
        for client_id, own in by_client.items():
            if client_id in self._ports:
                self._ports[client_id].send(own)
            else:
                logger.warning("client %d submitted %d requests and attached no port", client_id, len(own))
