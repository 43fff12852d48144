"""The installed commands: ``rl-train`` and the others, and ``python -m torchtitan_rl NAME``.

Before a command imports the library, it says in one line what the environment lacks.
"""

import importlib
import os
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from torchtitan_rl import DISTRIBUTION, installed_folder, library_folder

MODULES = ("train", "evaluate", "report", "export", "play", "simulate", "hosts.agent", "grpo")
"""Modules of the library that ``python -m torchtitan_rl`` runs."""

NOT_RESOLVED = ("torchstore==0.1.2",)
"""Requirements that the distribution leaves out because pip can't resolve them.

torchstore asks for torch 2.9 and torchmonarch 0.1.2, and works with the pinned ones.
"""


def main() -> int:
    """Run the module of the library that the first word of the command line names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in MODULES:
        print(f"error: no command {name!r}; there are {', '.join(MODULES)}", file=sys.stderr)
        return 2
    return _run(name)


def train() -> int:
    return _run("train")


def evaluate() -> int:
    return _run("evaluate")


def report() -> int:
    return _run("report")


def export() -> int:
    return _run("export")


def play() -> int:
    return _run("play")


def simulate() -> int:
    return _run("simulate")


def _run(module: str) -> int:
    """Run ``main`` of a module of the library, and end the process with its exit code.

    Modules of the current folder can be imported, as with ``python -m``.
    """
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    if problem := what_hides_the_library() or what_is_lacking():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    from torchtitan.experiments.rl.process.entry import run_command

    return run_command(
        lambda: importlib.import_module(f"torchtitan.experiments.rl.{module}").main()
    )


def what_hides_the_library() -> str | None:
    """Return one line if another torchtitan in the current folder would be imported."""
    current = Path.cwd()
    if sys.flags.safe_path or not (current / "torchtitan/__init__.py").is_file():
        return None
    if current.samefile(library_folder()):
        return None
    return (
        f"{current / 'torchtitan'} would be imported in place of the installed library: "
        "start in another folder"
    )


def what_is_lacking() -> str | None:
    """Return one line with the packages that are absent or of another version, and the cure."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # imported from a checkout by PYTHONPATH
        folder = shlex.quote(str(installed_folder()))
        return f"{DISTRIBUTION} is not installed; {pip} --no-deps --editable {folder} installs it"
    lacking = _lacking([*requirements, *NOT_RESOLVED])
    if not lacking:
        return None
    pins = shlex.quote(str(installed_folder() / "requirements" / "cpu.txt"))
    # torch with its dependencies: its CUDA build can't be imported without them.
    torch = f"{pip} {lacking['torch'].partition(' ')[0]} && " if "torch" in lacking else ""
    cure = f"{torch}{pip} --no-deps -r {pins} installs all (on GPUs: gpu.txt)"
    return f"not installed: {', '.join(lacking.values())}; {cure}"


def _lacking(requirements: list[str]) -> dict[str, str]:
    """Return the requirements that the environment does not meet, by package."""
    lacking = {}
    for requirement in requirements:
        if ";" in requirement:  # it belongs to an extra
            continue
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        pinned = requirement.partition("==")[2]
        try:
            present = version(name)
        except PackageNotFoundError:
            lacking[name] = requirement
            continue
        if pinned and present.partition("+")[0] != pinned:
            lacking[name] = f"{requirement} (here: {present})"
    return lacking
