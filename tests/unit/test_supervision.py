"""The supervisor fills a role again when its process dies, as often as allowed, and tells the run.

The roles here have no processes.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from tests.fakes.clock import Clock
from tests.fakes.waiting import iterations, until
from torchtitan.experiments.rl.compat.monarch import ProcessDeath
from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.errors import PeerGone, RunError
from torchtitan.experiments.rl.fleet.fleet import side_by_side
from torchtitan.experiments.rl.fleet.restarts import Restarts
from torchtitan.experiments.rl.fleet.role import Role
from torchtitan.experiments.rl.fleet.supervisor import Supervisor
from torchtitan.experiments.rl.observability.console import Waits
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.process.actor import ProcessIdentity
from torchtitan.experiments.rl.process.heartbeat import Pulse
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost

KILLED = "killed by SIGKILL"


class Generator(Role):
    """A role that notes what is done to it. ``hold`` keeps the named stage from ending."""

    def __init__(self):
        super().__init__(name="generator 1", context=None, place=Place(0, (0,)))
        self.done: list[str] = []
        self.hold: str | None = None
        self.fault: Exception | None = None
        self.spawned: list[str] = []

    def arguments(self):
        raise AssertionError("no process is spawned here")

    def spawn(self, name: str):
        self.done.append("spawn")
        self.spawned.append(name)
        endpoints = {
            "identity": SimpleNamespace(call_one=self.identity),
            "pulse": SimpleNamespace(choose=self.pulse),
            "send_notes_to": SimpleNamespace(call_one=self.send_notes_to),
        }
        return SimpleNamespace(stop=self.stop), SimpleNamespace(**endpoints)

    async def identity(self) -> ProcessIdentity:
        return ProcessIdentity(host="another-host", pid=1, stacks="")

    async def send_notes_to(self, port: object) -> None:
        self.done.append(f"send notes to {port}")

    async def pulse(self) -> Pulse:
        return Pulse(doing="", seconds=0.0, slow=False)

    async def stop(self) -> None:
        pass

    async def set_up(self, process) -> str:
        return await self.stage("set up")

    async def connect(self, process) -> None:
        await self.stage("connect")

    def disconnect(self) -> None:
        self.done.append("disconnect")

    async def stage(self, name: str) -> str:
        self.done.append(name)
        if self.hold == name:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        return f"{name} done"

    def die(self, cause: str = KILLED) -> None:
        self.process.life.end(cause)


class Watching:
    """A supervisor, and what it says."""

    def __init__(self, *, clock=time.monotonic, **limits):
        self.lines: list[str] = []
        self.failures: list[RunError] = []
        restarts = Restarts(SupervisionConfig(**limits), clock=clock)
        self.console = console_of(self.lines)
        self.supervisor = Supervisor(restarts, self.console, on_failure=self.failures.append)


def console_of(lines: list[str]) -> SimpleNamespace:
    return SimpleNamespace(note=lines.append, waits=Waits(), notes=None)


async def refuse() -> None:
    raise RunError("generator 1 and trainer disagree on version 7")


async def test_a_role_that_dies_is_disconnected_and_made_again_and_the_run_hears_of_it():
    made, watching = Generator(), Watching(max_restarts=2)
    assert await watching.supervisor.start(made) == "set up done"
    await watching.supervisor.connect(made)
    made.die()
    await until(lambda: made.done.count("connect") == 2)
    assert made.done == ["spawn", "set up", "connect", "disconnect", "spawn", "set up", "connect"]
    await until(lambda: len(watching.lines) == 2)
    assert watching.lines == [
        f"generator 1 died: {KILLED}; made again (1 of 2)",
        "generator 1 is back",
    ]
    assert watching.supervisor.restarts.counts == {"generator_1": 1} and watching.failures == []
    assert len(set(made.spawned)) == 2, (
        "Monarch reports a death long after: by a name that the next one has not"
    )
    await watching.supervisor.close()


async def test_every_process_of_a_role_is_told_where_to_send_its_notes_before_it_is_set_up():
    made, watching = Generator(), Watching()
    watching.console.notes = "a port"
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    made.die()
    await until(lambda: made.done.count("connect") == 2)
    told = ["spawn", "send notes to a port", "set up", "connect"]
    assert made.done == [*told, "disconnect", *told]
    await watching.supervisor.close()


async def test_a_role_that_dies_more_often_than_allowed_ends_the_run_with_every_cause():
    made, watching = Generator(), Watching(max_restarts=2)
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    for count, cause in enumerate(["first", "second", "third"], 2):
        made.die(cause)
        if count < 4:
            await until(lambda: made.done.count("connect") == count)  # noqa: B023
    await until(lambda: len(watching.failures) == 1)
    message = str(watching.failures[0])
    assert message.startswith(
        "generator 1 died: first; generator 1 died: second; generator 1 died: third "
    )
    assert (
        "supervision.max_restarts = 2" in message
        and watching.supervisor.failure is watching.failures[0]
    )
    await watching.supervisor.close()


async def test_deaths_before_the_window_do_not_count():
    clock = Clock()
    made, watching = Generator(), Watching(clock=clock, max_restarts=1, window_s=60.0)
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    for count in range(2, 7):
        made.die()
        await until(lambda: made.done.count("connect") == count)  # noqa: B023
        clock.now += 61
    assert watching.failures == [] and watching.supervisor.restarts.counts["generator_1"] == 5
    await watching.supervisor.close()


@pytest.mark.parametrize("stage", ["set up", "connect"])
async def test_a_role_that_dies_while_it_is_made_is_made_again(stage):
    made, watching = Generator(), Watching()
    made.hold = stage

    async def make() -> None:
        await watching.supervisor.start(made)
        await watching.supervisor.connect(made)

    making = asyncio.create_task(make())
    await until(lambda: stage in made.done)
    made.hold = None
    made.die()
    await asyncio.wait_for(making, 30)
    assert (
        made.done.count(stage) == 2
        and made.done[-1] == "connect"
        and watching.supervisor.restarts.counts["generator_1"] == 1
    )
    await watching.supervisor.close()


async def test_a_death_that_a_call_sees_before_the_supervisor_is_one_of_the_role():
    made, watching = Generator(), Watching()
    await watching.supervisor.start(made)
    connect = made.connect

    async def connect_to_the_dead(process):
        made.connect = connect
        asyncio.get_running_loop().call_later(0.01, made.die)
        raise SupervisionError("Actor X exited because of the following reason: gone")

    made.connect = connect_to_the_dead
    await watching.supervisor.connect(made)
    assert made.done == ["spawn", "set up", "disconnect", "spawn", "set up", "connect"]
    assert watching.lines == [f"generator 1 died: {KILLED}; made again (1 of 3)"]
    await watching.supervisor.close()


async def test_a_role_whose_first_setup_fails_ends_the_run_at_once():
    made, watching = Generator(), Watching()
    made.fault = ValueError("no such model")
    with pytest.raises(ValueError, match="no such model"):
        await watching.supervisor.start(made)
    assert made.done == ["spawn", "set up"]


async def test_a_role_whose_setup_fails_when_it_is_made_again_is_tried_as_often_as_allowed():
    made, watching = Generator(), Watching(max_restarts=2)
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    made.fault = MemoryError("no pages")
    made.die()
    await until(lambda: len(watching.failures) == 1)
    ended = str(watching.failures[0])
    assert KILLED in ended and ended.count("MemoryError: no pages") == 2
    await watching.supervisor.close()


async def test_a_role_that_is_not_what_it_should_be_when_it_is_back_ends_the_run():
    made, watching = Generator(), Watching()
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    made.connect = lambda process: refuse()
    made.die()
    await until(lambda: len(watching.failures) == 1)
    assert str(watching.failures[0]) == "generator 1 and trainer disagree on version 7"
    await watching.supervisor.close()


async def test_nothing_is_made_again_while_the_run_closes():
    made, watching = Generator(), Watching()
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    await watching.supervisor.close()
    made.die()
    await iterations()
    assert made.done == ["spawn", "set up", "connect"] and watching.lines == []


async def test_monarchs_report_ends_the_process_it_names_and_not_the_one_after():
    made, watching = Generator(), Watching()
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    first, _ = (
        made.spawned[0],
        watching.supervisor.died(ProcessDeath(actor="logger", rank="0", cause="gone")),
    )
    assert made.process.life.cause is None
    watching.supervisor.died(ProcessDeath(actor=first, rank="0", cause="gone"))
    await until(lambda: made.done.count("connect") == 2)
    watching.supervisor.died(ProcessDeath(actor=first, rank="0", cause="gone"))
    assert made.process.life.cause is None
    await watching.supervisor.close()


async def guarded(watching: Watching, ranks: int = 1) -> Lifetime:
    mesh = Lifetime("trainer")
    for rank in range(ranks):
        await watching.supervisor.guard(
            f"trainer rank {rank}", Generator().spawn("trainer")[1], mesh
        )
    return mesh


async def test_the_death_of_a_guarded_process_ends_the_run_by_its_name():
    watching = Watching()
    mesh = await guarded(watching)
    watching.supervisor.processes()[0][0].end(KILLED)
    await until(lambda: len(watching.failures) == 1)
    assert (
        str(watching.failures[0]) == f"trainer rank 0 died: {KILLED}"
        and watching.failures[0] is watching.supervisor.lost
    )
    assert mesh.cause == f"trainer rank 0: {KILLED}"
    await watching.supervisor.close()


async def test_ranks_end_with_the_first_that_does_and_the_first_is_to_blame():
    watching = Watching()
    mesh = await guarded(watching, ranks=3)
    ranks = [life for life, _ in watching.supervisor.processes()]
    ranks[1].end(KILLED)
    await until(lambda: all(rank.cause is not None for rank in ranks))
    assert mesh.cause == f"trainer rank 1: {KILLED}"
    assert str(watching.supervisor.failure) == f"trainer rank 1 died: {KILLED}"
    assert ranks[2].cause == f"ended with trainer rank 1: {KILLED}"
    await watching.supervisor.close()


async def test_of_ranks_that_hang_the_one_that_is_stopped_is_to_blame(monkeypatch):
    """The others wait for it in a collective, and may be noticed first."""
    watching = Watching()
    mesh = await guarded(watching, ranks=2)
    (first, _), (second, _) = watching.supervisor.processes()
    second.pid = 7
    monkeypatch.setattr(
        "torchtitan.experiments.rl.fleet.supervisor.is_stopped", lambda pid: pid == 7
    )
    first.end("hung: a computation of the trainer for 121 s")
    await until(lambda: mesh.cause is not None)
    assert str(watching.supervisor.lost) == "trainer rank 1 died: hung: stopped by a signal"
    await watching.supervisor.close()


async def test_an_error_that_follows_from_a_death_is_explained_by_it_when_it_is_seen():
    watching = Watching()
    await guarded(watching)
    # As a generator says it that maps the weights of a trainer of which the files are closed and the end is not seen yet.
    consequence = PeerGone("generator 0: the weights at /proc/7/fd/57 are gone")
    explaining = asyncio.create_task(watching.supervisor.explained(consequence))
    await iterations(5)
    assert not explaining.done()
    watching.supervisor.processes()[0][0].end(KILLED)
    assert str(await asyncio.wait_for(explaining, 30)) == f"trainer rank 0 died: {KILLED}"
    await watching.supervisor.close()


async def test_an_error_while_a_guarded_process_is_taken_down_is_explained_by_that(monkeypatch):
    """A rank whose collective ends because the other's sockets are closed raises what the library under it raises."""
    watching = Watching()
    await guarded(watching, ranks=2)
    monkeypatch.setattr(Lifetime, "ending", property(lambda life: life.name == "trainer rank 0"))
    explaining = asyncio.create_task(
        watching.supervisor.explained(RunError("trainer 1: RuntimeError: closed by peer"))
    )
    await iterations(5)
    watching.supervisor.processes()[0][0].end(KILLED)
    assert str(await asyncio.wait_for(explaining, 30)) == f"trainer rank 0 died: {KILLED}"
    await watching.supervisor.close()


