"""The client of the generators: which replica gets a request, when the client sends it, and how it ends."""

import asyncio

import numpy as np
import pytest

from tests.fakes.replicas import PROMPT, STOP, generate, open_session
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.envs.yield_queue import Priority, yield_queue
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.client import FULL_MESSAGE
from torchtitan.experiments.rl.generation.engine import (
    GenerateRequest,
    GeneratorFailed,
    RequestFailed,
)
from torchtitan.experiments.rl.generation.router import AHEAD, Router
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

# ---- which replica


def router_of(replicas: int) -> Router:
    router = Router()
    for replica in range(replicas):
        router.open(replica)
    return router


def test_least_loaded_replica_is_chosen_and_the_first_on_a_tie():
    router = router_of(3)
    assert router.choose(None) == 0
    router.add(0, 10)
    router.add(1, 5)
    assert router.choose(None) == 2
    router.add(2, 7)
    assert router.choose(None) == 1
    router.add(0, -10)
    assert router.choose(None) == 0


def test_a_conversation_stays_with_its_replica_however_loaded():
    router = router_of(2)
    router.add(1, 1000)
    assert router.choose(1) == 1


def test_a_group_stays_where_its_prompt_is_until_that_replica_is_too_far_ahead():
    router = router_of(2)
    for request in range(AHEAD + 1):  # 0 tokens ahead before the first, 10 x AHEAD before the last
        assert router.choose(None, group="a", tokens=10) == 0, request
        router.add(0, 10)
    assert router.choose(None, group="a", tokens=10) == 1
    router.add(1, 10)
    router.add(0, -10 * AHEAD)
    assert router.choose(None, group="a", tokens=10) == 1, "its prompt is there now"
    assert router.choose(None, group="b", tokens=10) == 0 and router.choose(None) == 0


def test_a_group_moves_when_its_replica_closes_and_is_forgotten_with_its_last_session():
    router = router_of(2)
    assert router.choose(None, group="a", tokens=1) == 0
    router.close(0)
    assert router.choose(None, group="a", tokens=1) == 1
    router.open(0)
    assert router.choose(None, group="a", tokens=1) == 1
    router.forget("a")
    router.forget("a")
    assert router.choose(None, group="a", tokens=1) == 0


async def test_the_rollouts_of_a_group_go_to_one_replica_and_groups_spread(connect):
    client, mesh = await connect(2)
    sessions = [
        client.session(
            rollout_id=f"{group}/{i}",
            seed=i,
            sampling=SamplingConfig(max_tokens=10),
            stop_token_ids=[STOP],
        )
        for group in ("a", "b")
        for i in range(8)
    ]
    tasks = [
        generate(session, np.array([session.group == "a", 5], np.int32)) for session in sessions
    ]
    await settle()
    first_tokens = [
        [int(request.prompt_token_ids[0]) for request in replica.requests] for replica in mesh
    ]
    assert first_tokens == [[1] * 8, [0] * 8]
    for replica in mesh:
        await replica.answer()
    await asyncio.gather(*tasks)
    for session in sessions:
        session.close()
    assert client._router._replica_of == {} and client._sessions.total() == 0


async def test_load_is_prompt_and_the_most_that_may_be_sampled(connect):
    client, _ = await connect()
    work = generate(open_session(client, max_tokens=50), max_tokens=20)
    await settle()
    assert client._router.load == {0: 23}
    work.cancel()


async def test_requests_spread_over_replicas_and_the_next_turn_goes_where_the_first_went(connect):
    client, mesh = await connect(2)
    sessions = [open_session(client, seed) for seed in range(4)]
    first = [generate(session) for session in sessions]
    await settle()
    assert [len(replica.requests) for replica in mesh] == [2, 2]
    second_of = {
        request.seed: index for index, replica in enumerate(mesh) for request in replica.requests
    }
    for replica in mesh:
        await replica.answer()
    await asyncio.gather(*first)
    assert client._router.load == {0: 0, 1: 0}
    # Only the two of one replica go on: free choice would send one of them to the other.
    on_second = [session for session in sessions if second_of[session._seed] == 1]
    for session in on_second:
        generate(session)
    await settle()
    assert [len(replica.messages) for replica in mesh] == [1, 2] and len(mesh[1].messages[1]) == 2


