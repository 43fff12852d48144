"""A disk that is full after some bytes."""

import errno
from pathlib import Path
from typing import IO, Any


class FullDisk:
    """File whose disk takes ``room`` more bytes, and no more than ``at_once`` in one write."""

    def __init__(self, file: IO[Any], room: int, *, at_once: int | None = None):
        self._file = file
        self._room = room
        self._at_once = at_once

    def write(self, data: Any) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self._room][: self._at_once])
        self._room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fill_disk(monkeypatch: Any, *, room: int, at_once: int) -> None:
    """Have each file that is opened to append to it from now on be on a disk of its own."""
    open_file = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        file = open_file(path, mode, **options)
        return FullDisk(file, room, at_once=at_once) if mode == "ab" else file

    monkeypatch.setattr(Path, "open", open_on_full_disk)
