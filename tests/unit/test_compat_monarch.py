"""Monarch has the private names that the library uses: one process is killed for it, which Monarch reports after some ten seconds."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from subprocess import PIPE
from types import SimpleNamespace

import psutil
import pytest
from monarch.actor import (
    Actor,
    ActorError,
    concurrent_endpoint,
    default_bootstrap_cmd,
    this_host,
    this_proc,
)

from tests.integration.command_runs import ROOT
from tests.integration.processes import descendants, listening_sockets
from torchtitan.experiments.rl.compat.monarch import (
    ENVIRONMENT,
    OneActor,
    ProcessDeath,
    call_ranks,
    drop_late_faults,
    original,
    process_death,
    process_death_behind,
    ranks_of,
)
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process.logs import set_up_logging


class Worker(Actor):
    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def refuse(self) -> None:
        raise RunError("the batch is empty")

    @concurrent_endpoint
    async def wait(self) -> None:
        await asyncio.sleep(600)

    @concurrent_endpoint
    async def log(self, folder: str) -> str:
        path = set_up_logging(folder, "worker")
        logging.getLogger("torchtitan.experiments.rl").info("as written")
        return path.read_text()


class Owner(Actor):
    def __init__(self):
        self._reports: list[ProcessDeath] = []

    @concurrent_endpoint
    async def kill_the_second(self) -> tuple[ProcessDeath, list[ProcessDeath]]:
        workers = (
            this_host()
            .spawn_procs(per_host={"procs": 2}, name="hosted_0")
            .spawn("hosted_0", Worker)
        )
        pids = {point.rank: pid for point, pid in (await workers.pid.call()).items()}
        waiting = workers.slice(procs=1).wait.call_one()
        os.kill(pids[1], signal.SIGKILL)
        try:
            await waiting
        except Exception as error:
            call = process_death_behind(error)
        for _ in range(100):
            if len(self._reports) > 1:
                break
            await asyncio.sleep(0.1)
        return call, self._reports

    def __supervise__(self, failure) -> bool:
        self._reports.append(process_death(failure))
        return True


def test_the_death_of_a_process_names_actor_rank_and_signal_in_the_call_and_in_the_report():
    call, reports = this_proc().spawn("owner", Owner).kill_the_second.call_one().get()
    changed = "Monarch reports a dead process in another form"
    (report,) = [report for report in reports if report.actor == "hosted_0"]
    for death in (call, report):
        assert (death.actor, death.rank) == ("hosted_0", "1"), changed
        assert "Killed(sig=9)" in death.cause and "\n" not in str(death), changed
    assert str(report).startswith("hosted_0 1: ")


@pytest.fixture(scope="module")
def worker():
    procs = this_host().spawn_procs(per_host={"procs": 1}, name="worker")
    yield procs.spawn("worker", Worker)
    procs.stop().get()


@pytest.mark.parametrize(
    ("end", "cause"), [("kill -9 $$", "killed by SIGKILL"), ("exit 3", "exit code 3")]
)
async def test_a_process_that_ends_while_it_is_started_is_a_death_with_its_cause(
    tmp_path, end, cause
):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{end}\n")
    program.chmod(0o700)

    def launch(point):
        command = default_bootstrap_cmd()
        command.program = str(program)
        return command

    procs = this_host().spawn_procs(
        per_host={"procs": 1}, name="generator_0_1", bootstrap_command=launch
    )
    with pytest.raises(ValueError, match="error creating proc") as error:
        await procs.spawn("generator", Worker).pid.call_one()
    death = process_death_behind(error.value)
    assert (death.actor, death.cause) == ("generator_0_1", f"{cause} while it was started")
    assert process_death_behind(ValueError("something else")) is None


def test_a_process_that_ends_after_the_run_does_not_end_the_command(monkeypatch, caplog):
    import monarch.actor
    from monarch._src.actor.actor_mesh import RootClientActor

    client = RootClientActor.__new__(RootClientActor)
    failure = SimpleNamespace(report=lambda: "generator died")
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", monarch.actor.unhandled_fault_hook)
    with pytest.raises(BaseException, match="SystemExit"):
        client.__supervise__(failure)
    drop_late_faults()
    with caplog.at_level(logging.INFO):
        assert client.__supervise__(failure) is True
    assert "generator died" in caplog.text


def test_what_an_actor_raised_arrives_as_it_was(worker):
    with pytest.raises(ActorError) as caught:
        worker.refuse.call_one().get()
    error = original(caught.value)
    assert type(error) is RunError and str(error) == "the batch is empty", (
        "ActorError no longer has it in `exception`"
    )
    assert process_death_behind(caught.value) is None


async def test_each_rank_is_asked_and_what_one_raises_arrives(worker):
    own = await worker.pid.call_one()
    assert own != os.getpid()
    assert await call_ranks(ranks_of(worker), "pid") == [own]
    with pytest.raises(ActorError):
        await call_ranks(ranks_of(worker), "refuse")


async def test_one_actor_answers_by_whatever_way_it_is_called(worker):
    only, own = OneActor(worker), await worker.pid.call_one()
    assert await only.pid.call_one() == await only.pid.call() == own
    with pytest.raises(ActorError):
        await only.refuse.call_one()


async def test_ranks_are_asked_in_their_order_with_the_same_arguments():
    class Rank:
        def __init__(self, number: int):
            self.double = SimpleNamespace(choose=lambda by: self._later(number * by))

        async def _later(self, value: int) -> int:
            for _ in range(10 - value):  # the first rank answers last
                await asyncio.sleep(0)
            return value

    mesh = SimpleNamespace(size={"procs": 3}.get, slice=lambda procs: Rank(procs))
    assert await call_ranks(ranks_of(mesh), "double", 2) == [0, 2, 4]


def test_errors_inside_several_actor_errors_are_found():
    error = KeyError("lost")
    assert original(ActorError(ActorError(error))) is error
    assert original(error) is error


def test_a_failure_of_another_form_keeps_its_text():
    class Failure:
        mesh_name = "trainer-3xYz"

        def report(self) -> str:
            return "the trainer is\n gone"

    assert process_death(Failure()) == ProcessDeath(
        actor="trainer", rank="", cause="the trainer is gone"
    )


def test_messages_are_logged_without_the_actors_name(worker, tmp_path):
    (line,) = worker.log.call_one(str(tmp_path)).get().splitlines()
    assert '"message": "as written"' in line, (
        "Monarch adds the actor's name to log messages in another way"
    )


LISTENER = """
from monarch.actor import this_host
this_host().spawn_procs(per_host={"procs": 2}).initialized.get()
print("ready", flush=True)
input()
"""


def test_monarch_listens_at_abstract_sockets_where_it_spawns_and_in_private_folders_elsewhere():
    """docs/security.md names these doors."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        command = [sys.executable, "-c", LISTENER]
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            own = listening_sockets([process.pid])
            assert len(own) >= 2 and all(path.startswith("@") for path in own)
            below = listening_sockets(descendants(process.pid))
            assert len(below) == 2 and {os.path.commonpath([path, folder]) for path in below} == {
                folder
            }
            assert os.stat(folder).st_mode & 0o777 == 0o700
            listening = {
                connection.pid
                for connection in psutil.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            assert not listening & {process.pid, *descendants(process.pid)}
            process.kill()


def test_the_message_limit_is_monarchs_own_name_and_holds_in_this_process():
    from monarch.config import get_global_config

    assert get_global_config()["codec_max_frame_length"] == int(
        ENVIRONMENT["HYPERACTOR_CODEC_MAX_FRAME_LENGTH"]
    ), "Monarch no longer takes its message limit from HYPERACTOR_CODEC_MAX_FRAME_LENGTH"


def test_the_limits_of_silence_are_monarchs_own_names_and_hold_in_this_process():
    from monarch.config import get_global_config

    known = get_global_config()
    for name, value in ENVIRONMENT.items():
        if value.endswith(("h", "m")):
            names = {
                name.removeprefix("HYPERACTOR_").lower(),
                name.removeprefix("HYPERACTOR_MESH_").lower(),
            } & known.keys()
            assert [known[field] for field in names] == [value], f"Monarch no longer knows {name}"
