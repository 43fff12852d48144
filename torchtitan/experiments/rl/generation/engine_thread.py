"""The thread that owns an engine: it adds requests, runs steps, loads weights.

    event loop ──commands──▶ queue ──▶ thread:  command, command, step, command, step, ...
                                                                   └──results──▶ deliver

No other thread uses the engine. Coroutines put commands into a queue, and the thread runs them
between two engine steps. So requests join and leave the batch at every step, weights change between
steps, and the engine needs no lock.

A weight update, in this order:

1. Withdraw the requests that have no token yet, and postpone those that arrive from now on.
2. With "drain", go on stepping until the requests that have tokens have finished.
3. Load, and compare what the engine holds with what was published.
4. Queue the canary, and then the postponed requests: they start under the new version.

One update ends, canary included, before the next begins.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.engine import (
    Engine,
    GeneratorFailed,
    GeneratorMessage,
    LoadReport,
    Occupancy,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
    ScoreResult,
    WrongWeights,
    check_held,
)
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.actor import cause_in, for_a_future
from torchtitan.experiments.rl.process.heartbeat import Heartbeat
from torchtitan.experiments.rl.weights.snapshot import Manifest, WeightReceipt, fingerprint

logger = logging.getLogger(__name__)

MAX_REMEMBERED_STEPS = 100_000
"""Maximum number of steps whose occupancy is kept while nobody asks for it."""

FIRST_STEPS = 20
"""Number of steps that may compile, and so take long."""

_CANARY_ID = -1
"""Request id of the first adapter's canary; those of the others count down. Clients' ids count up
from 0."""

Returned = TypeVar("Returned")


class EngineUsage:
    """How full the engine was after its steps.

    The engine's thread writes it, and the event loop reads it.
    """

    def __init__(self) -> None:
        self._steps: deque[Occupancy] = deque(maxlen=MAX_REMEMBERED_STEPS)
        """Occupancy after each step since the last `lap`."""
        self._last = Occupancy(running=0, waiting=0, cache=0.0)
        """Occupancy after the last step before these."""

    def add(self, occupancy: Occupancy) -> None:
        self._steps.append(occupancy)

    def lap(self) -> dict[str, float]:
        """Return the usage since the last call.

        Returns:
            ``steps``, their number; ``running`` and ``waiting``, mean number of requests after a
            step; ``cache_max``, largest share of the cache in use. If requests have finished also
            ``prompts_cached``, the share of their prompts' tokens that were cached. If tokens were
            computed twice also ``routes_kept``, the number of those that keep their first routes.
        """
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        before = self._last
        if steps:
            self._last = steps[-1]
        last = self._last
        count = max(1, len(steps))
        usage = {
            "steps": len(steps),
            "running": sum(step.running for step in steps) / count,
            "waiting": sum(step.waiting for step in steps) / count,
            "cache_max": max((step.cache for step in steps), default=0.0),
        }
        tokens = last.prompt_tokens - before.prompt_tokens
        if tokens:
            cached = last.prompt_tokens_cached - before.prompt_tokens_cached
            usage["prompts_cached"] = cached / tokens
        routes_kept = last.routes_kept - before.routes_kept
        if routes_kept:
            usage["routes_kept"] = routes_kept
        return usage


class EngineThread:
    """Runs an engine. The methods up to `stop` are called on the event loop."""

    def __init__(
        self,
        deliver: Callable[[Sequence[GeneratorMessage]], None],
        heartbeat: Heartbeat | None = None,
        adapters: Sequence[str] = ("",),
    ):
        """Start the thread. `start` gives it its engine.

        Args:
            deliver: called on the thread, with the results of a step, or with a GeneratorFailed if
                the engine fails.
            heartbeat: says what the thread is doing.
            adapters: names of the adapters of each version, in order. The canary is scored with
                each.
        """
        self._adapters = adapters
        self._engine: Engine | None = None
        self._deliver = deliver
        self._heartbeat = heartbeat or Heartbeat()
        self._steps = 0
        self.usage = EngineUsage()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._after_drain: Callable[[], None] | None = None
        """Command to run when the engine has no open request left."""
        self._postponed: dict[int, Request] | None = None
        """Requests that wait for the next version, by id, oldest first. None while requests are not
        postponed."""
        self._canaries: list[Future[np.ndarray]] = []
        """Canary's log-probabilities with each adapter."""
        self._update_lock = asyncio.Lock()
        """Held for a whole update: its canary must be scored before the next version is loaded."""
        self._pending: set[Future[Any]] = set()
        """Futures for which coroutines wait, and which the thread completes."""
        self._failure: RunError | None = None
        self._failure_lock = threading.Lock()
        """Held to add a future or to fail all: each future is either failed with the others, or
        sees the failure when it is made."""
        self._running = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine. Only commands use it, which run on the thread after `start`."""
        assert self._engine is not None, "start has not made the engine yet"
        return self._engine

    async def start(self, build: Callable[[], Engine]) -> None:
        """Make the engine, on the thread."""

        def start() -> None:
            with self._heartbeat.work("building the engine", slow=True):
                self._engine = build()

        await self.call(start)

    def submit(self, requests: list[Request]) -> None:
        """Add requests. Each is answered through ``deliver``."""
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_ids: list[int]) -> None:
        """Forget requests. They are not answered."""
        self._commands.put(lambda: self._abort(request_ids))

    async def call(self, command: Callable[[], Returned], *, drain: bool = False) -> Returned:
        """Run a command between two engine steps, and return what it returns.

        Args:
            drain: True to run it once every request that has a token by then has finished. The
                other requests, and new ones, are postponed.

        Raises:
            RunError: the engine failed or was stopped before.
        """
        done: Future[Returned] = self._future()

        def run() -> None:
            try:
                done.set_result(command())
            # SystemExit too: it would end this thread, and the caller would wait for ever.
            except BaseException as error:  # noqa: BLE001
                done.set_exception(for_a_future(error))
                if isinstance(error, WrongWeights):
                    raise  # no request may be answered with these weights

        def start_drain() -> None:
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
        """Load a version, and score the canary with it before any postponed request.

        Args:
            how: what happens to requests that have tokens.
            digests: coroutine that returns the digests of the version, awaited beside the load.
                They are compared with those of what the engine then holds. None if the load is not
                verified.

        Raises:
            RunError: the engine holds other weights than were published, or failed: it is used no
                more. Or the snapshot is gone: the engine then keeps its weights.
        """
        published = None
        if digests is not None:
            loop = asyncio.get_running_loop()
            published = asyncio.run_coroutine_threadsafe(digests, loop)

        def load() -> tuple[LoadReport, str, list[Future[np.ndarray]]]:
            self._postpone()
            logger.info("loading version %d", manifest.version)
            self._heartbeat.beat(f"loading version {manifest.version}", slow=True)
            try:
                with trace.span("load weights", version=manifest.version):
                    report = self.engine.load(
                        manifest, recompute=how == "recompute", verify=published is not None
                    )
                held = ""
                if published is not None:
                    held = _proven_fingerprint(report, manifest.version, published)
                logger.info("holds version %d", manifest.version)
                return report, held, self._add_canaries(canary_token_ids)
            finally:
                self._add_postponed()

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
        """Free the engine's memory until the next update.

        It waits for the requests that have a token. The others, and those that arrive meanwhile,
        start under the next version.
        """

        def sleep() -> None:
            self._heartbeat.beat("freeing the engine's memory", slow=True)
            self.engine.sleep()

        async with self._update_lock:
            await self.call(sleep, drain=True)

    async def score_canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the canary's log-probabilities under the current weights.

        It waits for an update that has begun.

        Returns:
            float32 [adapters * L], with each adapter in turn.
        """
        async with self._update_lock:
            return await _joined(await self.call(lambda: self._add_canaries(token_ids)))

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
        """Return a future that is completed even if the engine fails first."""
        future: Future[Any] = Future()
        # A coroutine may stop waiting, and cancel. A future that is marked as running can't be
        # cancelled, so the thread may set it.
        future.set_running_or_notify_cancel()
        with self._failure_lock:
            failure = self._failure
            if failure is None:
                self._pending.add(future)
        if failure is None:
            future.add_done_callback(self._pending.discard)
        else:
            future.set_exception(failure)
        return future

    # ---- on the engine's thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._busy:
                    self._step()
                if self._after_drain is not None and not self._busy:
                    command = self._after_drain
                    self._after_drain = None
                    with self._heartbeat.work("a command to the engine"):
                        command()
            self._fail_pending(RunError("the generator was shut down"))
        except BaseException as error:  # noqa: BLE001 - an engine may raise anything
            level = logging.INFO if self._stopping else logging.ERROR
            logger.log(level, "the engine stopped", exc_info=error)
            cause = cause_in(error)
            self._deliver([GeneratorFailed(cause=cause)])
            self._fail_pending(RunError(f"the engine stopped: {cause}"))

    @property
    def _busy(self) -> bool:
        return self._engine is not None and self._engine.busy

    def _run_commands(self) -> bool:
        """Run the queued commands. If no request is open, wait for the first of them.

        Return False after the command to stop.
        """
        waits = not self._busy
        while self._running:
            try:
                command = self._commands.get(block=waits)
            except queue.Empty:
                break
            waits = False
            with self._heartbeat.work("a command to the engine"):
                command()
        return self._running

    def _step(self) -> None:
        slow = self._steps < FIRST_STEPS
        with self._heartbeat.work("a step of the engine", slow=slow), trace.span("step"):
            results = self.engine.step()
        self._steps += 1
        self.usage.add(self.engine.occupancy())
        self._deliver_results(results)

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
        """Withdraw the requests without a token, and postpone new ones, unless that was done."""
        if self._postponed is None:
            self._postponed = {request.request_id: request for request in self.engine.withdraw()}

    def _add_postponed(self) -> None:
        postponed = self._postponed or {}
        self._postponed = None
        self._add(postponed.values())

    def _add_canaries(self, token_ids: np.ndarray) -> list[Future[np.ndarray]]:
        """Have the engine score the canary with each adapter; return the futures of the scores."""
        canaries = [self._future() for _ in self._adapters]
        self._canaries = canaries
        for index, adapter in enumerate(self._adapters):
            request = ScoreRequest(
                request_id=_CANARY_ID - index, token_ids=token_ids, adapter=adapter
            )
            failed = self.engine.add(request)
            if failed:
                self._end_canary(failed)
        return canaries

    def _end_canary(self, result: Result) -> None:
        canary = self._canaries[_CANARY_ID - result.request_id]
        if isinstance(result, ScoreResult):
            canary.set_result(result.logprobs)
        elif isinstance(result, RequestFailed):
            canary.set_exception(RunError(f"the canary: {result.cause}"))
        else:
            canary.set_exception(RunError("the canary: the engine sampled and did not score it"))

    def _deliver_results(self, results: list[Result]) -> None:
        answers = []
        for result in results:
            if result.request_id >= 0:
                answers.append(result)
            else:
                self._end_canary(result)
        if answers:
            self._deliver(answers)

    def _fail_pending(self, failure: RunError) -> None:
        with self._failure_lock:
            self._failure = failure
            pending = list(self._pending)
        for future in pending:
            if not future.done():
                future.set_exception(failure)


def _proven_fingerprint(
    report: LoadReport, version: int, published: Future[Mapping[str, str]]
) -> str:
    """Return the fingerprint of what an engine holds, if that is what was published.

    It runs on the engine's thread, which makes no step meanwhile.

    Raises:
        WrongWeights: the engine holds something else, or what was published can't be known.
    """
    try:
        with trace.span("wait for the digests of what was published"):
            digests = published.result()
    except BaseException as error:
        raise WrongWeights(
            f"weights of version {version} can't be proven: {cause_in(error)}"
        ) from error
    check_held(report, version, digests)
    return fingerprint(digests)


async def _joined(canaries: Iterable[Future[np.ndarray]]) -> np.ndarray:
    return np.concatenate(await asyncio.gather(*map(asyncio.wrap_future, canaries)))
