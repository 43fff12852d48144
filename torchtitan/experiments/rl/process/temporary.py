"""What a run leaves on its host and has to remove: one temporary folder, and POSIX shared memory.

The folder has what the run's processes put into TMPDIR. It goes when the run ends, or when a later run starts. Files of shared
memory stay when the process that made them is killed before it removes them.
"""

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

PREFIX = "torchtitan-rl-"
LOCK_FILE = ".lock"
SHARED_MEMORY_FILE = ".shared-memory"
"""Names of the shared memory of the run's processes, a line each."""
HOSTS_PREFIX = "hosts_"
"""Of the folder with the sockets of hosts that are processes."""
SOCKET_NAME = 24
"""Number of characters of the names that Monarch makes up for its sockets."""
_LONGEST = 107 - len(f"/{PREFIX}12345678/{HOSTS_PREFIX}12345678/") - SOCKET_NAME
"""Characters of a folder that sockets fit below: a socket's path has at most 107."""
SHARED_MEMORY = Path("/dev/shm")


class TemporaryFolder:
    """Made by the command before anything is spawned: children inherit TMPDIR."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: no folder for temporary files can be written.
        """
        parent = _parent()
        remove_left_over(parent)
        # Compiled kernels are for later runs too: they stay where torch keeps them.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{_user()}"))
        self._before = os.environ.get("TMPDIR")
        self.path, self._lock = _locked_folder(parent)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.path)

    def note_shared_memory(self, pids: list[int]) -> None:
        """Remember the POSIX shared memory that processes have open: nobody else removes that of a process that was killed."""
        with contextlib.suppress(OSError):
            (self.path / SHARED_MEMORY_FILE).write_text(
                "".join(f"{name}\n" for name in sorted(shared_memory_of(pids)))
            )

    def remove(self) -> None:
        """Call it when the run's processes have ended."""
        if self._before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._before
        tempfile.tempdir = None
        _remove(self.path)
        self._lock.close()
        # Processes of a killed run that had not ended when this one began may have written into theirs again.
        remove_left_over(self.path.parent)


def _locked_folder(parent: Path) -> tuple[Path, BinaryIO]:
    """A new folder, and its lock. It is locked before it has its name: one of that name without a lock belongs to no run."""
    unnamed = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = (unnamed / LOCK_FILE).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return unnamed.rename(parent / unnamed.name.removeprefix(".")), lock


def remove_left_over(parent: Path | None = None) -> None:
    """Remove the folders of runs that were killed. ``parent``: where they are; None: the folder for temporary files."""
    for path in (parent or _parent()).glob(f"{PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK_FILE).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except OSError:  # its run lives, or another command removes it
            pass


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _parent() -> Path:
    """The folder for temporary files; /tmp where its path is too long for sockets."""
    parent = Path(tempfile.gettempdir())
    return Path("/tmp") if len(str(parent)) > _LONGEST and os.access("/tmp", os.W_OK) else parent


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        remove_shared_memory((path / SHARED_MEMORY_FILE).read_text().split())
    shutil.rmtree(path, ignore_errors=True)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Names of the files that these processes have mapped and that are there."""
    found: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += re.findall(
                f" {SHARED_MEMORY}/([^/\n]+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE
            )
    return {name for name in found if not name.endswith(" (deleted)")}


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove files by name, as far as they are there."""
    for name in names:
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / Path(name).name).unlink()
