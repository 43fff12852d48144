"""The client of the Generator mesh: sends requests to replicas, and hands results to the coroutines that wait for them.

The client sends requests made in one event-loop tick as one message per replica, because one message costs as much as hundreds
of requests. Rollouts that render one after another (`envs/yield_queue.py`) count as one tick, up to a full message:
rendering the prompts of a whole step takes as long as an engine step.
"""

import asyncio
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from monarch.actor import Channel

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.envs.yield_queue import yield_queue
from torchtitan.experiments.rl.errors import RunError
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
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.rollouts.policy import ModelClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

logger = logging.getLogger(__name__)

FULL_MESSAGE = 64
"""Requests per replica that wait for no others: 13 % more tokens per second with 256 short rollouts a step."""

AHEAD = 16
"""Requests of its own size by which a group's replica may be ahead of the least loaded one before the group moves. The rollouts
of a group begin with one prompt, which a replica computes once.

``benchmarks/prefix_routing.py``, prompts of 512 tokens: 16 groups of 8 are 1.4 times as quick as with rollouts that go to any
replica. One group of 128 is as quick; without a bound it leaves a replica idle, and takes 1.5 times as long."""


class Router:
    """Chooses a replica: the one that has the conversation cached; else the one that has the prompt of the group, unless it is
    too far ahead; else the least loaded (lowest index on a tie)."""

    def __init__(self) -> None:
        self.load: Counter[int] = Counter()
        """Tokens in flight by replica: the prompts, and the most that may be sampled."""
        self._open: set[int] = set()
        self._by_load: list[tuple[int, int]] = []
        """A heap of load and replica; of each open replica its load of now is there. A request does not cost more for each
        replica that there is (benchmarks/control_plane.py)."""
        self._replica_of: dict[str, int] = {}
        """By group."""

    def open(self, replica: int) -> None:
        """It may be chosen from now on."""
        self._open.add(replica)
        self.add(replica, 0)

    def close(self, replica: int) -> None:
        self._open.discard(replica)

    def add(self, replica: int, tokens: int) -> None:
        """So many more tokens are in flight; below 0: fewer."""
        self.load[replica] += tokens
        if replica in self._open:
            heapq.heappush(self._by_load, (self.load[replica], replica))
        if len(self._by_load) > 8 * len(self._open) + 64:
            self._by_load = [(self.load[replica], replica) for replica in self._open]
            heapq.heapify(self._by_load)

    def choose(self, last_replica: int | None, *, group: str = "", tokens: int = 0) -> int:
        """At least one replica is open.

        Args:
            last_replica: of the conversation's last turn; None at its first.
            group: of the rollout; "" for a request that belongs to none.
            tokens: what the request will add to the load.
        """
        if last_replica is not None and last_replica in self._open:
            return last_replica
        while (first := self._by_load[0])[1] not in self._open or first[0] != self.load[first[1]]:
            heapq.heappop(self._by_load)
        least = first[1]
        if not group:
            return least
        replica = self._replica_of.get(group)
        if (
            replica is None
            or replica not in self._open
            or self.load[replica] > self.load[least] + AHEAD * tokens
        ):
            replica = self._replica_of[group] = least
        return replica

    def forget(self, group: str) -> None:
        """No more requests of this group will come."""
        self._replica_of.pop(group, None)


class Sender(Protocol):
    """What a session needs of its client: ``GeneratorClient`` describes each."""

    lockstep: bool
    stops_at_texts: bool

    def next_id(self) -> int: ...

    async def send(
        self, request: GenerateRequest, *, tokens: int, last_replica: int | None, group: str
    ) -> tuple[Any, int]: ...

    def session_closed(self, group: str) -> None: ...


class GeneratorSession:
    """Implements rollouts.policy.PolicySession: the seeds, limits and cache scope of one rollout's requests."""

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
        self.group, self._seed = rollout_id.rpartition("/")[0], seed
        own = (
            sampling.stop_token_ids
        )  # without them it stays one list for all: a message then holds it once
        self._sampling, self._stop_token_ids = (
            sampling,
            stop_token_ids + own if own else stop_token_ids,
        )
        self._turn = 0
        self._last_replica: int | None = None
        self._last_tokens = np.empty(0, np.int32)
        """Prompt and completion of the turn before, where it has routes."""
        self._closed = False
        self.frozen = False
        """Whether the model is no version of the policy."""
        self.adapter = ""
        self.stops_at_texts = client.stops_at_texts

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """See PolicySession.generate."""
        sampling = self._sampling
        if max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        if stop:
            sampling = replace(sampling, stop=[*sampling.stop, *stop])
        prompt, before = np.asarray(prompt_token_ids, np.int32), self._last_tokens
        goes_on = len(before) and np.array_equal(prompt[: len(before)], before)
        request = GenerateRequest(
            request_id=self._client.next_id(),
            prompt_token_ids=prompt,
            sampling=sampling,
            # Each turn has its own stream of random numbers. vLLM takes 63 bits.
            seed=(self._seed + self._turn * 0x9E3779B97F4A7C15 if seed is None else seed) % 2**63,
            stop_token_ids=self._stop_token_ids,
            # Whether a prefix is read from the cache or computed changes the last bits. What is cached must not depend on what
            # ran before, in this process or in one that the run was resumed from.
            cache_scope=self.group if self._client.lockstep else "",
            adapter=self.adapter,
            routes_from=len(before) - 1 if goes_on else 0,
        )
        self._turn += 1
        tokens = len(request.prompt_token_ids) + sampling.max_tokens
        result, self._last_replica = await self._client.send(
            request, tokens=tokens, last_replica=self._last_replica, group=self.group
        )
        if result.completion.routes is not None:
            self._last_tokens = np.concatenate([prompt, result.completion.token_ids])
        if self.frozen:
            no_version = np.full(len(result.completion.token_ids), -1, np.int32)
            return replace(result.completion, policy_versions=no_version, replica=-1)
        return replace(result.completion, replica=self._last_replica)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.session_closed(self.group)


