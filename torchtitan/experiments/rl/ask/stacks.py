"""Finds the function that user code is in: of a coroutine that waits, or of a thread that runs."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType

from torchtitan.experiments.rl.errors import is_library_file, is_users_file

_THIS_FOLDER = str(Path(__file__).parent)


def frames_of_coroutine(coroutine: object) -> list[FrameType]:
    """Return the frames of a suspended coroutine and of what it awaits, innermost first.

    `asyncio.Task.get_stack` has only the outermost of them.
    """
    frames = []
    while coroutine is not None:
        match coroutine:
            case CoroutineType():
                frame, awaited = coroutine.cr_frame, coroutine.cr_await
            case GeneratorType():
                frame, awaited = coroutine.gi_frame, coroutine.gi_yieldfrom
            case AsyncGeneratorType():
                frame, awaited = coroutine.ag_frame, coroutine.ag_await
            case _:  # a future, or an awaitable written in C
                frame, awaited = None, None
        if frame is not None:
            frames.append(frame)
        coroutine = awaited
    frames.reverse()
    return frames


def frames_of_thread(thread_id: int | None) -> Iterator[FrameType]:
    """Yield the frames that a thread of this process is in now, innermost first."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    while frame is not None:
        yield frame
        frame = frame.f_back


def location_in(frames: Iterable[FrameType]) -> str:
    """Return the innermost function of the user's with file and line: "Env.step (maze.py:31)".

    Without one, return the innermost function of the library's that asks nothing itself. Python's
    own code and that of installed packages is no location. Empty where there is none.

    Args:
        frames: innermost first.
    """
    of_library = ""
    for frame in frames:
        file = frame.f_code.co_filename
        if is_users_file(file):
            return _location(frame)
        if not of_library and is_library_file(file) and not file.startswith(_THIS_FOLDER):
            of_library = _location(frame)
    return of_library


def with_owner(owner: str, location: str) -> str:
    """Return a location with the name of the code that was asked.

    Such as "Maze.step, at fetch (web.py:7)".
    """
    if not owner or location.startswith(f"{owner} "):
        return location
    return f"{owner}, at {location}" if location else owner


def _location(frame: FrameType) -> str:
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
