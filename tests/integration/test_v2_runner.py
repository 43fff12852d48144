"""vLLM's V2 model runner, by tests/v2_engine.py: what test_weight_updates.py shows of the V1 runner, in short.

Log-probabilities are compared with transformers', which reads the whole prefix.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from monarch.actor import Channel, endpoint

from tests.fakes.hub_families import write_family
from tests.integration.deliveries import deliver, random_tokens, sampler
from tests.integration.fleets import (
    CANARY,
    PATIENCE_S,
    SEATS,
    Fleet,
    SwitchedGenerator,
    assert_agree,
    by_label,
    given_kept_cache,
    given_whole_prefix,
    prompt_of,
    running,
)
from tests.integration.learners import learner_of, samples_of
from tests.integration.models import MOE_MODEL
from tests.integration.routed_generators import (
    MOE,
    RoutedGenerator,
    assert_completions_have_their_experts,
)
from tests.v2_engine import ENVIRONMENT, V2EngineConfig
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.engine import GenerateRequest, ScoreRequest
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

MAX_LEN = 256


def engine_config() -> V2EngineConfig:
    return V2EngineConfig(max_model_len=MAX_LEN, max_num_seqs=SEATS, cpu_kv_cache_gib=0.01)


def launched(name: str, cores: int = 1) -> Any:
    """Return a mesh of one process in which Triton interprets its kernels."""
    place = Place(0, tuple(sorted(os.sched_getaffinity(0)))[:cores])
    return spawn_on(None, name, [place], "cpu", environment=ENVIRONMENT)[0]


def serving(procs: Any, actor: Any) -> Iterator[Any]:
    """Set up a generator for a fixture, and end it with its process."""

    async def set_up() -> None:
        await actor.setup.call_one()

    async def close() -> None:
        await shut_down([actor], [procs])

    asyncio.run(set_up())
    yield actor
    asyncio.run(close())


@pytest.fixture(scope="module")
def fleet(untied_model, tmp_path_factory) -> Iterator[Fleet]:
    """One replica, and the store that every test of this file publishes to."""
    config, run_dir = GeneratorConfig(engine=engine_config()), str(tmp_path_factory.mktemp("v2"))
    yield from running(launched("generator"), config, untied_model, run_dir)


def request(
    fleet: Fleet, prompt: np.ndarray, tokens: int, *, seed: int = 0, **sampling: Any
) -> GenerateRequest:
    made = fleet.request(prompt, tokens, seed)
    made.sampling = SamplingConfig(max_tokens=tokens, **sampling)
    return made


async def test_sampled_and_scored_tokens_have_the_models_log_probabilities_at_every_temperature(
    fleet,
):
    await fleet.begin("keep")
    model, temperatures = fleet.models[fleet.version], (0.0, 0.7, 1.0, 1.5)
    prompt = prompt_of(150, seed=1)  # in three chunks
    requests = [
        request(fleet, prompt, 6, seed=2**62 + 1, temperature=temperature)
        for temperature in temperatures
    ]
    # One token alone, a chunk and its neighbours, and several chunks.
    scores = [
        ScoreRequest(request_id=10**6 + length, token_ids=prompt_of(length, length))
        for length in (2, 63, 64, 65, 200)
    ]
    fleet.submit(*requests, *scores)
    results = await fleet.results(len(requests) + len(scores))
    for score in scores:
        found, ids = results[score.request_id].logprobs, score.token_ids
        assert found[0] == 0 and found.shape == ids.shape
        assert_agree(found[1:], given_whole_prefix(model, ids[:1], ids[1:]))
    for one, temperature in zip(requests, temperatures, strict=True):
        completion = results[one.request_id].completion
        assert len(completion.token_ids) == 6 and set(completion.policy_versions.tolist()) == {
            fleet.version
        }
        assert_agree(
            completion.logprobs,
            given_whole_prefix(model, prompt, completion.token_ids, temperature or 1.0),
        )
    greedy = results[requests[0].request_id].completion
    assert greedy.logprobs.max() <= 0 and (np.exp(greedy.logprobs) > 1 / 96).all(), (
        "each is the likeliest of 96"
    )


async def test_a_seed_gives_the_same_tokens_alone_and_among_others_and_another_seed_others(fleet):
    await fleet.begin("keep")
    prompt = prompt_of(20)
    alone = await fleet.complete(prompt, 12, seed=7)
    others = [
        request(fleet, prompt_of(10 + index, index), 3 + index, seed=index) for index in range(6)
    ]
    same, other = request(fleet, prompt, 12, seed=7), request(fleet, prompt, 12, seed=8)
    fleet.submit(*others[:3], same, other, *others[3:])
    results = await fleet.results(8)
    assert results[same.request_id].completion.token_ids.tolist() == alone.token_ids.tolist()
    assert results[other.request_id].completion.token_ids.tolist() != alone.token_ids.tolist()
    assert_agree(results[same.request_id].completion.logprobs, alone.logprobs)


@pytest.mark.parametrize(
    "how",
    [
        "keep",
        pytest.param("recompute", marks=pytest.mark.slow),
        pytest.param("drain", marks=pytest.mark.slow),
    ],
)
async def test_every_token_has_the_log_probability_of_its_label_over_an_update(fleet, how):
    await fleet.begin(how)
    first = fleet.version
    long = [
        request(fleet, prompt_of(length, seed), 30, seed=seed)
        for seed, length in enumerate((10, 100))
    ]
    await fleet.under_way(*long)
    waiting = [request(fleet, prompt_of(70, seed), 5, seed=seed) for seed in range(3, 8)]
    scores = [
        ScoreRequest(request_id=10**6 + index, token_ids=prompt_of(100, index))
        for index in range(3)
    ]
    await fleet.publish()
    fleet.submit(*waiting, *scores)
    receipt = await fleet.update()
    assert receipt.version == fleet.version
    assert_agree(
        receipt.canary_logprobs[1:],
        given_whole_prefix(fleet.models[fleet.version], CANARY[:1], CANARY[1:]),
    )
    results = await fleet.results(len(long) + len(waiting) + len(scores))
    seen = set()
    for one in long + waiting:
        completion = results[one.request_id].completion
        seen.update(completion.policy_versions.tolist())
        if how == "keep":
            assert_agree(
                completion.logprobs,
                given_kept_cache(fleet.models, one.prompt_token_ids, completion),
            )
        else:
            assert_agree(completion.logprobs, by_label(fleet, one.prompt_token_ids, completion))
    assert seen == {first, first + 1}
    versions = [set(results[one.request_id].completion.policy_versions.tolist()) for one in long]
    assert versions == [{first} if how == "drain" else seen] * 2
    for score in scores:
        ids, found = score.token_ids, results[score.request_id].logprobs
        by = [
            given_whole_prefix(fleet.models[version], ids[:1], ids[1:])
            for version in (first, first + 1)
        ]
        assert any(np.allclose(found[1:], expected, rtol=0, atol=1e-4) for expected in by), (
            "of one version"
        )


@pytest.mark.parametrize("how", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
async def test_the_random_stream_of_a_completion_goes_on_through_an_update(fleet, how):
    await fleet.begin(how)
    undisturbed = await fleet.complete(prompt_of(80), 30, seed=5)
    disturbed = request(fleet, prompt_of(80), 30, seed=5)
    await fleet.under_way(disturbed)
    await fleet.publish(same=True)
    await fleet.update()
    completion = await fleet.answer(disturbed)
    assert set(completion.policy_versions.tolist()) == {fleet.version - 1, fleet.version}
    assert completion.token_ids.tolist() == undisturbed.token_ids.tolist()
    assert_agree(completion.logprobs, undisturbed.logprobs)


async def test_aborted_requests_free_their_seats(fleet):
    await fleet.begin("keep")
    aborted = [request(fleet, prompt_of(10, seed), 200, seed=seed) for seed in range(SEATS - 1)]
    await fleet.under_way(*aborted)
    await fleet.generator.abort.call_one([one.request_id for one in aborted])
    requests = [request(fleet, prompt_of(10, seed), 4, seed=seed) for seed in range(2 * SEATS)]
    fleet.submit(*requests)
    results = await fleet.results(len(requests))
    for one in requests:
        completion = results[one.request_id].completion
        assert_agree(completion.logprobs, by_label(fleet, one.prompt_token_ids, completion))


async def test_whole_blocks_of_a_prompt_are_cached_for_their_version_alone(fleet):
    await fleet.begin("keep")
    prompt, found = prompt_of(100, seed=9), []
    for publish in (False, False, True):
        if publish:
            await fleet.publish()
            await fleet.update()
        one = request(fleet, prompt, 3)
        fleet.submit(one)
        completion = await fleet.answer(one)
        found.append(await fleet.generator.from_cache.call_one(one.request_id))
        assert_agree(completion.logprobs, by_label(fleet, prompt, completion))
    assert found == [0, 96, 0]  # blocks of 32 tokens on CPU, and none in part


# ---- a mixture of experts


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> Iterator[RoutedGenerator]:
    procs, options = launched("routed"), dict(model_path=str(MOE_MODEL), device="cpu", routes=True)
    config, run_dir = (
        GeneratorConfig(engine=engine_config()),
        str(tmp_path_factory.mktemp("routed")),
    )
    actor = procs.spawn("routed", SwitchedGenerator, config, run_dir=run_dir, **options)
    for served in serving(procs, actor):
        yield RoutedGenerator(served)


@pytest.mark.slow
async def test_the_v2_runner_returns_the_experts_of_each_token(routed, one_rank, tmp_path):
    learner = learner_of(tmp_path, **MOE)
    await assert_completions_have_their_experts(routed, learner)
    learner.close()


# ---- adapters

LORA, ADAPTERS = LoRA.Config(rank=3, alpha=6), ("code", "math")
ADAPTED_VERSION = 1000
"""Later than any version that the fleet's tests publish to the same store. The number of processes is added to it."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def adapted(request, llama_model, fleet, tmp_path_factory) -> Iterator[Any]:
    """A generator that serves two adapters of a Llama 3, whose engine has this number of processes, and that number."""
    config = GeneratorConfig(engine=engine_config())
    config.engine.tensor_parallel_degree = processes = request.param
    procs = launched(f"adapted_{processes}", cores=processes)
    options = dict(
        model_path=llama_model, device="cpu", adapters=dict.fromkeys(ADAPTERS, LORA.rank)
    )
    actor = procs.spawn(
        f"adapted_{processes}",
        Generator,
        config,
        run_dir=str(tmp_path_factory.mktemp("adapted")),
        **options,
    )
    for generator in serving(procs, actor):
        yield generator, processes


