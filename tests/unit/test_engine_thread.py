"""The thread between a generator's messages and its engine: which requests wait for a weight update, and how an update ends."""

import asyncio
import pickle
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import cloudpickle
import numpy as np
import pytest
import torch

from tests.fakes.engine import (
    TABLE,
    ScriptedEngine,
    ScriptedEngineConfig,
    counting_table,
    digests_of,
    snapshot_of,
)
from tests.fakes.waiting import LIMIT_S
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.config import WeightUpdate
from torchtitan.experiments.rl.generation.engine import (
    GenerateRequest,
    GenerateResult,
    GeneratorFailed,
    GeneratorMessage,
    LoadReport,
    RequestFailed,
    Result,
)
from torchtitan.experiments.rl.generation.engine_thread import EngineThread
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.train import main
from torchtitan.experiments.rl.weights.snapshot import fingerprint

CANARY = np.array([1, 2, 3], np.int32)
MODES = get_args(WeightUpdate)


def table(version: int) -> torch.Tensor:
    """Of a version: after t comes t + 1 with probability 1 / (version + 2)."""
    return counting_table(1 / (version + 2))


def canary_logprobs(version: int) -> np.ndarray:
    """Of [1, 2, 3]: the first token has none, and each of the others follows the one before."""
    return np.array([0.0, -np.log(version + 2), -np.log(version + 2)])


class Changes:
    """Wakes a test when the engine's thread has done something."""

    def __init__(self):
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    def notify(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._event.set)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._event.clear()
                await self._event.wait()


class GatedEngine(ScriptedEngine):
    """Four requests get a token in a step. A step waits, begun, until the test allows it."""

    def __init__(self, changes: Changes):
        super().__init__(ScriptedEngineConfig(max_num_seqs=4, max_model_len=1000), table(0))
        self.begun = self.ended = 0
        self.allowed = threading.Semaphore(0)
        self.breaks: Exception | None = None
        self.pulse: Callable[[], Any] = lambda: None
        self._changes = changes

    def step(self) -> list[Result]:
        self.begun += 1
        self._changes.notify()
        self.allowed.acquire()
        self.ended += 1
        self._changes.notify()
        if self.breaks is not None:
            raise self.breaks
        return super().step()

    def load(self, *args, **kwargs) -> LoadReport:
        self.pulse_in_load = self.pulse()
        report = super().load(*args, **kwargs)
        self._changes.notify()
        return report


class Harness:
    """An engine thread over a gated engine, and what it delivered."""

    def __init__(self):
        self.changes = Changes()
        self.engine = GatedEngine(self.changes)
        self.delivered: list[GeneratorMessage] = []
        self.thread = EngineThread(self._deliver)

    def _deliver(self, results: Sequence[GeneratorMessage]) -> None:
        self.delivered.extend(results)
        self.changes.notify()

    def submit(self, *requests) -> None:
        self.thread.submit(list(requests))

    async def step(self, count: int = 1) -> None:
        """Allow ``count`` steps, or as many as there are to make. The next has then begun: it ends before any later command."""
        await self._settle()
        for _ in range(count):
            if self.engine.begun > (ended := self.engine.ended):
                self.engine.allowed.release()
                await self.changes.until(lambda ended=ended: self.engine.ended > ended)
            await self._settle()

    async def _settle(self) -> None:
        """Return when a step waits to be allowed, or there is none to make."""

        def idle() -> bool:
            return not self.engine.busy and self.thread._after_drain is None

        while self.engine.begun == self.engine.ended:
            asked = asyncio.ensure_future(self.thread.call(idle))
            asked.add_done_callback(lambda _: self.changes.notify())
            await self.changes.until(
                lambda asked=asked: self.engine.begun > self.engine.ended or asked.done()
            )
            if asked.done() and (asked.exception() or asked.result()):
                return

    async def update(
        self,
        version: int,
        how: WeightUpdate,
        *,
        gone: bool = False,
        verify: bool = True,
        taken: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> asyncio.Task:
        """Ask for an update; the command is in the queue when this returns.

        Args:
            gone: there is no snapshot any more.
            taken: returns when the trainer has taken the digests.
        """
        manifest = snapshot_of(version, table(version))
        if gone:
            manifest = replace(
                manifest, parts=(manifest.parts[0]._replace(handle="/proc/self/fd/99999"),)
            )

        async def digests() -> dict[str, str]:
            await taken()
            return manifest.digests

        task = asyncio.create_task(
            self.thread.update_weights(manifest, CANARY, how, digests=digests() if verify else None)
        )
        await asyncio.sleep(0)
        return task

    def versions(self) -> dict[int, list[int]]:
        """Of every completion delivered, by request."""
        return {r.request_id: r.completion.policy_versions.tolist() for r in self.delivered}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    await made.thread.start(lambda: made.engine)
    yield made
    made.engine.allowed.release(1000)
    await asyncio.wait_for(made.thread.stop(), LIMIT_S)


def generate(request_id: int, tokens: int) -> GenerateRequest:
    sampling = SamplingConfig(max_tokens=tokens)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=CANARY,
        sampling=sampling,
        seed=request_id,
        stop_token_ids=[],
    )


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
    assert harness.versions() == {i: [0, 0, 0] for i in range(4)} | {
        4: [1, 1, 1],
        5: [1, 1, 1],
        6: [1],
    }


