"""Endpoints of the run's actors: whatever one raises reaches the caller as a RunError of one sentence."""

import asyncio
import inspect
import json
import pickle
import pkgutil
import re
import threading
from importlib import import_module

import pytest
import torch
from monarch.actor import Actor, this_host

import torchtitan.experiments.rl as library
from torchtitan.experiments.rl.compat.monarch import original
from torchtitan.experiments.rl.errors import ConfigError, PeerGone, RunError
from torchtitan.experiments.rl.process.actor import (
    cause_in,
    for_a_future,
    reported,
    reported_endpoint,
)
from torchtitan.experiments.rl.process.logs import set_up_logging

WAIT_S = 60


class Unpicklable(Exception):
    """Holds a lock, as an engine's exception may hold the engine."""

    def __init__(self, text: str):
        super().__init__(text)
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    def __reduce__(self):
        raise ValueError("no reduce")


class NotMadeAgain(Exception):
    """Pickled by its message, of which its constructor can't make it."""

    def __init__(self, size: int, limit: int):
        super().__init__(f"{size} exceeds {limit}")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def of_cpp() -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def local_class() -> None:
    class Local(Exception): ...

    raise Local("of a function")


def chained() -> None:
    try:
        raise Unpicklable("the first")
    except Unpicklable as error:
        raise KeyError("the second") from error


def raising(error):
    def raise_() -> None:
        raise error()

    return raise_


CASES = {
    "unpicklable": (raising(lambda: Unpicklable("out of memory")), "Unpicklable: out of memory"),
    "reduce_raises": (raising(lambda: ReduceRaises("bad config")), "ReduceRaises: bad config"),
    "not_made_again": (raising(lambda: NotMadeAgain(3, 2)), "NotMadeAgain: 3 exceeds 2"),
    "config": (
        raising(lambda: ConfigError("steps", 0, "be at least 1")),
        "steps = 0: be at least 1",
    ),
    "mute": (raising(lambda: Mute()), "Mute: its message can't be read (ValueError in __str__)"),
    "exits": (raising(lambda: SystemExit(3)), "SystemExit: 3"),
    "interrupts": (raising(KeyboardInterrupt), "KeyboardInterrupt"),
    "cancels": (raising(asyncio.CancelledError), "CancelledError"),
    "stops": (raising(StopIteration), "StopIteration"),
    "local_class": (local_class, "Local: of a function"),
    "chained": (chained, "KeyError: 'the second'"),
    "cpp": (of_cpp, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
    "own": (raising(lambda: RunError("the loss is nan")), "the loss is nan"),
    "own_with_name": (raising(lambda: RunError("worker 0: the loss is nan")), "the loss is nan"),
    "lines": (
        raising(lambda: ValueError("first\nsecond\n  third")),
        "ValueError: first second third",
    ),
}


class Worker(Actor):
    def __init__(self, run_dir: str):
        self.process_name = "worker 0"
        set_up_logging(run_dir, "worker-0")

    @reported_endpoint
    async def fail(self, case: str) -> None:
        if case == "stops":  # a coroutine can't raise it
            await asyncio.get_running_loop().run_in_executor(None, _stopped)
        CASES[case][0]()

    @reported_endpoint
    async def answer(self, number: int) -> int:
        """Twice the number."""
        return 2 * number


def _stopped() -> None:
    try:
        CASES["stops"][0]()
    except StopIteration as error:
        raise for_a_future(error) from error


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    procs = this_host().spawn_procs(per_host={"procs": 1}, name="worker")
    yield procs.spawn("worker", Worker, str(run_dir)), run_dir
    procs.stop().get()


@pytest.mark.parametrize("case", CASES)
def test_what_an_endpoint_raises_arrives_as_a_sentence_and_its_traceback_is_in_the_log(
    worker, case
):
    actor, run_dir = worker
    with pytest.raises(Exception) as caught:
        actor.fail.call_one(case).get(timeout=WAIT_S)
    error = original(caught.value)
    assert type(error) is RunError
    assert (
        re.sub(r" \(\w+\.py:\d+\)$", "", str(error)) == f"worker 0: {CASES[case][1]}"
    )  # which may name the place too
    lines = [
        json.loads(line) for line in (run_dir / "logs" / "worker-0.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["message"] == "worker 0: fail failed" and "Traceback" in lines[-1]["exception"]
    assert actor.answer.call_one(21).get(timeout=WAIT_S) == 42  # the actor lives on


class Local:
    """An actor's methods, called where they are."""

    process_name = "worker 0"

    async def fail(self) -> None:
        chained()

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def lack(self) -> None:
        raise PeerGone("the weights are gone")


async def test_the_error_that_arrives_keeps_nothing_of_the_one_that_was_raised():
    with pytest.raises(RunError) as caught:
        await reported(Local.fail)(Local())
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    assert str(pickle.loads(pickle.dumps(caught.value))).startswith(
        "worker 0: KeyError: 'the second' (test_actor_errors.py:"
    )


async def test_an_error_that_may_follow_from_a_death_arrives_as_that():
    with pytest.raises(PeerGone) as caught:
        await reported(Local.lack)(Local())
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert type(arrived) is PeerGone and str(arrived) == "worker 0: the weights are gone"


async def test_a_call_that_this_process_cancels_is_cancelled():
    call = asyncio.create_task(reported(Local.wait)(Local()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_sentence_has_no_end_that_fills_a_screen():
    assert len(cause_in(ValueError("x" * 100_000))) < 1000


def test_every_endpoint_of_every_actor_of_the_library_reports():
    actors = {
        value
        for module in pkgutil.walk_packages(library.__path__, f"{library.__name__}.")
        if not module.name.endswith(".__main__")
        for value in vars(import_module(module.name)).values()
        if inspect.isclass(value)
        and issubclass(value, Actor)
        and value.__module__.startswith(library.__name__)
    }
    actors = {
        actor for actor in actors if not actor.__module__.endswith("compat.torchstore")
    }  # torchstore's own
    names = {
        "Controller",
        "Evaluator",
        "Generator",
        "HostKeeper",
        "ModelServer",
        "PolicyTrainer",
        "RolloutWorker",
        "WatchedActor",
        "WeightReader",
    }
    assert {actor.__name__ for actor in actors} == names
    for actor in actors:
        endpoints = {
            name: value for name, value in inspect.getmembers(actor) if hasattr(value, "_method")
        }
        assert endpoints
        for name, endpoint in endpoints.items():
            # Monarch's wrapper, then what ``reported`` made of the method.
            codes = {getattr(function, "__code__", None) for function in wrapped(endpoint._method)}
            assert reported(Local.fail).__code__ in codes, (
                f"{actor.__name__}.{name}: its exception may never reach the caller"
            )
        assert hasattr(actor, "process_name") or "self.process_name = " in inspect.getsource(
            actor.__init__
        )


def wrapped(function) -> list:
    """A function and those it wraps."""
    return [function, *(wrapped(function.__wrapped__) if hasattr(function, "__wrapped__") else [])]
