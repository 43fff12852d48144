"""Clients of the generators and updates go on when a replica is lost, and when it is back."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fakes.replicas import Endpoint, Replica, generate, open_session
from tests.fakes.trainer import TrainerMesh
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.engine import GeneratorFailed
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt
from torchtitan.experiments.rl.weights.sync import CanaryBound, WeightSync

CANARY = np.zeros(2, np.float32)


def receipt(version: int, canary: float = 0.0) -> WeightReceipt:
    logprobs = np.full(2, canary, np.float32)
    return WeightReceipt(
        version=version, fingerprint="f", canary_logprobs=logprobs, verify_s=0.5, reload_s=0.25
    )


# ---- requests


async def test_open_requests_of_a_lost_replica_start_again_with_another_at_once(connect):
    client, replicas = await connect(2)
    tasks = [generate(open_session(client, seed)) for seed in range(4)]
    await settle()
    assert [len(replica.requests) for replica in replicas] == [2, 2]
    lost = replicas[0].requests
    client.lose(0)
    await settle()
    assert replicas[1].requests[2:] == lost and client._router.load[0] == 0
    await replicas[1].answer()
    for task in tasks:
        assert (await task).finish_reason == "stop"
    assert client._open == {} and client._router.load == {0: 0, 1: 0}


async def test_with_no_replica_left_requests_wait_for_the_one_that_is_back(connect):
    client, (replica,) = await connect()
    before = generate(open_session(client, 1))
    await settle()
    client.lose(0)
    after = generate(open_session(client, 2))
    await settle()
    assert len(replica.requests) == 1
    again = Replica()
    await client.admit(0, again)
    await settle()
    assert {request.seed for request in again.requests} == {1, 2}
    await again.answer()
    assert (await before).finish_reason == (await after).finish_reason == "stop"


async def test_a_replica_that_dies_while_it_is_admitted_makes_room_for_the_next(connect):
    client, _ = await connect(1)
    life = Lifetime("generator 1")
    life.end("killed by SIGKILL")
    with pytest.raises(ProcessLost):
        await client.admit(1, Replica(), life)
    again = Replica()
    await client.admit(1, again)
    tasks = [generate(open_session(client, seed)) for seed in range(2)]
    await settle()
    assert len(again.requests) == 1, "it takes its share of the requests"
    for task in tasks:
        task.cancel()


async def test_a_late_answer_of_a_lost_replica_is_no_answer(connect):
    client, replicas = await connect(2)
    task = generate(open_session(client))
    await settle()
    client.lose(0)
    await replicas[0].answer()
    assert not task.done() and client.generated_tokens == 0
    await replicas[1].answer()
    assert (await task).finish_reason == "stop"


async def test_a_conversation_whose_replica_is_lost_goes_on_with_another(connect):
    client, replicas = await connect(2)
    session = open_session(client)
    first = generate(session)
    await settle()
    await replicas[0].answer()
    await first
    client.lose(0)
    second = generate(session)
    await settle()
    assert len(replicas[1].requests) == 1
    await replicas[1].answer()
    assert (await second).finish_reason == "stop"


async def test_in_lockstep_requests_of_a_lost_replica_wait_for_those_in_flight(connect):
    client, replicas = await connect(2, lockstep=True)
    sessions = [open_session(client, seed) for seed in range(2)]
    tasks = [generate(session) for session in sessions]
    await settle()
    client.lose(0)
    await settle()
    assert [len(replica.requests) for replica in replicas] == [1, 1]
    await replicas[1].answer()
    sessions[1].close()
    await settle()
    assert len(replicas[1].requests) == 2
    await replicas[1].answer(replicas[1].requests[1])
    for task in tasks:
        assert (await task).finish_reason == "stop"


async def test_an_engine_that_stops_is_reported_and_its_requests_wait(connect):
    stopped = []
    client, (replica,) = await connect(
        on_stopped=lambda index, cause: stopped.append((index, cause))
    )
    task = generate(open_session(client))
    await settle()
    await replica.send([GeneratorFailed(cause="RuntimeError: out of memory")])
    assert stopped == [(0, "RuntimeError: out of memory")] and not task.done()
    client.lose(0)
    again = Replica()
    await client.admit(0, again)
    await settle()
    await again.answer()
    assert (await task).finish_reason == "stop"


async def test_results_that_can_not_be_read_stop_the_replica_that_sent_them(connect):
    stopped = []
    client, (replica,) = await connect(
        on_stopped=lambda index, cause: stopped.append((index, cause))
    )
    generate(open_session(client))
    await settle()
    await replica.send(["a result of no kind"])
    ((index, cause),) = stopped
    assert index == 0 and cause.startswith("its results can't be read: AttributeError: ")


async def test_a_replica_that_is_lost_while_it_is_admitted_gets_no_request(connect):
    client, replicas = await connect(1)
    late = Replica()
    late.attach = SimpleNamespace(call_one=lambda client_id, port: asyncio.Event().wait())
    admitting = asyncio.create_task(client.admit(1, late))
    await settle()
    client.lose(1)
    with pytest.raises(ProcessLost):
        await admitting
    tasks = [generate(open_session(client, seed)) for seed in range(3)]
    await settle()
    assert late.messages == [] and len(replicas[0].requests) == 3
    await replicas[0].answer()
    await asyncio.gather(*tasks)


# ---- weight updates


async def test_a_replica_that_is_lost_in_an_update_has_no_receipt_and_the_others_have(connect):
    client, _ = await connect(0)
    begun = asyncio.Event()

    async def hang(version, canary):
        begun.set()
        await asyncio.Event().wait()

    lives = [Lifetime("generator 0"), Lifetime("generator 1")]
    for index, update in enumerate(
        [hang, Endpoint(lambda version, canary: receipt(version)).choose]
    ):
        replica = Replica()
        replica.update_weights = SimpleNamespace(choose=update)
        await client.admit(index, replica, lives[index])
    updating = asyncio.create_task(client.update_weights(3, CANARY))
    await begun.wait()
    lives[0].end("killed by SIGKILL")
    assert list(await updating) == [1] and client.version == 3


class Generators:
    """Those that take requests; an update of them ends when the test says so."""

    def __init__(self):
        self.updated: list[int] = []
        self.released = asyncio.Event()
        self.released.set()

    async def update_weights(self, version, canary_token_ids):
        self.updated.append(version)
        await self.released.wait()
        return {}

    async def sleep(self):
        self.updated.append("sleep")


def sync_of(generators: Generators) -> WeightSync:
    return WeightSync(TrainerMesh(), generators, text=np.arange(2), bound=CanaryBound("float32"))


async def test_a_replica_that_is_back_loads_the_version_of_the_others_before_it_takes_requests():
    generators = Generators()
    sync, loaded = sync_of(generators), []

    def load(version, canary_token_ids):
        loaded.append(version)
        return receipt(version, version / 10)

    again = SimpleNamespace(
        update_weights=Endpoint(load), canary=Endpoint(lambda ids: np.zeros(2, np.float32))
    )

    async def take_requests() -> None:
        loaded.append("takes requests")

    await sync.admit(0, again, take_requests)  # nothing was published: it is at version 0 by itself
    assert loaded == ["takes requests"]
    generators.released.clear()
    updating = asyncio.create_task(sync.update(await sync.copy_out(7)))
    await settle()
    admitting = asyncio.create_task(sync.admit(1, again, take_requests))
    await settle()
    assert loaded == ["takes requests"], "it waits for the update that runs"
    generators.released.set()
    report = await updating
    await admitting
    assert loaded[1:] == [7, "takes requests"]
    assert report.version == 7 and report.canary_max_diff == 0 and report.reload_s == 0, (
        "no replica was there"
    )


async def test_no_update_begins_while_a_replica_loads():
    generators = Generators()
    sync = sync_of(generators)
    await sync.update(await sync.copy_out(1))
    loading, loaded = asyncio.Event(), asyncio.Event()

    async def load(version, canary_token_ids):
        loading.set()
        await loaded.wait()
        return receipt(version, version / 10)

    async def take_requests() -> None:
        assert generators.updated == [1]

    again = SimpleNamespace(update_weights=SimpleNamespace(call_one=load))
    admitting = asyncio.create_task(sync.admit(0, again, take_requests))
    await loading.wait()
    updating = asyncio.create_task(sync.update(await sync.copy_out(2)))
    await settle()
    assert generators.updated == [1]
    loaded.set()
    await admitting
    await updating
    assert generators.updated == [1, 2]


async def test_a_trainer_with_one_buffer_writes_over_no_version_that_a_replica_loads():
    trainer, generators = TrainerMesh(), Generators()
    bound = CanaryBound("float32")
    sync = WeightSync(trainer, generators, text=np.arange(2), bound=bound, one_buffer=True)
    await sync.update(await sync.copy_out(1))
    loading, loaded, order = asyncio.Event(), asyncio.Event(), []

    async def load(version, canary_token_ids):
        loading.set()
        await loaded.wait()
        order.append((version, trainer.published))
        return receipt(version, version / 10)

    again = SimpleNamespace(update_weights=SimpleNamespace(call_one=load))
    admitting = asyncio.create_task(sync.admit(0, again, nothing))
    await loading.wait()
    copying = asyncio.create_task(sync.copy_out(2))
    await settle()
    assert trainer.published == 1
    loaded.set()
    copied = await copying
    late = asyncio.create_task(sync.admit(1, again, nothing))  # version 1 is nowhere any more
    await settle()
    await sync.update(copied)
    await asyncio.gather(admitting, late)
    assert order == [(1, 1), (2, 2)]


async def test_a_replica_that_is_back_while_the_others_sleep_takes_no_memory_before_they_wake():
    generators = Generators()
    sync, loaded = sync_of(generators), []
    await sync.update(await sync.copy_out(1))
    await sync.sleep()

    def load(version, canary_token_ids):
        loaded.append(version)
        return receipt(version, version / 10)

    async def take_requests() -> None: ...

    admitting = asyncio.create_task(
        sync.admit(0, SimpleNamespace(update_weights=Endpoint(load)), take_requests)
    )
    await settle()
    assert loaded == []
    await sync.update(await sync.copy_out(2))
    await admitting
    assert generators.updated == [1, "sleep", 2] and loaded == [2]


async def test_a_replica_that_is_back_with_other_weights_than_the_trainer_takes_no_request():
    sync = sync_of(Generators())
    await sync.update(await sync.copy_out(2))
    wrong = SimpleNamespace(update_weights=Endpoint(lambda version, ids: receipt(version, 0.1)))
    taken = []

    async def take_requests() -> None:
        taken.append(True)

    with pytest.raises(RunError, match="generator 1 and trainer disagree on version 2"):
        await sync.admit(1, wrong, take_requests)
    assert taken == []


@pytest.mark.parametrize(
    "wrong, error",
    [
        (receipt(1, 0.2), "generator 1 answered version 2 with the weights of version 1"),
        (
            replace(receipt(2, 0.2), fingerprint="g"),
            "generator 1 holds weights of fingerprint g as version 2; .* published f",
        ),
    ],
)
async def test_a_replica_that_is_back_without_the_published_version_takes_no_request(wrong, error):
    sync = sync_of(Generators())
    await sync.update(await sync.copy_out(2))

    async def take_requests() -> None:
        raise AssertionError("it takes requests")

    with pytest.raises(RunError, match=error):
        await sync.admit(
            1, SimpleNamespace(update_weights=Endpoint(lambda version, ids: wrong)), take_requests
        )


async def test_replicas_are_admitted_side_by_side_and_an_update_waits_for_all_of_them():
    generators = Generators()
    sync = sync_of(generators)
    await sync.update(await sync.copy_out(1))
    all_load = asyncio.Barrier(4)

    async def load(version, canary_token_ids):
        await all_load.wait()  # none goes on before all have begun
        return receipt(version, version / 10)

    taken = []

    async def take_requests() -> None:
        assert generators.updated == [1]
        taken.append(True)

    again = SimpleNamespace(update_weights=SimpleNamespace(call_one=load))
    admitting = [asyncio.create_task(sync.admit(index, again, take_requests)) for index in range(3)]
    await settle()
    updating = asyncio.create_task(sync.update(await sync.copy_out(2)))
    await settle()
    assert taken == [] and generators.updated == [1]
    await all_load.wait()
    await asyncio.gather(*admitting, updating)
    assert len(taken) == 3 and generators.updated == [1, 2]
    await sync.admit(
        0,
        SimpleNamespace(update_weights=Endpoint(lambda version, ids: receipt(version, 0.2))),
        nothing,
    )


async def test_an_admission_that_is_given_up_leaves_the_way_free_for_the_next_update():
    generators = Generators()
    sync = sync_of(generators)
    await sync.update(await sync.copy_out(1))
    hangs = SimpleNamespace(
        update_weights=SimpleNamespace(call_one=lambda version, ids: asyncio.Event().wait())
    )
    admitting = asyncio.create_task(sync.admit(0, hangs, nothing))
    await settle()
    generators.released.clear()
    updating = asyncio.create_task(sync.update(await sync.copy_out(2)))
    await settle()
    admitting.cancel()
    await settle()
    assert generators.updated == [1, 2]
    waiting = asyncio.create_task(sync.admit(1, hangs, nothing))  # for the update that runs now
    await settle()
    waiting.cancel()
    generators.released.set()
    await updating
    await sync.update(await sync.copy_out(3))


async def nothing() -> None:
    pass
