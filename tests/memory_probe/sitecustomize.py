"""Looks at the memory of the process it is imported into, for `tests/soak.py`: Python imports this when it starts.

Its folder is on the PYTHONPATH of a soaked run. ``MEMORY_PROBE`` names the folder that it writes to: every second, one JSON
object in the file ``<pid>``.

    live_kb, free_kb    what malloc has handed out, and what it has free and keeps
    python_blocks       objects of Python's own allocator
    answers             calls of other actors that Monarch has answered: it keeps some memory of each
"""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
EVERY_S = 1.0
MONARCH = "monarch._src.actor.actor_mesh"


class MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: sums over all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


class Probe:
    def __init__(self, folder: Path):
        self._folder = folder
        self._libc: Any = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = MallocInfo
        self._answers = 0
        self._counts_answers = False

    def run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            if not self._counts_answers and hasattr(sys.modules.get(MONARCH), "_Actor"):
                self._count_answers(sys.modules[MONARCH])
                self._counts_answers = True
            self._write()

    def _count_answers(self, actor_mesh: Any) -> None:
        handle = actor_mesh._Actor.handle

        def counted(actor: Any, *message: Any) -> Any:
            self._answers += any(
                isinstance(part, actor_mesh.Port) for part in message
            )  # a broadcast brings none
            return handle(actor, *message)

        actor_mesh._Actor.handle = counted

    def _write(self) -> None:
        malloc = self._libc.mallinfo2()
        seen = {
            "live_kb": (malloc.uordblks + malloc.hblkhd) // 1024,
            "free_kb": malloc.fordblks // 1024,
            "python_blocks": sys.getallocatedblocks(),
            "answers": self._answers,
        }
        path = self._folder / str(os.getpid())
        path.with_suffix(".new").write_text(json.dumps(seen))
        path.with_suffix(".new").rename(path)


if "MEMORY_PROBE" in os.environ:
    threading.Thread(
        target=Probe(Path(os.environ["MEMORY_PROBE"])).run, name="memory probe", daemon=True
    ).start()
