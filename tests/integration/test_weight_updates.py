"""Weights that change while a real engine samples: in every mode a token has the log-probability of the version on its label.

A generator of two replicas; the versions are random models that have nothing in common. transformers says what their tokens'
log-probabilities are, given a whole prefix or a cache that older versions have filled.
"""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from typing import get_args

import numpy as np
import pytest

from tests.integration.fleets import (
    CANARY,
    MAX_LEN,
    SEATS,
    Fleet,
    assert_agree,
    by_label,
    given_kept_cache,
    given_whole_prefix,
    prompt_of,
    running,
)
from torchtitan.experiments.rl.fleet.spawn import spawn_on
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig, WeightUpdate
from torchtitan.experiments.rl.generation.engine import ScoreRequest
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion

MODES = get_args(WeightUpdate)
every_mode = pytest.mark.parametrize("how", MODES)


@pytest.fixture(scope="module")
def fleet(untied_model, tmp_path_factory) -> Iterator[Fleet]:
    config = GeneratorConfig(replicas=2)
    config.engine.max_model_len, config.engine.max_num_seqs = MAX_LEN, SEATS
    cores = sorted(os.sched_getaffinity(0))
    procs = spawn_on(
        None, "generator", [Place(0, share) for share in ((cores[0],), (cores[-1],))], "cpu"
    )[0]
    yield from running(procs, config, untied_model, str(tmp_path_factory.mktemp("fleet")))


def assert_other(seen: np.ndarray, expected: np.ndarray) -> None:
    """So that agreement means something: nearly no token's log-probability is within the tolerance of those."""
    assert len(seen) == 0 or (
        np.mean(np.abs(seen - expected) > 1e-3) > 0.9 and np.abs(seen - expected).max() > 0.1
    )


# ---- labels


@every_mode
async def test_every_token_has_the_log_probability_of_its_label_over_two_updates(fleet, how):
    await fleet.begin(how)
    first = fleet.version
    # Three long ones have tokens when the first update comes; of the others, one has, and the rest waits for a seat.
    requests = [
        fleet.request(prompt_of(length, seed), 700, seed)
        for seed, length in enumerate((10, 200, 300))
    ]
    await fleet.under_way(*requests)
    requests += [fleet.request(prompt_of(150, seed), 60, seed) for seed in range(3, 9)]
    fleet.submit(*requests[3:])
    for seeds in (range(9, 12), range(12, 15)):
        await fleet.publish()
        # Submitted right before the update, so that each version samples something however long it took to publish.
        late = [fleet.request(prompt_of(150, seed), 60, seed) for seed in seeds]
        fleet.submit(*late)
        requests += late
        receipt = await fleet.update()
        assert receipt.version == fleet.version
        canary = given_whole_prefix(fleet.models[fleet.version], CANARY[:1], CANARY[1:])
        assert_agree(receipt.canary_logprobs[1:], canary)
    results = await fleet.results(len(requests))
    completions = [results[request.request_id].completion for request in requests]
    seen = set()
    for request, completion in zip(requests, completions, strict=True):
        prompt, versions = request.prompt_token_ids, completion.policy_versions
        seen.update(versions.tolist())
        assert (np.diff(versions) >= 0).all()
        labelled = by_label(fleet, prompt, completion)
        if how == "keep":
            assert_agree(completion.logprobs, given_kept_cache(fleet.models, prompt, completion))
            later = versions > versions[0]
            assert_other(completion.logprobs[later], labelled[later])
        else:
            assert_agree(completion.logprobs, labelled)
        for version in range(first, fleet.version + 1):
            others = versions != version
            assert_other(
                completion.logprobs[others],
                given_whole_prefix(fleet.models[version], prompt, completion.token_ids)[others],
            )
        if how == "drain":
            assert len(set(versions.tolist())) == 1
    assert seen == {first, first + 1, first + 2}
    long_versions = [set(completion.policy_versions.tolist()) for completion in completions[:3]]
    assert long_versions == [{first} if how == "drain" else seen] * 3


@pytest.mark.parametrize("how", ["keep", "recompute"])
async def test_the_random_stream_of_a_completion_goes_on_through_an_update(fleet, how):
    await fleet.begin(how)
    request = fleet.request(prompt_of(200), 300, seed=5)
    undisturbed = await fleet.complete(request.prompt_token_ids, 300, seed=5)
    await fleet.under_way(request)
    await fleet.publish(same=True)
    await fleet.update()
    completion = await fleet.answer(request)
    assert set(completion.policy_versions.tolist()) == {fleet.version - 1, fleet.version}
    assert completion.token_ids.tolist() == undisturbed.token_ids.tolist()
    assert_agree(completion.logprobs, undisturbed.logprobs)


# ---- caches