@pytest.mark.slow
async def test_the_v2_runner_serves_two_adapters_each_to_its_own_requests(
    adapted, llama_model, one_rank, tmp_path
):
    """Each adapter is asked twice for the same prompts of several chunks, with and without a prefix in the cache."""
    generator, processes = adapted
    version = ADAPTED_VERSION + processes
    model = ModelConfig(hf_assets_path=llama_model)
    learner = learner_of(tmp_path, model=model, lr=0.1, lora=LORA, adapters=ADAPTERS)
    samples = [
        replace(sample, adapter=ADAPTERS[index % 2]) for index, sample in enumerate(samples_of(16))
    ]
    learner.forward_backward(
        Batcher.Config(row_length=512).build().plan(samples, 1).microbatches[0], 0
    )
    learner.optim_step()
    canary, sample = random_tokens(8), await sampler(generator, max_tokens=8)
    receipt = await deliver(learner, generator, version, canary)
    assert_agree(receipt.canary_logprobs, learner.canary(canary))
    for seed, adapter in itertools.product((1, 1, 2), ADAPTERS):
        tokens, sampled, versions = await sample(seed, adapter, length=150)
        assert versions == {version} and len(sampled) == 8
        (other,) = set(ADAPTERS) - {adapter}
        assert_agree(sampled, learner.score(tokens, adapter)[150:])
        assert np.abs(sampled - learner.score(tokens, other)[150:]).max() > 0.1
    learner.close()