async def test_an_error_that_no_death_explains_stands(monkeypatch):
    watching = Watching()
    await guarded(watching)
    unrelated, alone = RunError("task 'sums' failed"), PeerGone("generator 0: the weights are gone")
    assert await watching.supervisor.explained(unrelated) is unrelated
    monkeypatch.setattr("torchtitan.experiments.rl.fleet.supervisor.DEATH_REPORTS_S", 0.0)
    assert await watching.supervisor.explained(alone) is alone
    await watching.supervisor.close()


async def test_a_role_that_can_not_come_back_because_the_trainer_is_gone_is_not_to_blame():
    made, watching = Generator(), Watching()
    await guarded(watching)
    await watching.supervisor.start(made)
    await watching.supervisor.connect(made)
    made.fault = PeerGone("generator 1: the weights at /proc/7/fd/57 are gone")
    made.set_up = lambda process: asyncio.sleep(0)
    made.die()
    await until(lambda: made.done.count("connect") == 2)
    watching.supervisor.processes()[0][0].end(KILLED)
    await until(lambda: len(watching.failures) == 2)
    assert {str(failure) for failure in watching.failures} == {f"trainer rank 0 died: {KILLED}"}
    await watching.supervisor.close()


async def test_a_run_that_is_built_again_goes_on_counting_and_gives_no_name_twice():
    restarts = Restarts(SupervisionConfig(max_restarts=1))
    first, second = Generator(), Generator()
    for made in (first, second):
        lines = []
        supervisor = Supervisor(restarts, console_of(lines), on_failure=lines.append)
        await supervisor.start(made)
        await supervisor.connect(made)
        made.die()
        await until(lambda: len(lines) == 2 or supervisor.failure is not None)  # noqa: B023
        await supervisor.close()
    assert restarts.counts == {"generator_1": 1}
    assert str(supervisor.failure).count("generator 1 died: ") == 2
    assert len({*first.spawned, *second.spawned}) == 3


