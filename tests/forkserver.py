"""Processes for tests, forked from one server, which has imported the library and started nothing.

Importing it takes 6 s of a core. Each process of pytest has one server, which starts when a test first needs it. Modules that
start actors can't run so: Monarch hangs in a forked process.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800
"""Seconds after which a module that was run counts as hanging."""
PRELOADED = [
    "tests.integration.learners",
    "torchtitan.models.llama3",
    "torchtitan.models.qwen3",
    "torchtitan.experiments.rl.command.gate",
    "torchtitan.experiments.rl.config_registry",
]


class Ended(NamedTuple):
    """Exit code of a module that was run, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def forkserver() -> ForkServerContext:
    """Return the context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # before it starts; later calls change nothing
    with contextlib.chdir(ROOT):  # elsewhere it would import the released torchtitan alone
        ensure_running()
    return context


def measure_for(test: str) -> None:
    """Have coverage, if it measures this process, count what runs from now on for a test.

    Without this it counts for the test that started the server.

    Args:
        test: the test, as pytest has it in ``PYTEST_CURRENT_TEST``.
    """
    if "coverage" in sys.modules:
        measuring = sys.modules["coverage"].Coverage.current()
        if measuring is not None:
            measuring.switch_context(test)


def run_module(module: str, *words: str, folder: Path = ROOT, path: Path | None = None) -> Ended:
    """Do what ``python -m MODULE WORDS`` does, in a process that has imported the library already.

    Args:
        module: the module, such as "tests.zoo".
        words: arguments of the module.
        folder: folder that the module runs in.
        path: a further folder that Python finds modules in.

    Raises:
        TimeoutError: it has not ended within `LIMIT_S`, and was killed.
    """
    # Files take what is printed: a full pipe would block.
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        arguments = (test, module, words, folder, path, out.name, err.name)
        process = forkserver().Process(target=_be_module, args=arguments)
        process.start()
        process.join(LIMIT_S)
        printed = out.read().decode(), err.read().decode()
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{module} has not ended within {LIMIT_S} s: {printed}")
        return Ended(process.exitcode, *printed)


def _be_module(
    test: str,
    module: str,
    words: tuple[str, ...],
    folder: Path,
    path: Path | None,
    out: str,
    err: str,
) -> None:
    measure_for(test)
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    folders = [str(ROOT)] + ([] if path is None else [str(path)])
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    sys.path[:0] = folders
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
