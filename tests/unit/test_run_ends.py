"""How a run ends: its exit code, its last lines, and that nothing of it is left."""

import contextlib
import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from monarch import actor

from tests.fakes.waiting import wait_until
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command.history import read_history
from torchtitan.experiments.rl.command.start import Ready
from torchtitan.experiments.rl.controller import signals as session
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.process import temporary as temporary_module
from torchtitan.experiments.rl.process.temporary import TemporaryFolder, remove_left_over

ROOT = Path(__file__).parents[2]


class Running:
    """A run that ends as ``end`` says when it is asked to stop; None: it never does."""

    def __init__(self, end=None, error=None):
        self.asked: list[str] = []
        self._end, self._error = end, error
        self.run = SimpleNamespace(call_one=lambda: self)
        self.request_stop = SimpleNamespace(call_one=self.asked.append)

    def get(self, timeout=None):
        if self._error is not None:
            raise self._error
        if self._end == "at once" or (self._end == "when asked" and self.asked):
            return SimpleNamespace(stopped_by=self.asked[0] if self.asked else None)
        time.sleep(0.001)
        raise TimeoutError


class Exited(BaseException):
    pass


@pytest.fixture
def ending(monkeypatch, tmp_path, capsys):
    """Runs a session around a stand-in for the controller, and sends it signals: gives exit code, output and error output."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    killed = []

    def run(
        controller: Running, *signals: int, grace_s: float = 600.0, left_s: float = 0.0, steps=(20,)
    ):
        folder = CheckpointWriter(tmp_path, keep=9)
        for step in steps:
            folder.begin(step)
            folder.commit(step)
        monkeypatch.setattr(
            session, "this_proc", lambda: SimpleNamespace(spawn=lambda *args, **options: controller)
        )
        monkeypatch.setattr(
            actor, "unhandled_fault_hook", actor.unhandled_fault_hook
        )  # the session replaces it for good
        monkeypatch.setattr(session, "shutdown_context", lambda: SimpleNamespace(get=lambda: None))
        monkeypatch.setattr(session, "SIGNAL_POLL_S", 0.001)
        monkeypatch.setattr(session, "kill_descendants", lambda: killed.append(True))

        def leave(code):
            raise Exited(code)

        monkeypatch.setattr(session.os, "_exit", leave)
        job = SimpleNamespace(seconds_left=lambda: left_s, start=lambda *hosts: None)
        config = SimpleNamespace(
            checkpoint=SimpleNamespace(grace_s=grace_s), provision=SimpleNamespace(job=job)
        )
        plan = cast(RunPlan, SimpleNamespace(device="cpu", hosts=1))
        start = Ready(run_dir=str(tmp_path), plan=plan, lock=io.BytesIO())
        temporary = SimpleNamespace(
            note_shared_memory=lambda pids: None, remove=lambda: killed.append("folder")
        )

        def send():
            for index, number in enumerate(signals):
                wait_until(
                    lambda number=number: signal.getsignal(number) is not before[number]
                )  # else it ends the tests
                wait_until(lambda index=index: len(controller.asked) >= min(index, 1))
                os.kill(os.getpid(), number)

        sender = threading.Thread(target=send)
        try:
            sender.start()
            code = session.run_to_end(config, start, "quick", temporary)
        except Exited as end:
            code = end.args[0]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        sender.join()
        out, err = capsys.readouterr()
        return code, out, err, killed

    return run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_run_after_its_step(ending, tmp_path, number, code):
    controller = Running("when asked")
    found, out, err, killed = ending(controller, number, steps=(20, 40))
    assert found == code and controller.asked == [number.name] and killed == []
    assert err == "stopping after this step; once more stops at once\n"
    assert out == ""  # the controller's summary says what was saved


def test_a_second_ctrl_c_ends_everything_at_once_and_keeps_the_last_checkpoint(ending, tmp_path):
    code, out, err, killed = ending(Running(), signal.SIGINT, signal.SIGINT)
    assert code == 130 and killed == [True, "folder", True]
    assert err.splitlines()[1] == "stopped at once: what follows the last checkpoint is lost"
    assert out.splitlines() == [
        f"saved       step 20: {tmp_path}/checkpoints/step-000020",
        f"see it      {typed_command('report')} {tmp_path}",
        f"go on with  {typed_command('train')} --resume {tmp_path}",
    ]
    assert ending(Running(), signal.SIGINT, signal.SIGINT, steps=())[1] == out


def test_a_run_that_is_stopped_before_its_first_checkpoint_is_told_how_to_begin_again(
    ending, tmp_path
):
    code, out, _, _ = ending(Running(), signal.SIGINT, signal.SIGINT, steps=())
    assert code == 130
    assert out.splitlines() == [
        "saved       no checkpoint: the run had not taken one",
        f"see it      {typed_command('report')} {tmp_path}",
        f"begin again {typed_command('train')} --resume {tmp_path}",
    ]


def test_a_step_that_outlasts_the_grace_period_is_given_up(ending):
    code, out, err, killed = ending(Running(), signal.SIGTERM, grace_s=0.01)
    assert code == 143 and killed == [True, "folder", True]
    assert (
        "the step did not end within its grace period (0.01 s, checkpoint.grace_s): what follows the last checkpoint is lost"
        in err
    )
    assert "step 20" in out


def test_a_step_has_the_time_that_the_scheduler_leaves_where_that_is_more(ending):
    controller = Running("when asked")
    assert ending(controller, signal.SIGTERM, grace_s=0.0, left_s=600.0)[0] == 143
    assert controller.asked == ["SIGTERM"], "it was not given up"
    assert (
        "(0.01 s, checkpoint.grace_s)"
        in ending(Running(), signal.SIGTERM, grace_s=0.001, left_s=0.01)[2]
    )


def test_ctrl_c_has_no_grace_period(ending):
    controller = Running("when asked")
    assert ending(controller, signal.SIGINT, grace_s=0.0)[0] == 130 and controller.asked == [
        "SIGINT"
    ]


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP)]
)
def test_a_scheduler_that_follows_a_ctrl_c_has_its_grace_period(ending, signals):
    """The scheduler kills the process soon, whether or not a person has pressed Ctrl-C before."""
    code, _, err, killed = ending(Running(), *signals, grace_s=0.01)
    assert code == 130 and killed == [True, "folder", True]
    assert "the step did not end within its grace period (0.01 s" in err


def test_a_hangup_that_comes_twice_is_not_asked_twice(ending):
    class Slow(Running):
        def get(self, timeout=None):
            if len(received) >= 2:
                return SimpleNamespace(stopped_by="SIGHUP")
            time.sleep(0.001)
            raise TimeoutError

    received: list[int] = []
    real = session.Signals

    class Seen(real):
        def __init__(self):
            super().__init__()
            nonlocal received
            received = self.received

    session.Signals = Seen
    try:
        code, _, err, killed = ending(Slow(), signal.SIGHUP, signal.SIGHUP)
    finally:
        session.Signals = real
    assert code == 129 and killed == [] and err.count("\n") == 1


def test_two_signals_before_the_first_look_end_the_run_after_its_step(ending, monkeypatch):
    """A closed terminal sends one and a scheduler the other, between two looks at the signals."""

    class Both(session.Signals):
        def __init__(self):
            super().__init__()
            self.received += [signal.SIGHUP, signal.SIGTERM]

    monkeypatch.setattr(session, "Signals", Both)
    controller = Running(end="when asked")
    code, _, _, killed = ending(controller)
    assert (code, controller.asked, killed) == (143, ["SIGTERM"], [])


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch):
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        session.Signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_is_one_sentence(ending, tmp_path):
    remote = RunError(
        "generator 1 died: killed by SIGKILL\n" + "Traceback of a remote process\n" * 500
    )
    code, out, err, _ = ending(Running(error=remote))
    assert (code, err) == (
        1,
        f"error: generator 1 died: killed by SIGKILL (logs in {tmp_path}/logs)\n",
    )


def test_a_run_that_is_done_says_no_more(ending):
    assert ending(Running("at once"))[:3] == (0, "", "")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/r/metrics.jsonl"),
            "/r/metrics.jsonl: No space left on device; see",
        ),
        (ValueError("a\nb\nc"), "ValueError: a b c"),
        (RuntimeError("x" * 5000), "RuntimeError: " + "x" * 286 + "..."),
        (
            RuntimeError("it failed\nTraceback (most recent call last):\n  File x\nKeyError: 'k'"),
            "KeyError: 'k'",
        ),
    ],
)
def test_what_ended_a_run_is_said_in_one_sentence(error, sentence):
    assert session.cause(error).startswith(sentence) and len(session.cause(error)) < 350


# ---- the history of the folder, which the report reads


def last_end(folder):
    end = read_history(folder).end
    assert end is not None
    return end.how, end.why


def test_the_folder_has_the_error_that_the_terminal_has(ending, tmp_path):
    error = RunError("none of the first 100 groups teaches anything: look at the rubric")
    _, _, err, _ = ending(Running(error=error))
    assert err == f"error: {error} (logs in {tmp_path}/logs)\n"
    assert last_end(tmp_path) == ("failed", str(error))


def test_the_folder_says_what_stopped_the_run(ending, tmp_path):
    ending(Running("when asked"), signal.SIGINT)
    assert last_end(tmp_path) == ("stopped", "SIGINT")
    ending(Running(), signal.SIGINT, signal.SIGINT)
    assert last_end(tmp_path) == ("stopped", "SIGINT: stopped at once")
    ending(Running(), signal.SIGTERM, grace_s=0.01)
    assert last_end(tmp_path) == (
        "stopped",
        "SIGTERM: the step did not end within its grace period (0.01 s, checkpoint.grace_s)",
    )
    assert len(read_history(tmp_path).starts) == 3


def test_the_folder_of_a_run_that_is_done_says_so(ending, tmp_path):
    ending(Running("at once"))
    assert last_end(tmp_path) == ("done", None)


def test_a_run_whose_hosts_do_not_come_has_failed(ending, tmp_path, monkeypatch):
    def take(*_, **__):
        raise RunError("hosts did not come")

    monkeypatch.setattr(session, "take_hosts", take)
    with contextlib.suppress(Exited):
        ending(Running("at once"))
    assert last_end(tmp_path) == ("failed", "hosts did not come")


# ---- nothing is left


def test_every_descendant_is_killed_also_one_with_a_session_of_its_own():
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    main = (
        "import subprocess, sys\n"
        "from torchtitan.experiments.rl.process.lifetime import descendants, kill_descendants\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.PIPE, text=True)\n"
        "grandchild = int(child.stdout.readline())\n"
        "assert descendants() == [child.pid, grandchild], descendants()\n"
        "kill_descendants()\n"
        "assert descendants() == []\n"
        "print(grandchild)"
    )
    done = subprocess.run(
        [sys.executable, "-c", main], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not _lives(int(done.stdout)))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Where temporary folders are made, its path short enough for sockets."""
    monkeypatch.setattr(temporary_module, "_LONGEST", 200)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(temporary_module.tempfile, "tempdir", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "kept")
    monkeypatch.setattr(temporary_module, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path


def test_a_runs_temporary_files_lie_in_one_folder_that_goes_with_it(parent):
    folder = TemporaryFolder()
    assert folder.path.parent == parent and os.environ["TMPDIR"] == str(folder.path)
    made = subprocess.check_output(
        [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], text=True
    ).strip()
    assert Path(made).parent == folder.path == Path(temporary_module.tempfile.gettempdir())
    folder.remove()
    assert not folder.path.exists() and os.environ["TMPDIR"] == str(parent)


def test_what_a_killed_run_left_goes_when_a_later_one_starts_and_a_live_ones_stays(parent):
    live = TemporaryFolder()
    os.environ["TMPDIR"] = temporary_module.tempfile.tempdir = str(parent)
    killed = parent / "torchtitan-rl-killed"
    killed.mkdir()
    (killed / ".lock").touch()
    (killed / "vllm_dist_1").mkdir()
    (killed / ".shared-memory").write_text("psm_1\nsem.mp-2\n../../passwd\n")
    for name in ("psm_1", "psm_other"):
        (parent / "shm" / name).touch()
    (parent / ".torchtitan-rl-new").mkdir()  # its run has not locked it yet
    (parent / "unrelated").mkdir()
    remove_left_over(parent)
    names = sorted(path.name for path in parent.iterdir())
    assert names == sorted(["shm", ".torchtitan-rl-new", "unrelated", live.path.name])
    assert [path.name for path in (parent / "shm").iterdir()] == ["psm_other"]
    live.remove()


def test_a_folder_too_long_for_sockets_is_not_used(monkeypatch):
    monkeypatch.setattr(temporary_module.tempfile, "tempdir", "/" + "x" * 80)
    assert temporary_module._parent() == Path("/tmp")


def test_the_longest_folder_that_is_used_has_room_for_monarchs_sockets(monkeypatch):
    name = "x" * (temporary_module._LONGEST - len("/tmp/"))
    monkeypatch.setattr(temporary_module.tempfile, "tempdir", f"/tmp/{name}")
    assert temporary_module._parent() == Path(f"/tmp/{name}")
    folder = Path(f"/tmp/{name}", "torchtitan-rl-v6pft_ft", "monarch_process_job_vicq95ks")
    folder.mkdir(parents=True)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(folder / "hosts_10"))
    finally:
        shutil.rmtree(f"/tmp/{name}")


# ---- a console that can't be written


def test_a_closed_pipe_is_a_line_in_the_log_and_not_the_end():
    code = (
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stderr)\n"
        "from torchtitan.experiments.rl.observability.console import write_line\n"
        "for number in range(20000):\n"
        "    write_line(sys.stdout, f'line {number}')\n"
        "print('went on', file=sys.stderr)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "line 0\n"
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait(240) == 0 and err.endswith("went on\n"), err
    assert err.count("the console can't be written any more") == 1 and "Traceback" not in err


def test_a_full_disk_under_the_output_is_no_end_either(caplog):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        write_line(full, "x")
    assert "No space left on device" in caplog.text
