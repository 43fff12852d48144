"""The thread between a generator's messages and its engine: who waits for a weight update, who doesn't, and how it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import get_args

import numpy as np
import pytest

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.engine_thread import EngineThread
from torchtitan.experiments.rl.generation.messages import (
    GenerateRequest,
    GenerateResult,
    GeneratorFailed,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
)
from torchtitan.experiments.rl.grpo import main
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import Manifest, SnapshotLayout

CANARY = np.array([1, 2, 3], np.int32)
MODES = get_args(WeightUpdate)


class FakeEngine:
    """Gives the oldest ``seats`` requests a token a step. A step waits, begun, until the test allows it."""

    def __init__(self, seats: int = 4):
        self.version = 0
        self.recomputed: list[int] = []
        self.closed = False
        self.begun = self.ended = 0
        self.allowed = threading.Semaphore(0)
        self.breaks: Exception | None = None
        self.refuses_load = False
        self._seats = seats
        self._open: dict[int, tuple] = {}

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def add(self, request) -> RequestFailed | None:
        if isinstance(request, GenerateRequest) and request.sampling.max_tokens > 1000:
            return RequestFailed(request_id=request.request_id, cause="too long")
        self._open[request.request_id] = (request, [])
        return None

    def step(self) -> list:
        self.begun += 1
        self.allowed.acquire()
        self.ended += 1
        if self.breaks is not None:
            raise self.breaks
        results = []
        for request_id, (request, versions) in list(self._open.items())[: self._seats]:
            versions.append(self.version)
            if isinstance(request, ScoreRequest):
                results.append(ScoreResult(request_id=request_id, logprobs=np.full(3, self.version, np.float32)))
            elif len(versions) == request.sampling.max_tokens:
                results.append(GenerateResult(request_id=request_id, completion=completion_of(versions)))
            else:
                continue
            del self._open[request_id]
        return results

    def withdraw(self) -> list:
        fresh = [request for request, versions in self._open.values() if not versions]
        for request in fresh:
            del self._open[request.request_id]
        return fresh

    def load(self, manifest, path, *, recompute: bool) -> dict:
        if self.refuses_load:
            raise RunError("fingerprint")
        assert not any(not versions for _, versions in self._open.values()), "a request without a token was not withdrawn"
        self.version = manifest.version
        self.recomputed += [self.version] if recompute else []
        return {"fingerprint": "f", "verify_s": 0.0, "reload_s": 0.0}

    def abort(self, request_ids) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def close(self) -> None:
        self.closed = True


def completion_of(versions: list[int]) -> Completion:
    count = len(versions)
    return Completion(
        token_ids=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
        policy_versions=np.array(versions, np.int32),
        finish_reason="length",
    )


class Harness:
    """An engine thread over a fake engine, and what it delivered."""

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        self.delivered: list = []
        self.thread = EngineThread(self.delivered.extend)

    def submit(self, *requests) -> None:
        self.thread.submit(list(requests))

    async def step(self, count: int = 1) -> None:
        """Allow ``count`` steps, or as many as there are to make. The next has then begun: it ends before any later command."""
        await self._settle()
        for _ in range(count):
            if self.engine.begun > (ended := self.engine.ended):
                self.engine.allowed.release()
                await until(lambda ended=ended: self.engine.ended > ended)
            await self._settle()

    async def _settle(self) -> None:
        """Return when a step waits to be allowed, or there is none to make."""
        idle = asyncio.ensure_future(self.thread.call(lambda: not self.engine.busy))
        await until(lambda: self.engine.begun > self.engine.ended or (idle.done() and (idle.exception() or idle.result())))

    async def update(self, version: int, how: str) -> asyncio.Task:
        """Ask for an update; the command is in the queue when this returns."""
        task = asyncio.create_task(self.thread.update_weights(manifest(version), "path", CANARY, how))
        await asyncio.sleep(0)
        return task

    def versions(self) -> dict[int, list[int]]:
        """Of every completion delivered, by request."""
        return {r.request_id: r.completion.policy_versions.tolist() for r in self.delivered}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(FakeEngine())
    await made.thread.start(lambda: made.engine)
    yield made
    made.engine.allowed.release(1000)
    await asyncio.wait_for(made.thread.stop(), 10)


def manifest(version: int) -> Manifest:
    layout = SnapshotLayout(entries=(), nbytes=0)
    return Manifest(version=version, layout=layout, path="path", host="here", fingerprint="f", payload_key=None)


def generate(request_id: int, tokens: int) -> GenerateRequest:
    sampling = SamplingConfig(max_tokens=tokens)
    return GenerateRequest(request_id=request_id, prompt_token_ids=CANARY, sampling=sampling, seed=0, stop_token_ids=[])


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# ---- what becomes of requests


@pytest.mark.parametrize("how", ["keep", "recompute"])
async def test_completions_under_way_go_on_under_the_new_version_at_once(harness, how):
    harness.submit(generate(1, 4))
    await harness.step()
    update = await harness.update(1, how)
    await harness.step(3)
    assert harness.versions() == {1: [0, 0, 1, 1]}
    assert (await update).version == 1
    assert harness.engine.recomputed == ([1] if how == "recompute" else [])


async def test_draining_ends_what_has_tokens_and_keeps_everything_else_for_the_new_version(harness):
    harness.submit(*(generate(i, 3) for i in range(6)))  # four of them find a seat
    await harness.step()
    update = await harness.update(1, "drain")
    harness.submit(generate(6, 1))
    await harness.step()
    assert not update.done() and harness.versions() == {}
    await harness.step()
    assert harness.versions() == {i: [0, 0, 0] for i in range(4)}
    await harness.step(4)
    assert (await update).version == 1
    assert harness.versions() == {i: [0, 0, 0] for i in range(4)} | {4: [1, 1, 1], 5: [1, 1, 1], 6: [1]}


@pytest.mark.parametrize("how", MODES)
async def test_nothing_without_a_token_starts_under_the_old_version(harness, how):
    harness.submit(*(generate(i, 1) for i in range(20)))
    await harness.step()
    update = await harness.update(1, how)
    # The engine waits inside its step when the update is asked for: four more may have begun by then.
    await harness.step(6)
    await update
    versions = harness.versions()
    assert len(versions) == 20 and [versions[i] for i in range(4)] == [[0]] * 4
    assert [versions[i] for i in range(8, 20)] == [[1]] * 12


@pytest.mark.parametrize("how", MODES)
async def test_the_canary_is_scored_before_all_that_waited(harness, how):
    harness.submit(*(generate(i, 2) for i in range(40)))
    await harness.step()
    update = await harness.update(1, how)
    await harness.step(2)  # those with tokens end, and one step more
    receipt = await asyncio.wait_for(update, 10)
    np.testing.assert_array_equal(receipt.canary_logprobs, np.ones(3))
    assert len(harness.delivered) < 10


@pytest.mark.parametrize("how", MODES)
async def test_an_idle_engine_takes_new_weights_without_a_request_to_wake_it(harness, how):
    update = await harness.update(1, how)
    await harness.step()
    assert (await asyncio.wait_for(update, 10)).version == 1


@pytest.mark.parametrize("how", MODES)
async def test_two_updates_asked_for_at_once_are_made_in_turn_each_with_its_own_canary(harness, how):
    harness.submit(generate(1, 3))
    await harness.step()
    updates = [await harness.update(1, how), await harness.update(2, how)]
    harness.submit(generate(2, 1))
    await harness.step(5)
    receipts = await asyncio.wait_for(asyncio.gather(*updates), 10)
    assert [(r.version, r.canary_logprobs.tolist()) for r in receipts] == [(1, [1.0] * 3), (2, [2.0] * 3)]
    assert harness.engine.version == 2 and set(harness.versions()) == {1, 2}
    if how == "drain":
        assert harness.versions()[1] == [0, 0, 0]


async def test_a_canary_asked_for_while_draining_is_scored_with_the_new_weights(harness):
    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "drain")
    canary = asyncio.create_task(harness.thread.score_canary(CANARY))
    await harness.step(4)
    assert (await asyncio.wait_for(canary, 10)).tolist() == [1.0] * 3
    assert update.done()


# ---- how it ends


async def test_requests_can_be_aborted_while_the_engine_drains(harness):
    harness.submit(generate(1, 500), generate(2, 2))
    await harness.step()
    update = await harness.update(1, "drain")
    harness.submit(generate(3, 1), generate(4, 1))
    harness.thread.abort([1, 3])
    await harness.step(3)
    assert (await asyncio.wait_for(update, 10)).version == 1
    assert harness.versions() == {2: [0, 0], 4: [1]}


async def test_a_request_that_waited_and_can_not_run_is_refused_alone(harness):
    harness.submit(generate(1, 2))
    await harness.step()
    update = await harness.update(1, "drain")
    harness.submit(generate(2, 1001), generate(3, 1))
    await harness.step(3)
    await asyncio.wait_for(update, 10)
    assert [(r.request_id, type(r)) for r in harness.delivered] == [
        (1, GenerateResult),
        (2, RequestFailed),
        (3, GenerateResult),
    ]


@pytest.mark.parametrize("how", MODES)
async def test_a_refused_snapshot_fails_its_update_alone_and_lets_go_of_what_waited(harness, how):
    harness.engine.refuses_load = True
    harness.submit(*(generate(i, 2) for i in range(6)))
    await harness.step()
    update = await harness.update(1, how)
    await harness.step(5)
    with pytest.raises(RunError, match="fingerprint"):
        await asyncio.wait_for(update, 10)
    assert harness.versions() == {i: [0, 0] for i in range(6)}
    harness.engine.refuses_load = False
    update = await harness.update(1, how)
    await harness.step()
    assert (await asyncio.wait_for(update, 10)).version == 1


@pytest.mark.parametrize("how", MODES)
async def test_an_engine_that_fails_ends_every_update_that_waits_for_it_and_those_asked_for_later(harness, how):
    harness.submit(generate(1, 5), generate(2, 5))
    await harness.step()
    updates = [await harness.update(1, how), await harness.update(2, how)]
    harness.engine.breaks = ValueError("out of memory")
    await harness.step()
    for update in (*updates, await harness.update(3, how)):
        with pytest.raises(RunError, match="the engine stopped: ValueError: out of memory"):
            await asyncio.wait_for(update, 10)
    assert [r.cause for r in harness.delivered if isinstance(r, GeneratorFailed)] == ["ValueError: out of memory"]


async def test_a_shutdown_while_draining_leaves_nobody_waiting(harness):
    harness.submit(generate(1, 500))
    await harness.step()
    update = await harness.update(1, "drain")
    stop = asyncio.create_task(harness.thread.stop())
    await asyncio.sleep(0)
    harness.engine.allowed.release()
    await asyncio.wait_for(stop, 10)
    with pytest.raises(RunError, match="shut down"):
        await asyncio.wait_for(update, 10)
    assert harness.engine.closed


async def test_whoever_gives_up_on_an_update_does_not_stop_the_engine(harness):
    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "drain")
    update.cancel()
    harness.submit(generate(2, 1))
    await harness.step(4)
    await until(lambda: set(harness.versions()) == {1, 2})


# ---- how it is chosen


@pytest.mark.parametrize("how", MODES)
def test_the_command_line_chooses_a_mode(how):
    assert main(["--config", "rl_grpo_qwen3_debug", "--generator.weight-update", how, "--dry-run"]) == 0


def test_a_mode_that_is_none_is_refused_with_the_modes_there_are(capsys):
    assert main(["--config", "rl_grpo_qwen3_debug", "--generator.weight-update", "sometimes", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--generator.weight-update" in line and all(f"'{how}'" in line for how in MODES)
