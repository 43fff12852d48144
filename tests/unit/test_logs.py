"""Each test sets logging up in a process of its own: this one's belongs to pytest."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import contextlib, logging, sys, threading, warnings
from pathlib import Path
from torchtitan.experiments.rl.process.logs import ENDS_THE_RUN, set_up_logging
path = set_up_logging(Path(sys.argv[1]), "trainer-0")
ours, other = logging.getLogger("torchtitan.experiments.rl.controller.actor"), logging.getLogger("vllm.engine")
"""


@pytest.fixture
def run(tmp_path):
    def run(code: str) -> tuple[list[dict], str]:
        """The records of the log file, and what reached the terminal."""
        command = [sys.executable, "-c", SETUP + code, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        text = (tmp_path / "logs" / "trainer-0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()], result.stdout + result.stderr

    return run


def test_a_record_is_one_json_line_with_its_time_level_logger_and_process(run):
    (record,), terminal = run("ours.info('step %d\\nof two lines', 3)")
    assert datetime.fromisoformat(record.pop("time")).tzinfo is not None
    assert record == {
        "level": "INFO",
        "logger": "torchtitan.experiments.rl.controller.actor",
        "process": "trainer-0",
        "message": "step 3\nof two lines",
    }
    assert terminal == ""


def test_the_terminal_gets_our_warnings_and_only_errors_of_others(run):
    records, terminal = run("""
for logger in (ours, other):
    logger.info("i"); logger.warning("w"); logger.error("e")
warnings.warn("deprecated")
""")
    assert terminal.splitlines() == [
        "WARNING trainer-0: w",
        "ERROR trainer-0: e",
        "ERROR trainer-0: e",
    ]
    assert [r["level"] for r in records] == ["INFO", "WARNING", "ERROR"] * 2 + ["WARNING"]
    assert records[-1]["logger"] == "py.warnings" and "deprecated" in records[-1]["message"]


def test_a_traceback_is_in_the_file_and_one_line_on_the_terminal(run):
    (record,), terminal = run("""
path = sys.modules["torchtitan.experiments.rl.process.logs"].__file__  # the library's own code
exec(compile("try: 1 / 0\\nexcept ZeroDivisionError: ours.exception('reward function failed')", path, "exec"))
""")
    assert record["exception"].startswith("Traceback") and "Traceback" not in terminal
    (line,) = terminal.splitlines()
    assert line.startswith(
        "ERROR trainer-0: reward function failed (ZeroDivisionError: division by zero; traceback in "
    )


def test_the_terminal_gets_the_users_frames_alone_of_an_error_that_ends_the_run(run):
    records, terminal = run("""
exec(compile("def fail(): return {}['x']", "/home/me/mine.py", "exec"))
try: fail()
except KeyError:
    ours.exception("group %s", "sum_digits-3", extra=ENDS_THE_RUN)
    ours.exception("the run failed", extra=ENDS_THE_RUN)
""")
    assert [record["message"] for record in records] == ["group sum_digits-3", "the run failed"]
    header, *frames, last = terminal.splitlines()
    assert header == "Traceback (most recent call last):" and last == "KeyError: 'x'"
    assert sum("/home/me/mine.py" in frame for frame in frames) == 1


def test_the_terminal_shows_the_frames_of_the_users_code_once(run):
    records, terminal = run("""
exec(compile("def fail(): return {}['x']", "/home/me/mine.py", "exec"))
from torchtitan.experiments.rl.errors import RunError
for _ in range(2):
    try:
        try: fail()
        except KeyError as error: raise RunError("Sampler.next: KeyError: 'x'") from error
    except RunError: ours.exception("the run failed")
""")
    assert all(
        "mine.py" in record["exception"] and record["exception"].startswith("Traceback")
        for record in records
    )
    line, header, *frames, last = terminal.splitlines()
    assert line.startswith(
        "ERROR trainer-0: the run failed (RunError: Sampler.next: KeyError: 'x'; traceback in "
    )
    assert header == "Traceback (most recent call last):" and last.startswith(
        "ERROR trainer-0: the run failed (RunError"
    )
    assert '  File "/home/me/mine.py", line 1, in fail' in frames and frames[-1] == "KeyError: 'x'"


def test_user_code_that_fails_is_logged_with_its_traceback_the_first_time_in_each_way(run):
    records, terminal = run("""
import asyncio
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.errors import UserCodeError
exec(compile(
    "def fail(i): return {}[i]\\nasync def late(i):\\n    return {}[i]", "/home/me/mine.py", "exec"
))
async def main():
    for i in range(10):
        for function in (fail, late):
            try: await ask(function, i, timeout_s=10, owner="Env.reset")
            except UserCodeError: pass
    try: await OrderedCalls().call(fail, 0, owner="sampler")
    except RuntimeError: pass
for level in (logging.CRITICAL, logging.NOTSET):  # the first as in the preflight, which has no log
    logging.disable(level)
    asyncio.run(main())
""")
    logged = [
        record["exception"].splitlines()
        for record in records
        if "user code failed" in record["message"]
    ]
    assert [lines[-1] for lines in logged] == ["KeyError: 0", "KeyError: 0"]
    assert [", in fail" in "".join(lines) for lines in logged] == [True, False] and terminal == ""


def test_an_exception_that_ends_a_thread_is_logged_with_the_threads_name(run):
    (record,), terminal = run("""
def fail(): raise KeyError("lost")
threads = [threading.Thread(target=fail, name="weight-sync"), threading.Thread(target=sys.exit)]
for thread in threads: thread.start(); thread.join()
""")
    assert record["message"] == "thread weight-sync ended by an exception"
    assert (
        "KeyError: 'lost'" in record["exception"]
        and terminal.count("thread weight-sync ended") == 1
    )


def test_setting_up_twice_writes_each_record_once(run):
    records, terminal = run("set_up_logging(Path(sys.argv[1]), 'trainer-0'); ours.warning('w')")
    assert len(records) == len(terminal.splitlines()) == 1


def test_a_second_setup_takes_the_terminal_from_libraries_that_took_it(run):
    records, terminal = run("""
logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout)); logging.getLogger("vllm").propagate = False
logging.getLogger().addHandler(logging.StreamHandler())
set_up_logging(path.parents[1], "trainer-0"); other.warning("chatter")
""")
    assert [r["message"] for r in records] == ["chatter"] and terminal == ""


def test_messages_that_cannot_be_formatted_or_encoded_are_still_logged(run):
    records, terminal = run(
        "other.warning('%d groups', 'many'); other.warning('half a \\ud83d character')"
    )
    assert [r["message"] for r in records] == ["%d groups ('many',)", "half a \ud83d character"]
    assert terminal == ""


def test_a_log_that_can_not_be_written_is_one_line_on_the_terminal(run):
    _, terminal = run("""
handler = logging.getLogger().handlers[0]
full = handler.stream = open("/dev/full", "w")
for number in range(3):
    ours.info("record %d", number)
handler.stream = None
with contextlib.suppress(OSError):  # else Python 3.13 prints what it can't write when the file is dropped
    full.close()
""")
    assert (
        terminal.count("\n") == 1
        and "WARNING the log " in terminal
        and "No space left on device" in terminal
    )


def test_a_full_disk_is_one_line_however_many_parts_meet_it_and_of_the_command_alone(run, tmp_path):
    meet = """
error = OSError(28, "No space left on device", "ledger.jsonl")
for number in range(3):
    ours.warning("the state after step %d is not saved: %s", number, error)
ours.error("the run failed", exc_info=error)
handler = logging.getLogger().handlers[0]
full = handler.stream = open("/dev/full", "w")
ours.info("record")
handler.stream = None
with contextlib.suppress(OSError):  # else Python 3.13 prints what it can't write when the file is dropped
    full.close()
ours.warning("another thing")
"""
    records, terminal = run(meet)
    assert terminal.splitlines() == [
        "WARNING trainer-0: the state after step 0 is not saved: [Errno 28] No space left on device: 'ledger.jsonl'",
        "WARNING trainer-0: another thing",
    ]
    assert len(records) >= 4, "the file has all"
    spawned = f"""
from torchtitan.experiments.rl.process.output import print_to, send_notes_to
class Port:
    def send(self, note):
        print(note)
print_to(Path({str(tmp_path / "x.txt")!r}))
send_notes_to(Port())
"""
    assert run(spawned + meet)[1] == ""
    assert (tmp_path / "x.txt").read_text() == "WARNING trainer-0: another thing\n"


def test_a_traceback_from_another_process_is_one_sentence_on_the_terminal(run):
    _, terminal = run(
        "ours.warning('it failed: Traceback (most recent call last):\\n' + '  File x, line 1\\n' * 500 + 'KeyError: 3')"
    )
    assert terminal == "WARNING trainer-0: KeyError: 3\n"


def test_a_log_grows_to_its_limit_and_keeps_the_file_before(run, tmp_path):
    records, terminal = run("""
from torchtitan.experiments.rl.process import logs
logs.LOG_BYTES = 2000
set_up_logging(path.parents[1], "trainer-0")
for number in range(100):
    ours.info("record %d", number)
""")
    older = [
        json.loads(line)
        for line in (tmp_path / "logs" / "trainer-0.jsonl.1").read_text().splitlines()
    ]
    assert (
        sorted(os.listdir(tmp_path / "logs")) == ["trainer-0.jsonl", "trainer-0.jsonl.1"]
        and terminal == ""
    )
    messages = [record["message"] for record in older + records]
    assert (
        messages == [f"record {number}" for number in range(100 - len(messages), 100)]
        and 10 < len(messages) < 40
    )
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "logs").iterdir())
