"""A generator's replica that samples nothing and takes its time, in virtual time.

It models continuous batching, a prefix cache, preemption and loads of new weights.

    submit ──▶ waiting ──admit──▶ running ──▶ finished: the answer goes to the client
                  ▲                  │
                  └──── preempt ◀────┘   the cache has no room for the next tokens

The replica is event-driven. Between an admission and the next completion every engine step has the
same sequences, so their time is a sum in closed form (`EngineRates.decode_s`), and one timer stands
for all of them. A request or an update that comes meanwhile takes effect after the engine step that
is under way then.

The task that asks decides how long a completion is (`tasks.py`): the length stands in the request's
``stop_token_ids``. Its prompts say what the prefix cache may share: the first token names the
example, the second is the number of tokens that all prompts of the example begin with, and the
token after those names the conversation.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.engine import GenerateRequest, GenerateResult, Request
from torchtitan.experiments.rl.plan.costs import EngineRates
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.simulation.clock import Cores, Timer
from torchtitan.experiments.rl.simulation.local_actor import LocalEndpoint, LocalSender
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

SPARE_PARTS = 100
"""A sequence is admitted only if one in so many tokens of the cache stays free: without them it
would soon be preempted."""

Prefix = int | tuple[int, int]
"""Key of a cached prefix: an example, or an example and one of its conversations."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    """A request in the engine, with its tokens up to the decode step ``counted_to``."""

    request: GenerateRequest
    length: int
    """Number of tokens that the request will sample."""
    counted_to: int = 0
    """Number of decode steps that the engine had taken when the fields below were brought up to
    date: at the admission, at a load of weights, or when the sequence left."""
    own_tokens: int = 0
    """Tokens of its context that no other sequence shares."""
    sampled: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Policy version and number of tokens sampled with it, in order."""


@dataclass(kw_only=True, slots=True)
class EngineTotals:
    """Totals of an engine, or of several together, since they began."""

    busy_s: float = 0.0
    """Seconds of engine steps."""
    computed_s: float = 0.0
    """Part of ``busy_s`` in which the engine had a core."""
    loading_s: float = 0.0
    """Seconds in which new weights were loaded."""
    sampled: int = 0
    """Number of tokens sampled."""
    prompt: int = 0
    """Number of tokens of the prompts."""
    cached: int = 0
    """Number of tokens of the prompts that the prefix cache had."""
    recomputed: int = 0
    """Number of tokens computed again, after a preemption or under new weights."""
    preemptions: int = 0
    """Number of sequences that were preempted."""

    def __add__(self, other: "EngineTotals") -> "EngineTotals":
        names = [field.name for field in fields(self)]
        return EngineTotals(**{name: getattr(self, name) + getattr(other, name) for name in names})


class PrefixCache:
    """Prefixes that no running sequence holds, the least recently used first."""

    def __init__(self) -> None:
        self._tokens_of: OrderedDict[Prefix, int] = OrderedDict()
        self._tokens = 0

    def add(self, prefix: Prefix, tokens: int, *, room: int) -> None:
        """Cache a prefix of so many tokens, and drop the oldest ones that have no room."""
        self._tokens += tokens - self._tokens_of.pop(prefix, 0)
        self._tokens_of[prefix] = tokens
        while self._tokens_of and self._tokens > room:
            _, dropped = self._tokens_of.popitem(last=False)
            self._tokens -= dropped

    def tokens_of(self, prompt: np.ndarray) -> int:
        """Return the number of the prompt's tokens that are cached: at most all but the last."""
        example, shared = prompt[:2].tolist()
        prefixes: list[Prefix] = [example]
        if len(prompt) > shared:
            prefixes.insert(0, (example, int(prompt[shared])))
        for prefix in prefixes:
            if prefix in self._tokens_of:
                self._tokens_of.move_to_end(prefix)
                return min(self._tokens_of[prefix], len(prompt) - 1)
        return 0

    def clear(self) -> None:
        self._tokens_of.clear()
        self._tokens = 0