async def test_work_that_waits_for_a_process_that_is_not_made_again_ends_with_its_death():
    watching = Watching()
    await guarded(watching)
    never = asyncio.Event()
    waiting = asyncio.create_task(watching.supervisor.unless_failed(never.wait()))
    await iterations(5)
    assert not waiting.done()
    watching.supervisor.processes()[0][0].end("hung: a computation of the trainer for 121 s")
    with pytest.raises(
        RunError, match="^trainer rank 0 died: hung: a computation of the trainer for 121 s$"
    ):
        await asyncio.wait_for(waiting, 30)
    await watching.supervisor.close()


async def test_a_role_that_fails_to_start_ends_those_that_start_beside_it():
    """Else one of them would be filled again after the run has closed."""
    broken, slow, watching = Generator(), Generator(), Watching()
    broken.fault, slow.hold = ValueError("no such model"), "set up"
    with pytest.raises(ValueError, match="no such model"):
        await side_by_side(watching.supervisor.start(slow), watching.supervisor.start(broken))
    slow.die()
    await iterations()
    assert slow.spawned == ["generator_1_1"] and watching.lines == []
    await watching.supervisor.close()


class Dropped(Generator):
    """A process that died as it was spawned: its first call is dropped, and later ones refused."""

    async def identity(self) -> ProcessIdentity:
        self.done.append("identity")
        if self.done.count("identity") == 1:
            await asyncio.Event().wait()
        raise RuntimeError("the actor is gone")


