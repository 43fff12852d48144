"""The Generator actor: an engine in this process, and the thread that owns it: it adds requests, runs steps, loads weights.

No other thread uses the engine. The event loop puts commands in a queue, and the thread runs them between two engine steps. So
requests join and leave the batch at every step, weights change between steps, and the engine needs no lock.

A weight update withdraws the requests that have no token yet, loads, compares what the engine holds with what was published,
adds the canary, and then adds those requests again, with the ones that arrived meanwhile: they start under the new version.
``GeneratorConfig.weight_update`` says what happens to the requests that have tokens. One update ends, canary included, before
the next begins.

The results of one engine step leave in one message.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import numpy as np
from monarch.actor import Port, current_rank

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.config import GeneratorConfig, WeightUpdate
from torchtitan.experiments.rl.generation.engine import (
    CLIENT_BITS,
    Engine,
    GeneratorFailed,
    GeneratorMessage,
    LoadReport,
    Occupancy,
    Request,
    Result,
    ScoreRequest,
    ScoreResult,
    WrongWeights,
    check_held,
)
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.lifetime import Heartbeat
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.user_code.endpoint import (
    WatchedActor,
    cause_in,
    for_a_future,
    reported_endpoint,
)
from torchtitan.experiments.rl.weights.reader import on_this_host, proven, published
from torchtitan.experiments.rl.weights.snapshot import Manifest, WeightReceipt, fingerprint

logger = logging.getLogger(__name__)

MOST_STEPS = 100_000
"""That are remembered where nobody asks how full the engine was."""
FIRST_STEPS = 20
"""They may compile, and so take long."""
_CANARY_ID = -1
"""Of the first adapter; those of others count down. Clients' ids count up from 0."""


