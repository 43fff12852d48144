"""A generator of two replicas whose versions are random models, and what transformers says of tokens sampled with these."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torchstore
from monarch.actor import Channel, concurrent_endpoint
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from torchtitan.experiments.rl.fleet.spawn import shut_down
from torchtitan.experiments.rl.generation.config import GeneratorConfig, WeightUpdate
from torchtitan.experiments.rl.generation.engine import (
    GenerateRequest,
    GenerateResult,
    Result,
    ScoreResult,
)
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.reader import start_store

SEATS = 4
"""Sequences in one engine step."""
MAX_LEN = 1024
PATIENCE_S = 240
"""How long to wait for what must come; nothing is claimed about how long it takes."""
CANARY = np.random.default_rng(0).integers(3, 96, 8).astype(np.int32)


class SwitchedGenerator(Generator):
    """A Generator whose way to update can be changed, so that one engine serves all tests, and which watches its cache."""

    @concurrent_endpoint
    async def switch(self, how: WeightUpdate) -> None:
        self.config.weight_update = how

    @concurrent_endpoint
    async def watch_cache(self) -> None:
        engine = self._thread.engine._engine
        self._from_cache: dict[str, int] = {}
        step = engine.step

        def watched_step() -> list:
            outputs = step()
            self._from_cache.update(
                (output.request_id, output.num_cached_tokens) for output in outputs
            )
            return outputs

        engine.step = watched_step

    @concurrent_endpoint
    async def from_cache(self, request_id: int) -> int:
        """Tokens of an answered request's prompt that were not computed but found."""
        return self._from_cache[str(request_id)]


class Fleet:
    """The generator's replicas, the versions published to them, and the models those are."""

    def __init__(self, path: str, mesh: Any):
        self.mesh = mesh
        self.generator = mesh.slice(procs=0)
        """The replica that tests speak to where one is enough."""
        self.version = 0
        self.models: dict[int, Qwen3ForCausalLM] = {
            0: Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        }
        self._publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)
        self._config = Qwen3Config.from_pretrained(path)
        self._ids = itertools.count()

    async def begin(self, how: WeightUpdate) -> None:
        """A test of its own: no answer of an earlier one, no prefix cached, every replica on the same weights."""
        port, self._receiver = Channel.open()
        await self.generator.attach.call_one(0, port)
        await self.mesh.switch.call(how)
        await self.publish()
        await self.mesh.update_weights.call(self.version, CANARY)

    async def publish(self, *, same: bool = False) -> None:
        """Put the next version into the store: a random model, or the last one once more."""
        last = self.models[self.version]
        self.version += 1
        torch.manual_seed(self.version)
        self.models[self.version] = last if same else Qwen3ForCausalLM(self._config).float().eval()
        self._publisher.write(self.version, self.models[self.version].state_dict())
        await self._publisher.announce(False)
        await self._publisher.prove()

    async def update(self):
        return await self.generator.update_weights.call_one(self.version, CANARY)

    def start_update(self) -> asyncio.Task:
        return asyncio.create_task(self.update())

    def request(self, prompt: np.ndarray, tokens: int, seed: int = 0) -> GenerateRequest:
        return GenerateRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt,
            sampling=SamplingConfig(max_tokens=tokens),
            seed=seed,
            stop_token_ids=[],
        )

    def submit(self, *requests) -> None:
        self.generator.submit.broadcast(list(requests))

    async def results(self, count: int) -> dict[int, Result]:
        """The next ``count`` results, by request."""
        results: list[Result] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(results) < count:
                results += await self._receiver.recv()
        assert len(results) == count and all(
            isinstance(r, GenerateResult | ScoreResult) for r in results
        ), results
        return {result.request_id: result for result in results}

    async def answer(self, request: GenerateRequest) -> Completion:
        """The next result, which is that of ``request``."""
        return (await self.results(1))[request.request_id].completion

    async def complete(self, prompt: np.ndarray, tokens: int, seed: int = 0) -> Completion:
        request = self.request(prompt, tokens, seed)
        self.submit(request)
        return await self.answer(request)

    async def under_way(self, *requests: GenerateRequest) -> None:
        """Submit, and return when each has tokens: a short one that came later was answered."""
        assert len(requests) < SEATS
        self.submit(*requests)
        await self.complete(prompt_of(5), 3)


def running(procs: Any, config: GeneratorConfig, model_path: str, run_dir: str) -> Iterator[Fleet]:
    """For a fixture: generators of the config in the processes, with a store beside the first."""

    async def build() -> Fleet:
        options: dict[str, Any] = {"model_path": model_path, "device": "cpu", "run_dir": run_dir}
        mesh = procs.spawn("generator", SwitchedGenerator, config, **options)
        await start_store(procs.slice(procs=0))
        await mesh.setup.call()
        await mesh.watch_cache.call()
        return Fleet(model_path, mesh)

    async def close(mesh: Any) -> None:
        await torchstore.shutdown()  # a process has one store at a time
        await shut_down([mesh], [procs])

    made = asyncio.run(build())
    yield made
    asyncio.run(close(made.mesh))


def assert_agree(seen: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-4)


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 96, length).astype(np.int32)


# ---- what the log-probabilities should be


@torch.no_grad()
def given_whole_prefix(
    model: Qwen3ForCausalLM, prompt: np.ndarray, token_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """[T]: of each token, by one model that reads everything before it."""
    tokens = torch.from_numpy(np.concatenate([prompt, token_ids]).astype(np.int64))
    return chosen(
        model(tokens[None, :-1]).logits[0, len(prompt) - 1 :] / temperature, tokens[len(prompt) :]
    )


@torch.no_grad()
def given_kept_cache(
    models: dict[int, Qwen3ForCausalLM], prompt: np.ndarray, completion: Completion
) -> np.ndarray:
    """[T]: of each token, by its version, which reads what the versions before it have left in the cache."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))
    cache, read, logprobs = DynamicCache(), 0, []
    for version, group in itertools.groupby(completion.policy_versions.tolist()):
        # To sample n tokens, a version reads up to the one before the last of them.
        upto = max(read, len(prompt) - 1) + len(list(group))
        logits = models[version](tokens[None, read:upto], past_key_values=cache).logits[0]
        first = max(read, len(prompt) - 1)
        logprobs.append(chosen(logits[first - read :], tokens[first + 1 : upto + 1]))
        read = upto
    return np.concatenate(logprobs)


def chosen(logits: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    return logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1).numpy()


def by_label(fleet: Fleet, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """[T]: of each token, by the version on its label, which reads everything before it."""
    expected = np.zeros(len(completion.token_ids))
    for version in set(completion.policy_versions.tolist()):
        mine = completion.policy_versions == version
        expected[mine] = given_whole_prefix(fleet.models[version], prompt, completion.token_ids)[
            mine
        ]
    return expected
