"""How long a process can be called: real processes that end, and calls to them."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from tests.fakes.waiting import until
from torchtitan.experiments.rl.process import lifetime
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


async def fail(error):
    raise error


async def test_the_end_of_a_watched_process_is_noticed_with_its_signal(sleeper):
    life = Lifetime("generator 1")
    life.watch(sleeper.pid)
    assert life.cause is None and life.pid == sleeper.pid
    sleeper.kill()
    assert await asyncio.wait_for(life.ended(), 30) == "killed by SIGKILL"


async def test_the_end_of_a_watched_process_is_noticed_with_its_exit_code():
    life = Lifetime("generator 1")
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    life.watch(process.pid)
    process.stdin.close()
    assert await asyncio.wait_for(life.ended(), 30) == "its process ended with exit code 3"
    process.wait()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "print('terminate called', flush=True); os.abort()",
            "killed by SIGABRT (what it printed is in {})",
        ),
        (
            "print('no memory', flush=True); os._exit(3)",
            "its process ended with exit code 3 (what it printed is in {})",
        ),
        ("os.abort()", "killed by SIGABRT"),
        ("print('of no interest', flush=True); os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
async def test_the_cause_of_a_crash_names_the_file_with_its_last_words(tmp_path, code, cause):
    life, output = Lifetime("generator 1"), tmp_path / "generator-1.txt"
    with output.open("wb") as file:
        command = [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {code}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file)
    life.watch(process.pid, str(output))
    process.stdin.close()
    assert await asyncio.wait_for(life.ended(), 60) == cause.format(output)
    process.wait()


async def test_a_process_that_is_being_taken_down_is_known_before_its_end_is(sleeper):
    life = Lifetime("trainer rank 0")
    life.pid = sleeper.pid  # its end is not watched
    assert not life.ending
    os.kill(sleeper.pid, signal.SIGKILL)
    await until(lambda: life.ending)  # nobody has waited for it: it is still there
    sleeper.wait()
    assert not life.ending and life.cause is None


async def test_a_process_that_is_gone_when_it_is_to_be_watched_has_ended(sleeper):
    sleeper.kill()
    sleeper.wait()
    life = Lifetime("generator 1")
    life.watch(sleeper.pid)
    assert life.cause == "ended before it was watched"


async def test_the_cause_a_watch_learns_counts_when_monarch_reports_the_end_first(sleeper):
    life = Lifetime("generator 1")
    life.watch(sleeper.pid)
    life.report("the process this actor was running on failed: Killed(sig=9)")
    call = asyncio.create_task(
        life.call(fail(SupervisionError("Actor X exited because of the following reason: gone")))
    )
    await asyncio.sleep(0.01)
    assert life.cause is None and not call.done()
    sleeper.kill()
    with pytest.raises(ProcessLost, match="^generator 1 died: killed by SIGKILL$"):
        await call
    assert life.cause == "killed by SIGKILL"


async def test_monarchs_report_counts_for_a_process_that_lives_on_or_is_not_watched(
    sleeper, monkeypatch
):
    monkeypatch.setattr(lifetime, "WATCH_S", 0.0)
    watched, elsewhere = Lifetime("generator 0"), Lifetime("generator 1")
    watched.watch(sleeper.pid)
    elsewhere.report("its host is gone")
    assert elsewhere.cause == "its host is gone"
    with pytest.raises(ProcessLost, match="^generator 0 died: its actor failed$"):
        await watched.call(fail(SupervisionError("its actor failed")))


async def test_kill_ends_the_process_for_the_cause_it_is_given(sleeper):
    life = Lifetime("generator 1")
    life.watch(sleeper.pid)
    life.kill("its engine stopped")
    assert life.cause == "its engine stopped" and sleeper.wait() == -9


async def test_a_call_ends_with_the_process_and_says_whose_it_was_and_why():
    life = Lifetime("generator 1")
    never = asyncio.get_running_loop().create_future()
    call = asyncio.create_task(life.call(never))
    await asyncio.sleep(0)
    life.end("killed by SIGKILL")
    with pytest.raises(ProcessLost, match="^generator 1 died: killed by SIGKILL$") as lost:
        await call
    assert lost.value.cause == "killed by SIGKILL"
    await until(never.cancelled)
    with pytest.raises(ProcessLost):  # of a process that has ended before
        await life.call(asyncio.sleep(0))


async def test_a_call_returns_and_raises_what_the_process_answers():
    async def answer(value):
        return value

    async def refuse():
        raise ValueError("no")

    life = Lifetime("generator 1")
    assert await life.call(answer(7)) == 7
    with pytest.raises(ValueError, match="no"):
        await life.call(refuse())
    assert life.cause is None


async def test_a_call_that_is_cancelled_cancels_its_work():
    life, never = Lifetime("generator 1"), asyncio.get_running_loop().create_future()
    call = asyncio.create_task(life.call(never))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    await until(never.cancelled)
