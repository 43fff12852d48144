"""How busy processes are and how full engines: what is measured, and what the metrics say."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.fakes.clock import Clock
from torchtitan.experiments.rl.generation.engine import Occupancy
from torchtitan.experiments.rl.generation.engine_thread import EngineUsage
from torchtitan.experiments.rl.process import heartbeat
from torchtitan.experiments.rl.process.heartbeat import Heartbeat
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.watch import profile
from torchtitan.experiments.rl.watch.profile import lap_usage


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(100.0)
    monkeypatch.setattr(heartbeat.time, "monotonic", clock)
    return clock


def test_busy_is_the_share_of_the_time_that_was_work_since_the_last_lap(clock):
    beat = Heartbeat()
    with beat.work("a"):
        clock.now += 3
        beat.beat()
    clock.now += 1
    assert beat.lap_busy() == 3 / 4
    assert beat.lap_busy() == 0.0, "no time has passed"
    clock.now += 2
    with pytest.raises(ValueError), beat.work("b"):
        clock.now += 2
        raise ValueError
    assert beat.lap_busy() == 1 / 2


def test_a_process_without_a_working_thread_says_nothing_of_its_work(clock):
    beat = Heartbeat()
    clock.now += 1
    assert beat.lap_busy() is None


def test_work_under_way_counts_when_it_ends_and_no_share_is_above_one(clock):
    beat = Heartbeat()
    work = beat.work("long")
    with work:
        clock.now += 9
        assert beat.lap_busy() == 0.0
        clock.now += 1
    assert beat.lap_busy() == 1.0, "10 s of work ended in a lap of 1 s"


def test_an_engine_s_usage_is_the_mean_over_its_steps():
    usage = EngineUsage()
    assert usage.lap() == {"steps": 0, "running": 0, "waiting": 0, "cache_max": 0}
    for running, waiting, cache in ((4, 2, 0.5), (2, 0, 0.75), (0, 1, 0.25)):
        usage.add(Occupancy(running=running, waiting=waiting, cache=cache))
    assert usage.lap() == {"steps": 3, "running": 2, "waiting": 1, "cache_max": 0.75}
    assert usage.lap()["steps"] == 0


def test_the_cached_share_of_prompts_is_that_of_the_requests_that_finished_since():
    usage = EngineUsage()
    for tokens, cached in ((0, 0), (100, 25)):
        usage.add(
            Occupancy(
                running=1, waiting=0, cache=0, prompt_tokens=tokens, prompt_tokens_cached=cached
            )
        )
    assert usage.lap()["prompts_cached"] == 0.25
    assert "prompts_cached" not in usage.lap(), "none has finished"
    usage.add(Occupancy(running=1, waiting=0, cache=0, prompt_tokens=300, prompt_tokens_cached=175))
    assert usage.lap()["prompts_cached"] == 0.75


class Process:
    def __init__(self, answer):
        self.usage = SimpleNamespace(choose=answer)


async def test_each_process_has_metrics_of_its_own_and_one_that_does_not_answer_has_none(
    monkeypatch,
):
    monkeypatch.setattr(profile, "USAGE_TIMEOUT_S", 0.05)

    async def answers():
        return {"busy": 0.25, "running": 3.0}

    async def fails():
        raise ValueError("boom")

    async def hangs():
        await asyncio.Event().wait()

    dead = Lifetime("trainer rank 1")
    dead.end("killed by SIGKILL")
    processes = [
        (Lifetime("trainer rank 0"), Process(fails)),
        (dead, Process(answers)),
        (Lifetime("generator 0"), Process(answers)),
        (Lifetime("rollout worker 0"), Process(hangs)),
    ]
    assert await lap_usage(processes) == {
        "perf/generator_0/busy": 0.25,
        "perf/generator_0/running": 3.0,
    }