# ---- two kinds of attention, each with blocks of its own

WINDOWED_VERSION = 2000
"""Later than any other test's."""


class WindowedGenerator(SwitchedGenerator):
    """A generator that tells of its cache's groups of blocks."""

    @endpoint
    async def kinds_of_blocks(self) -> set[str]:
        """Return the names of vLLM's specifications of the groups."""
        scheduler = self._thread.engine._engine.engine_core.engine_core.scheduler
        groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        return {type(group.kv_cache_spec).__name__ for group in groups}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> str:
    """Folder of a Gemma 3: three layers see 8 tokens, and one sees all."""
    return str(write_family("gemma3_text", tmp_path_factory.mktemp("gemma")))


@pytest.fixture(scope="module")
def windowed(gemma, fleet, tmp_path_factory) -> Iterator[Any]:
    procs, options = launched("windowed"), dict(model_path=gemma, device="cpu")
    config = GeneratorConfig(engine=engine_config(), weight_update="recompute")
    run_dir = str(tmp_path_factory.mktemp("windowed"))
    yield from serving(
        procs, procs.spawn("windowed", WindowedGenerator, config, run_dir=run_dir, **options)
    )


@pytest.mark.slow
async def test_the_v2_runner_keeps_blocks_of_windows_beside_those_of_full_attention(
    windowed, gemma, reference, one_rank, tmp_path
):
    """Prompts of many windows and several chunks, found in the cache in part; then an update that computes them again."""
    assert await windowed.kinds_of_blocks.call_one() == {"FullAttentionSpec", "SlidingWindowSpec"}
    await windowed.watch_cache.call_one()
    learner = learner_of(tmp_path, model=ModelConfig(hf_assets_path=gemma), lr=0.01)
    port, receiver = Channel.open()
    await windowed.attach.call_one(0, port)
    ids = itertools.count()

    def asked(length: int, tokens: int) -> GenerateRequest:
        made = GenerateRequest(
            request_id=next(ids),
            prompt_token_ids=random_tokens(length, seed=length),
            sampling=SamplingConfig(max_tokens=tokens),
            seed=length,
            stop_token_ids=[],
        )
        windowed.submit.broadcast([made])
        return made

    async def completions(*requests: GenerateRequest) -> list[Any]:
        found = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < len(requests):
                found |= {one.request_id: one.completion for one in await receiver.recv()}
        return [found[one.request_id] for one in requests]

    def assert_of(request: GenerateRequest, completion: Any, logprobs_of: dict[int, Any]) -> None:
        """Each token has the log-probability that the version of its label gives it."""
        assert set(completion.policy_versions.tolist()) == {*logprobs_of}
        prompt = request.prompt_token_ids
        tokens = np.concatenate([prompt, completion.token_ids])
        for version, logprobs in logprobs_of.items():
            labelled = completion.policy_versions == version
            expected = logprobs(tokens)[len(prompt) :]
            assert_agree(completion.logprobs[labelled], expected[labelled])

    def by_checkpoint(tokens: np.ndarray) -> np.ndarray:
        return reference(gemma, tokens)

    for found in (0, 128):  # whole blocks of 32 tokens
        one = asked(150, 20)
        (completion,) = await completions(one)
        assert_of(one, completion, {0: by_checkpoint})
        assert await windowed.from_cache.call_one(one.request_id) == found

    under_way = [asked(90, 60), asked(20, 60), asked(5, 3)]
    (short,) = await completions(under_way[2])
    assert_of(under_way[2], short, {0: by_checkpoint})
    learner.forward_backward(
        Batcher.Config(row_length=512).build().plan(samples_of(8), 1).microbatches[0], 0
    )
    learner.optim_step()
    canary = random_tokens(8)
    receipt = await deliver(learner, windowed, WINDOWED_VERSION, canary)
    assert_agree(receipt.canary_logprobs, learner.score(canary))
    for request, completion in zip(under_way[:2], await completions(*under_way[:2]), strict=True):
        assert_of(request, completion, {0: by_checkpoint, WINDOWED_VERSION: learner.score})
    several = [asked(length, 12) for length in (150, 64, 10)]
    for request, completion in zip(several, await completions(*several), strict=True):
        assert_of(request, completion, {WINDOWED_VERSION: learner.score})
    learner.close()
