"""Removes what a run leaves on its host: its folder of temporary files, and POSIX shared memory.

Each run has a folder of its own, and its processes have it as TMPDIR. The folder is removed when
the run ends. If the run was killed, the next run on the host removes it: a run holds a lock in its
folder while it lives, so a folder that can be locked belongs to no run.

Shared memory lies outside of that folder, as files in /dev/shm. A process removes its own, unless
it is killed. So the run notes in its folder which files its processes have, and whoever removes the
folder removes these files too.
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
"""Beginning of the name of a run's folder."""
LOCK_FILE = ".lock"
"""File in a run's folder that the run holds a lock on while it lives."""
SHARED_MEMORY_FILE = ".shared-memory"
"""File in a run's folder that names the shared memory of the run's processes, one name a line."""
SHARED_MEMORY = Path("/dev/shm")
HOSTS_PREFIX = "hosts_"
"""Beginning of the name of a folder inside a run's, for the sockets of hosts that are processes."""
SOCKET_NAME = 24
"""Number of characters of the names that Monarch gives its sockets."""
_MAX_SOCKET_PATH = 107
"""Maximum number of characters of a socket's path in Linux."""
_LONGEST = _MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/{HOSTS_PREFIX}12345678/") - SOCKET_NAME
"""Maximum number of characters of the path of a folder that a run's folder, with its sockets, may
lie in."""


class TemporaryFolder:
    """Folder for the temporary files of a run, from its start until `remove`.

    The command makes it before it starts a process, because processes inherit TMPDIR.
    """

    def __init__(self) -> None:
        """Make the folder, lock it, and put it into TMPDIR. Remove those of runs that were killed.

        Raises:
            OSError: There is no place where temporary files can be written.
        """
        parent = _parent()
        remove_left_over(parent)
        # Compiled kernels stay where torch keeps them, because later runs use them too.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(parent / f"torchinductor_{_user()}"))
        self._tmpdir_before = os.environ.get("TMPDIR")
        self.path, self._lock = _locked_folder(parent)
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = str(self.path)

    def note_shared_memory(self, pids: list[int]) -> None:
        """Note the shared memory that processes have now, so that it is removed with the folder."""
        lines = [f"{name}\n" for name in sorted(shared_memory_of(pids))]
        with contextlib.suppress(OSError):
            (self.path / SHARED_MEMORY_FILE).write_text("".join(lines))

    def remove(self) -> None:
        """Remove the folder, after the run's processes have ended."""
        if self._tmpdir_before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._tmpdir_before
        tempfile.tempdir = None
        _remove(self.path)
        self._lock.close()
        # Once more: processes of a killed run that still lived when this run began may have made
        # theirs again.
        remove_left_over(self.path.parent)


def remove_left_over(parent: Path | None = None) -> None:
    """Remove the folders of this user's runs that were killed.

    Args:
        parent: folder that these folders are in; None for the place of temporary files.
    """
    for path in (parent or _parent()).glob(f"{PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK_FILE).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except OSError:  # its run lives, or another command is removing it
            pass


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the names of the files of shared memory that processes have mapped."""
    mapped = re.compile(f" {SHARED_MEMORY}/([^/\n]+)$", re.MULTILINE)
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names.update(mapped.findall(Path(f"/proc/{pid}/maps").read_text()))
    return {name for name in names if not name.endswith(" (deleted)")}


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove files of shared memory by name. Those that are gone already are passed over."""
    for name in names:
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / Path(name).name).unlink()


def _parent() -> Path:
    """Return the place of temporary files, or /tmp if its path leaves no room for sockets."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST and os.access("/tmp", os.W_OK):
        return Path("/tmp")
    return parent


def _locked_folder(parent: Path) -> tuple[Path, BinaryIO]:
    """Make a run's folder, and return it with its lock.

    The folder is locked before it gets its name. Else `remove_left_over` of another run could find
    it without a lock, and remove it.
    """
    unnamed = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = (unnamed / LOCK_FILE).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return unnamed.rename(parent / unnamed.name.removeprefix(".")), lock


def _remove(path: Path) -> None:
    """Remove a run's folder, and the shared memory that is noted in it."""
    with contextlib.suppress(OSError):
        remove_shared_memory((path / SHARED_MEMORY_FILE).read_text().split())
    shutil.rmtree(path, ignore_errors=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        return str(os.getuid())