async def test_each_answer_reaches_the_session_that_asked_and_is_counted(connect):
    client, (replica,) = await connect()
    tasks = [
        generate(open_session(client, last), np.array([9, last], np.int32), max_tokens=4)
        for last in (4, 6, 8)
    ]
    await settle()
    await replica.answer(*reversed(replica.requests))
    assert [(await task).token_ids.tolist() for task in tasks] == [
        [5, 6, 7, 8],
        [7, 8, 9, 10],
        [9, 10, 11, 12],
    ]
    assert client.generated_tokens == 12 and client._open == {}


async def test_each_turn_has_a_seed_of_its_own_within_63_bits(connect):
    client, (replica,) = await connect()
    session = open_session(client, seed=2**63 - 1)
    for turn in range(3):
        task = generate(session)
        await settle()
        await replica.answer(replica.messages[turn][0])
        await task
    seeds = [request.seed for request in replica.requests]
    assert (
        len(set(seeds)) == 3 and seeds[0] == 2**63 - 1 and all(0 <= seed < 2**63 for seed in seeds)
    )


async def test_score_returns_log_probabilities_and_frees_its_load(connect):
    client, (replica,) = await connect()
    task = asyncio.create_task(client.score(PROMPT))
    await settle()
    assert client._router.load == {0: 3}
    await replica.answer()
    np.testing.assert_allclose(await task, [0, np.log(1 / 2), np.log(1 / 30)], rtol=1e-6)
    assert client._router.load == {0: 0} and client.generated_tokens == 0


async def test_requests_of_a_tasks_policy_name_its_adapter(connect):
    client, (replica,) = await connect()
    client.version = 3
    policies = {adapter: client.with_adapter(adapter) for adapter in ("tutor", "critic")}
    turns = [generate(open_session(policy)) for policy in policies.values()]
    scores = [asyncio.create_task(policy.score(PROMPT)) for policy in policies.values()]
    await settle()
    asked = [(type(request).__name__, request.adapter) for request in replica.requests]
    assert sorted(asked) == [
        (kind, adapter)
        for kind in ("GenerateRequest", "ScoreRequest")
        for adapter in ("critic", "tutor")
    ]
    await replica.answer()
    assert [(await turn).token_ids.tolist() for turn in turns] == [[1, 2], [1, 2]]
    assert [len(await score) for score in scores] == [3, 3]
    assert [policy.version for policy in policies.values()] == [3, 3]


# ---- when it leaves


async def test_requests_of_one_tick_leave_in_one_message(connect):
    client, mesh = await connect(2)
    for seed in range(100):
        generate(open_session(client, seed))
    await settle()
    assert [len(replica.messages) for replica in mesh] == [1, 1]
    assert sum(len(replica.requests) for replica in mesh) == 100


async def test_without_lockstep_no_request_waits_for_another_session(connect):
    client, (replica,) = await connect()
    first, _ = generate(open_session(client, 1)), open_session(client, 2)
    await settle()
    assert len(replica.requests) == 1
    first.cancel()


async def test_lockstep_keeps_requests_until_every_open_session_waits_for_one(connect):
    client, (replica,) = await connect(lockstep=True)
    sessions = [open_session(client, seed) for seed in range(3)]
    generate(sessions[2])
    generate(sessions[0])
    await settle()
    assert replica.messages == []
    generate(sessions[1])
    await settle()
    assert [request.seed for request in replica.requests] == [0, 1, 2] and len(
        replica.messages
    ) == 1


async def test_lockstep_order_does_not_depend_on_who_asked_first(connect):
    orders = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        client, mesh = await connect(2, lockstep=True)
        sessions = [open_session(client, seed) for seed in range(4)]
        for index in order:
            generate(sessions[index])
        await settle()
        orders.append([[request.seed for request in replica.requests] for replica in mesh])
    assert orders[0] == orders[1] == [[0, 2], [1, 3]]


async def test_lockstep_goes_on_when_the_last_session_that_was_waited_for_closes(connect):
    client, (replica,) = await connect(lockstep=True)
    generate(open_session(client, 1))
    idle = open_session(client, 2)
    await settle()
    assert replica.messages == []
    idle.close()
    idle.close()
    await settle()
    assert len(replica.messages) == 1


async def test_lockstep_sends_no_next_turn_while_others_are_still_sampled(connect):
    client, (replica,) = await connect(lockstep=True)
    sessions = [open_session(client, seed) for seed in range(3)]
    turns = [generate(session) for session in sessions]
    await settle()
    # One is answered and sends its next turn. When the others finish depends on timing: they must not share steps with it.
    await replica.answer(replica.requests[0])
    await turns[0]
    generate(sessions[0])
    await settle()
    assert len(replica.messages) == 1
    await replica.answer(*replica.messages[0][1:])
    await turns[1]
    generate(sessions[1])
    await settle()
    assert len(replica.messages) == 1
    sessions[2].close()
    await settle()
    assert len(replica.messages) == 2 and len(replica.messages[1]) == 2


