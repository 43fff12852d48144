"""Isolated calls: nothing of one stays for the next or after it, and each is bounded, whatever it does."""

import asyncio
import builtins
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.waiting import LIMIT_S
from torchtitan.experiments.rl.ask import child_server
from torchtitan.experiments.rl.ask.child import IsolatedCalls, _Caller, _ChildServer
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout

ROOT = Path(__file__).resolve().parents[2]
GRADER = """
import os, subprocess, sys, time

def right(answer): return answer == "42"

def grade(reply):
    exec(reply, {})
    return float(right(reply) and sum([1]))
"""
POISONS = {
    "a builtin": "import builtins; builtins.sum = lambda values: 1; builtins.float = lambda value: 1.0",
    "the grader": "import sys; sys.modules['grader'].right = lambda answer: True",
    "the grader's code": "import sys; sys.modules['grader'].right.__code__ = (lambda answer: True).__code__",
    "the environment": "import os, time; os.chdir('/'); os.environ.clear(); time.sleep = None",
}
STARTS = {
    "a child": "subprocess.Popen(['sleep', '3600.25'])",
    "a child in a session of its own": "subprocess.Popen(['sleep', '3600.25'], start_new_session=True)",
    "an orphan without environment": "subprocess.run(['sh', '-c', 'env -i setsid sleep 3600.25 &'])",
}
ENDINGS = {"returns": "", "hangs": "; time.sleep(3600)", "crashes": "; os.kill(os.getpid(), 11)"}


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    """A module of a user, on the path of this process."""
    folder = tmp_path_factory.mktemp("grader")
    (folder / "grader.py").write_text(GRADER)
    sys.path.insert(0, str(folder))
    import grader

    yield grader
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def calls(grader):
    return IsolatedCalls(max_workers=1, memory_gib=0.5)


def leaves():
    raise SystemExit(3)  # not sys.exit: wandb, once used in this process, puts its own in its place


def sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"3600.25" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            pass
    return found


def test_each_call_has_a_process_of_its_own_in_the_main_thread(calls):
    first, main = calls.call(
        lambda: (os.getpid(), threading.current_thread() is threading.main_thread()),
        (),
        timeout_s=30,
    )
    second, _ = calls.call(lambda: (os.getpid(), 0), (), timeout_s=30)
    assert main and len({first, second, os.getpid()}) == 3


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_what_one_reply_changes_no_later_reply_gains_from(calls, grader, poison):
    assert calls.call(grader.grade, ("0",), timeout_s=30) == 0.0
    calls.call(grader.grade, (poison,), timeout_s=30)
    assert [calls.call(grader.grade, (reply,), timeout_s=30) for reply in ("0", "42", "1")] == [
        0.0,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    "ending",
    ["", "; time.sleep(3600)", "; os.kill(os.getpid(), 11)"],
    ids=["returns", "hangs", "crashes"],
)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_all_that_a_call_has_started_ends_with_it(calls, grader, start, ending):
    code = f"import os, subprocess, time; {start}{ending}"
    try:
        calls.call(grader.grade, (code,), timeout_s=1.0 if "sleep(3600)" in ending else 30.0)
    except UserCodeError as error:
        assert str(error) in (
            "no answer within 1 s; its process was killed",
            "its process died (SIGSEGV)",
        )
    assert sleepers() == []


def test_what_outlives_its_server_ends_all_the_same(calls, grader):
    kills = "import os, signal, subprocess; subprocess.Popen(['sleep', '3600.25'], start_new_session=True); "
    with pytest.raises(UserCodeError, match="its process died .SIGKILL"):
        calls.call(
            grader.grade, (kills + "os.kill(os.getppid(), 9); signal.pause()",), timeout_s=30
        )
    assert sleepers() == [] and calls.call(grader.grade, ("42",), timeout_s=30) == 1.0


