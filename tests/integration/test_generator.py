"""A real generator beside a real trainer: what it samples, when it answers, and whose weights it used."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
import torchstore
from monarch.actor import ProcMesh
from transformers import AutoTokenizer

from tests.integration.pairs import CANARY, Pair
from tests.integration.processes import descendants
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.fleet import spawn
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on, start_trainer
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.engine import GeneratorFailed, RequestFailed, ScoreRequest
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.plan.placement import Place, place
from torchtitan.experiments.rl.process import temporary
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan.experiments.rl.training.trainer import PolicyTrainer
from torchtitan.experiments.rl.weights.reader import manifest_key
from torchtitan.experiments.rl.weights.snapshot import SharedBuffer, fingerprint

FLAT = 2.0
"""A temperature at which the tiny model, too, has many things to say."""
MAX_LEN = 1024
AT_ONCE = 8
"""Sequences in one engine step."""


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Processes below this one that earlier tests have left, such as multiprocessing's servers."""
    return descendants(os.getpid())


@pytest.fixture(scope="module")
def meshes(others) -> list[tuple[ProcMesh, Any]]:
    """Processes, and the actors in them."""
    return []


async def build(name: str, pair: Pair, meshes: list[tuple[ProcMesh, Any]], run_dir: str) -> None:
    """Start the pair's trainer and generator, and append them to ``meshes``."""
    placement = place(rl_grpo_qwen3_debug(), "cpu")
    config = TrainerConfig(optimizer=OptimizerConfig(lr=0.02))
    config.lr_scheduler.warmup_steps = 0
    generator_config = GeneratorConfig()
    generator_config.engine.max_model_len, generator_config.engine.max_num_seqs = MAX_LEN, AT_ONCE
    trainers, _ = spawn_on(None, "trainer", placement.trainer, "cpu")
    generators, _ = spawn_on(None, "g", placement.generators, "cpu")
    pair.trainer = trainers.spawn(
        f"trainer_{name}",
        PolicyTrainer,
        config,
        model=ModelConfig(hf_assets_path=pair.path),
        device="cpu",
        max_seq_len=MAX_LEN,
        total_steps=100,
        run_dir=run_dir,
        generator_dtype=torch.float32,
    )
    pair.generator = generators.spawn(
        f"generator_{name}",
        Generator,
        generator_config,
        model_path=pair.path,
        device="cpu",
        run_dir=run_dir,
    )
    meshes.extend([(trainers, pair.trainer), (generators, pair.generator)])
    await asyncio.gather(start_trainer(trainers, pair.trainer), pair.set_up())
    await pair.attach()


@pytest.fixture(scope="module")
def tied(meshes, tied_model, tmp_path_factory) -> Iterator[Pair]:
    made = Pair(path=tied_model, vocabulary=768, version=0)
    asyncio.run(build("tied", made, meshes, str(tmp_path_factory.mktemp("tied"))))
    yield made
    asyncio.run(close_all(meshes))


@pytest.fixture(scope="module")
def untied(tied, meshes, untied_model, tmp_path_factory) -> Pair:
    """Pair of the untied model. It shares the tied pair's store and is closed with it: a process has one store."""
    made = Pair(path=untied_model, vocabulary=96, version=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "start_store", AsyncMock())
        asyncio.run(build("untied", made, meshes, str(tmp_path_factory.mktemp("untied"))))
    return made


async def close_all(meshes: list[tuple[ProcMesh, Any]]) -> None:
    await torchstore.shutdown()  # a process has one store at a time, and other tests need theirs
    await shut_down([actor for _, actor in meshes], [procs for procs, _ in meshes])
    meshes.clear()