@pytest.mark.parametrize("how", MODES)
async def test_an_engine_sleeps_when_what_has_tokens_is_done_and_wakes_with_the_next_version(
    harness, how
):
    harness.submit(*(generate(i, 2) for i in range(5)))  # four of them find a seat
    await harness.step()
    falling = asyncio.create_task(harness.thread.sleep())
    await asyncio.sleep(0)
    harness.submit(generate(5, 1))
    await harness.step()
    await falling
    assert harness.engine.asleep and harness.versions() == {i: [0, 0] for i in range(4)}
    harness.submit(generate(6, 1))
    update = await harness.update(1, how)
    await harness.step(3)
    assert (await update).version == 1 and not harness.engine.asleep
    assert harness.versions() == {i: [0, 0] for i in range(4)} | {4: [1, 1], 5: [1], 6: [1]}


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
    receipt = await asyncio.wait_for(update, LIMIT_S)
    np.testing.assert_allclose(receipt.canary_logprobs, canary_logprobs(1), rtol=1e-6)
    assert len(harness.delivered) < 10


async def test_a_load_is_work_that_may_take_long_and_says_of_which_version(harness):
    """A supervisor would kill a large model's engine as hung otherwise."""
    harness.engine.pulse = harness.thread._heartbeat.pulse
    update = await harness.update(1, "keep")
    await harness.step()
    await update
    assert (harness.engine.pulse_in_load.doing, harness.engine.pulse_in_load.slow) == (
        "loading version 1",
        True,
    )
    assert not harness.thread._heartbeat.pulse().slow


@pytest.mark.parametrize("how", MODES)
async def test_an_idle_engine_takes_new_weights_without_a_request_to_wake_it(harness, how):
    update = await harness.update(1, how)
    await harness.step()
    assert (await asyncio.wait_for(update, LIMIT_S)).version == 1


@pytest.mark.parametrize("how", MODES)
async def test_two_updates_asked_for_at_once_are_made_in_turn_each_with_its_own_canary(
    harness, how
):
    harness.submit(generate(1, 3))
    await harness.step()
    updates = [await harness.update(1, how), await harness.update(2, how)]
    harness.submit(generate(2, 1))
    await harness.step(5)
    receipts = await asyncio.wait_for(asyncio.gather(*updates), LIMIT_S)
    assert [receipt.version for receipt in receipts] == [1, 2]
    for receipt in receipts:
        np.testing.assert_allclose(
            receipt.canary_logprobs, canary_logprobs(receipt.version), rtol=1e-6
        )
    assert harness.engine.version == 2 and set(harness.versions()) == {1, 2}
    if how == "drain":
        assert harness.versions()[1] == [0, 0, 0]


async def test_a_canary_asked_for_while_draining_is_scored_with_the_new_weights(harness):
    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "drain")
    canary = asyncio.create_task(harness.thread.score_canary(CANARY))
    while not canary.done():  # the engine may be idle for a moment, when the update's canary is scored and this one not asked
        await harness.step()
    np.testing.assert_allclose(canary.result(), canary_logprobs(1), rtol=1e-6)
    assert update.done()