def test_all_end_with_the_process_that_is_killed(grader, tmp_path):
    code = (
        "from torchtitan.experiments.rl.ask.child import IsolatedCalls; import grader\n"
        'IsolatedCalls(1).call(grader.grade, ("import subprocess, time; '
        "subprocess.Popen(['sleep', '3600.25'], start_new_session=True); time.sleep(3600)\",), timeout_s=3600)"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(grader.__file__).parent}{os.pathsep}{ROOT}"}
    host = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    until(sleepers)
    host.kill()
    host.communicate(timeout=60)  # nothing holds its stderr
    until(lambda: not sleepers())


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_memory_is_bounded(calls, grader):
    with pytest.raises(UserCodeError, match="MemoryError"):
        calls.call(grader.grade, ("x = bytearray(1 << 30)",), timeout_s=30)
    eats = "import subprocess, sys, time; [subprocess.Popen([sys.executable, '-S', '-c', "
    eats += "'import time; x = bytearray(100 << 20); time.sleep(60)']) for _ in range(8)]; time.sleep(60)"
    with pytest.raises(
        UserCodeError, match="it used more than 0.5 GiB of memory; its processes were killed"
    ):
        calls.call(grader.grade, (eats,), timeout_s=60)


def test_what_the_server_has_imported_does_not_count_as_the_calls_memory(grader):
    folder = Path(grader.__file__).parent
    code = "import time; WEIGHTS = b'x' * (400 << 20)\ndef linger(): time.sleep(1); return len(WEIGHTS)"
    (folder / "heavy.py").write_text(code)
    import heavy

    assert IsolatedCalls(1, memory_gib=0.1).call(heavy.linger, (), timeout_s=60) == 400 << 20


def test_the_number_of_processes_is_bounded(calls, grader):
    many = "import subprocess, time; [subprocess.Popen(['sleep', '3600.25']) for _ in range(80)]; time.sleep(60)"
    with pytest.raises(UserCodeError, match="it had more than 64 processes; they were killed"):
        calls.call(grader.grade, (many,), timeout_s=60)
    assert sleepers() == []


def test_output_and_answer_are_bounded(calls, grader):
    floods = "import os; [os.write(1, b'x' * (1 << 16)) for _ in range(1000)]"
    assert calls.call(grader.grade, (floods,), timeout_s=60) == 0.0
    with pytest.raises(UserCodeError, match="its answer has more than 16,777,216 bytes"):
        calls.call(lambda: "x" * (child_server.MAX_ANSWER + 1), (), timeout_s=60)


def test_what_a_call_prints_is_cut(grader):
    code = (
        "from torchtitan.experiments.rl.ask.child import IsolatedCalls; import grader\n"
        'IsolatedCalls(1).call(grader.grade, (\'print("seen" + "x" * 100000)\',), timeout_s=60)'
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(grader.__file__).parent}{os.pathsep}{ROOT}"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert (
        printed.stdout == b""
        and printed.stderr.startswith(b"seenx")
        and len(printed.stderr) == child_server.MAX_OUTPUT
    )


