"""The thread that owns a generator's engine: it steps it, feeds it, and changes its weights.

Nothing else touches the engine. Whoever wants something puts a command in a queue, and the thread runs the queue between two
engine steps: so requests join and leave the batch at every step, weights change between steps, and nothing needs a lock.

A weight update takes back the requests that have no token yet, loads, scores the canary, and puts them in again behind it, with
those that came meanwhile: they start under the new version. What happens to those that have tokens is said at
``GeneratorConfig.weight_update``. Updates take turns, canary included, so none is scored with the next one's weights.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.messages import GeneratorFailed, Request, Result, ScoreRequest
from torchtitan.experiments.rl.generation.vllm_engine import Engine
from torchtitan.experiments.rl.weights.snapshot import Manifest, WeightReceipt

logger = logging.getLogger(__name__)

_CANARY_ID = -1
"""Clients' ids count up from 0."""


class EngineThread:
    def __init__(self, deliver: Callable[[list[Result]], None]):
        """``deliver`` is called on this thread: with what one step finished, and with a GeneratorFailed if the engine stops."""
        self.engine: Engine | None = None
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._once_drained: Callable[[], None] | None = None
        """A command that waits until the engine has nothing left to do."""
        self._held: dict[int, Request] | None = None
        """Requests that wait for the next version, oldest first; None where none has to."""
        self._canary: Future[np.ndarray] | None = None
        self._canary_turn = asyncio.Lock()
        """Held for a whole update: its canary has to be scored before the next one's weights are there."""
        self._awaited: set[Future[Any]] = set()
        """Whatever coroutines wait for from this thread."""
        self._failure: RunError | None = None
        self._running = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # For the event loop.

    async def start(self, build: Callable[[], Engine]) -> None:
        """Make the engine, on its thread."""

        def start() -> None:
            self.engine = build()

        await self.call(start)

    def submit(self, requests: list[Request]) -> None:
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_ids: list[int]) -> None:
        self._commands.put(lambda: self._abort(request_ids))

    async def call(self, command: Callable[[], Any], *, drain: bool = False) -> Any:
        """Run ``command`` between two engine steps, and return what it returns.

        With ``drain`` it runs when every request that has a token by now has ended; the others wait, and so do new ones.

        Raises:
            RunError: the engine failed or was stopped before.
        """
        done = self._future()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as error:
                logger.exception("a command to the engine failed")
                done.set_exception(error)

        def start_draining() -> None:
            self._hold()
            self._once_drained = run

        self._commands.put(start_draining if drain else run)
        return await asyncio.wrap_future(done)

    async def update_weights(
        self, manifest: Manifest, path: str, canary_token_ids: np.ndarray, how: WeightUpdate
    ) -> WeightReceipt:
        """Load the snapshot at ``path``, and score the canary with it before any request that had to wait.

        Raises:
            RunError: what was mapped is not what was published, and the engine goes on with what it has; or the engine failed.
        """

        def load() -> tuple[dict[str, Any], Future[np.ndarray]]:
            return self._load(manifest, path, canary_token_ids, recompute=how == "recompute")

        async with self._canary_turn:
            report, canary = await self.call(load, drain=how == "drain")
            return WeightReceipt(version=manifest.version, canary_logprobs=await asyncio.wrap_future(canary), **report)

    async def score_canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [L] log-probabilities under the weights of now; after an update that is under way, under its."""
        async with self._canary_turn:
            return await asyncio.wrap_future(await self.call(lambda: self._score_canary(token_ids)))

    async def stop(self) -> None:
        """End the thread and close the engine; whoever still waits hears of it."""

        def stop() -> None:
            self._running = False

        self._commands.put(stop)
        await asyncio.to_thread(self._thread.join)
        if self.engine is not None:
            self.engine.close()

    def _future(self) -> Future[Any]:
        """One that is answered even if the engine stops first."""
        future: Future[Any] = Future()
        # Whoever waits may give up, the thread still answers: to a cancelled future it could not.
        future.set_running_or_notify_cancel()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        if self._failure is not None:
            future.set_exception(self._failure)
        return future

    # The engine's thread from here on.

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._busy:
                    self._hand_out(self.engine.step())
                if self._once_drained is not None and not self._busy:
                    command, self._once_drained = self._once_drained, None
                    command()
            self._refuse(RunError("the generator was shut down"))
        except Exception as error:
            logger.exception("the engine stopped")
            cause = f"{type(error).__name__}: {error}"
            self._deliver([GeneratorFailed(cause=cause)])
            self._refuse(RunError(f"the engine stopped: {cause}"))

    @property
    def _busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    def _run_commands(self) -> bool:
        """Run what is queued; wait for a command when the engine has nothing to do. False when one of them was to stop."""
        idle = not self._busy
        while self._running:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                break
            command()
            idle = False
        return self._running

    def _add(self, requests: Iterable[Request]) -> None:
        if self._held is not None:
            self._held.update((request.request_id, request) for request in requests)
            return
        failures = [failed for request in requests if (failed := self.engine.add(request))]
        if failures:
            self._deliver(failures)

    def _abort(self, request_ids: list[int]) -> None:
        if self._held is not None:
            for request_id in request_ids:
                self._held.pop(request_id, None)
        self.engine.abort(request_ids)

    def _hold(self) -> None:
        self._held = {request.request_id: request for request in self.engine.withdraw()}

    def _load(
        self, manifest: Manifest, path: str, canary_token_ids: np.ndarray, *, recompute: bool
    ) -> tuple[dict[str, Any], Future[np.ndarray]]:
        if self._held is None:
            self._hold()
        try:
            report = self.engine.load(manifest, path, recompute=recompute)
            return report, self._score_canary(canary_token_ids)
        finally:
            held, self._held = self._held, None
            self._add(held.values())

    def _score_canary(self, token_ids: np.ndarray) -> Future[np.ndarray]:
        self._canary = self._future()
        failed = self.engine.add(ScoreRequest(request_id=_CANARY_ID, token_ids=token_ids))
        if failed:
            self._canary.set_exception(RunError(f"the canary: {failed.cause}"))
        return self._canary

    def _hand_out(self, results: list[Result]) -> None:
        answers = []
        for result in results:
            if result.request_id == _CANARY_ID:
                self._canary.set_result(result.logprobs)
            else:
                answers.append(result)
        if answers:
            self._deliver(answers)

    def _refuse(self, failure: RunError) -> None:
        self._failure = failure
        for future in list(self._awaited):
            if not future.done():
                future.set_exception(failure)