@pytest.fixture(scope="module")
def generator_of_two(tied, meshes, tmp_path_factory) -> Any:
    """The tied model once more, in an engine whose two processes share each layer and the vocabulary. Closed with the pair."""
    config = GeneratorConfig()
    (
        config.engine.max_model_len,
        config.engine.max_num_seqs,
        config.engine.tensor_parallel_degree,
    ) = MAX_LEN, AT_ONCE, 2
    procs = spawn.spawn_on(
        None, "generator_of_two", [Place(0, tuple(sorted(os.sched_getaffinity(0))))], "cpu"
    )[0]
    run_dir = str(tmp_path_factory.mktemp("generator_of_two"))
    path = tied.path
    generator = procs.spawn(
        "generator_of_two", Generator, config, model_path=path, device="cpu", run_dir=run_dir
    )

    meshes.append((procs, generator))

    async def start() -> None:
        await generator.setup.call_one()

    asyncio.run(start())
    return generator


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def pair(request) -> Pair:
    return request.getfixturevalue(request.param)


# ---- what is sampled


async def test_log_probabilities_are_those_of_the_trainer_and_of_transformers_at_the_sampling_temperature(
    pair, reference
):
    assert not pair.updated
    for temperature in (0.7, 1.0, FLAT):
        prompt = pair.prompt(20)
        completion = await pair.complete(prompt, max_tokens=30, temperature=temperature, seed=5)
        assert len(completion.token_ids) == 30 and completion.finish_reason == "length"
        expected = reference(
            pair.path, np.concatenate([prompt, completion.token_ids]), temperature
        )[20:]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
        if temperature == 1.0:
            trained = await pair.trained_logprobs(prompt, completion)
            np.testing.assert_allclose(completion.logprobs, trained, rtol=0, atol=1e-4)
    assert np.ptp(completion.logprobs) > 1, (
        "at the last temperature at least there is something to agree on"
    )


async def test_score_gives_the_trainers_log_probabilities_of_any_tokens(pair, reference):
    assert not pair.updated
    tokens = [pair.prompt(length, seed=length) for length in (2, 17, 300)]
    results = await pair.run(
        *(ScoreRequest(request_id=next(pair.ids), token_ids=each) for each in tokens)
    )
    for each, result in zip(tokens, results, strict=True):
        assert result.logprobs.shape == each.shape and result.logprobs[0] == 0
        np.testing.assert_allclose(result.logprobs, reference(pair.path, each), rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            result.logprobs, await pair.trainer.score.call_one(each), rtol=0, atol=1e-4
        )


async def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(tied):
    prompt, options = tied.prompt(12, seed=3), dict(max_tokens=20, temperature=FLAT)
    alone = await tied.complete(prompt, seed=77, **options)
    others = [tied.request(tied.prompt(5 + i, seed=i), seed=i, max_tokens=5 + i) for i in range(30)]
    among = [tied.request(prompt, seed=seed, **options) for seed in (77, 78)]
    results = await tied.run(*others[:15], *among, *others[15:])
    same, other_seed = results[15].completion, results[16].completion
    assert same.token_ids.tolist() == alone.token_ids.tolist() != other_seed.token_ids.tolist()
    np.testing.assert_allclose(same.logprobs, alone.logprobs, rtol=0, atol=1e-5)


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(tied):
    prompt, options = tied.prompt(12, seed=3), dict(seed=77, max_tokens=20, temperature=FLAT)
    free = await tied.complete(prompt, **options)
    stop = int(free.token_ids[6])
    length = free.token_ids.tolist().index(stop) + 1
    stopped = await tied.complete(prompt, stop=[stop], **options)
    assert stopped.token_ids.tolist() == free.token_ids[:length].tolist()
    assert (
        stopped.finish_reason == "stop"
        and len(stopped.logprobs) == len(stopped.policy_versions) == length
    )