class EngineUsage:
    """How full the engine was after its steps. Written by the engine's thread, read by the event loop."""

    def __init__(self) -> None:
        self._steps: deque[Occupancy] = deque(maxlen=MOST_STEPS)
        """Since someone asked last."""
        self._last = Occupancy(running=0, waiting=0, cache=0.0)
        """After the last step before that."""

    def add(self, now: Occupancy) -> None:
        self._steps.append(now)

    def lap(self) -> dict[str, float]:
        """Since the last call: number of ``steps``, the mean of requests ``running`` and ``waiting`` after a step, the largest
        share of the cache in use, and, where requests have finished, the share of their prompts' tokens that were cached."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        count, before = max(1, len(steps)), self._last
        last = self._last = steps[-1] if steps else before
        found = {
            "steps": len(steps),
            "running": sum(step.running for step in steps) / count,
            "waiting": sum(step.waiting for step in steps) / count,
            "cache_max": max((step.cache for step in steps), default=0.0),
        }
        if tokens := last.prompt_tokens - before.prompt_tokens:
            found["prompts_cached"] = (
                last.prompt_tokens_cached - before.prompt_tokens_cached
            ) / tokens
        if kept := last.routes_kept - before.routes_kept:
            found["routes_kept"] = kept
        return found


class EngineThread:
    def __init__(
        self,
        deliver: Callable[[Sequence[GeneratorMessage]], None],
        heartbeat: Heartbeat | None = None,
        adapters: Sequence[str] = ("",),
    ):
        """
        Args:
            deliver: called on this thread: with the results of a step, and with a GeneratorFailed if the engine fails.
            adapters: of each version, in order. The canary is scored with each.
        """
        self._adapters = adapters
        self._engine: Engine | None = None
        self._deliver = deliver
        self._heartbeat = heartbeat or Heartbeat()
        self._steps = 0
        self.usage = EngineUsage()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._after_drain: Callable[[], None] | None = None
        """A command to run when the engine has no open request left."""
        self._postponed: dict[int, Request] | None = None
        """Requests that wait for the next version, by id, oldest first. None while no update makes them wait."""
        self._canaries: list[Future[np.ndarray]] = []
        """By adapter."""
        self._update_lock = asyncio.Lock()
        """For the whole of an update: its canary must be scored before the next version is loaded."""
        self._pending: set[Future[Any]] = set()
        """Futures that coroutines wait for and this thread completes."""
        self._failure: RunError | None = None
        self._running, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Used by commands only, which run on this thread after ``start``."""
        assert self._engine is not None, "start has not made the engine yet"
        return self._engine

    # On the event loop.

    async def start(self, build: Callable[[], Engine]) -> None:
        """Make the engine, on this thread."""

        def start() -> None:
            with self._heartbeat.work("building the engine", slow=True):
                self._engine = build()

        await self.call(start)

    def submit(self, requests: list[Request]) -> None:
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_ids: list[int]) -> None:
        self._commands.put(lambda: self._abort(request_ids))

    async def call(self, command: Callable[[], Any], *, drain: bool = False) -> Any:
        """Run ``command`` between two engine steps, and return what it returns.

        With ``drain`` it runs when every request that has a token by then has finished. The other requests, and new ones, wait.

        Raises:
            RunError: the engine failed or was stopped before.
        """
        done = self._future()

        def run() -> None:
            try:
                done.set_result(command())
            except BaseException as error:  # SystemExit too: it would end this thread, and the caller would wait for ever
                done.set_exception(for_a_future(error))
                if isinstance(error, WrongWeights):
                    raise  # no request may be answered with these weights

        def start_drain() -> None:
            if self._postponed is None:
                self._postpone()
            self._after_drain = run

        self._commands.put(start_drain if drain else run)
        return await asyncio.wrap_future(done)

    async def update_weights(
        self,
        manifest: Manifest,
        canary_token_ids: np.ndarray,
        how: WeightUpdate,
        *,
        digests: Coroutine[Any, Any, Mapping[str, str]] | None,
    ) -> WeightReceipt:
        """Load a version, and score the canary with it before any request that waited.

        Args:
            digests: returns those of the version, which are compared with what the engine then holds. It runs beside the load.
                None: what it holds is not verified.

        Raises:
            RunError: the engine holds other weights than were published, or failed: it is used no more. Or the snapshot is
                gone: the engine then keeps its weights.
        """

        wanted = (
            None
            if digests is None
            else asyncio.run_coroutine_threadsafe(digests, asyncio.get_running_loop())
        )

        def load() -> tuple[LoadReport, str, list[Future[np.ndarray]]]:
            if self._postponed is None:
                self._postpone()
            logger.info("loading version %d", manifest.version)
            self._heartbeat.beat(f"loading version {manifest.version}", slow=True)
            try:
                with trace.span("load weights", version=manifest.version):
                    report = self.engine.load(
                        manifest, recompute=how == "recompute", verify=wanted is not None
                    )
                held = "" if wanted is None else _proven(report, manifest.version, wanted)
                logger.info("holds version %d", manifest.version)
                return report, held, self._score_canary(canary_token_ids)
            finally:
                postponed, self._postponed = self._postponed, None
                self._add((postponed or {}).values())

        async with self._update_lock:
            report, held, canaries = await self.call(load, drain=how == "drain")
            logprobs = await _joined(canaries)
            return WeightReceipt(
                version=manifest.version,
                fingerprint=held,
                canary_logprobs=logprobs,
                verify_s=report.verify_s,
                reload_s=report.reload_s,
            )

    async def sleep(self) -> None:
        """Free the engine's memory until the next update, once the requests that have a token have finished. The others, and
        those that arrive meanwhile, start under that version."""

        def sleep() -> None:
            self._heartbeat.beat("freeing the engine's memory", slow=True)
            self.engine.sleep()

        async with self._update_lock:
            await self.call(sleep, drain=True)

    async def score_canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [adapters * L] log-probabilities under the current weights, with each adapter in turn. Waits for an update
        that has begun."""
        async with self._update_lock:
            return await _joined(await self.call(lambda: self._score_canary(token_ids)))

    async def stop(self) -> None:
        """End the thread and close the engine. Every coroutine that still waits gets a RunError."""

        def stop() -> None:
            self._running = False

        self._stopping = True
        self._commands.put(stop)
        await asyncio.to_thread(self._thread.join)
        if self._engine is not None:
            self._engine.close()

    def _future(self) -> Future[Any]:
        """A future that is completed even if the engine fails first."""
        future: Future[Any] = Future()
        # A coroutine may stop waiting, and cancel. Marked as running, the future can't be cancelled, and the thread may set it.
        future.set_running_or_notify_cancel()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._failure is not None:
            future.set_exception(self._failure)
        return future

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._busy:
                    with (
                        self._heartbeat.work(
                            "a step of the engine", slow=self._steps < FIRST_STEPS
                        ),
                        trace.span("step"),
                    ):
                        results = self.engine.step()
                    self._steps += 1
                    self.usage.add(self.engine.occupancy())
                    self._deliver_results(results)
                if self._after_drain is not None and not self._busy:
                    command, self._after_drain = self._after_drain, None
                    with self._heartbeat.work("a command to the engine"):
                        command()
            self._fail_pending(RunError("the generator was shut down"))
        except BaseException as error:
            logger.log(
                logging.INFO if self._stopping else logging.ERROR,
                "the engine stopped",
                exc_info=error,
            )
            cause = cause_in(error)
            self._deliver([GeneratorFailed(cause=cause)])
            self._fail_pending(RunError(f"the engine stopped: {cause}"))

    @property
    def _busy(self) -> bool:
        return self._engine is not None and self._engine.busy

    def _run_commands(self) -> bool:
        """Run the queued commands; wait for one if no request is open. Returns False after the command to stop."""
        idle = not self._busy
        while self._running:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                break
            with self._heartbeat.work("a command to the engine"):
                command()
            idle = False
        return self._running

    def _add(self, requests: Iterable[Request]) -> None:
        if self._postponed is not None:
            self._postponed.update((request.request_id, request) for request in requests)
            return
        with trace.span("add requests"):
            failures = [failed for request in requests if (failed := self.engine.add(request))]
        if failures:
            self._deliver(failures)

    def _abort(self, request_ids: list[int]) -> None:
        if self._postponed is not None:
            for request_id in request_ids:
                self._postponed.pop(request_id, None)
        self.engine.abort(request_ids)

    def _postpone(self) -> None:
        self._postponed = {request.request_id: request for request in self.engine.withdraw()}

    def _score_canary(self, token_ids: np.ndarray) -> list[Future[np.ndarray]]:
        canaries = self._canaries = [self._future() for _ in self._adapters]
        for number, (adapter, canary) in enumerate(zip(self._adapters, canaries, strict=True)):
            request = ScoreRequest(
                request_id=_CANARY_ID - number, token_ids=token_ids, adapter=adapter
            )
            if failed := self.engine.add(request):
                canary.set_exception(RunError(f"the canary: {failed.cause}"))
        return canaries

    def _deliver_results(self, results: list[Result]) -> None:
        answers = []
        for result in results:
            if result.request_id >= 0:
                answers.append(result)
            elif isinstance(result, ScoreResult):
                self._canaries[_CANARY_ID - result.request_id].set_result(result.logprobs)
        if answers:
            self._deliver(answers)

    def _fail_pending(self, failure: RunError) -> None:
        self._failure = failure
        for future in list(self._pending):
            if not future.done():
                future.set_exception(failure)


def _proven(report: LoadReport, version: int, wanted: Future[Mapping[str, str]]) -> str:
    """The fingerprint of what an engine holds, once that is known to be what was published. On the engine's thread: it makes no
    step meanwhile.

    Raises:
        WrongWeights: it is something else, or can't be known.
    """
    try:
        with trace.span("wait for the digests of what was published"):
            published = wanted.result()
    except BaseException as error:
        raise WrongWeights(
            f"weights of version {version} can't be proven: {cause_in(error)}"
        ) from error
    check_held(report, version, published)
    return fingerprint(published)


async def _joined(canaries: Iterable[Future[np.ndarray]]) -> np.ndarray:
    return np.concatenate(await asyncio.gather(*map(asyncio.wrap_future, canaries)))


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
        routes: bool = False,
    ):
        """
        Args:
            role, index: name of its log; without an index, its rank in its mesh.
            adapters: that each version is, and the rank of each. None: a version is the whole model.
            routes: completions say which experts computed each token.
        """
        super().__init__()
        self.config = config
        self._build = partial(config.engine.build, model_path=model_path, device=device)
        if adapters:
            self._build = partial(self._build, adapters=adapters)
        if routes:
            self._build = partial(self._build, routes=True)
        self._ports: dict[int, Port[list[GeneratorMessage]]] = {}
        place = current_rank().rank if index is None else index
        self.part = f"{role} {place}"
        set_up_logging(run_dir, f"{role}-{place}")
        self._thread = EngineThread(self._send, self.heartbeat, tuple(adapters or ("",)))

    @reported_endpoint
    async def setup(self) -> str:
        """Build the engine on the checkpoint's weights, which are version 0. Returns its host's identity."""
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
        manifest = await on_this_host(await published(version))
        digests = None if version % self.config.verify_every else proven(manifest)
        return await self._thread.update_weights(
            manifest, canary_token_ids, self.config.weight_update, digests=digests
        )

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
                logger.warning(
                    "client %d submitted %d requests and attached no port", client_id, len(own)
                )