@dataclass(kw_only=True, slots=True)
class _OpenRequest:
    """A request without a result yet."""

    request: Request
    last_replica: int | None
    """The replica of the conversation's last turn; None at its first."""
    group: str
    """See ``Router.choose``."""
    answer: asyncio.Future
    replica: int = -1
    """-1 until it is sent."""
    tokens: int
    """What it adds to its replica's load."""


@dataclass(kw_only=True, slots=True)
class _Replica:
    """A replica that takes requests."""

    actor: Any
    life: Lifetime
    reader: asyncio.Task[None]


class GeneratorClient:
    """Implements rollouts.policy.PolicyClient over replicas that may be lost and made again.

    With ``lockstep`` the client sends requests only when every open session waits for one and none is in flight, and sends them
    sorted. Which requests share an engine step then does not depend on timing. So the same seed gives the same bits on CPU,
    where the batch a request is in changes the last bits of its logits.
    """

    is_frozen = False
    """Whether the model is no version of the policy."""

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
        """
        Args:
            client_id: distinct among the clients of the same replicas.
            stops_at_texts: see EngineConfig.
            on_failure: called with what every open request has failed with.
            on_stopped: called with a replica whose engine can't go on, and the cause; its requests wait until someone calls
                ``lose``. None: every request fails.
            frozen: returns the client of a frozen model.
            open_channel: returns a port that a replica sends its results to, and their receiver. None: Monarch's.
        """
        self._client_id, self._open_channel = client_id, open_channel
        self._on_failure, self._on_stopped = on_failure, on_stopped
        self._find_frozen = frozen
        self.version = 0
        self.lockstep = lockstep
        self.stops_at_texts = stops_at_texts
        self._sessions: Counter[str] = Counter()
        """Open ones, by group."""
        self._ids = itertools.count(client_id << CLIENT_BITS)
        self._outbox: list[_OpenRequest] = []
        self._open: dict[int, _OpenRequest] = {}
        self._flush_scheduled = False
        self._failure: RunError | None = None
        self._replicas: dict[int, _Replica] = {}
        self._lives: dict[int, Lifetime] = {}
        """Of the replicas, those that are about to be admitted too."""
        self._router = Router()
        self.generated_tokens = 0
        """Sampled since the start."""

    async def admit(self, index: int, actor: Any, life: Lifetime | None = None) -> None:
        """Attach to replica ``index``, which is set up, and send it requests from now on. Once, until it is lost.

        Args:
            life: its process; without it, calls to the replica end when Monarch says so.

        Raises:
            ProcessLost: the process ended first.
        """
        if index in self._lives:
            return
        life = self._lives[index] = life or Lifetime(f"generator {index}")
        port, receiver = (self._open_channel or Channel.open)()
        await life.call(actor.attach.call_one(self._client_id, port))
        reader = asyncio.create_task(self._read(index, receiver))
        self._replicas[index] = _Replica(actor=actor, life=life, reader=reader)
        self._router.open(index)
        self._schedule_flush()

    def lose(self, index: int) -> None:
        """Replica ``index`` is gone. Its open requests start again: with another replica, or when one is admitted."""
        if (life := self._lives.pop(index, None)) is not None:
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

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> GeneratorSession:
        session = GeneratorSession(
            self, rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids
        )
        session.frozen = self.is_frozen
        self._sessions[session.group] += 1
        return session

    def frozen(self, model: ModelReference) -> ModelClient:
        if self._find_frozen is None:
            raise RunError(f"no frozen models here: asked for {model}")
        return self._find_frozen(model)

    async def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        request = ScoreRequest(request_id=self.next_id(), token_ids=token_ids, adapter=adapter)
        answer, _ = await self.send(request, tokens=len(token_ids), last_replica=None)
        return answer.logprobs

    async def update_weights(
        self, version: int, canary_token_ids: np.ndarray
    ) -> dict[int, WeightReceipt]:
        """Have every replica load a published version. ``GeneratorConfig.weight_update`` says what that does to requests.

        Returns:
            The receipt of each replica by its index. A replica that is lost meanwhile has none.
        """
        receipts: dict[int, WeightReceipt] = {}

        async def update(index: int, replica: _Replica) -> None:
            with suppress(ProcessLost):
                receipts[index] = await replica.life.call(
                    ask(replica.actor.update_weights, version, canary_token_ids)
                )

        await asyncio.gather(*(update(*entry) for entry in self._replicas.items()))
        self.version = version
        return dict(sorted(receipts.items()))

    async def sleep(self) -> None:
        """Have every replica free its engine's memory until it loads the next version. No request is open."""

        async def sleep(replica: _Replica) -> None:
            with suppress(ProcessLost):
                await replica.life.call(ask(replica.actor.sleep))

        await asyncio.gather(*map(sleep, self._replicas.values()))

    async def send(
        self, request: Request, *, tokens: int, last_replica: int | None, group: str = ""
    ) -> tuple[Any, int]:
        """Queue a request and wait. Returns its result and its replica.

        Raises:
            RunError: the request can't run, or its replica failed.
        """
        if self._failure is not None:
            raise self._failure
        answer = asyncio.get_running_loop().create_future()
        waiting = _OpenRequest(
            request=request, last_replica=last_replica, group=group, answer=answer, tokens=tokens
        )
        self._open[request.request_id] = waiting
        self._outbox.append(waiting)
        if not self.lockstep and len(self._outbox) >= self._full_outbox:
            self._flush()
        self._schedule_flush()
        try:
            return await waiting.answer, waiting.replica
        except asyncio.CancelledError:
            self._cancel(waiting)
            raise

    def next_id(self) -> int:
        """Of a request; distinct among all clients of the replicas."""
        return next(self._ids)

    def session_closed(self, group: str) -> None:
        self._sessions[group] -= 1
        if not self._sessions[group]:
            del self._sessions[group]
            self._router.forget(group)
        # With lockstep, the others' requests may have waited for this session's.
        self._schedule_flush()

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request with ``failure``."""
        self._fail_open_requests(failure)
        self._on_failure(failure)

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.reader.cancel()
        self._fail_open_requests(RunError("the generator client was closed"))

    def _schedule_flush(self) -> None:
        if self._outbox and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self.lockstep and yield_queue().busy and len(self._outbox) < self._full_outbox:
            return self._schedule_flush()
        if self.lockstep:
            if self._lockstep_must_wait():
                return
            self._outbox.sort(key=_canonical_order)
        if not self._replicas:
            return  # the next that is admitted gets them
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
    def _full_outbox(self) -> int:
        return FULL_MESSAGE * max(1, len(self._replicas))

    def _lockstep_must_wait(self) -> bool:
        in_flight = len(self._open) - len(self._outbox)
        # Scores belong to no session, and so don't count for one that has no request yet.
        waiting = sum(isinstance(entry.request, GenerateRequest) for entry in self._outbox)
        return in_flight > 0 or waiting < self._sessions.total()

    async def _read(self, index: int, receiver: Any) -> None:
        while True:
            messages: Sequence[GeneratorMessage] = await receiver.recv()
            for message in messages:
                if isinstance(message, GeneratorFailed):
                    if self._on_stopped is None:
                        self.fail(RunError(f"a generator stopped: {message.cause}"))
                    else:
                        self._on_stopped(index, message.cause)
                    return
                self._answer(message)

    def _answer(self, result: Result) -> None:
        waiting = self._open.pop(result.request_id, None)
        if waiting is None:  # cancelled meanwhile
            return
        self._router.add(waiting.replica, -waiting.tokens)
        self._schedule_flush()  # it may have been the last in flight
        if waiting.answer.done():
            return
        if isinstance(result, RequestFailed):
            waiting.answer.set_exception(RunError(result.cause))
        else:
            if isinstance(result, GenerateResult):
                self.generated_tokens += len(result.completion.token_ids)
            waiting.answer.set_result(result)

    def _cancel(self, waiting: _OpenRequest) -> None:
        if self._open.pop(waiting.request.request_id, None) is None:
            return
        if waiting.replica < 0:
            self._outbox = [w for w in self._outbox if w is not waiting]
        else:
            self._schedule_flush()
            self._router.add(waiting.replica, -waiting.tokens)
            self._replicas[waiting.replica].actor.abort.broadcast([waiting.request.request_id])

    def _fail_open_requests(self, failure: RunError) -> None:
        self._failure = self._failure or failure
        for waiting in self._open.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(failure)
        self._open.clear()
        self._outbox.clear()


class AdaptedPolicy:
    """Implements rollouts.policy.PolicyClient: the policy with one of its adapters."""

    def __init__(self, policy: GeneratorClient, adapter: str):
        self._policy, self._adapter = policy, adapter
        self.frozen = policy.frozen

    @property
    def version(self) -> int:
        return self._policy.version

    def session(self, **options: Any) -> GeneratorSession:
        session = self._policy.session(**options)
        session.adapter = self._adapter
        return session

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        return await self._policy.score(token_ids, self._adapter)


def _canonical_order(waiting: _OpenRequest) -> tuple:
    request = waiting.request
    if isinstance(request, GenerateRequest):
        return (0, request.seed, request.prompt_token_ids.tobytes())
    return (1, 0, request.token_ids.tobytes())