async def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it_and_all_sampled_is_kept(
    tied,
):
    decode = AutoTokenizer.from_pretrained(tied.path).decode
    prompt, options = tied.prompt(12, seed=3), dict(seed=77, max_tokens=20, temperature=FLAT)
    free = (await tied.complete(prompt, **options)).token_ids.tolist()
    texts = [decode(free[:n]) for n in range(len(free) + 1)]
    end = next(
        n
        for n in range(3, len(free))
        if len(texts[n]) > len(texts[n - 1]) + 1 and texts[n].isascii()
    )
    stop = texts[end][
        len(texts[end - 1]) - 1 : -1
    ]  # ends inside a token, and began in the one before
    length = next(n for n, text in enumerate(texts) if stop in text)
    stopped, other = await tied.run(
        tied.request(prompt, texts=["never said", stop], **options),
        tied.request(prompt, texts=["never said"], **options),
    )
    assert (
        stopped.completion.token_ids.tolist() == free[:length]
        and stopped.completion.finish_reason == "stop"
    )
    assert len(stopped.completion.logprobs) == len(stopped.completion.policy_versions) == length
    assert (
        other.completion.token_ids.tolist() == free and other.completion.finish_reason == "length"
    )


async def test_greedy_takes_the_most_likely_token_and_needs_no_seed(tied):
    prompt = tied.prompt(12, seed=4)
    first, second = await tied.run(
        *(tied.request(prompt, temperature=0.0, seed=seed, max_tokens=6) for seed in (1, 2))
    )
    assert first.completion.token_ids.tolist() == second.completion.token_ids.tolist()


# ---- when it answers


async def test_a_long_request_holds_up_no_short_one(tied):
    long = tied.request(tied.prompt(10), max_tokens=600)
    tied.submit(long)
    shorts = [
        tied.request(tied.prompt(10, seed=i), seed=i, max_tokens=2 + i % 5) for i in range(20)
    ]
    for short in shorts:
        tied.submit(short)
    order = [result.request_id for result in await tied.answers(21)]
    assert order[-1] == long.request_id and set(order[:-1]) == {
        short.request_id for short in shorts
    }


async def test_a_request_that_can_not_run_is_refused_alone(tied):
    good, bad = tied.request(tied.prompt(10)), tied.request(tied.prompt(10), max_tokens=MAX_LEN)
    completed, refused = await tied.run(good, bad)
    assert len(completed.completion.token_ids) == 8
    assert isinstance(refused, RequestFailed) and f"max_model_len {MAX_LEN}" in refused.cause
    # vLLM's own refusals, which are no ValueErrors.
    completed, refused = await tied.run(
        tied.request(tied.prompt(10)), tied.request(tied.prompt(10), temperature=3.0)
    )
    assert len(completed.completion.token_ids) == 8
    assert isinstance(refused, RequestFailed) and "temperature must be in" in refused.cause


async def test_aborted_requests_are_not_answered_and_leave_the_others_alone(tied):
    long, short = (
        tied.request(tied.prompt(10), max_tokens=900),
        tied.request(tied.prompt(10), max_tokens=50),
    )
    tied.submit(long, short)
    await tied.generator.abort.call_one([long.request_id])
    (result,) = await tied.answers(1)
    assert result.request_id == short.request_id and len(result.completion.token_ids) == 50
    assert len((await tied.complete(tied.prompt(5))).token_ids) == 8


# ---- whose weights


async def test_after_an_update_generator_and_trainer_agree_on_weights_that_clearly_changed(pair):
    before = await pair.generator.canary.call_one(CANARY)
    for _ in range(3):
        await pair.train()
        trainer = await pair.publish()
        receipt = await pair.update()
        assert receipt.version == pair.version
        np.testing.assert_allclose(receipt.canary_logprobs, trainer, rtol=0, atol=1e-4)
        # Were the old weights still in use anywhere, the canary would be off by this much.
        assert np.abs(receipt.canary_logprobs - before).max() > 0.5
        before = receipt.canary_logprobs
        completion = await pair.complete(pair.prompt(20), max_tokens=10)
        assert set(completion.policy_versions.tolist()) == {pair.version}
        trained = await pair.trained_logprobs(pair.prompt(20), completion)
        np.testing.assert_allclose(completion.logprobs, trained, rtol=0, atol=1e-4)