async def test_a_guarded_process_whose_first_call_is_dropped_is_known_to_have_died(monkeypatch):
    monkeypatch.setattr("torchtitan.experiments.rl.fleet.supervisor.IDENTIFY_S", 0.01)
    watching, mesh = Watching(), Lifetime("trainer")
    with pytest.raises(ProcessLost, match="its process ended while it was started"):
        await asyncio.wait_for(
            watching.supervisor.guard("trainer rank 0", Dropped().spawn("trainer")[1], mesh), 60
        )
    assert str(watching.supervisor.lost) == (
        "trainer rank 0 died: its process ended while it was started"
    )
    await watching.supervisor.close()


class Slow(Generator):
    """A process that takes longer to start than it is waited for."""

    async def identity(self) -> ProcessIdentity:
        self.done.append("identity")
        await until(lambda: self.done.count("identity") >= 3)
        return await super().identity()


async def test_a_process_that_starts_slowly_is_asked_again_and_waited_for(monkeypatch):
    monkeypatch.setattr("torchtitan.experiments.rl.fleet.supervisor.IDENTIFY_S", 0.01)
    made, watching = Slow(), Watching()
    assert await watching.supervisor.start(made) == "set up done"
    assert made.spawned == ["generator_1_1"] and watching.failures == []
    await watching.supervisor.close()


async def test_a_role_that_dies_in_its_setup_is_told_to_nobody_any_more():
    made, watching = Generator(), Watching()
    made.hold = "set up"
    making = asyncio.create_task(watching.supervisor.start(made))
    await until(lambda: "set up" in made.done)
    made.hold = None
    made.die()
    assert await making == "set up done"
    assert made.done == ["spawn", "set up", "disconnect", "spawn", "set up"]
    await watching.supervisor.close()


async def test_work_ends_as_it_ends_while_nothing_fails():
    async def answer() -> int:
        return 7

    watching = Watching()
    assert await watching.supervisor.unless_failed(answer()) == 7
    with pytest.raises(RunError, match="disagree"):
        await watching.supervisor.unless_failed(refuse())
