"""Runs the library's commands, each in a process of its own, which share one import of the library: it takes 7 s of a core."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FORKING = """
import json, os, runpy, sys, tempfile
from torchtitan.experiments.rl.process.setup import set_up_process
set_up_process()
import torchtitan.experiments.rl.command.gate, torchtitan.experiments.rl.config_registry
ends = []
for module, *words in json.loads(sys.argv[1]):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.closerange(3, 100)
        sys.argv = [module, *words]
        runpy.run_module(f"torchtitan.experiments.rl.{module}", run_name="__main__", alter_sys=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0), err.seek(0)
    ends.append([code, out.read().decode(), err.read().decode()])
print(json.dumps(ends))
"""
"""Program that forks a process for each command. Files take what is printed: a full pipe would block."""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_commands(*commands: list[str], folder: Path, path: Path | None = None) -> list[Ended]:
    """Run commands such as ["train", "--list"] in a folder, one after the other.

    Args:
        path: a further folder that Python finds modules in.
    """
    folders = [str(ROOT)] + ([] if path is None else [str(path)])
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return [Ended(*end) for end in json.loads(ended.stdout)]