async def test_lockstep_sends_a_score_at_once_without_sessions_and_otherwise_with_theirs(connect):
    client, (replica,) = await connect(lockstep=True)
    score = asyncio.create_task(client.score(PROMPT))
    await settle()
    assert len(replica.messages) == 1
    session = open_session(client, 1)
    generate(session)
    await settle()
    assert len(replica.messages) == 1
    await replica.answer()
    await score
    await settle()
    assert len(replica.messages) == 2
    # A score belongs to no session: it does not count for one that has no request yet.
    await replica.answer(*replica.messages[1])
    asyncio.create_task(client.score(PROMPT))
    await settle()
    assert len(replica.messages) == 2
    generate(session)
    await settle()
    assert len(replica.messages) == 3 and len(replica.messages[2]) == 2


# ---- how it ends


async def test_cancelled_request_in_flight_frees_its_load_and_is_aborted(connect):
    client, (replica,) = await connect()
    task = generate(open_session(client))
    await settle()
    task.cancel()
    await settle()
    assert client._router.load == {0: 0} and client._open == {}
    assert replica.aborted == [replica.requests[0].request_id]
    await replica.answer()  # a result that was on its way is dropped
    assert client._router.load == {0: 0} and client.generated_tokens == 0


async def test_request_cancelled_before_it_left_never_leaves(connect):
    client, (replica,) = await connect(lockstep=True)
    waiting, _ = generate(open_session(client, 1)), open_session(client, 2)
    await settle()
    waiting.cancel()
    await settle()
    assert replica.aborted == [] and client._open == {} and client._outbox == []


async def test_request_that_can_not_run_fails_alone(connect):
    client, (replica,) = await connect()
    good, bad = generate(open_session(client, 1)), generate(open_session(client, 2))
    await settle()
    ids = {request.seed: request.request_id for request in replica.requests}
    await replica.send([RequestFailed(request_id=ids[2], cause="prompt of 300 tokens")])
    with pytest.raises(RunError, match="prompt of 300 tokens"):
        await bad
    assert client._router.load == {0: 13}
    await replica.answer(replica.requests[0])
    assert (await good).finish_reason == "stop"


async def test_failed_replica_answers_everybody_now_and_later(connect):
    failures = []
    client, mesh = await connect(2, on_failure=failures.append)
    tasks = [generate(open_session(client, seed)) for seed in range(4)]
    score = asyncio.create_task(client.score(PROMPT))
    await settle()
    await mesh[0].send([GeneratorFailed(cause="RuntimeError: out of memory")])
    for task in (*tasks, score):
        with pytest.raises(RunError, match="a generator stopped: RuntimeError: out of memory"):
            await task
    assert [str(failure) for failure in failures] == [
        "a generator stopped: RuntimeError: out of memory"
    ]
    with pytest.raises(RunError, match="out of memory"):
        await open_session(client).generate(PROMPT, max_tokens=3)


async def test_closed_client_answers_everybody(connect):
    client, _ = await connect()
    task = generate(open_session(client))
    await settle()
    client.close()
    with pytest.raises(RunError, match="closed"):
        await task


async def test_requests_carry_the_smaller_of_the_two_token_limits(connect):
    client, (replica,) = await connect()
    session = open_session(client, max_tokens=6)
    for limit, expected in ((4, 4), (9, 6)):
        generate(session, max_tokens=limit)
        await settle()
        request = replica.requests[-1]
        assert isinstance(request, GenerateRequest) and request.sampling.max_tokens == expected
        assert request.stop_token_ids == [STOP] and request.prompt_token_ids.dtype == np.int32


async def test_requests_of_rollouts_that_render_one_after_another_leave_together(connect):
    client, mesh = await connect()
    gate = yield_queue()

    async def rollout(seed):
        await gate.wait(Priority.COMPLETION)  # one in each iteration of the loop
        await open_session(client, seed).generate(PROMPT, max_tokens=4)

    work = [asyncio.create_task(rollout(seed)) for seed in range(FULL_MESSAGE + 9)]
    for _ in range(4 * len(work)):
        await asyncio.sleep(0)
    assert [len(message) for message in mesh[0].messages] == [FULL_MESSAGE, 9]
    await mesh[0].answer()
    await asyncio.gather(*work)
