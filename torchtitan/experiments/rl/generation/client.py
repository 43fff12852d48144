"""The client of the generators: sends requests to replicas, and hands results to whoever waits.

    session.generate ──▶ outbox ──one message per replica──▶ Generator.submit
            ▲                                                      │
            └──────────────── reader of the replica's port ◀───────┘

The client sends the requests of one iteration of the event loop as one message per replica, because
one message costs as much as hundreds of requests. Rollouts that render one after another
(`envs/yield_queue.py`) count as one iteration, up to a full message: rendering the prompts of a
whole step takes as long as an engine step.

A replica may be lost. Its open requests are then sent again, to another replica, or to one that is
admitted later.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from monarch.actor import Channel

from torchtitan.experiments.rl.compat.monarch import call_actor
from torchtitan.experiments.rl.envs.yield_queue import yield_queue
from torchtitan.experiments.rl.errors import RunError, cause_of
from torchtitan.experiments.rl.generation.engine import (
    CLIENT_BITS,
    GenerateRequest,
    GenerateResult,
    GeneratorFailed,
    GeneratorMessage,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
)
from torchtitan.experiments.rl.generation.references import ModelReference
from torchtitan.experiments.rl.generation.router import Router
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.rollouts.policy import ModelClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

logger = logging.getLogger(__name__)

FULL_MESSAGE = 64
"""Number of requests per replica that are sent without waiting for others: 13 % more tokens a
second with 256 short rollouts a step."""

_TURN_SEEDS = 0x9E3779B97F4A7C15
"""Distance of the seeds of a rollout's turns: 2^64 divided by the golden ratio, which spreads
multiples evenly over 64 bits."""


class Sender(Protocol):
    """Part of a client that its sessions use. `GeneratorClient` describes each member."""

    lockstep: bool
    stops_at_texts: bool

    def next_id(self) -> int: ...

    async def send(
        self, request: GenerateRequest, *, tokens: int, last_replica: int | None, group: str
    ) -> tuple[Any, int]: ...

    def session_closed(self, group: str) -> None: ...


class GeneratorSession:
    """Implements rollouts.policy.PolicySession: seeds, limits and cache scope of one rollout."""

    def __init__(
        self,
        client: Sender,
        *,
        rollout_id: str,
        seed: int,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
    ):
        self._client = client
        self.group = rollout_id.rpartition("/")[0]  # a rollout's id is <group id>/<index>
        self._seed = seed
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        if sampling.stop_token_ids:  # else all requests share one list, and a message holds it once
            self._stop_token_ids = stop_token_ids + sampling.stop_token_ids
        self._turn = 0
        self._last_replica: int | None = None
        self._last_tokens = np.empty(0, np.int32)
        """Prompt and completion of the last turn whose completion had routes, the experts that a
        mixture's router chose (`Completion.routes`). Empty if no turn had any."""
        self._closed = False
        self.is_frozen = False
        """True if the model is no version of the policy."""
        self.adapter = ""
        """Name of the adapter that samples; "" for the model itself."""
        self.stops_at_texts = client.stops_at_texts

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """Sample a completion; see PolicySession.generate."""
        sampling = self._sampling
        if max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        if stop:
            sampling = replace(sampling, stop=[*sampling.stop, *stop])
        if seed is None:  # each turn has its own stream of random numbers
            seed = self._seed + self._turn * _TURN_SEEDS
        prompt = np.asarray(prompt_token_ids, np.int32)
        request = GenerateRequest(
            request_id=self._client.next_id(),
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed % 2**63,  # vLLM takes 63 bits
            stop_token_ids=self._stop_token_ids,
            # Whether a prefix is read from the cache or computed changes the last bits. What is
            # cached must not depend on what ran before, in this process or in one that the run was
            # resumed from.
            cache_scope=self.group if self._client.lockstep else "",
            adapter=self.adapter,
            routes_from=self._tokens_with_routes(prompt),
        )
        self._turn += 1
        result, self._last_replica = await self._client.send(
            request,
            tokens=len(prompt) + sampling.max_tokens,
            last_replica=self._last_replica,
            group=self.group,
        )
        completion = result.completion
        if completion.routes is not None:
            self._last_tokens = np.concatenate([prompt, completion.token_ids])
        if self.is_frozen:
            completion.policy_versions = np.full(len(completion.token_ids), -1, np.int32)
        else:
            completion.replica = self._last_replica
        return completion

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.session_closed(self.group)

    def _tokens_with_routes(self, prompt: np.ndarray) -> int:
        """Return the number of tokens at the prompt's beginning whose routes are known.

        The last token of a completion has no route yet: it was sampled, and never an input.
        """
        before = self._last_tokens
        continues = len(before) > 0 and np.array_equal(prompt[: len(before)], before)
        return len(before) - 1 if continues else 0


