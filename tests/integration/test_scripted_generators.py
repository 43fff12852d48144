"""Generators, their client and their engine threads over a real mesh, with an engine whose every probability is known.

Each version is a table of its own, so a token's log-probability tells which version sampled it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torchstore

from tests.fakes.engine import TABLE, ScriptedEngineConfig, save_table
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig, WeightUpdate
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.reader import start_store

REPLICAS = 2
VOCABULARY = 64
MODES = get_args(WeightUpdate)
VERSIONS = 6
"""Published in each mode."""
SESSIONS = 24
"""At once: three times as many as both replicas' engines take into a step."""
CANARY = np.arange(8, dtype=np.int32)


def table_of(version: int) -> torch.Tensor:
    """No two versions agree on any token."""
    return torch.randn(
        VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(version)
    ).softmax(-1)


TABLES = {
    version: table_of(version).double().numpy() for version in range(len(MODES) * VERSIONS + 1)
}


def logprobs_of(version: int, token_ids: np.ndarray) -> np.ndarray:
    """[L - 1], of every token but the first."""
    return np.log(TABLES[version][token_ids[:-1], token_ids[1:]])


@pytest.fixture(scope="module")
def meshes(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """For each test its own generators, by name; all in the same processes, because a process takes its time to start."""
    folder = tmp_path_factory.mktemp("generators")
    path = save_table(table_of(0), folder)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    procs = spawn_on(None, "generator", [Place(0, share) for share in (cores,) * REPLICAS], "cpu")[
        0
    ]

    def generators(name: str, how: WeightUpdate) -> Any:
        # 50 tokens take 50 ms, longer than the client takes to ask for more: every update finds completions running.
        engine = ScriptedEngineConfig(max_model_len=4096, step_s=0.001)
        config = GeneratorConfig(replicas=REPLICAS, weight_update=how, engine=engine)
        return procs.spawn(
            name, Generator, config, model_path=path, device="cpu", run_dir=str(folder), role=name
        )

    async def build() -> dict[str, Any]:
        made = {how: generators(how, how) for how in MODES} | {
            "failing": generators("failing", "keep")
        }
        await start_store(procs.slice(procs=0))
        for mesh in made.values():
            await mesh.setup.call()
        return made

    async def close() -> None:
        await torchstore.shutdown()  # a process has one store at a time
        await shut_down(made.values(), [procs])

    made = asyncio.run(build())
    yield made
    asyncio.run(close())


@asynccontextmanager
async def connected(mesh: Any) -> AsyncIterator[GeneratorClient]:
    client = GeneratorClient()
    try:
        for index in range(REPLICAS):
            await client.admit(index, mesh.slice(procs=index))
        yield client
    finally:
        client.close()


@dataclass
class Load:
    """Sessions that start a conversation when they end one, while versions change; and all they were answered."""

    client: GeneratorClient
    turns: list[tuple[np.ndarray, Completion, int]] = field(default_factory=list)
    """Prompt, completion, and the version that was live when it was requested."""
    scores: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    requested: int = 0
    cancelled: int = 0
    over: bool = False
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def converse(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self.over:
            own, sampling = int(random.integers(2**62)), SamplingConfig(max_tokens=200)
            session = self.client.session(
                rollout_id=str(seed), seed=own, sampling=sampling, stop_token_ids=[]
            )
            prompt = random.integers(0, VOCABULARY, 3).astype(np.int32)
            for _ in range(3):
                completion = await self._turn(session, prompt, tokens=int(random.integers(1, 100)))
                prompt = np.concatenate([prompt, completion.token_ids])
            session.close()

    async def _turn(self, session, prompt: np.ndarray, tokens: int) -> Completion:
        self.requested += 1
        live = self.client.version
        completion = await session.generate(prompt, max_tokens=tokens)
        assert len(completion.token_ids) == tokens
        self.turns.append((prompt, completion, live))
        self.progress.set()
        return completion

    async def score(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self.over:
            token_ids = random.integers(0, VOCABULARY, 50).astype(np.int32)
            self.scores.append((token_ids, await self.client.score(token_ids)))

    async def cancel(self, seed: int) -> None:
        """Requests far too long to finish, given up while they run or wait."""
        while not self.over:
            session = self.client.session(
                rollout_id="c",
                seed=seed,
                sampling=SamplingConfig(max_tokens=4000),
                stop_token_ids=[],
            )
            request = asyncio.create_task(session.generate(CANARY, max_tokens=4000))
            await self.more_turns(1)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            self.cancelled += 1
            session.close()

    async def more_turns(self, count: int) -> None:
        """Return when ``count`` more turns were answered."""
        enough = len(self.turns) + count
        while len(self.turns) < enough:
            self.progress.clear()
            await self.progress.wait()


@pytest.mark.parametrize("how", MODES)
async def test_weight_updates_under_load_lose_no_request_and_label_every_token(how, meshes):
    # The modes share a store: each has versions of its own.
    versions = range(MODES.index(how) * VERSIONS + 1, (MODES.index(how) + 1) * VERSIONS + 1)
    publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)
    async with asyncio.timeout(120), connected(meshes[how]) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as tasks:
            for seed in range(SESSIONS):
                tasks.create_task(load.converse(seed))
            tasks.create_task(load.score(100))
            tasks.create_task(load.cancel(200))
            for version in versions:
                await load.more_turns(SESSIONS)
                publisher.write(version, {TABLE: table_of(version)})
                await publisher.announce(False)
                await publisher.prove()
                for receipt in (await client.update_weights(version, CANARY)).values():
                    assert receipt.version == version
                    np.testing.assert_allclose(
                        receipt.canary_logprobs[1:], logprobs_of(version, CANARY), rtol=1e-5
                    )
            await load.more_turns(SESSIONS)
            load.over = True
        assert load.requested == len(load.turns) and load.cancelled > 0
        assert client._open == {} and not any(client._router.load.values())
        assert client.generated_tokens == sum(
            len(completion.token_ids) for _, completion, _ in load.turns
        )

    seen, mixed = set(), 0
    for prompt, completion, live in load.turns:
        labels = completion.policy_versions
        seen.update(labels.tolist())
        mixed += labels[0] != labels[-1]
        assert (np.diff(labels) >= 0).all() and labels[0] >= live
        tokens = np.concatenate([prompt[-1:], completion.token_ids])
        expected = np.array([logprobs_of(version, tokens)[i] for i, version in enumerate(labels)])
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-6)
    assert seen == {0, *versions}
    assert mixed == 0 if how == "drain" else mixed > 0
    for token_ids, logprobs in load.scores:
        agrees = [
            np.allclose(logprobs[1:], logprobs_of(version, token_ids), rtol=1e-5)
            for version in (0, *versions)
        ]
        assert sum(agrees) == 1, "one version scored all of them"


async def test_a_generator_whose_engine_fails_ends_every_request_with_the_cause(meshes):
    async with asyncio.timeout(60), connected(meshes["failing"]) as client:
        sampling = SamplingConfig(max_tokens=10)
        session = client.session(rollout_id="r", seed=0, sampling=sampling, stop_token_ids=[])
        # The table has no row for this token, and the scripted engine does not look before it samples.
        outside = np.array([VOCABULARY], np.int32)
        with pytest.raises(RunError, match="a generator stopped: IndexError"):
            await session.generate(outside, max_tokens=1)
        with pytest.raises(RunError, match="a generator stopped: IndexError"):
            await client.score(CANARY)
