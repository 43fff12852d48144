"""Processes print into files of their own, and a crash's last words among it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.experiments.rl.compat.monarch import printed_to

ROOT = Path(__file__).parents[2]
SETUP = """
import logging, os, subprocess, sys
from pathlib import Path
from torchtitan.experiments.rl.process.output import print_to, send_notes_to
from torchtitan.experiments.rl.process.logs import set_up_logging
folder = Path(sys.argv[1])
print("before")
print_to(folder / "logs" / "generator_0_0.txt")
set_up_logging(folder, "generator-0")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SETUP + code, str(folder)]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_a_process_and_its_children_print_is_in_its_file_and_nothing_on_the_terminal(tmp_path):
    done = run(
        """
print("by Python", flush=True)
print("to stderr", file=sys.stderr)
os.write(1, b"by C\\n")
subprocess.run(["sh", "-c", "echo by a child; echo to its stderr >&2"])
""",
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("before\n", "")
    printed = (tmp_path / "logs/generator_0_0.txt").read_text()
    assert printed.splitlines() == ["by Python", "to stderr", "by C", "by a child", "to its stderr"]


def test_warnings_of_a_process_go_where_its_notes_are_sent_and_those_before_it_knew_go_first(
    tmp_path,
):
    run(
        """
class Port:
    def send(self, note):
        print(repr(note), flush=True)

ours = logging.getLogger("torchtitan.experiments.rl.x")
ours.warning("early")
print("nothing is sent yet")
send_notes_to(Port())
exec(compile("def fail(): return {}['x']", "/home/me/mine.py", "exec"))
try: fail()
except KeyError: ours.exception("late")
""",
        tmp_path,
    )
    lines = (tmp_path / "logs/generator_0_0.txt").read_text().splitlines()
    assert lines[:2] == ["nothing is sent yet", repr("WARNING generator-0: early")]
    late = ast.literal_eval(lines[2])
    assert late.startswith("ERROR generator-0: late (KeyError: 'x'; traceback in ")
    assert '\n  File "/home/me/mine.py", line 1, in fail\n' in late, "a note has the user's frames"
    assert late.endswith("\nKeyError: 'x'") and len(lines) == 3


def test_the_last_words_of_a_crash_are_in_the_file(tmp_path):
    done = run("import faulthandler; faulthandler.enable(); faulthandler._sigsegv()", tmp_path)
    assert done.returncode < 0 and done.stderr == ""
    assert "Segmentation fault" in (tmp_path / "logs/generator_0_0.txt").read_text()


def test_a_process_that_prints_nothing_leaves_no_file(tmp_path):
    assert run("", tmp_path).returncode == 0
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["generator-0.jsonl"]


def test_what_monarch_prints_at_its_start_goes_to_a_file(tmp_path, capfd):
    with printed_to(tmp_path / "logs/monarch.txt"):
        os.write(2, b"Monarch internal logs are being written to ...\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    assert (
        tmp_path / "logs/monarch.txt"
    ).read_text() == "Monarch internal logs are being written to ...\n"
    with printed_to(tmp_path / "none.txt"):
        pass
    assert not (tmp_path / "none.txt").exists()


def test_what_it_prints_when_it_can_not_start_is_on_the_terminal(tmp_path, capfd):
    with pytest.raises(KeyError), printed_to(tmp_path / "monarch.txt"):
        os.write(2, b"thread 'main' panicked\n")
        raise KeyError
    assert (
        capfd.readouterr().err == "thread 'main' panicked\n"
        and not (tmp_path / "monarch.txt").exists()
    )
