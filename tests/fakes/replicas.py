"""Replicas of a generator as their client sees them, with an engine in place of a process."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fakes.engine import ScriptedEngine, ScriptedEngineConfig, counting_table
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.engine import Request
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion

PROMPT = np.array([6, 7, 0], np.int32)
STOP = 2
"""Token that ends a completion."""
TABLE = counting_table(0.5)
"""Table of the engines: after t comes t + 1 with probability 1/2, and each of the 15 others has
1/30. Greedy sampling counts up: after PROMPT come 1 and 2."""


class Endpoint:
    """Endpoint of an actor, or of the actors of a mesh: each way to call it calls ``function``.

    For ``call``, the function returns the answers of all actors by their number.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    async def call_one(self, *args: Any) -> Any:
        return self._function(*args)

    choose = call = call_one

    def broadcast(self, *args: Any) -> None:
        self._function(*args)


class Replica:
    """Replica that keeps the messages it gets.

    A scripted engine answers the requests that the test names, when it names them.
    """

    def __init__(self) -> None:
        self.engine = ScriptedEngine(ScriptedEngineConfig(max_num_seqs=1000), TABLE)
        self.messages: list[list[Request]] = []
        self.aborted: list[int] = []
        self.attach = Endpoint(self._attach)
        self.submit = Endpoint(self.messages.append)
        self.abort = Endpoint(self.aborted.extend)

    def _attach(self, client_id: Any, port: Any) -> None:
        self.port = port

    @property
    def requests(self) -> list[Any]:
        """Requests of all messages."""
        return [request for message in self.messages for request in message]

    async def answer(self, *requests: Request) -> None:
        """Finish ``requests`` (all so far where none is given), in one message."""
        results: list[Any] = []
        for request in requests or self.requests:
            assert self.engine.add(request) is None
        while self.engine.busy:
            results += self.engine.step()
        await self.send(results)

    async def send(self, results: list[Any]) -> None:
        """Send results to the client, and let it take them."""
        self.port.put_nowait(results)
        await settle()


class FakeChannel:
    """Channel of Monarch between actors, in one process."""

    @staticmethod
    def open() -> tuple[Any, Any]:
        results: asyncio.Queue[Any] = asyncio.Queue()
        return results, type("Receiver", (), {"recv": results.get})


def open_session(client: GeneratorClient, seed: int = 0, max_tokens: int = 10) -> PolicySession:
    """Open a session that samples greedily until STOP."""
    sampling = SamplingConfig(max_tokens=max_tokens, temperature=0.0)
    return client.session(
        rollout_id=f"r{seed}", seed=seed, sampling=sampling, stop_token_ids=[STOP]
    )


def generate(
    session: PolicySession, prompt: np.ndarray = PROMPT, *, max_tokens: int = 10
) -> "asyncio.Task[Completion]":
    """Ask for a completion, and return the task that waits for it."""
    return asyncio.create_task(session.generate(prompt, max_tokens=max_tokens))