# ---- how it ends


async def test_requests_can_be_aborted_while_the_engine_drains(harness):
    harness.submit(generate(1, 500), generate(2, 2))
    await harness.step()
    update = await harness.update(1, "drain")
    harness.submit(generate(3, 1), generate(4, 1))
    harness.thread.abort([1, 3])
    await harness.step(3)
    assert (await asyncio.wait_for(update, LIMIT_S)).version == 1
    assert harness.versions() == {2: [0, 0], 4: [1]}


async def test_a_request_that_waited_and_can_not_run_is_refused_alone(harness):
    harness.submit(generate(1, 2))
    await harness.step()
    update = await harness.update(1, "drain")
    harness.submit(generate(2, 998), generate(3, 1))
    await harness.step(3)
    await asyncio.wait_for(update, LIMIT_S)
    assert [(r.request_id, type(r)) for r in harness.delivered] == [
        (1, GenerateResult),
        (2, RequestFailed),
        (3, GenerateResult),
    ]


@pytest.mark.parametrize("how", MODES)
async def test_a_snapshot_that_is_gone_fails_its_update_alone_and_lets_go_of_what_waited(
    harness, how
):
    harness.submit(*(generate(i, 2) for i in range(6)))
    await harness.step()
    update = await harness.update(1, how, gone=True)
    await harness.step(5)
    with pytest.raises(RunError, match="the weights at /proc/self/fd/99999 are gone"):
        await asyncio.wait_for(update, LIMIT_S)
    assert harness.versions() == {i: [0, 0] for i in range(6)}
    update = await harness.update(1, how)
    await harness.step()
    assert (await asyncio.wait_for(update, LIMIT_S)).version == 1


async def test_a_canary_that_fails_in_a_step_fails_its_update(harness):
    step = harness.engine.step
    harness.engine.step = lambda: [
        RequestFailed(request_id=result.request_id, cause="no logits") for result in step()
    ]
    update = await harness.update(1, "keep")
    await harness.step()
    with pytest.raises(RunError, match="^the canary: no logits$"):
        await asyncio.wait_for(update, LIMIT_S)


@pytest.mark.parametrize("how", MODES)
async def test_an_engine_that_fails_ends_every_update_that_waits_for_it_and_those_asked_for_later(
    harness, how
):
    harness.submit(generate(1, 5), generate(2, 5))
    await harness.step()
    updates = [await harness.update(1, how), await harness.update(2, how)]
    harness.engine.breaks = ValueError("out of memory")
    await harness.step()
    for update in (*updates, await harness.update(3, how)):
        with pytest.raises(RunError, match="the engine stopped: ValueError: out of memory"):
            await asyncio.wait_for(update, LIMIT_S)
    (failed,) = (r for r in harness.delivered if isinstance(r, GeneratorFailed))
    assert failed.cause.startswith("ValueError: out of memory (test_engine_thread.py:")


async def test_a_shutdown_while_draining_fails_the_update_that_waits(harness):
    harness.submit(generate(1, 500))
    await harness.step()
    update = await harness.update(1, "drain")
    stop = asyncio.create_task(harness.thread.stop())
    await asyncio.sleep(0)
    harness.engine.allowed.release()
    await asyncio.wait_for(stop, LIMIT_S)
    with pytest.raises(RunError, match="shut down"):
        await asyncio.wait_for(update, LIMIT_S)
    assert harness.engine.closed


async def test_a_caller_that_cancels_its_update_does_not_stop_the_engine(harness):
    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "drain")
    update.cancel()
    harness.submit(generate(2, 1))
    await harness.step(4)
    await harness.changes.until(lambda: set(harness.versions()) == {1, 2})


# ---- how it is chosen


@pytest.mark.parametrize("how", MODES)
def test_the_command_line_chooses_a_mode(how):
    assert (
        main(["--config", "rl_grpo_qwen3_debug", "--generator.weight-update", how, "--dry-run"])
        == 0
    )