async def test_an_engine_of_two_processes_takes_versions_over_as_one_of_one_process_does(
    tied, generator_of_two
):
    before = await generator_of_two.canary.call_one(CANARY)
    for _ in range(2):
        await tied.train()
        trainer = await tied.publish()
        receipt, single = await asyncio.gather(
            *(
                generator.update_weights.call_one(tied.version, CANARY)
                for generator in (generator_of_two, tied.generator)
            )
        )
        assert (receipt.version, receipt.fingerprint) == (tied.version, single.fingerprint)
        np.testing.assert_allclose(receipt.canary_logprobs, trainer, rtol=0, atol=1e-4)
        assert np.abs(receipt.canary_logprobs - before).max() > 0.5
        before = receipt.canary_logprobs


async def test_tokens_carry_the_version_they_were_sampled_with_when_weights_change_in_mid_completion(
    tied,
):
    await tied.train()
    prompt, old = tied.prompt(10), tied.version
    before = await tied.complete(prompt, seed=9, max_tokens=5)
    await tied.publish()
    long, short = tied.request(prompt, seed=9, max_tokens=900), tied.request(prompt, max_tokens=3)
    tied.submit(long)
    tied.submit(short)
    (answered,) = await tied.answers(1)
    assert answered.request_id == short.request_id  # so the long one has tokens too
    await tied.update()
    (result,) = await tied.answers(1)
    versions = result.completion.policy_versions
    assert set(versions.tolist()) == {old, tied.version}
    switch = int((versions == old).sum())
    assert (versions[:switch] == old).all() and (versions[switch:] == tied.version).all()
    assert result.completion.token_ids[:3].tolist() == before.token_ids[:3].tolist()


@pytest.mark.parametrize("length, shared", [(21, 0), (170, 160)])
async def test_full_blocks_of_a_prompt_are_computed_once_for_a_group_and_all_answer_as_if_alone(
    pair, length, shared
):
    # 21 tokens are less than a cache block (32 on CPU), and 170 are five blocks and a part: full blocks are shared.
    prompt, options = pair.prompt(length, seed=12), dict(max_tokens=6)
    await pair.generator.usage.call_one()
    group = [
        result.completion
        for result in await pair.run(
            *(pair.request(prompt, seed=seed, **options) for seed in range(4))
        )
    ]
    assert (await pair.generator.usage.call_one())["prompts_cached"] == 3 * shared / (4 * length)
    assert len({tuple(completion.token_ids.tolist()) for completion in group}) > 1
    for completion in group:
        trained = await pair.trained_logprobs(prompt, completion)
        np.testing.assert_allclose(completion.logprobs, trained, rtol=0, atol=1e-4)
    last = await pair.complete(prompt, seed=3, **options)
    assert last.token_ids.tolist() == group[3].token_ids.tolist(), "also one that comes later"


async def test_no_prompt_is_answered_from_another_versions_prefix_cache(pair):
    # Several cache blocks long (32 tokens each on CPU); the second request finds them cached.
    prompt = pair.prompt(400, seed=8)
    for _ in range(2):
        completion = await pair.complete(prompt, max_tokens=4, seed=2)
    old = await pair.trained_logprobs(prompt, completion)
    np.testing.assert_allclose(completion.logprobs, old, rtol=0, atol=1e-4)
    await pair.train()
    await pair.publish()
    await pair.update()
    renewed = await pair.complete(prompt, max_tokens=4, seed=2)
    trained = await pair.trained_logprobs(prompt, renewed)
    np.testing.assert_allclose(renewed.logprobs, trained, rtol=0, atol=1e-4)
    assert np.abs(await pair.trained_logprobs(prompt, completion) - old).max() > 0.1


