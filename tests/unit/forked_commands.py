"""Runs the library's commands, each in a process of its own, which share one import of the library: it takes 7 s of a core."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FORKING = """
import json, os, runpy, sys
from torchtitan.experiments.rl.process.setup import set_up_process
set_up_process()
import torchtitan.experiments.rl.command.gate, torchtitan.experiments.rl.config_registry
ends = []
for module, *words in json.loads(sys.argv[1]):
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out[1], 1)
        os.dup2(err[1], 2)
        os.closerange(3, 100)
        sys.argv = [module, *words]
        runpy.run_module(f"torchtitan.experiments.rl.{module}", run_name="__main__", alter_sys=True)
        os._exit(0)
    os.close(out[1])
    os.close(err[1])
    said = [open(pipe[0], encoding="utf-8").read() for pipe in (out, err)]
    ends.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *said])
print(json.dumps(ends))
"""
"""Nothing that a command started may hold its pipes when it has ended, as with subprocess.run."""


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
