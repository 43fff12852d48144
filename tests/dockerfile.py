"""Reads the Dockerfile of this checkout, and follows it in a folder where there is no Docker.

It knows what this Dockerfile has, and refuses other instructions: it is no parser for any Dockerfile.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ("FROM", "RUN", "WORKDIR", "ENV", "COPY", "ARG")


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    words: str
    """Text after the name, its lines joined by spaces."""

    @property
    def commands(self) -> list[str]:
        """Shell commands of a RUN, one after the other."""
        return [command.strip() for command in self.words.split("&&")]


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile, in their order.

    Raises:
        ValueError: an instruction is none of KNOWN.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, words = line.strip().partition(" ")
        if name and name not in KNOWN:
            raise ValueError(f"the Dockerfile has {name}, and tests/dockerfile.py knows {KNOWN}")
        if name:
            found.append(Instruction(name, " ".join(words.split())))
    return found


def shell_commands(text: str) -> list[str]:
    """Return the commands of all RUN instructions, in their order."""
    runs = [instruction for instruction in instructions(text) if instruction.name == "RUN"]
    return [command for run in runs for command in run.commands]


class Ignored:
    """Paths of the build context that Docker leaves out, by the patterns of a ``.dockerignore``."""

    def __init__(self, text: str):
        """
        Raises:
            ValueError: a pattern is of a kind that this class does not know.
        """
        lines = [line.strip() for line in text.splitlines()]
        patterns = [line for line in lines if line and not line.startswith("#")]
        if unknown := [pattern for pattern in patterns if re.search(r"[!?\[]", pattern)]:
            raise ValueError(f".dockerignore has {unknown}: tests/dockerfile.py knows * and **/")
        self._patterns = [re.compile(self._expression(pattern)) for pattern in patterns]

    def __contains__(self, path: str) -> bool:
        """True if a pattern matches the path, or a folder that it lies in."""
        whole = PurePosixPath(path)
        above = [str(part) for part in (whole, *whole.parents)]
        return any(pattern.fullmatch(part) for pattern in self._patterns for part in above)

    @staticmethod
    def _expression(pattern: str) -> str:
        anywhere = pattern.startswith("**/")
        name = re.escape(pattern.removeprefix("**/")).replace(r"\*", "[^/]*")
        return f"(?:.*/)?{name}" if anywhere else name


def context_files(ignored: Ignored) -> Iterator[str]:
    """Yield the files of this checkout that Docker sends to a build, relative to the root."""
    for folder, folders, files in os.walk(ROOT):
        below = PurePosixPath(Path(folder).relative_to(ROOT))
        folders[:] = [name for name in folders if str(below / name) not in ignored]
        yield from (path for name in files if (path := str(below / name)) not in ignored)


def follow(folder: Path, *, pins: str) -> Iterator[str]:
    """Do in ``folder`` what the Dockerfile does in its WORKDIR, with ``pins`` in place of gpu.txt.

    Commands that need another system are left out: apt's, and the download of a GPU's kernels.

    Yields:
        Each command, before it runs.

    Raises:
        CalledProcessError: a command fails.
    """
    ignored = Ignored((ROOT / ".dockerignore").read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments: dict[str, str] = {}
    work_dir = ""
    for instruction in instructions((ROOT / "Dockerfile").read_text()):
        match instruction.name:
            case "WORKDIR":
                work_dir = instruction.words
            case "ARG":
                name, _, value = instruction.words.partition("=")
                arguments[name] = value
            case "ENV":
                for setting in instruction.words.split():
                    name, _, value = setting.partition("=")
                    value = value.replace(f"{work_dir}/", f"{folder}/")
                    value = value.replace("$PATH", environment["PATH"])
                    for argument, given in arguments.items():
                        value = value.replace(f"${argument}", given)
                    environment[name] = value
            case "COPY":
                source, target = instruction.words.split()
                copy_context(source, folder / target, ignored)
            case "RUN" if "apt-get" not in instruction.words:
                for command in instruction.commands:
                    if "flashinfer" in command:
                        continue
                    command = command.replace("gpu.txt", pins)
                    yield command
                    subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)


def copy_context(source: str, target: Path, ignored: Ignored) -> None:
    """Copy a file or folder of the build context as COPY does."""
    for file in context_files(ignored):
        if PurePosixPath(file).is_relative_to(source):
            copied = target / PurePosixPath(file).relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copied)