async def test_requests_that_wait_while_weights_change_are_answered_with_the_new_ones_alone(tied):
    await tied.train()
    # Cached in whole blocks under the old weights, which the engine must not use for those that have yet to begin.
    prompt = tied.prompt(300, seed=11)
    await tied.complete(prompt)
    await tied.publish()
    requests = [
        tied.request(prompt, seed=seed, max_tokens=100, temperature=1.0)
        for seed in range(3 * AT_ONCE)
    ]
    tied.submit(*requests)
    await tied.update()
    completions = [result.completion for result in await tied.answers(len(requests))]
    versions = [set(completion.policy_versions.tolist()) for completion in completions]
    assert all((np.diff(completion.policy_versions) >= 0).all() for completion in completions)
    assert versions.count({tied.version}) >= AT_ONCE, "those that waited"
    for completion, seen in zip(completions, versions, strict=True):
        if seen == {tied.version}:
            trained = await tied.trained_logprobs(prompt, completion)
            np.testing.assert_allclose(completion.logprobs, trained, rtol=0, atol=1e-4)


async def test_a_snapshot_that_is_gone_is_not_loaded_and_the_old_weights_stay(
    tied, generator_of_two
):
    generators = (tied.generator, generator_of_two)
    await asyncio.gather(
        *(generator.update_weights.call_one(tied.version, CANARY) for generator in generators)
    )
    old = [await generator.canary.call_one(CANARY) for generator in generators]
    await tied.train()
    trainer = await tied.publish()
    manifest = await torchstore.get(manifest_key(tied.version))
    gone = replace(manifest, parts=(manifest.parts[0]._replace(handle="/proc/self/fd/99999"),))
    await torchstore.put(manifest_key(tied.version), gone)
    for generator, before in zip(generators, old, strict=True):
        with pytest.raises(Exception, match="the weights at /proc/self/fd/99999 are gone"):
            await generator.update_weights.call_one(tied.version, CANARY)
        np.testing.assert_array_equal(await generator.canary.call_one(CANARY), before)
    assert set((await tied.complete(tied.prompt(5))).policy_versions.tolist()) == {tied.version - 1}
    # Found again, the same version is taken over.
    await torchstore.put(manifest_key(tied.version), manifest)
    for generator in generators:
        receipt = await generator.update_weights.call_one(tied.version, CANARY)
        assert receipt.fingerprint == fingerprint(manifest.digests)
        np.testing.assert_allclose(receipt.canary_logprobs, trainer, rtol=0, atol=1e-4)


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_engine_that_was_given_a_corrupted_snapshot_answers_nothing_any_more(
    tied, generator_of_two, workers
):
    """Called last of those that use the engines."""
    await tied.train()
    await tied.publish()
    manifest = await torchstore.get(manifest_key(tied.version))
    (part,) = manifest.parts
    buffer = SharedBuffer.attach(part.handle)
    buffer.bytes[len(buffer.bytes) // 2] ^= 1
    generator = tied.generator if workers == 1 else generator_of_two
    if workers == 1:
        waiting = [
            tied.request(tied.prompt(5), seed=seed, max_tokens=900) for seed in range(2 * AT_ONCE)
        ]
        tied.submit(*waiting)
    error = f"weights of version {tied.version}"
    with pytest.raises(Exception, match=f"{error}.* published"):
        await generator.update_weights.call_one(tied.version, CANARY)
    with pytest.raises(Exception, match=f"the engine stopped: {error}"):
        await generator.canary.call_one(CANARY)
    if workers == 1:
        assert isinstance((await tied.messages(1))[-1], GeneratorFailed), (
            "a completion under way was answered"
        )


async def test_shutdown_leaves_no_process_and_no_shared_memory(
    tied, generator_of_two, meshes, others
):
    before = descendants(os.getpid()) - others
    assert len(before) >= 4
    shared = temporary.shared_memory_of(before)
    assert shared, "the engine of two processes has some"
    await close_all(meshes)
    assert not before & descendants(os.getpid())
    assert not shared & set(os.listdir(temporary.SHARED_MEMORY))
