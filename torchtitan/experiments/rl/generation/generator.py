"""The Generator actor: one replica of an engine, and its ports to clients.

Consumes:  requests of clients; versions of the weights.
Produces:  results, on the port of the client that asked; a receipt of each version.

`EngineThread` runs the engine. The results of one engine step leave in one message to each client.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from monarch.actor import Port, current_rank

from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.engine import (
    CLIENT_BITS,
    GeneratorFailed,
    GeneratorMessage,
    Request,
)
from torchtitan.experiments.rl.generation.engine_thread import EngineThread
from torchtitan.experiments.rl.process.actor import WatchedActor, reported_endpoint
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.weights.reader import on_this_host, proven, published
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

logger = logging.getLogger(__name__)


class Generator(WatchedActor):
    """Replica of an engine, in a process of its own.

    Call ``setup``, ``attach`` a port for each client, then ``submit`` requests, and read their
    results from the port.
    """

    def __init__(  # noqa: PLR0913 - what the controller tells a process that it spawns
        self,
        config: GeneratorConfig,
        *,
        model_path: str,
        device: Literal["cpu", "cuda"],
        run_dir: str,
        role: str = "generator",
        index: int | None = None,
        adapters: Mapping[str, int] | None = None,
        routes: bool = False,
    ):
        """Start the engine's thread. ``setup`` builds the engine.

        Args:
            model_path: hub-format folder whose weights are version 0.
            role: name of the replica in its log and in errors, before its index.
            index: index of the replica; None for its rank in its mesh.
            adapters: rank of each adapter of a version, by name. None if a version is the whole
                model.
            routes: True if completions say which experts computed each token.
        """
        super().__init__()
        self.config = config
        self._build = partial(config.engine.build, model_path=model_path, device=device)
        # An engine that can't serve adapters or say routes need not know these arguments.
        if adapters:
            self._build = partial(self._build, adapters=adapters)
        if routes:
            self._build = partial(self._build, routes=True)
        self._ports: dict[int, Port[list[GeneratorMessage]]] = {}
        number = current_rank().rank if index is None else index
        self.process_name = f"{role} {number}"
        set_up_logging(run_dir, f"{role}-{number}")
        self._thread = EngineThread(self._send, self.heartbeat, tuple(adapters or ("",)))

    @reported_endpoint
    async def setup(self) -> str:
        """Build the engine on the checkpoint's weights, which are version 0, and return the host.

        The host is named by `host_identity`.
        """
        logger.info("building the engine")
        await self._thread.start(self._build)
        logger.info("the engine is built")
        return host_identity()

    @reported_endpoint
    async def attach(self, client_id: int, port: Port[list[GeneratorMessage]]) -> None:
        """Send the results of this client's requests to ``port`` from now on."""
        self._ports[client_id] = port

    @reported_endpoint
    async def submit(self, requests: list[Request]) -> None:
        """Queue requests.

        Each is answered on its client's port, by its request_id, with a result or a RequestFailed.
        """
        self._thread.submit(requests)

    @reported_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Forget requests. They are not answered."""
        self._thread.abort(request_ids)

    @reported_endpoint
    async def update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """Load a published version between two engine steps, then score the canary with it.

        Raises:
            RunError: the engine holds something else than was published, or failed.
        """
        manifest = await on_this_host(await published(version))
        is_verified = version % self.config.verify_every == 0
        return await self._thread.update_weights(
            manifest,
            canary_token_ids,
            self.config.weight_update,
            digests=proven(manifest) if is_verified else None,
        )

    @reported_endpoint
    async def sleep(self) -> None:
        """Free the engine's memory until the next update."""
        await self._thread.sleep()

    @reported_endpoint
    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the canary's log-probabilities under the weights that this replica holds now.

        Returns:
            float32 [adapters * L], with each adapter in turn.
        """
        return await self._thread.score_canary(token_ids)

    @reported_endpoint
    async def shutdown(self) -> None:
        """Stop the engine's thread and free the engine."""
        await self._thread.stop()

    def _more_usage(self) -> dict[str, float]:
        return self._thread.usage.lap()

    def _send(self, messages: Sequence[GeneratorMessage]) -> None:
        """Send each client the messages about its requests. Called on the engine's thread."""
        by_client: dict[int, list[GeneratorMessage]] = {}
        for message in messages:
            if isinstance(message, GeneratorFailed):
                for client_id in self._ports:
                    by_client.setdefault(client_id, []).append(message)
            else:
                by_client.setdefault(message.request_id >> CLIENT_BITS, []).append(message)
        for client_id, its_messages in by_client.items():
            if client_id in self._ports:
                self._ports[client_id].send(its_messages)
            else:
                logger.warning(
                    "client %d submitted %d requests and attached no port",
                    client_id,
                    len(its_messages),
                )
