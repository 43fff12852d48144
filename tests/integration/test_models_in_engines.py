"""Trainer, engine and transformers agree on each model, before a step and after:

- a second family, Llama 3, and adapters of one
- a flavor of torchtitan with fused queries, keys and values
- a mixture of experts
- families that are trained by transformers' modules, and adapters of one
- tensors that are fused in the hub, in an engine of two processes

Versions are copied, as on CPU, and then reloaded by vLLM layer by layer, as on GPUs. A generator for each model, and one learner in this process, in float32.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchstore

from tests.fakes.hub_families import FAMILIES, write_family
from tests.integration.deliveries import (
    LENGTH,
    ReloadingGenerator,
    deliver,
    random_tokens,
    sampler,
)
from tests.integration.learners import full, fused_config, learner_of, samples_of
from tests.integration.models import MODEL, MOE_MODEL
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.weights.reader import start_store

LLAMA, FUSED, MOE, ADAPTED, ADAPTED_GEMMA = (
    "Llama 3",
    "fused flavor of Qwen3",
    "mixture of experts",
    "adapters of a Llama 3",
    "adapters of a Gemma 3",
)
TWO = "two adapters of a Llama 3, in an engine of two processes"
NAMES = ("code", "math")
QWEN, LLAMA_ALONE, MOE_ALONE, GEMMA_ALONE = (
    "Qwen3, by itself",
    "Llama 3, by itself",
    "mixture of experts, by itself",
    "Gemma 3, by itself",
)
"""Models with a tied head, which have a generator of their own."""
FUSED_IN_HUB = {f"{family}, in an engine of two processes": family for family in ("phi3", "glm4")}
"""Families whose queries, keys and values, or gates and ups, are one tensor of the hub."""
NOTHING, BOTH = 1, 5
"""Versions: adapters that are zero, and two of them."""
SERVED = [family for family in FAMILIES if family not in ("gpt_oss", "nemotron", "stablelm")]
"""Families of transformers whose versions an engine loads. Nemotron and StableLM were not tried."""
RELOADED = [*SERVED, *FUSED_IN_HUB, QWEN, LLAMA_ALONE, MOE_ALONE, GEMMA_ALONE]
VERSIONS = {LLAMA: 2, FUSED: 3, ADAPTED: 4, MOE: 6, ADAPTED_GEMMA: 7} | {
    family: 8 + index for index, family in enumerate(RELOADED)
}
"""That a test publishes. They share a store."""
AGAIN = 100
"""Added to a version for the next one that a test publishes."""
LR = dict.fromkeys(RELOADED, 0.01) | {QWEN: 0.005, LLAMA_ALONE: 0.02, MOE_ALONE: 0.005}
LR |= {LLAMA: 0.02, FUSED: 0.005, ADAPTED: 0.1, MOE: 0.005, ADAPTED_GEMMA: 0.1}
LORA = LoRA.Config(rank=3, alpha=6)
ADAPTERS = {
    ADAPTED: {"": LORA.rank},
    ADAPTED_GEMMA: {"": LORA.rank},
    TWO: dict.fromkeys(NAMES, LORA.rank),
}
SLOW = {FUSED, TWO}
"""Models whose generators start only where a slow test asks for them."""
ALONE = {*RELOADED, ADAPTED_GEMMA} - {"gemma3_text"}
"""Models whose generators start one at a time, for a slow test each: all of them would take 16 GiB."""


@pytest.fixture(scope="module")
def models(llama_model, fused_model, tmp_path_factory) -> dict[str, ModelConfig]:
    llama = ModelConfig(hf_assets_path=llama_model)
    moe = ModelConfig(hf_assets_path=str(MOE_MODEL))
    folder = tmp_path_factory.mktemp("families")
    families = {
        family: ModelConfig(hf_assets_path=str(write_family(family, folder / family)))
        for family in SERVED
    }
    return {
        LLAMA: llama,
        FUSED: fused_config(fused_model),
        MOE: moe,
        ADAPTED: llama,
        TWO: llama,
        ADAPTED_GEMMA: families["gemma3_text"],
        QWEN: ModelConfig(hf_assets_path=str(MODEL)),
        LLAMA_ALONE: llama,
        MOE_ALONE: moe,
        GEMMA_ALONE: families["gemma3_text"],
        **families,
        **{name: families[family] for name, family in FUSED_IN_HUB.items()},
    }


def running(models: dict[str, ModelConfig], folder: Path) -> Iterator[dict[str, Any]]:
    """For a fixture: start a generator for each model, and end them."""
    cores = sorted(os.sched_getaffinity(0))
    of_two = {TWO, *FUSED_IN_HUB}
    places = [
        Place(0, (cores[0], cores[-1]) if name in of_two else (cores[-(index % 2)],))
        for index, name in enumerate(models)
    ]
    procs = spawn_on(None, "generator", places, "cpu")[0]

    async def build() -> dict[str, Any]:
        made = {}
        for index, (name, model) in enumerate(models.items()):
            run_dir = folder / str(index)
            run_dir.mkdir()
            options = dict(
                model_path=model.hf_assets_path,
                device="cpu",
                run_dir=str(run_dir),
            )
            config = GeneratorConfig()
            config.engine.max_model_len, config.engine.tensor_parallel_degree = (
                512,
                2 if name in of_two else 1,
            )
            own = procs.slice(procs=index)
            made[name] = own.spawn(
                f"generator_{index}",
                ReloadingGenerator,
                config,
                adapters=ADAPTERS.get(name),
                **options,
            )
        await asyncio.gather(*(generator.setup.call_one() for generator in made.values()))
        return made

    async def close(made: dict[str, Any]) -> None:
        await shut_down(made.values(), [procs])

    made = asyncio.run(build())
    yield made
    asyncio.run(close(made))


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """The store of what all tests publish, because a process has one store at a time."""
    procs = spawn_on(None, "store", [Place(0, (min(os.sched_getaffinity(0)),))], "cpu")[0]
    asyncio.run(start_store(procs))
    yield

    async def close() -> None:
        await torchstore.shutdown()
        await shut_down([], [procs])

    asyncio.run(close())


@pytest.fixture(scope="module")
def generators(models, store, tmp_path_factory) -> Iterator[dict[str, Any]]:
    named = {name: model for name, model in models.items() if name not in SLOW | ALONE}
    yield from running(named, tmp_path_factory.mktemp("generators"))


@pytest.fixture(scope="module")
def more_generators(models, store, tmp_path_factory) -> Iterator[dict[str, Any]]:
    named = {name: model for name, model in models.items() if name in SLOW}
    yield from running(named, tmp_path_factory.mktemp("generators"))


@pytest.fixture
def generator(name, request, models, store, tmp_path) -> Iterator[Any]:
    """The generator of the model that the test is about."""
    if name in ALONE:
        for made in running({name: models[name]}, tmp_path):
            yield made[name]
    else:
        fixture = "more_generators" if name in SLOW else "generators"
        yield request.getfixturevalue(fixture)[name]


async def test_adapters_that_add_nothing_leave_engine_and_trainer_as_they_are_bit_for_bit(
    models, generators, one_rank, tmp_path
):
    learner = learner_of(tmp_path, model=models[ADAPTED], lora=LORA)
    canary = random_tokens(8)
    receipt = await deliver(learner, generators[ADAPTED], NOTHING, canary)
    base = await generators[LLAMA].canary.call_one(canary)
    assert (receipt.canary_logprobs == base).all() and np.ptp(base) > 1
    plain, adapted = [await sampler(generators[name]) for name in (LLAMA, ADAPTED)]
    for seed in range(3):
        (tokens, logprobs, versions), (own_tokens, own, own_versions) = (
            await plain(seed),
            await adapted(seed),
        )
        assert (versions, own_versions) == ({0}, {NOTHING})
        assert (tokens == own_tokens).all() and (logprobs == own).all()
    assert (learner.score(tokens) == learner_of(tmp_path, model=models[LLAMA]).score(tokens)).all()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW | ALONE else name
        for name in VERSIONS
    ],
)
async def test_engine_trainer_and_transformers_agree_before_and_after_a_published_step(
    name,
    models,
    generator,
    one_rank,
    reference,
    tmp_path,
):
    path, version = models[name].hf_assets_path, VERSIONS[name]
    lora = LORA if name in ADAPTERS else None
    learner = learner_of(tmp_path, model=models[name], lr=LR[name], lora=lora)
    assert any("wqkv" in parameter for parameter, _ in learner.model.named_parameters()) == (
        name == FUSED
    )
    sample = await sampler(generator)

    tokens, sampled, versions = await sample(seed=1)
    expected = reference(path, tokens)[LENGTH:]
    assert (
        versions == {NOTHING if name == ADAPTED else 0}
        and len(sampled) == 40
        and np.ptp(expected) > 1
    )
    np.testing.assert_allclose(learner.score(tokens)[LENGTH:], expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(sampled, expected, rtol=0, atol=1e-4)

    deliveries = [version, version + AGAIN] if name in RELOADED and name in ALONE else [version]
    for delivery in deliveries:
        if delivery > version:
            await generator.reload_layer_by_layer.call_one()
        before = learner.score(tokens)[LENGTH:]
        plan = Batcher.Config(row_length=512).build().plan(samples_of(8), 1)
        learner.forward_backward(plan.microbatches[0], 0)
        learner.optim_step()
        trained = learner.score(tokens)[LENGTH:]
        assert np.abs(trained - before).max() > 0.1, "the step changed nothing"
        canary = random_tokens(8)
        receipt = await deliver(learner, generator, delivery, canary)
        of_canary = learner.score(canary)
        np.testing.assert_allclose(receipt.canary_logprobs, of_canary, rtol=0, atol=1e-4)

        tokens, sampled, versions = await sample(seed=1)
        assert versions == {delivery} and np.ptp(sampled) > 0.5  # steps flatten the mixture
        np.testing.assert_allclose(sampled, learner.score(tokens)[LENGTH:], rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        sampled, by_flex_attention(learner, models[name], tokens, lora)[LENGTH:], rtol=0, atol=1e-4
    )
    assert np.abs(sampled - reference(path, tokens)[LENGTH:]).max() > 0.1, (
        "the engine has its old weights"
    )

    # What is saved at the end is a folder that transformers reads as the trained policy.
    folder = learner.save_final(version)
    learner.close()
    np.testing.assert_allclose(reference(str(folder), tokens)[LENGTH:], sampled, rtol=0, atol=1e-4)


@pytest.mark.slow
async def test_an_engine_of_two_processes_serves_two_adapters_each_to_its_own_requests(
    models, more_generators, one_rank, tmp_path
):
    """Prompts of many cached blocks and of less than one, asked of both adapters in turn: neither reads the other's cache."""
    learner, generator = (
        learner_of(tmp_path, model=models[TWO], lr=LR[ADAPTED], lora=LORA, adapters=NAMES),
        more_generators[TWO],
    )
    samples = [
        replace(sample, adapter=NAMES[index % 2]) for index, sample in enumerate(samples_of(16))
    ]
    learner.forward_backward(
        Batcher.Config(row_length=512).build().plan(samples, 1).microbatches[0], 0
    )
    learner.optim_step()
    canary, sample = random_tokens(8), await sampler(generator)
    receipt = await deliver(learner, generator, BOTH, canary)
    np.testing.assert_allclose(receipt.canary_logprobs, learner.canary(canary), rtol=0, atol=1e-4)
    for length in (LENGTH, 20):
        for seed, name in itertools.product((1, 1, 2), NAMES):
            tokens, sampled, versions = await sample(seed, name, length)
            assert versions == {BOTH}
            own, others = (
                learner.score(tokens, adapter)[length:]
                for adapter in (name, *(set(NAMES) - {name}))
            )
            np.testing.assert_allclose(sampled, own, rtol=0, atol=1e-4)
            assert np.abs(sampled - others).max() > 0.1
    learner.close()


@torch.no_grad()
def by_flex_attention(
    learner: Learner, model: ModelConfig, tokens: np.ndarray, lora: LoRA.Config | None
) -> np.ndarray:
    """Log-probabilities of the learner's policy with the attention that it has on GPUs, not compiled."""
    policy = policy_spec(model, device="cuda", max_seq_len=512, lora=lora).model.build()
    if next(policy.parameters()).is_meta:  # as transformers' are
        policy.to_empty(device="cpu")
    policy.init_states(buffer_device=torch.device("cpu"))
    trained = dict(learner.model.named_parameters())
    for name, parameter in policy.named_parameters():
        parameter.copy_(full(trained[name]))
    tokens_BL = torch.from_numpy(tokens)[None]
    positions = torch.arange(len(tokens), dtype=torch.int32)[None]
    torch.compiler.set_stance("force_eager")
    try:
        logprobs, _ = policy(tokens_BL, positions, torch.ones(tokens_BL.shape), positions != 0)
    finally:
        torch.compiler.set_stance("default")
    return logprobs[0].numpy()