@dataclass(kw_only=True, slots=True)
class _OpenRequest:
    """A request without a result yet."""

    request: Request
    last_replica: int | None
    """Replica of the conversation's last turn; None at its first."""
    group: str
    """Group of the rollout (`Router.choose`)."""
    result: asyncio.Future
    replica: int = -1
    """Replica that the request was sent to; -1 until it is sent."""
    tokens: int
    """Number of tokens that it adds to its replica's load."""


@dataclass(kw_only=True, slots=True)
class _Replica:
    """A replica that takes requests."""

    actor: Any
    life: Lifetime
    reader: asyncio.Task[None]


class GeneratorClient:
    """Implements rollouts.policy.PolicyClient over replicas that may be lost and made again.

    With ``lockstep`` the client sends requests only when every open session waits for one and none
    is in flight, and sends them sorted. Which requests share an engine step then does not depend on
    timing, so the same seed gives the same bits on CPU, where the batch that a request is in
    changes the last bits of its logits.
    """

    is_frozen = False
    """True if the model is no version of the policy."""

    def __init__(
        self,
        *,
        client_id: int = 0,
        lockstep: bool = False,
        stops_at_texts: bool = False,
        on_failure: Callable[[RunError], None] = lambda failure: None,
        on_stopped: Callable[[int, str], None] | None = None,
        frozen: Callable[[ModelReference], ModelClient] | None = None,
        open_channel: Callable[[], tuple[Any, Any]] | None = None,
    ):
        """Start without replicas: requests wait until one is admitted.

        Args:
            client_id: distinct among the clients of the same replicas.
            lockstep: True to send requests of all sessions together, for reproducible runs.
            stops_at_texts: True if the engine ends completions at texts (`EngineConfig`).
            on_failure: called with the error with which every open request has failed.
            on_stopped: called with a replica whose engine can't go on, and the cause. Its requests
                wait until someone calls ``lose``. None if every request fails then.
            frozen: returns the client of a frozen model.
            open_channel: returns a port that a replica sends its results to, and the port's
                receiver. None for Monarch's.
        """
        self._client_id = client_id
        self._open_channel = open_channel or Channel.open
        self._on_failure = on_failure
        self._on_stopped = on_stopped
        self._find_frozen = frozen
        self.version = 0
        self.lockstep = lockstep
        self.stops_at_texts = stops_at_texts
        self._sessions: Counter[str] = Counter()
        """Number of open sessions by group."""
        self._ids = itertools.count(client_id << CLIENT_BITS)
        self._outbox: list[_OpenRequest] = []
        """Requests that are not sent yet."""
        self._open: dict[int, _OpenRequest] = {}
        """Requests without a result, by id, those of the outbox too."""
        self._flush_scheduled = False
        self._failure: RunError | None = None
        self._replicas: dict[int, _Replica] = {}
        self._lives: dict[int, Lifetime] = {}
        """Processes of the replicas, and of those that are about to be admitted."""
        self._router = Router()
        self.generated_tokens = 0
        """Number of tokens sampled since the start."""

    # ---- replicas

    async def admit(self, index: int, actor: Any, life: Lifetime | None = None) -> None:  # noqa: ANN401 - Monarch's
        """Attach to a replica that is set up, and send it requests from now on.

        A replica that is admitted already, or is about to be, is left as it is.

        Args:
            life: the replica's process. Without it, calls to the replica end when Monarch notices
                that the process has ended.

        Raises:
            ProcessLost: the process ended first.
        """
        if index in self._lives:
            return
        life = life or Lifetime(f"generator {index}")
        self._lives[index] = life
        port, receiver = self._open_channel()
        try:
            await life.call(actor.attach.call_one(self._client_id, port))
        except BaseException:  # also CancelledError: else its next process would not be admitted
            if self._lives.get(index) is life:
                del self._lives[index]
            raise
        if self._lives.get(index) is not life:  # it was lost meanwhile
            raise ProcessLost(life.name, life.cause or "given up")
        reader = asyncio.create_task(self._read(index, receiver))
        self._replicas[index] = _Replica(actor=actor, life=life, reader=reader)
        self._router.open(index)
        self._schedule_flush()

    def lose(self, index: int) -> None:
        """Forget a replica whose process is gone.

        Its open requests start again: with another replica, or when one is admitted.
        """
        life = self._lives.pop(index, None)
        if life is not None:
            life.end("given up")
        replica = self._replicas.pop(index, None)
        if replica is None:
            return
        replica.reader.cancel()
        self._router.close(index)
        for waiting in self._open.values():
            if waiting.replica == index:
                waiting.replica = -1
                self._router.add(index, -waiting.tokens)
                self._outbox.append(waiting)
        self._schedule_flush()

    async def update_weights(
        self, version: int, canary_token_ids: np.ndarray
    ) -> dict[int, WeightReceipt]:
        """Have every replica load a published version.

        ``GeneratorConfig.weight_update`` says what happens to requests meanwhile.

        Returns:
            The receipt of each replica by its index. A replica that is lost meanwhile has none.
        """
        receipts: dict[int, WeightReceipt] = {}

        async def update(index: int, replica: _Replica) -> None:
            with suppress(ProcessLost):
                receipts[index] = await replica.life.call(
                    call_actor(replica.actor.update_weights, version, canary_token_ids)
                )

        await asyncio.gather(*(update(*entry) for entry in self._replicas.items()))
        self.version = version
        return dict(sorted(receipts.items()))

    async def sleep(self) -> None:
        """Have every replica free its engine's memory until it loads the next version.

        Call it while no request is open.
        """

        async def sleep(replica: _Replica) -> None:
            with suppress(ProcessLost):
                await replica.life.call(call_actor(replica.actor.sleep))

        await asyncio.gather(*map(sleep, self._replicas.values()))

    # ---- requests

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> GeneratorSession:
        """Open the session of a rollout. With lockstep, requests wait for every open session."""
        session = GeneratorSession(
            self, rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids
        )
        session.is_frozen = self.is_frozen
        self._sessions[session.group] += 1
        return session

    def session_closed(self, group: str) -> None:
        """Note that a session of this group makes no more requests."""
        self._sessions[group] -= 1
        if not self._sessions[group]:
            del self._sessions[group]
            self._router.forget(group)
        # With lockstep, the others' requests may have waited for this session's.
        self._schedule_flush()

    def with_adapter(self, name: str) -> "AdaptedPolicy":
        """Return the client of the policy with one of its adapters."""
        return AdaptedPolicy(self, name)

    def frozen(self, model: ModelReference) -> ModelClient:
        """Return the client of a frozen model."""
        if self._find_frozen is None:
            raise RunError(f"no frozen models here: asked for {model}")
        return self._find_frozen(model)

    async def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        """Return the tokens' log-probabilities at temperature 1, float32 [L]."""
        request = ScoreRequest(request_id=self.next_id(), token_ids=token_ids, adapter=adapter)
        result, _ = await self.send(request, tokens=len(token_ids), last_replica=None)
        return result.logprobs

    async def send(
        self, request: Request, *, tokens: int, last_replica: int | None, group: str = ""
    ) -> tuple[Any, int]:
        """Queue a request and wait for it.

        A caller that is cancelled aborts its request.

        Args:
            tokens: number of tokens that the request adds to its replica's load.
            last_replica: replica of the conversation's last turn; None at its first.
            group: group of the rollout; "" for a request that belongs to none.

        Returns:
            The result, and the replica that gave it.

        Raises:
            RunError: the request can't run, or its replica failed.
        """
        if self._failure is not None:
            raise self._failure
        result = asyncio.get_running_loop().create_future()
        waiting = _OpenRequest(
            request=request, last_replica=last_replica, group=group, result=result, tokens=tokens
        )
        self._open[request.request_id] = waiting
        self._outbox.append(waiting)
        if self._outbox_is_full and not self.lockstep:
            self._flush()
        self._schedule_flush()  # does nothing if `_flush` has emptied the outbox
        try:
            return await waiting.result, waiting.replica
        except asyncio.CancelledError:
            self._cancel(waiting)
            raise

    def next_id(self) -> int:
        """Return the id of a new request, distinct among all clients of the replicas."""
        return next(self._ids)

    def fail(self, failure: RunError) -> None:
        """Fail every open request, and every later one, with ``failure``.

        After a second failure later requests still fail with the first.
        """
        self._fail_open_requests(failure)
        self._on_failure(failure)

    def close(self) -> None:
        """Stop reading. Open requests fail."""
        for replica in self._replicas.values():
            replica.reader.cancel()
        self._fail_open_requests(RunError("the generator client was closed"))

    # ---- sending

    def _schedule_flush(self) -> None:
        if self._outbox and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the requests of the outbox, unless they have to wait for others."""
        self._flush_scheduled = False
        if not self._replicas:
            return  # the next replica that is admitted gets them
        if self.lockstep:
            if self._lockstep_must_wait():
                return
            self._outbox.sort(key=_canonical_order)
        elif yield_queue().busy and not self._outbox_is_full:
            self._schedule_flush()  # further rollouts are about to make requests
            return
        messages: dict[int, list[Request]] = {}
        for waiting in self._outbox:
            waiting.replica = self._router.choose(
                waiting.last_replica, group=waiting.group, tokens=waiting.tokens
            )
            self._router.add(waiting.replica, waiting.tokens)
            messages.setdefault(waiting.replica, []).append(waiting.request)
        self._outbox.clear()
        for replica, requests in messages.items():
            self._replicas[replica].actor.submit.broadcast(requests)

    @property
    def _outbox_is_full(self) -> bool:
        """True if there is a full message for each replica.

        A full outbox is sent without waiting for the requests of further rollouts.
        """
        return len(self._outbox) >= FULL_MESSAGE * max(1, len(self._replicas))

    def _lockstep_must_wait(self) -> bool:
        """Return True if a request is in flight, or an open session has made no request yet."""
        in_flight = len(self._open) - len(self._outbox)
        # Only requests of sessions are counted against the sessions: a score belongs to none.
        waiting = sum(isinstance(entry.request, GenerateRequest) for entry in self._outbox)
        return in_flight > 0 or waiting < self._sessions.total()

    # ---- receiving

    async def _read(self, index: int, receiver: Any) -> None:  # noqa: ANN401 - Monarch's
        """Answer requests with the results that a replica sends, until it can't go on."""
        try:
            while True:
                messages: Sequence[GeneratorMessage] = await receiver.recv()
                for message in messages:
                    if isinstance(message, GeneratorFailed):
                        self._stopped(index, message.cause)
                        return
                    self._answer(message)
        except Exception as error:
            # Nobody awaits this task, and the replica's requests would wait for ever.
            logger.exception("reading the results of replica %d", index)
            self._stopped(index, f"its results can't be read: {cause_of(error)}")

    def _stopped(self, index: int, cause: str) -> None:
        if self._on_stopped is None:
            self.fail(RunError(f"a generator stopped: {cause}"))
        else:
            self._on_stopped(index, cause)

    def _answer(self, result: Result) -> None:
        waiting = self._open.pop(result.request_id, None)
        if waiting is None:  # its caller was cancelled meanwhile
            return
        self._router.add(waiting.replica, -waiting.tokens)
        self._schedule_flush()  # it may have been the last in flight
        if waiting.result.done():
            return
        if isinstance(result, RequestFailed):
            waiting.result.set_exception(RunError(result.cause))
            return
        if isinstance(result, GenerateResult):
            self.generated_tokens += len(result.completion.token_ids)
        waiting.result.set_result(result)

    def _cancel(self, waiting: _OpenRequest) -> None:
        if self._open.pop(waiting.request.request_id, None) is None:
            return
        if waiting.replica < 0:
            self._outbox = [entry for entry in self._outbox if entry is not waiting]
            return
        self._schedule_flush()
        self._router.add(waiting.replica, -waiting.tokens)
        self._replicas[waiting.replica].actor.abort.broadcast([waiting.request.request_id])

    def _fail_open_requests(self, failure: RunError) -> None:
        self._failure = self._failure or failure
        for waiting in self._open.values():
            if not waiting.result.done():
                waiting.result.set_exception(failure)
        self._open.clear()
        self._outbox.clear()


class AdaptedPolicy:
    """Implements rollouts.policy.PolicyClient: the policy with one of its adapters."""

    def __init__(self, policy: GeneratorClient, adapter: str):
        self._policy = policy
        self._adapter = adapter

    @property
    def version(self) -> int:
        return self._policy.version

    def session(self, **options: Any) -> GeneratorSession:  # noqa: ANN401 - GeneratorClient.session's
        session = self._policy.session(**options)
        session.adapter = self._adapter
        return session

    def with_adapter(self, name: str) -> "AdaptedPolicy":
        return AdaptedPolicy(self._policy, name)

    def frozen(self, model: ModelReference) -> ModelClient:
        return self._policy.frozen(model)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        return await self._policy.score(token_ids, self._adapter)


def _canonical_order(waiting: _OpenRequest) -> tuple:
    """Return a sort key that does not depend on the order in which requests were made."""
    request = waiting.request
    if isinstance(request, GenerateRequest):
        return (0, request.seed, request.prompt_token_ids.tobytes())
    return (1, 0, request.token_ids.tobytes())