def test_a_mode_that_is_none_is_refused_with_the_modes_there_are(capsys):
    assert (
        main(
            [
                "--config",
                "rl_grpo_qwen3_debug",
                "--generator.weight-update",
                "sometimes",
                "--dry-run",
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "--generator.weight-update" in line and all(f"'{how}'" in line for how in MODES)


@pytest.mark.parametrize("how", MODES)
async def test_an_engine_that_holds_other_weights_than_it_was_given_answers_nothing_with_them(
    harness, how, monkeypatch
):
    load = harness.engine.load

    def wrong(manifest, **how):
        return replace(load(manifest, **how), digests={TABLE: "of the version before"})

    monkeypatch.setattr(harness.engine, "load", wrong)
    harness.submit(generate(1, 2), generate(2, 2))
    await harness.step(2)
    update = await harness.update(1, how)
    harness.submit(generate(3, 2))
    await harness.step(5)
    expected = f"weights of version 1: the engine holds {TABLE} = of the version before, [0-9a-f]+ was published"
    with pytest.raises(RunError, match=expected):
        await asyncio.wait_for(update, LIMIT_S)
    (failed,) = [r for r in harness.delivered if isinstance(r, GeneratorFailed)]
    assert re.fullmatch(expected, failed.cause)
    assert {r.request_id for r in harness.delivered if isinstance(r, GenerateResult)} <= {1, 2}


async def test_an_engine_that_has_loaded_makes_no_step_before_the_trainer_has_taken_digests(
    harness,
):
    taken = asyncio.Event()
    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "keep", taken=taken.wait)
    harness.engine.allowed.release(1000)
    await harness.changes.until(lambda: harness.engine.version == 1)
    await asyncio.sleep(0.05)
    assert not update.done() and not harness.delivered
    taken.set()
    receipt = await asyncio.wait_for(update, LIMIT_S)
    assert receipt.fingerprint == fingerprint(digests_of(table(1)))
    await harness.changes.until(lambda: harness.versions() == {1: [0, 0, 1]})


async def test_an_engine_whose_weights_can_not_be_proven_answers_nothing_with_them(harness):
    async def dies() -> None:
        raise ConnectionError("the trainer is gone")

    harness.submit(generate(1, 3))
    await harness.step()
    update = await harness.update(1, "keep", taken=dies)
    harness.engine.allowed.release(1000)
    with pytest.raises(
        RunError, match="weights of version 1 can't be proven: ConnectionError: the trainer is gone"
    ):
        await asyncio.wait_for(update, LIMIT_S)
    await harness.changes.until(lambda: harness.delivered)
    assert [type(message) for message in harness.delivered] == [GeneratorFailed]


async def test_a_version_that_is_not_verified_has_no_fingerprint_and_its_canary(harness):
    harness.engine.allowed.release(1000)
    receipts = [
        await asyncio.wait_for(await harness.update(v, "keep", verify=v == 2), LIMIT_S)
        for v in (1, 2)
    ]
    assert [receipt.fingerprint for receipt in receipts] == ["", fingerprint(digests_of(table(2)))]
    assert all(len(receipt.canary_logprobs) == len(CANARY) for receipt in receipts)


def test_results_travel_whole_in_the_order_and_the_types_they_have():
    """They are pickled as bytes: every field of a completion arrives, and what is no array of numbers travels as it is."""
    completion = Completion(
        token_ids=np.array([3, 1], np.int32),
        logprobs=np.array([-0.5, -np.inf], np.float32),
        policy_versions=np.array([7, 8], np.int32),
        finish_reason="length",
        replica=2,
        routes=np.arange(6, dtype=np.uint8).reshape(3, 1, 2),
    )
    odd = replace(
        completion,
        token_ids=["a"],
        logprobs=np.zeros((1, 2)),
        policy_versions=np.array([object]),
        routes=None,
    )
    sent = [
        GenerateResult(request_id=number, completion=own)
        for number, own in enumerate((completion, odd))
    ]
    for result, arrived in zip(sent, pickle.loads(cloudpickle.dumps(sent)), strict=True):
        assert arrived.request_id == result.request_id
        for entry in fields(Completion):
            ours, theirs = (
                getattr(result.completion, entry.name),
                getattr(arrived.completion, entry.name),
            )
            assert type(theirs) is type(ours) and np.array_equal(theirs, ours)
            if isinstance(ours, np.ndarray):
                assert theirs.dtype == ours.dtype and theirs.flags.writeable
