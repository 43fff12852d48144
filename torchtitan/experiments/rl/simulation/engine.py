"""A generator's replica that samples nothing and takes its time: continuous batching, a prefix cache, preemption, new weights.

It is event-driven: between an admission and the next completion every engine step has the same sequences, so their time is a
sum in closed form (``EngineRates``). What happens in between takes effect after the engine step that it falls into.

A request's length stands in its ``stop_token_ids``: the task that asks knows it (`tasks.py`). Prompts of one example begin with
a token of its own, and then with the length that they have in common; what comes there tells one conversation from another.
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.fleet.weight_readers import READERS_AT_ONCE
from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.engine import GenerateRequest, GenerateResult, Request
from torchtitan.experiments.rl.plan.costs import (
    GPUS_PER_HOST,
    EngineRates,
    Gpu,
    ModelSizes,
    TrainerRates,
    device_rates,
    version_bytes,
)
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.simulation.clock import Cores
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt


class Endpoint:
    """Of an actor in this process: called as Monarch's are."""

    def __init__(self, call: Callable[..., Any]):
        self.broadcast = call
        self._call = call

    async def choose(self, *args: Any) -> Any:
        return await self._call(*args)

    call_one = choose

    async def call(self, *args: Any) -> dict[int, Any]:
        return {0: await self._call(*args)}


def open_channel() -> tuple[Any, Any]:
    """Both ends of a channel in this process."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    return SimpleNamespace(send=messages.put_nowait), SimpleNamespace(recv=messages.get)


@dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    request: GenerateRequest
    length: int
    """Tokens that it will sample."""
    began: int = 0
    """Decode steps that the engine had taken when it was admitted, or got new weights, last."""
    held: int = 0
    """Tokens of its context until then that only it holds."""
    had: int = 0
    """Tokens that it had sampled by then."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Version and count of these."""


