"""The Generator actor: a vLLM engine in this process, fed by messages, stepped by one thread.

The actor's endpoints never touch the engine. They put commands in a queue; the engine thread drains the queue between two
steps, so requests join and leave the batch at every step, weights change between steps, and nothing needs a lock. Finished
requests of one step go back in one message.
"""

import asyncio
import logging
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torchstore
from monarch.actor import Actor, Port, concurrent_endpoint, current_rank

from torchtitan.config import Configurable
from torchtitan.experiments.rl.actors.engine import Engine, EngineConfig
from torchtitan.experiments.rl.actors.messages import GeneratorFailed, Request, Result, ScoreRequest, ScoreResult, WeightReceipt
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.observability.logs import setup_process_logging
from torchtitan.experiments.rl.weights.snapshot import Manifest
from torchtitan.experiments.rl.weights.store import local_copy, manifest_key, use_torchstore

logger = logging.getLogger(__name__)


class Generator(Actor, Configurable):
    """One replica: ``setup``, ``attach`` a port, then ``submit`` requests and read results from the port."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        engine: EngineConfig = field(default_factory=EngineConfig)
        replicas: int = 1
        """Independent engines. Requests go to the least loaded; a conversation stays where its prefix is cached."""

    def __init__(
        self, config: Config, *, model_path: str, device: Literal["cpu", "cuda"], run_dir: str, role: str = "generator"
    ):
        self.config = config
        self._model_path = model_path
        self._device = device
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._port: Port[list[Result]] | None = None
        self._engine: Engine | None = None
        self._canaries: dict[int, Future[np.ndarray]] = {}
        self._awaited: set[Future[Any]] = set()
        """Whatever endpoints wait for from the engine thread."""
        self._failure: RunError | None = None
        self._running = True
        setup_process_logging(run_dir, f"{role}-{current_rank().rank}")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @concurrent_endpoint
    async def setup(self) -> str:
        """Build the engine on the checkpoint's weights, which are version 0. Returns this process's host name."""
        use_torchstore()

        def build() -> None:
            self._engine = Engine(self.config.engine, model_path=self._model_path, device=self._device)

        await self._on_engine(build)
        return socket.gethostname()

    @concurrent_endpoint
    async def attach(self, port: Port[list[Result]]) -> None:
        """Send results to ``port`` from now on."""
        self._port = port

    @concurrent_endpoint
    async def submit(self, requests: list[Request]) -> None:
        """Queue requests. Each is answered on the port by its request_id: a result or a RequestFailed."""
        self._commands.put(lambda: self._add(requests))

    @concurrent_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Forget requests; they are not answered."""
        self._commands.put(lambda: self._engine.abort(request_ids))

    @concurrent_endpoint
    async def update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """Load a published version between two engine steps, then score the canary with it.

        Raises:
            RunError: what was mapped is not what was published.
        """
        manifest: Manifest = await torchstore.get(manifest_key(version))
        path = await local_copy(manifest)
        report = await self._on_engine(lambda: self._engine.load(manifest, path))
        canary = await self._score_canary(version, canary_token_ids)
        return WeightReceipt(version=version, canary_logprobs=canary, **report)

    @concurrent_endpoint
    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [L] log-probabilities of the canary under the weights this replica holds now."""
        return await self._score_canary(self._engine.version, token_ids)

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """Stop the engine thread and free the engine."""

        def stop() -> None:
            self._running = False

        self._commands.put(stop)
        await asyncio.to_thread(self._thread.join)
        if self._engine is not None:
            self._engine.close()

    # Engine thread from here on.

    def _run(self) -> None:
        try:
            while self._running:
                self._drain()
                if self._engine is not None and self._engine.busy:
                    self._deliver(self._engine.step())
        except Exception as error:
            logger.exception("the engine stopped")
            cause = f"{type(error).__name__}: {error}"
            if self._port is not None:
                self._port.send([GeneratorFailed(cause=cause)])
            self._failure = RunError(f"the engine stopped: {cause}")
            for future in list(self._awaited):
                if not future.done():
                    future.set_exception(self._failure)

    def _drain(self) -> None:
        """Run queued commands; wait for one when the engine has nothing to do."""
        idle = self._engine is None or not self._engine.busy
        while self._running:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            command()
            idle = False

    def _add(self, requests: list[Request]) -> None:
        failures = [failed for request in requests if (failed := self._engine.add(request))]
        if failures:
            self._port.send(failures)

    def _deliver(self, results: list[Result]) -> None:
        canaries = [r for r in results if isinstance(r, ScoreResult) and r.request_id in self._canaries]
        for result in canaries:
            self._canaries.pop(result.request_id).set_result(result.logprobs)
        answers = [r for r in results if not any(r is c for c in canaries)]
        if answers:
            self._port.send(answers)

    # From an endpoint to the engine thread and back.

    def _future(self) -> Future[Any]:
        """One that is answered even if the engine stops first."""
        future: Future[Any] = Future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        if self._failure is not None:
            future.set_exception(self._failure)
        return future

    async def _on_engine(self, command: Callable[[], Any]) -> Any:
        done: Future[Any] = self._future()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as error:
                logger.error("%s", traceback.format_exc())
                done.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(done)

    async def _score_canary(self, version: int, token_ids: np.ndarray) -> np.ndarray:
        # Negative ids are the generator's own; the controller's count up from 0.
        request_id = -1 - version
        done: Future[np.ndarray] = self._future()

        def add() -> None:
            self._canaries[request_id] = done
            failed = self._engine.add(ScoreRequest(request_id=request_id, token_ids=token_ids))
            if failed:
                self._canaries.pop(request_id).set_exception(ValueError(failed.cause))

        self._commands.put(add)
        return await asyncio.wrap_future(done)
