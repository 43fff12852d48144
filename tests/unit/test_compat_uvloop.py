"""Processes are started by the run's event loop as by asyncio's own."""

import asyncio
import os
import sys

import pytest
import uvloop

from torchtitan.experiments.rl.compat.uvloop import EventLoop, EventLoopPolicy


@pytest.fixture
def event_loop_policy():
    return EventLoopPolicy()


async def started(*command, **options):
    return await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1, stdin=-1, **options)


async def test_processes_are_started_side_by_side_and_give_output_and_codes():
    assert isinstance(asyncio.get_running_loop(), EventLoop) and issubclass(EventLoop, uvloop.Loop)

    async def one(code):
        program = f"import sys; print(sys.stdin.read() * 2); print('bad', file=sys.stderr); sys.exit({code})"
        process = await started(sys.executable, "-S", "-c", program)
        return (*(await process.communicate(b"x")), process.returncode)

    await one(0)  # the first opens what all share
    before = len(os.listdir("/proc/self/fd"))
    assert await asyncio.gather(*map(one, range(20))) == [
        (b"xx\n", b"bad\n", code) for code in range(20)
    ]
    process = await asyncio.create_subprocess_shell("echo $((6 * 7)); exit 3", stdout=-1)
    assert await process.communicate() == (b"42\n", None) and process.returncode == 3
    with pytest.raises(FileNotFoundError):
        await started("no-such-program")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_signals_and_cancellation_leave_no_process():
    process = await started("sleep", "3600", start_new_session=True)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == -15
    process = await started("sleep", "3600")
    waiting = asyncio.create_task(process.communicate())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    process.kill()
    assert await asyncio.wait_for(process.wait(), 10) == -9
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


async def test_a_process_has_ended_whoever_holds_its_pipes():
    process = await asyncio.create_subprocess_shell("sleep 3600 & echo $!", stdout=-1)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    os.kill(int(await process.stdout.readline()), 9)
    assert await process.stdout.read() == b""


async def test_nothing_runs_between_fork_and_exec():
    calls = []
    os.register_at_fork(
        before=lambda: calls.append("before"), after_in_child=lambda: calls.append("child")
    )
    process = await started("true")
    await process.communicate()
    assert not calls


@pytest.mark.parametrize("writes", [True, False])
async def test_a_pipe_is_closed_once(writes):
    """A second close would close what another thread has opened in between. A file that is closed now is not closed again."""
    ends = os.pipe()
    file = os.fdopen(ends[writes], "wb" if writes else "rb", 0)
    loop = asyncio.get_running_loop()
    transport, _ = await (loop.connect_write_pipe if writes else loop.connect_read_pipe)(
        asyncio.Protocol, file
    )
    assert file.closed and not transport.is_closing()
    os.fstat(transport.get_extra_info("pipe").fileno())
    transport.close()
    os.close(ends[not writes])
