"""The installed commands. Before one imports the library it says in one line what the environment lacks."""

import importlib
import os
import re
import shlex
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

from torchtitan_rl import DISTRIBUTION, root

NOT_RESOLVED = ("torchstore==0.1.2",)
"""Needed, and no dependency of the distribution: it asks for torch 2.9 and torchmonarch 0.1.2, so pip finds no solution."""


def _run(module: str) -> int:
    """The ``main`` of a module of the library, which finds modules in the current folder too, as ``python -m`` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    if problem := what_is_lacking():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    from torchtitan.experiments.rl.process.setup import run_command

    return run_command(
        lambda: importlib.import_module(f"torchtitan.experiments.rl.{module}").main()
    )


def what_is_lacking() -> str | None:
    """One line with the packages that are absent or of another version, and the command that installs them."""
    lacking = {}
    for requirement in (*(requires(DISTRIBUTION) or ()), *NOT_RESOLVED):
        if ";" in requirement:  # of an extra
            continue
        name, wanted = (
            re.split(r"[^\w.-]", requirement, maxsplit=1)[0],
            requirement.partition("==")[2],
        )
        try:
            found = version(name)
        except PackageNotFoundError:
            lacking[name] = requirement
            continue
        if wanted and found.partition("+")[0] != wanted:
            lacking[name] = f"{requirement} (here: {found})"
    if not lacking:
        return None
    pip, pins = (
        f"{shlex.quote(sys.executable)} -m pip install",
        shlex.quote(os.path.join(root(), "requirements", "cpu.txt")),
    )
    # torch with its dependencies: its CUDA build can't be imported without them.
    torch = f"{pip} {lacking['torch'].partition(' ')[0]} && " if "torch" in lacking else ""
    return f"not installed: {', '.join(lacking.values())}; {torch}{pip} --no-deps -r {pins} installs all (on GPUs: gpu.txt)"


# What ``rl-train``, ``rl-evaluate`` and the others start: as ``python -m torchtitan.experiments.rl.grpo``, ``.evaluate`` ...
train = partial(_run, "grpo")
evaluate, report = partial(_run, "evaluate"), partial(_run, "report")
export, play, simulate = partial(_run, "export"), partial(_run, "play"), partial(_run, "simulate")