@every_mode
async def test_no_prompt_is_answered_from_another_versions_cache(fleet, how):
    await fleet.begin(how)
    prompt, spread = prompt_of(300, seed=1), fleet.request(prompt_of(300, seed=2), 500)
    answered = await fleet.complete(prompt, 150)
    await fleet.under_way(spread)
    await fleet.publish()
    await fleet.update()
    begun_before = await fleet.answer(spread)
    turns = [
        prompt,
        np.concatenate([prompt, answered.token_ids, prompt_of(20)]),
        np.concatenate([spread.prompt_token_ids, begun_before.token_ids, prompt_of(20)]),
    ]
    # Blocks of 32 tokens are cached. The new version has read the prompt when the next turn comes, and, where it had to
    # read the completion under way once more, all of that but its last token. The second time every full block of a prompt
    # is cached.
    from_cache = [0, 288, 768 if how == "recompute" else 0]
    for turn, expected in zip(turns * 2, [*from_cache, 288, 448, 800], strict=True):
        request = fleet.request(turn, 5)
        fleet.submit(request)
        completion = await fleet.answer(request)
        assert set(completion.policy_versions.tolist()) == {fleet.version}
        assert_agree(
            completion.logprobs,
            given_whole_prefix(fleet.models[fleet.version], turn, completion.token_ids),
        )
        assert_other(
            completion.logprobs,
            given_whole_prefix(fleet.models[fleet.version - 1], turn, completion.token_ids),
        )
        assert await fleet.generator.from_cache.call_one(request.request_id) == expected


@every_mode
async def test_tokens_to_score_are_read_by_one_version(fleet, how):
    await fleet.begin(how)
    await fleet.under_way(*(fleet.request(prompt_of(50, seed), 300, seed) for seed in range(3)))
    await fleet.publish()
    scores = [
        ScoreRequest(request_id=10**6 + i, token_ids=prompt_of(400, seed=i)) for i in range(20)
    ]
    fleet.submit(*scores)
    await fleet.update()
    results, versions = await fleet.results(23), []
    for score in scores:
        for version in (fleet.version - 1, fleet.version):
            expected = given_whole_prefix(
                fleet.models[version], score.token_ids[:1], score.token_ids[1:]
            )
            if np.allclose(results[score.request_id].logprobs[1:], expected, rtol=0, atol=1e-4):
                versions.append(version)
    assert len(versions) == 20 and versions[-1] == fleet.version


# ---- draining


async def test_aborting_what_an_engine_drains_lets_the_update_come(fleet):
    await fleet.begin("drain")
    long = [fleet.request(prompt_of(10, seed), 1000, seed) for seed in range(3)]
    await fleet.under_way(*long)
    await fleet.publish()
    updating = fleet.start_update()
    waiting = [fleet.request(prompt_of(10, seed), 5, seed) for seed in range(8)]
    fleet.submit(*waiting)
    await fleet.generator.abort.call_one([request.request_id for request in long + waiting[4:]])
    await asyncio.wait_for(updating, 60)
    results = await fleet.results(4)
    for request in waiting[:4]:
        completion = results[request.request_id].completion
        assert_agree(completion.logprobs, by_label(fleet, request.prompt_token_ids, completion))


# ---- replicas


@pytest.mark.parametrize(
    ("how", "lockstep"), [*((how, False) for how in MODES), ("recompute", True)]
)
async def test_replicas_change_their_weights_each_on_its_own_and_answer_together(
    fleet, how, lockstep
):
    await fleet.begin(how)
    old, client = fleet.version, GeneratorClient(lockstep=lockstep)
    for index in range(2):
        await client.admit(index, fleet.mesh.slice(procs=index))
    sampling, begun = SamplingConfig(max_tokens=400), asyncio.Event()

    async def talk(seed: int) -> list[tuple[np.ndarray, Completion]]:
        session = client.session(
            rollout_id=str(seed), seed=seed, sampling=sampling, stop_token_ids=[]
        )
        prompt, turns = prompt_of(40, seed), []
        for tokens in (30 * (seed + 1), 40):
            completion = await session.generate(prompt, max_tokens=tokens)
            begun.set()
            turns.append((prompt, completion))
            prompt = np.concatenate([prompt, completion.token_ids, prompt_of(10, seed)])
        session.close()
        return turns

    try:
        talks = [asyncio.create_task(talk(seed)) for seed in range(10)]
        await begun.wait()  # the shortest was answered; some of the others have tokens, some none
        await fleet.publish()
        receipts = await asyncio.wait_for(client.update_weights(fleet.version, CANARY), 60)
        expected = given_whole_prefix(fleet.models[fleet.version], CANARY[:1], CANARY[1:])
        assert len(receipts) == 2 and client.version == fleet.version
        for receipt in receipts.values():
            assert_agree(receipt.canary_logprobs[1:], expected)
        turns = sum(await asyncio.wait_for(asyncio.gather(*talks), 60), [])
        later = await asyncio.wait_for(talk(10), 60)
    finally:
        client.close()
    reference = (
        partial(given_kept_cache, fleet.models) if how == "keep" else partial(by_label, fleet)
    )
    for prompt, completion in turns + later:
        assert set(completion.policy_versions.tolist()) <= {old, fleet.version}
        assert_agree(completion.logprobs, reference(prompt, completion))
    assert {
        version for _, completion in later for version in completion.policy_versions.tolist()
    } == {fleet.version}
