"""What a process has freed goes back to the system, once a minute."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.unit.waiting import until
from torchtitan.experiments.rl.user_code import endpoint as watched
from torchtitan.experiments.rl.user_code.endpoint import WatchedActor

ROOT = Path(__file__).resolve().parents[2]

# 800 blocks of 100 kB are of the heap, and the last of them keeps glibc from returning the others by itself.
FREES_80_MB = """
import ctypes
from pathlib import Path
from torchtitan.experiments.rl.process.setup import give_back_free_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident_kb(): return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmRSS"))
blocks = [libc.malloc(100_000) for _ in range(800)]
for block in blocks: ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]: libc.free(block)
before = resident_kb()
give_back_free_memory()
print(before - resident_kb())
"""


def test_memory_between_what_stays_is_given_back():
    freed = subprocess.run(
        [sys.executable, "-c", FREES_80_MB], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(freed.stdout) > 60_000, freed.stdout


async def test_a_process_of_the_run_does_so_once_a_minute_when_it_is_asked_for_its_usage(
    monkeypatch,
):
    actor, given, now = WatchedActor(), [], 1000.0
    actor._gave_back = now
    monkeypatch.setattr(watched, "give_back_free_memory", lambda: given.append(now))
    monkeypatch.setattr(watched, "time", SimpleNamespace(monotonic=lambda: now))
    answers: list[dict] = []
    for second in range(151):
        now = 1000.0 + second
        await WatchedActor.usage._method(
            actor, SimpleNamespace(send=answers.append, exception=answers.append)
        )
        await until(lambda number=second: len(answers) == number + 1)
    assert given == [1060.0, 1120.0] and isinstance(answers[0], dict)
