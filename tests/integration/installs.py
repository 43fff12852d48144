"""Fresh virtual environments that the library is installed into."""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

from tests.integration.command_runs import PATIENCE_S, ROOT, environment


class FreshEnvironment:
    """A new virtual environment.

    It sees the packages that the tests run with, by a path file: they are not downloaded again. ``tests/fresh_install.py``
    makes an environment from nothing.
    """

    def __init__(self, folder: Path, *, with_packages: bool = True):
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        if with_packages:
            (self.packages / "present.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *words: str) -> None:
        """Run this process's pip for this environment."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        done = subprocess.run(
            [*pip, *words], cwd=self.bin, env=without_python_path(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout

    def run(self, *command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=folder,
            env=without_python_path() | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def files(self) -> set[str]:
        """Files and folders at the top of site-packages and bin."""
        return set(os.listdir(self.packages)) | set(os.listdir(self.bin))


def build_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        *no_isolation(),
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(
        command, cwd=folder, env=without_python_path(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel


def no_isolation() -> list[str]:
    """Builds need no package index where the build backend of requirements/dev.txt is installed."""
    return ["--no-build-isolation"] if find_spec("hatchling") else []


def without_python_path() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}
