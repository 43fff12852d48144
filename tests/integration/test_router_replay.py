"""Router replay: engines that say which experts computed each token, and a trainer that computes them by these."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchstore

from tests.integration.deliveries import deliver, random_tokens
from tests.integration.fleets import SwitchedGenerator
from tests.integration.learners import (
    EXPERTS,
    LAYERS,
    LAYOUTS,
    REFERENCE_LAYOUT,
    K,
    accumulate,
    assert_same,
    assert_same_step,
    learner_of,
    loss_and_gradient,
    own_routes,
    parameters,
    routed_samples,
    samples_of,
)
from tests.integration.models import MOE_MODEL
from tests.integration.routed_generators import (
    MOE,
    RoutedGenerator,
    assert_completions_have_their_experts,
    assert_routes,
)
from tests.unit.tree_samples import random_routed
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.models.decoder import batch_logprobs
from torchtitan.experiments.rl.models.experts import mixtures_of
from torchtitan.experiments.rl.models.lora import LoRA, trained_state
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.weights.reader import start_store

ABSENT = 255


# ---- the trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_models_own_routes_replayed_are_the_plain_forward_bit_for_bit(exact, tmp_path, dtype):
    learner = learner_of(tmp_path, **MOE) if dtype == torch.float32 else exact(**MOE)
    samples = routed_samples(learner)
    found = []
    for given in (samples, [replace(sample, routes=None) for sample in samples]):
        for batch in Batcher.Config(**LAYOUTS["short rows"]).build().plan(given, 1).microbatches[0]:
            found += batch_logprobs(learner.model, batch, replay=True)
        found += loss_and_gradient(learner, LAYOUTS["short rows"], given)[1].values()
    half = len(found) // 2
    assert all(
        torch.equal(left, right) for left, right in zip(found[:half], found[half:], strict=True)
    )
    metrics = accumulate(learner, LAYOUTS["short rows"], samples)
    assert (
        metrics["experts/agreement"] == metrics["experts/tokens_agree"] == 1
        and metrics["experts/unrecorded"] == 0
    )
    assert metrics["experts/mismatch_kl_own"] == metrics["experts/mismatch_kl_replayed"]
    learner.close()


def test_a_routers_gradient_with_replay_is_that_of_finite_differences(exact):
    """By the scores of the experts that it is told to take, which are others than its own. torchtitan rotates queries and keys
    in float32, so this is each layer by itself."""
    learner, random = (
        exact(**MOE, mixed_precision_param="float64"),
        torch.Generator().manual_seed(0),
    )
    for moe in mixtures_of(learner.model).values():
        x, v = torch.randn(2, 2, 5, 128, generator=random, dtype=torch.float64)
        moe.router.routes_BLK = (
            torch.rand(2, 5, EXPERTS, generator=random).argsort(-1)[..., :K].short()
        )
        moe.router.routes_BLK[0, 0] = -1
        gate = moe.router.gate.weight

        def value(
            weight: torch.Tensor, moe: Any = moe, x: torch.Tensor = x, v: torch.Tensor = v
        ) -> torch.Tensor:
            return (torch.func.functional_call(moe, {"router.gate.weight": weight}, x) * v).sum()

        assert torch.autograd.gradcheck(value, gate, eps=1e-6, rtol=1e-6, atol=1e-8, fast_mode=True)
        assert torch.autograd.grad(value(gate), gate)[0].abs().max() > 1e-3
        assert (
            0 < (moe.router.agreed_BLK == 1).sum() < 18
            and (moe.router.agreed_BLK[0, 0] == -1).all()
        )
    learner.close()


def test_prefix_trees_whose_routes_part_anywhere_are_the_samples_apart(exact):
    learner, trees = exact(**MOE), 0
    for seed in range(30):
        samples = random_routed(seed * 100, 2 + seed % 9, LAYERS)
        layout = dict(row_length=256, rows_per_microbatch=4)
        (batch,) = Batcher.Config(**layout).build().plan(samples, 1).microbatches[0]
        trees += batch.trees is not None
        apart = loss_and_gradient(learner, layout | {"share_prefixes": False}, samples)
        together = loss_and_gradient(learner, layout, samples)
        assert together[0] == pytest.approx(apart[0], rel=1e-9, abs=1e-12)
        scale = max(float(gradient.abs().max()) for gradient in apart[1].values())
        # torchtitan rotates queries and keys in float32.
        assert_same(together[1], apart[1], rtol=1e-6, atol=1e-7 * scale)
    assert trees > 18
    learner.close()


@pytest.mark.parametrize(
    "option", [dict(activation_checkpoint="full"), dict(mixed_precision_param="float64")], ids=str
)
def test_recomputed_activations_and_no_fsdp_compute_with_the_same_routes(exact, option):
    expected = loss_and_gradient(exact(**MOE), REFERENCE_LAYOUT, routed_samples(None))
    assert_same_step(
        loss_and_gradient(exact(**MOE, **option), REFERENCE_LAYOUT, routed_samples(None)), expected
    )
    others = loss_and_gradient(exact(model=str(MOE_MODEL)), REFERENCE_LAYOUT, routed_samples(None))
    assert abs(others[0] / expected[0] - 1) > 1e-3, "without replay the routers choose"


def test_adapters_of_attention_are_trained_with_replay(exact):
    learner = exact(**MOE, lora=LoRA.Config(rank=4))
    samples = routed_samples(learner)
    own = loss_and_gradient(learner, REFERENCE_LAYOUT, samples)
    plain = loss_and_gradient(
        learner, REFERENCE_LAYOUT, [replace(sample, routes=None) for sample in samples]
    )
    assert own[0] == plain[0] and all(torch.equal(own[1][name], plain[1][name]) for name in own[1])
    assert own[1].keys() == trained_state(learner.model).keys() and not any(
        "moe" in name for name in own[1]
    )
    learner.close()


def test_a_learner_that_goes_on_from_a_checkpoint_takes_the_same_step(one_rank, tmp_path):
    learner, samples = learner_of(tmp_path / "first", **MOE), routed_samples(None)

    def next_step(learner: Learner) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        metrics = accumulate(learner, LAYOUTS["long rows"], samples)
        return metrics | learner.optim_step(), parameters(learner)

    next_step(learner)
    learner.checkpoints.begin(tmp_path / "saved", 1).result()
    resumed = learner_of(
        tmp_path / "second", start=TrainerStart(folder=tmp_path / "saved", step=1), **MOE
    )
    (metrics, expected), (found_metrics, found) = next_step(learner), next_step(resumed)
    assert found_metrics == metrics and 0 < metrics["experts/agreement"] < 1
    assert_same(found, expected, rtol=0, atol=0)
    learner.close(), resumed.close()


def test_tokens_without_a_route_are_counted_and_routes_of_another_model_are_refused(
    one_rank, tmp_path
):
    learner = learner_of(tmp_path, **MOE)
    samples = routed_samples(learner, count=4)
    for sample in samples:
        sample.routes[-1] = ABSENT  # nothing comes after it
    assert accumulate(learner, REFERENCE_LAYOUT, samples)["experts/unrecorded"] == 0
    lost = 0
    for sample in samples:
        sample.routes[2:5], lost = ABSENT, lost + 3
    metrics = accumulate(learner, REFERENCE_LAYOUT, samples)
    assert metrics["experts/unrecorded"] == lost / sum(len(sample) - 1 for sample in samples)
    assert metrics["experts/agreement"] == 1
    samples[0].routes[1, 2, 0] = EXPERTS
    with pytest.raises(
        RunError,
        match=r"took experts up to 8, in \[layers, k\] = \[4, 2\], and the trainer's model has 8 in",
    ):
        accumulate(learner, REFERENCE_LAYOUT, samples)
    with pytest.raises(RunError, match=r"= \[3, 2\], and the trainer's model has 8 in \[4, 2\]"):
        accumulate(
            learner,
            REFERENCE_LAYOUT,
            [replace(sample, routes=sample.routes[:, :3]) for sample in samples[1:]],
        )
    learner.close()


# ---- the engine


def running(processes: int, run_dir: Path) -> Iterator[RoutedGenerator]:
    """For a fixture: start a generator with a store beside it, and end both."""
    cores = sorted(os.sched_getaffinity(0))
    procs = spawn_on(None, "generator", [Place(0, (cores[0], cores[-1])[:processes])], "cpu")[0]
    config = GeneratorConfig()
    config.engine.max_model_len, config.engine.tensor_parallel_degree = 512, processes
    config.engine.cpu_kv_cache_gib = 0.0012 if processes == 1 else 0.01
    options: dict[str, Any] = dict(model_path=str(MOE_MODEL), device="cpu", routes=True)
    actor = procs.spawn("generator", SwitchedGenerator, config, run_dir=str(run_dir), **options)

    async def set_up() -> None:
        await start_store(procs)
        await actor.setup.call_one()

    async def close() -> None:
        await torchstore.shutdown()  # a process has one store at a time
        await shut_down([actor], [procs])

    asyncio.run(set_up())
    yield RoutedGenerator(actor)
    asyncio.run(close())


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> Iterator[RoutedGenerator]:
    """Generator of one process, with a cache of some 600 tokens."""
    yield from running(1, tmp_path_factory.mktemp("generator"))


@pytest.fixture
def generator_of_two(tmp_path) -> Iterator[RoutedGenerator]:
    (tmp_path / "generator_of_two").mkdir()
    yield from running(2, tmp_path / "generator_of_two")


async def test_completions_have_the_experts_of_prompt_cached_prefix_and_sampled_tokens(
    generator, one_rank, tmp_path
):
    learner = learner_of(tmp_path, **MOE)
    await assert_completions_have_their_experts(generator, learner)
    learner.close()


async def test_preempted_requests_keep_the_routes_that_they_had(generator, one_rank, tmp_path):
    learner = learner_of(tmp_path, **MOE)
    await generator.begin()
    requests = [generator.request(random_tokens(40, seed), 200) for seed in range(6)]
    for request, completion in zip(requests, await generator.answers(*requests), strict=True):
        tokens = np.concatenate([request.prompt_token_ids, completion.token_ids])
        assert_routes(completion.routes, own_routes(learner, tokens)[:-1])
    assert (await generator.actor.usage.call_one())["routes_kept"] > 40
    learner.close()


async def test_a_request_that_an_update_computes_again_keeps_the_routes_of_its_log_probabilities(
    generator, one_rank, tmp_path
):
    learner = learner_of(tmp_path, lr=0.01, **MOE)
    await generator.begin()
    await generator.actor.switch.call_one("recompute")
    request = generator.request(random_tokens(30), 300)
    generator.actor.submit.broadcast([request])
    while not (await generator.actor.usage.call_one())["steps"]:
        await asyncio.sleep(0.01)
    before = learner_of(tmp_path, **MOE)
    learner.forward_backward(
        Batcher.Config(row_length=512).build().plan(samples_of(8), 1).microbatches[0], 0
    )
    learner.optim_step()
    await deliver(learner, generator.actor, 1, random_tokens(8))
    (completion,) = await generator.wait(request)
    old = int((completion.policy_versions == 0).sum())
    assert 0 < old < 300
    tokens = np.concatenate([request.prompt_token_ids, completion.token_ids])
    end = 30 + old - 1  # the last old token was no input yet
    assert_routes(completion.routes[:end], own_routes(before, tokens)[:end])
    assert_routes(completion.routes[end:], own_routes(learner, tokens)[end:-1])
    assert (own_routes(before, tokens) != own_routes(learner, tokens)).any(), (
        "the step changed no route"
    )
    assert (await generator.actor.usage.call_one())["routes_kept"] == end
    before.close(), learner.close()


@pytest.mark.slow
async def test_an_engine_of_two_processes_proves_its_halves_of_every_expert_and_computes_with_them(
    generator_of_two, one_rank, tmp_path
):
    learner = learner_of(tmp_path, lr=0.01, **MOE)
    await assert_completions_have_their_experts(generator_of_two, learner)
    canary = random_tokens(8)
    before = learner.score(canary)
    plan = Batcher.Config(row_length=512).build().plan(samples_of(8), 1)
    learner.forward_backward(plan.microbatches[0], 0)
    learner.optim_step()
    receipt = await deliver(learner, generator_of_two.actor, 2, canary)
    assert receipt.fingerprint, "what it holds was compared with what was published"
    np.testing.assert_allclose(receipt.canary_logprobs, learner.score(canary), rtol=0, atol=1e-4)
    assert np.abs(receipt.canary_logprobs - before).max() > 0.01, "the step changed nothing"
    learner.close()