class SimulatedReplica:
    """Stands in for a generator's actor, for a ``GeneratorClient`` and a ``WeightSync``."""

    def __init__(
        self,
        rates: EngineRates,
        *,
        max_num_seqs: int,
        weight_update: WeightUpdate = "keep",
        prefix_caching: bool = True,
        version: int = 0,
        cores: Cores | None = None,
    ):
        """Start idle, in the running event loop.

        Args:
            version: version of the weights that the replica starts with.
        """
        self.totals = EngineTotals()
        self._rates = rates
        self._max_num_seqs = max_num_seqs
        self._weight_update = weight_update
        self._prefix_caching = prefix_caching
        self._version = version
        self._cores = cores or Cores()
        self._loop = asyncio.get_running_loop()
        self._port: LocalSender | None = None
        """Takes the results; None until a client attaches."""
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        """Sequences by the id of their request, in the order of their admission."""
        self._ends: list[tuple[int, int, _Sequence]] = []
        """Heap of the decode step after which each running sequence ends, a number that decides
        between equal steps, and the sequence."""
        self._order = itertools.count()
        self._steps = 0
        """Number of decode steps taken."""
        self._context_tokens = 0
        """Tokens that the running sequences read in a decode step."""
        self._held_tokens = 0
        """Tokens whose keys and values the running sequences hold, those of shared prefixes not
        counted."""
        self._cache = PrefixCache()
        self._prefill_s = 0.0
        """Seconds of prompts that are to be computed before the next decode step."""
        self._timer: Timer | None = None
        """Ends the planned decode steps; None while the engine takes none."""
        self._planned_steps = 0
        self._plan_began = 0.0
        """Time of the event loop at which the engine began the prompts before the planned steps."""
        self._compute_began = 0.0
        """The same by the time of the cores."""
        self._decode_began = 0.0
        """Time of the cores at which the planned steps begin, after the prompts."""
        self._update: tuple[int, asyncio.Future[None]] | None = None
        """Version to load, and the future that says when it is loaded."""
        self._loading = False
        self._dead = False
        self.attach = LocalEndpoint(self._attach)
        self.submit = LocalEndpoint(self._submit)
        self.abort = LocalEndpoint(len)  # no simulated rollout aborts a request
        self.update_weights = LocalEndpoint(self._update_weights)
        self.sleep = LocalEndpoint(self._sleep)
        self.canary = LocalEndpoint(self._canary)

    def kill(self) -> int:
        """Answer nothing any more, and return the tokens sampled for the requests that are open."""
        self._dead = True
        if self._timer is not None:
            self._timer.cancel()
        return sum(
            sequence.sampled + self._steps - sequence.counted_to
            for sequence in self._running.values()
        )

    # Endpoints.

    async def _attach(self, client_id: int, port: LocalSender) -> None:
        self._port = port

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert isinstance(request, GenerateRequest), "simulated tasks ask for no scores"
            length = min(request.stop_token_ids[0], request.sampling.max_tokens)
            self._waiting.append(_Sequence(request=request, length=length))
        if len(self._running) < self._max_num_seqs:
            self._interrupt()

    async def _update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """Load a version between two engine steps, as the engine thread does.

        With ``weight_update="drain"`` the running sequences finish first.
        """
        loaded: asyncio.Future[None] = self._loop.create_future()
        self._update = (version, loaded)
        self._interrupt()
        await loaded
        return WeightReceipt(
            version=version,
            fingerprint=str(version),
            canary_logprobs=await self._canary(canary_token_ids),
            verify_s=0.0,
            reload_s=self._rates.load_s,
        )

    async def _sleep(self) -> None:
        assert not self._running and not self._waiting, "a request is open"

    async def _canary(self, canary_token_ids: np.ndarray) -> np.ndarray:
        """Score the canary, in a step of its own unless the engine takes steps anyway."""
        if not self._running:
            await self._cores.use(self._rates.step_s)
            self.totals.busy_s += self._rates.step_s
            self.totals.computed_s += self._rates.step_s
        return np.zeros(len(canary_token_ids), np.float32)

    # Engine steps.

    def _interrupt(self) -> None:
        """Look at new requests and updates once the engine step that is under way has ended."""
        if self._loading or self._dead:
            return
        if self._timer is None:
            self._continue()
            return
        decoded_s = self._cores.time() - self._decode_began
        steps = 0
        if decoded_s > 0:
            steps = self._rates.steps_in(decoded_s, len(self._running), self._context_tokens)
        if steps < self._planned_steps:
            self._timer.cancel()
            self._plan(steps)

    def _plan(self, steps: int) -> None:
        """Take so many decode steps, counted from ``_decode_began``."""
        self._planned_steps = steps
        seconds = self._rates.decode_s(steps, len(self._running), self._context_tokens)
        self._timer = self._cores.call_at(self._decode_began + seconds, self._end_steps)

    def _end_steps(self) -> None:
        """Count the planned steps, send what has finished, and go on."""
        self._timer = None
        sampled = len(self._running) * self._planned_steps
        self.totals.busy_s += self._loop.time() - self._plan_began
        self.totals.computed_s += self._cores.time() - self._compute_began
        self.totals.sampled += sampled
        self._steps += self._planned_steps
        self._context_tokens += sampled
        self._held_tokens += sampled
        results = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, sequence = heapq.heappop(self._ends)
            results.append(self._finish(sequence))
        if results:
            assert self._port is not None, "no client is attached"
            self._port.send(results)
        self._continue()

    def _continue(self) -> None:
        """Load weights or admit and preempt sequences, and plan steps until a sequence ends."""
        is_draining = self._weight_update == "drain" and (
            bool(self._running) or self._has_preempted
        )
        if self._update is not None and not is_draining:
            self._load()
            return
        while self._may_admit() and self._admit():
            pass
        while self._running and self._room < len(self._running):
            self._preempt()
        if not self._running:
            return
        self._plan_began = self._loop.time()
        self._compute_began = self._cores.time()
        self._decode_began = self._compute_began + self._prefill_s
        self._prefill_s = 0.0
        first_end, _, _ = self._ends[0]
        steps_with_room = self._room // len(self._running)
        self._plan(min(first_end - self._steps, steps_with_room))

    # Sequences.

    @property
    def _room(self) -> int:
        """Number of tokens that the cache has room for beside those of the running sequences."""
        return self._rates.cache_tokens - self._held_tokens

    @property
    def _has_preempted(self) -> bool:
        """True if a preempted sequence waits. Such a sequence comes before new ones."""
        return bool(self._waiting) and self._waiting[0].sampled > 0

    def _may_admit(self) -> bool:
        """Return False if nothing waits, or if an update waits for the engine to drain.

        A preempted sequence is admitted even then: it has tokens of the old version.
        """
        return bool(self._waiting) and (self._update is None or self._has_preempted)

    def _admit(self) -> bool:
        """Start the first sequence that waits. Return False if there is no place for it."""
        if len(self._running) == self._max_num_seqs:
            return False
        sequence = self._waiting[0]
        prompt = sequence.request.prompt_token_ids
        context_tokens = len(prompt) + sequence.sampled
        cached_tokens = self._cache.tokens_of(prompt) if self._prefix_caching else 0
        own_tokens = context_tokens - cached_tokens
        spare = max(len(self._running) + 1, self._rates.cache_tokens // SPARE_PARTS)
        if self._running and self._room < own_tokens + spare:
            return False
        self._waiting.popleft()
        sequence.counted_to = self._steps
        sequence.own_tokens = own_tokens
        self._running[sequence.request.request_id] = sequence
        end = self._steps + sequence.length - sequence.sampled
        heapq.heappush(self._ends, (end, next(self._order), sequence))
        self._context_tokens += context_tokens
        self._held_tokens += own_tokens
        self._prefill_s += self._rates.prompt_s + self._rates.prefill_token_s * own_tokens
        if sequence.sampled:
            self.totals.recomputed += own_tokens
        else:
            self.totals.prompt += len(prompt)
            self.totals.cached += cached_tokens
        self._cache.add(int(prompt[0]), int(prompt[1]), room=self._room)
        return True

    def _preempt(self) -> None:
        """Let the sequence that was admitted last wait, to compute its context again later."""
        sequence = self._running[next(reversed(self._running))]
        self._remove(sequence)
        self._ends = [end for end in self._ends if end[2] is not sequence]
        heapq.heapify(self._ends)
        self._waiting.appendleft(sequence)
        self.totals.preemptions += 1

    def _finish(self, sequence: _Sequence) -> GenerateResult:
        """Remove a sequence that has all its tokens, and return its result."""
        self._remove(sequence)
        request = sequence.request
        # No other rollout's completion begins with this token, and no two of the tokens are alike.
        first_id = request.seed % 2**30
        token_ids = np.arange(first_id, first_id + sequence.length, dtype=np.int32)
        if self._prefix_caching:
            prompt = request.prompt_token_ids
            shared = prompt[1]
            conversation = int(prompt[shared]) if len(prompt) > shared else first_id
            tokens = len(prompt) + sequence.length
            self._cache.add((int(prompt[0]), conversation), tokens, room=self._room)
        versions, counts = zip(*sequence.versions, strict=True)
        completion = Completion(
            token_ids=token_ids,
            logprobs=np.full(sequence.length, -0.5, np.float32),
            policy_versions=np.repeat(np.array(versions, np.int32), counts),
            finish_reason="stop" if sequence.length == request.stop_token_ids[0] else "length",
        )
        return GenerateResult(request_id=request.request_id, completion=completion)

    def _remove(self, sequence: _Sequence) -> None:
        """Take a sequence out of the running ones."""
        self._count_tokens(sequence)
        del self._running[sequence.request.request_id]
        self._context_tokens -= len(sequence.request.prompt_token_ids) + sequence.sampled
        self._held_tokens -= sequence.own_tokens

    def _count_tokens(self, sequence: _Sequence) -> None:
        """Add what a sequence has sampled since it was counted, with the current version."""
        sampled = self._steps - sequence.counted_to
        if sampled:
            sequence.versions.append((self._version, sampled))
            sequence.counted_to = self._steps
            sequence.sampled += sampled
            sequence.own_tokens += sampled

    # Weights.

    def _load(self) -> None:
        """Begin to load the version that `_update` names. No engine step is taken meanwhile."""
        assert self._update is not None
        version, loaded = self._update
        self._update = None
        self._loading = True

        def end_load() -> None:
            if not self._dead:
                self._end_load(version)
                if not loaded.done():
                    loaded.set_result(None)
                self._continue()

        self._cores.call_at(self._cores.time() + self._rates.load_s, end_load)

    def _end_load(self, version: int) -> None:
        """Sample with the new version from now on."""
        for sequence in self._running.values():
            self._count_tokens(sequence)
        self._loading = False
        self._version = version
        self.totals.loading_s += self._rates.load_s
        self._cache.clear()
        if self._weight_update == "recompute":
            self._prefill_s += self._rates.prefill_token_s * self._context_tokens
            self.totals.recomputed += self._context_tokens
