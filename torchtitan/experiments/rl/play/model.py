"""The model of a config in an engine of this process, for the turns that a person lets it answer."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.engine import Engine
from torchtitan.experiments.rl.generation.engine_thread import EngineThread
from torchtitan.experiments.rl.generation.messages import (
    GenerateRequest,
    GenerateResult,
    GeneratorFailed,
    GeneratorMessage,
    RequestFailed,
)
from torchtitan.experiments.rl.generation.session import GeneratorSession
from torchtitan.experiments.rl.process.setup import quiet_libraries
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.user_code.endpoint import cause_in


class LocalModel:
    """Opens sessions of an engine that is started at the first request. One request at a time."""

    lockstep = False
    """See GeneratorClient."""

    def __init__(self, build: Callable[[], Engine]):
        """``build`` makes the engine, on a thread of its own."""
        self._build = build
        self._thread: EngineThread | None = None
        self._failed: EngineThread | None = None
        """Stopped before another is started: a process has one engine."""
        self._starting: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[GenerateResult] | None = None
        self._asked = -1
        self._ids = itertools.count()

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> GeneratorSession:
        """See ModelClient.session."""
        return GeneratorSession(self, rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)

    def next_id(self) -> int:
        return next(self._ids)

    async def send(
        self, request: GenerateRequest, *, tokens: int, last_replica: int | None, group: str
    ) -> tuple[GenerateResult, int]:
        """See ``generation.session.Sender``.

        Raises:
            RunError: the engine can't be started or has failed, or refuses the request. The next request may start another.
        """
        thread = await self._started()
        self._asked, self._answer = request.request_id, asyncio.get_running_loop().create_future()
        thread.submit([request])
        try:
            return await self._answer, -1
        except asyncio.CancelledError:
            thread.abort([request.request_id])
            raise

    def session_closed(self, group: str) -> None: ...

    async def close(self) -> None:
        """End the engine. One that is still being started ends with the process."""
        await self._stop_failed()
        if self._thread is not None and self._starting is not None and self._starting.done():
            await self._thread.stop()

    async def _started(self) -> EngineThread:
        await self._stop_failed()
        if self._thread is None:
            loop = asyncio.get_running_loop()

            def deliver(messages: Sequence[GeneratorMessage]) -> None:
                loop.call_soon_threadsafe(self._take, messages)

            self._thread = EngineThread(deliver)
            self._starting = asyncio.create_task(self._thread.start(self._built))
        thread, starting = self._thread, self._starting
        assert starting is not None
        try:
            await asyncio.shield(starting)  # whoever stops waiting for it finds it started later
        except Exception as error:
            self._thread = None
            raise RunError(f"the engine can't be started: {cause_in(error)}") from error
        return thread

    async def _stop_failed(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            await failed.stop()

    def _built(self) -> Engine:
        with quiet_libraries():
            return self._build()

    def _take(self, messages: Sequence[GeneratorMessage]) -> None:
        for message in messages:
            if isinstance(message, GeneratorFailed):
                self._failed, self._thread = self._thread, None
            elif message.request_id != self._asked:
                continue  # of a request that nobody waits for any more
            if self._answer is None or self._answer.done():
                continue
            if isinstance(message, GenerateResult):
                self._answer.set_result(message)
            elif isinstance(message, RequestFailed | GeneratorFailed):
                self._answer.set_exception(RunError(f"the engine: {message.cause}"))