def test_no_key_is_in_the_environment(grader, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    names = IsolatedCalls(1).call(lambda: sorted(os.environ), (), timeout_s=30)
    assert "PATH" in names and "WANDB_API_KEY" not in names


def test_an_answer_runs_no_code_here(calls, grader):
    class Trap:
        def __reduce__(self):
            return builtins.exec, ("import builtins; builtins.TRAPPED = True",)

    with pytest.raises(
        UserCodeError, match="returned a Trap, want a number, a text, or lists of them"
    ):
        calls.call(Trap, (), timeout_s=30)
    forged = (
        "import os, stat\ndef is_pipe(fd):\n    try: return stat.S_ISFIFO(os.fstat(fd).st_mode)\n"
    )
    forged += "    except OSError: return False\n"
    forged += "for fd in filter(is_pipe, range(3, 64)):\n    try: os.write(fd, b'no json')\n    except OSError: pass"
    with pytest.raises(UserCodeError, match="its answer can't be read"):
        calls.call(grader.grade, (forged,), timeout_s=30)
    assert not hasattr(builtins, "TRAPPED")


def test_numbers_of_numpy_and_lists_arrive(calls):
    assert calls.call(
        lambda: [np.float32(0.5), np.int64(2), True, np.bool_(True)], (), timeout_s=30
    ) == [0.5, 2, True, True]
    assert calls.call(lambda: np.array([1.0, 2.0]), (), timeout_s=30) == [1.0, 2.0]
    assert (
        np.isnan(calls.call(lambda: float("nan"), (), timeout_s=30))
        and calls.call(str, ("a",), timeout_s=30) == "a"
    )


def test_errors_have_their_cause_and_the_users_frames(calls, grader):
    with pytest.raises(
        UserCodeError, match=r"ZeroDivisionError: division by zero \(<string>:1\)"
    ) as failed:
        calls.call(grader.grade, ("1 / 0",), timeout_s=30)
    assert "grader.py" in failed.value.traceback and failed.value.traceback.endswith(
        "ZeroDivisionError: division by zero"
    )
    with pytest.raises(UserCodeError, match="SystemExit"):
        calls.call(leaves, (), timeout_s=30)
    with pytest.raises(UserCodeError, match="can't be sent"):
        calls.call(lambda: None, (threading.Lock(),), timeout_s=30)
    with pytest.raises(UserCodeTimeout):
        calls.call(time.sleep, (60,), timeout_s=0.2)
    with pytest.raises(UserCodeError, match="its process died .exit status 0"):
        calls.call(os._exit, (0,), timeout_s=30)


async def test_a_call_is_awaited_and_a_caller_that_is_cancelled_is_cancelled(calls, grader):
    assert await calls.ask(grader.grade, "42", timeout_s=30) == 1.0
    with pytest.raises(UserCodeTimeout, match="^no answer within 0.2 s; its process was killed$"):
        await calls.ask(time.sleep, 60, timeout_s=0.2)
    waiting = asyncio.create_task(calls.ask(time.sleep, 1, timeout_s=30))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await calls.ask(grader.grade, "42", timeout_s=30) == 1.0


async def test_a_call_whose_caller_is_cancelled_gives_its_place_up_with_all_that_it_has_started(
    calls, grader
):
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '3600.25']); time.sleep(3600)"
    hung = asyncio.create_task(calls.ask(grader.grade, hangs, timeout_s=3600))
    async with asyncio.timeout(LIMIT_S):
        while not sleepers():
            await asyncio.sleep(0.05)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        assert await calls.ask(grader.grade, "42", timeout_s=30) == 1.0
        while sleepers():
            await asyncio.sleep(0.05)


async def test_a_call_that_is_given_up_before_it_begins_never_runs(calls, grader, tmp_path):
    trace = tmp_path / "ran"
    running = asyncio.create_task(calls.ask(time.sleep, 0.5, timeout_s=30))
    queued = asyncio.create_task(calls.ask(trace.touch, timeout_s=30))
    await asyncio.sleep(0.1)
    queued.cancel()
    await running
    assert await calls.ask(grader.grade, "42", timeout_s=30) == 1.0
    assert queued.cancelled() and not trace.exists()


def test_a_server_that_is_ended_just_after_it_has_answered_is_given_to_no_other_call(
    grader, monkeypatch
):
    calls = IsolatedCalls(max_workers=1, memory_gib=0.5)
    caller = _Caller()
    answered = _ChildServer.call

    def given_up_then(server, request):
        value = answered(server, request)
        caller.give_up()  # the caller's limit comes between the answer and its thread's next line
        return value

    monkeypatch.setattr(_ChildServer, "call", given_up_then)
    calls.call(grader.grade, ("42",), timeout_s=30, caller=caller)
    monkeypatch.undo()
    assert calls.call(grader.grade, ("42",), timeout_s=30) == 1.0