class SimulatedReplica:
    """What a ``GeneratorClient`` and a ``WeightSync`` call a generator's actor."""

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
        self._rates, self._max_num_seqs = rates, max_num_seqs
        self._weight_update, self._prefix_caching = weight_update, prefix_caching
        self.totals: Any = Counter()
        """Since it began: seconds ``busy_s``, of which it had a core for ``computed_s``, and ``loading_s``; ``sampled`` tokens;
        ``prompt`` tokens, and how many of them were ``cached``; tokens ``recomputed`` after ``preemptions`` or, where
        ``weight_update`` says so, under new weights."""
        self._port: Any = None
        self._loop, self._cores = asyncio.get_running_loop(), cores or Cores()
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        """By request id, in the order of their admission."""
        self._ends: list[tuple[int, int, _Sequence]] = []
        """A heap: the decode step after which each running sequence ends."""
        self._order = itertools.count()
        self._version = version
        self._steps = 0
        """Decode steps taken."""
        self._context = self._held = 0
        """Tokens that running sequences read in a step; tokens whose keys and values they hold."""
        self._cached: OrderedDict[Any, int] = OrderedDict()
        """Tokens of each prefix that is cached and held by nobody, the least recently used first."""
        self._cached_tokens = 0
        self._debt_s = 0.0
        """Of prompts that are to be computed before the next decode step."""
        self._timer: Any = None
        self._planned = 0
        """Decode steps until ``_timer``."""
        self._decode_began = self._plan_began = self._compute_began = 0.0
        """When they began: after the prompts, by the cores' time; with the prompts, by the loop's and by the cores'."""
        self._update: tuple[int, asyncio.Future[None]] | None = None
        self._loading = self._dead = False
        self.attach, self.submit, self.abort = (
            Endpoint(self._attach),
            Endpoint(self._submit),
            Endpoint(len),
        )
        self.update_weights, self.sleep = Endpoint(self._update_weights), Endpoint(self._sleep)
        self.canary = Endpoint(self._canary)

    def kill(self) -> int:
        """It answers nothing any more. Returns the tokens that were sampled for open requests."""
        self._dead = True
        if self._timer is not None:
            self._timer.cancel()
        return sum(each.had + self._steps - each.began for each in self._running.values())

    # Endpoints.

    async def _attach(self, client_id: int, port: Any) -> None:
        self._port = port

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert isinstance(request, GenerateRequest), "simulated tasks ask for no scores"
            length = min(request.stop_token_ids[0], request.sampling.max_tokens)
            self._waiting.append(_Sequence(request=request, length=length))
        if len(self._running) < self._max_num_seqs:
            self._interrupt()

    async def _update_weights(self, version: int, canary_token_ids: np.ndarray) -> WeightReceipt:
        """As the engine thread: between two steps; with ``drain`` when what runs has finished."""
        self._update = version, self._loop.create_future()
        done = self._update[1]
        self._interrupt()
        await done
        proof = await self._canary(canary_token_ids)
        return WeightReceipt(
            version=version,
            fingerprint=str(version),
            canary_logprobs=proof,
            verify_s=0.0,
            reload_s=self._rates.load_s,
        )

    async def _sleep(self) -> None:
        assert not self._running and not self._waiting, "a request is open"

    async def _canary(self, canary_token_ids: np.ndarray) -> np.ndarray:
        """A step of its own, unless the engine takes steps anyway."""
        if not self._running:
            await self._cores.use(self._rates.step_s)
            for name in ("busy_s", "computed_s"):
                self.totals[name] += self._rates.step_s
        return np.zeros(len(canary_token_ids), np.float32)

    # The engine.

    def _interrupt(self) -> None:
        """Have what is new taken up after the engine step that is under way."""
        if self._loading or self._dead:
            return
        if self._timer is None:
            return self._next()
        spent = self._cores.time() - self._decode_began
        steps = 0 if spent <= 0 else self._rates.steps_in(spent, len(self._running), self._context)
        if steps < self._planned:
            self._timer.cancel()
            self._plan(steps)

    def _plan(self, steps: int) -> None:
        self._planned = steps
        ends = self._decode_began + self._rates.decode_s(steps, len(self._running), self._context)
        self._timer = self._cores.call_at(ends, self._advance)

    def _advance(self) -> None:
        """The planned steps are taken."""
        self._timer = None
        sampled = len(self._running) * self._planned
        self.totals["busy_s"] += self._loop.time() - self._plan_began
        self.totals["computed_s"] += self._cores.time() - self._compute_began
        self.totals["sampled"] += sampled
        self._steps += self._planned
        self._context += sampled
        self._held += sampled
        finished = []
        while self._ends and self._ends[0][0] <= self._steps:
            finished.append(self._finish(heapq.heappop(self._ends)[2]))
        if finished:
            self._port.send(finished)
        self._next()

    def _next(self) -> None:
        """Load weights, admit what waits, preempt what has no room, and plan until something ends."""
        drains = self._weight_update == "drain" and (bool(self._running) or self._preempted)
        if self._update is not None and not drains:
            return self._load()
        while self._waiting and (self._update is None or self._preempted) and self._admit():
            pass
        while self._running and self._room < len(self._running):
            self._preempt()
        if not self._running:
            return
        self._plan_began, self._compute_began = self._loop.time(), self._cores.time()
        self._decode_began = self._compute_began + self._debt_s
        self._debt_s = 0.0
        self._plan(min(self._ends[0][0] - self._steps, self._room // len(self._running)))

    @property
    def _room(self) -> int:
        return self._rates.cache_tokens - self._held

    @property
    def _preempted(self) -> bool:
        """Whether the next that waits has tokens already: such come first."""
        return bool(self._waiting) and self._waiting[0].had > 0

    def _admit(self) -> bool:
        """The next that waits, unless there is no place or no room for it."""
        if len(self._running) == self._max_num_seqs:
            return False
        sequence = self._waiting[0]
        prompt = sequence.request.prompt_token_ids
        context = len(prompt) + sequence.had
        hit = self._hit(prompt) if self._prefix_caching else 0
        spare = max(
            len(self._running) + 1, self._rates.cache_tokens // 100
        )  # else it would be preempted soon
        if self._running and self._room < context - hit + spare:
            return False
        self._waiting.popleft()
        sequence.began, sequence.held = self._steps, context - hit
        self._running[sequence.request.request_id] = sequence
        heapq.heappush(
            self._ends, (self._steps + sequence.length - sequence.had, next(self._order), sequence)
        )
        self._context += context
        self._held += sequence.held
        self._debt_s += self._rates.prompt_s + self._rates.prefill_token_s * sequence.held
        if sequence.had:
            self.totals["recomputed"] += sequence.held
        else:
            self.totals["prompt"] += len(prompt)
            self.totals["cached"] += hit
        self._keep(int(prompt[0]), int(prompt[1]))
        return True

    def _preempt(self) -> None:
        """The sequence that was admitted last waits again, and its context is computed again then."""
        sequence = self._running[next(reversed(self._running))]
        self._leave(sequence)
        self._ends = [entry for entry in self._ends if entry[2] is not sequence]
        heapq.heapify(self._ends)
        self._waiting.appendleft(sequence)
        self.totals["preemptions"] += 1

    def _load(self) -> None:
        assert self._update is not None
        version, done = self._update
        self._loading, self._update = True, None

        def loaded() -> None:
            if self._dead:
                return
            for sequence in self._running.values():
                self._note(sequence)
            self._loading, self._version = False, version
            self.totals["loading_s"] += self._rates.load_s
            self._cached.clear()
            self._cached_tokens = 0
            if self._weight_update == "recompute":
                self._debt_s += self._rates.prefill_token_s * self._context
                self.totals["recomputed"] += self._context
            if not done.done():
                done.set_result(None)
            self._next()

        self._cores.call_at(self._cores.time() + self._rates.load_s, loaded)

    def _finish(self, sequence: _Sequence) -> GenerateResult:
        self._leave(sequence)
        request = sequence.request
        versions, counts = zip(*sequence.versions, strict=True)
        # Ids that no other rollout begins with, and of which none is like the next.
        first = request.seed % 2**30
        ids = np.arange(first, first + sequence.length, dtype=np.int32)
        if self._prefix_caching:
            prompt = request.prompt_token_ids
            own = int(prompt[prompt[1]]) if len(prompt) > prompt[1] else first
            self._keep((int(prompt[0]), own), len(prompt) + sequence.length)
        completion = Completion(
            token_ids=ids,
            logprobs=np.full(sequence.length, -0.5, np.float32),
            policy_versions=np.repeat(np.array(versions, np.int32), counts),
            finish_reason="stop" if sequence.length == request.stop_token_ids[0] else "length",
        )
        return GenerateResult(request_id=request.request_id, completion=completion)

    def _leave(self, sequence: _Sequence) -> None:
        self._note(sequence)
        del self._running[sequence.request.request_id]
        self._context -= len(sequence.request.prompt_token_ids) + sequence.had
        self._held -= sequence.held

    def _note(self, sequence: _Sequence) -> None:
        """What it has sampled since ``began`` is of this version."""
        if sampled := self._steps - sequence.began:
            sequence.versions.append((self._version, sampled))
            sequence.began = self._steps
            sequence.had += sampled
            sequence.held += sampled

    def _hit(self, prompt: np.ndarray) -> int:
        """Tokens that are cached, at most all but one."""
        family, shared = prompt[:2].tolist()
        for key in ((family, int(prompt[shared])), family) if len(prompt) > shared else (family,):
            if key in self._cached:
                self._cached.move_to_end(key)
                return min(self._cached[key], len(prompt) - 1)
        return 0

    def _keep(self, key: Any, tokens: int) -> None:
        self._cached_tokens += tokens - self._cached.pop(key, 0)
        self._cached[key] = tokens
        while self._cached and self._cached_tokens > self._room:
            self._cached_tokens -= self._cached.popitem(last=False)[1]


READER_BYTES_S = 1.5e9
"""A weight reader's, measured over TCP between two hosts of one machine (benchmarks/host_weights.py).
No network of a device is slower."""
TURN_S = 0.77e-3
"""Seconds of the event loop's time that a turn takes, its renderer included (docs/scale.md)."""
START_S, DEATH_SEEN_S = 180.0, 10.0
"""Until a process of a real model takes work, compiled; until Monarch reports the death of a process elsewhere."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    engine: EngineRates
    trainer: TrainerRates
    fetch_s: float = 0.0
    """Until every host of generators has a version."""
    start_s: float = START_S
    turn_s: float = 0.0
    """Of the process that runs the rollouts, for each turn: rendering, parsing, messages. One Python thread does that."""


def run_rates(config: RunConfig, sizes: ModelSizes, gpu: Gpu) -> Rates:
    """Of a config on GPUs of one kind."""
    engine, trainer = device_rates(config, sizes, gpu)
    # From the hosts of the trainer to all hosts of generators, each of which others read from next.
    generators = config.generator.replicas * config.generator.engine.tensor_parallel_degree
    readers = math.ceil(generators / GPUS_PER_HOST) / max(1, config.trainer.ranks // GPUS_PER_HOST)
    rounds = math.ceil(math.log(readers + 1, READERS_AT_ONCE + 1))
    fetch_s = rounds * version_bytes(config, sizes) / READER_BYTES_S
    return Rates(engine=engine, trainer=trainer, fetch_s=fetch_s, turn_s=TURN_S)
