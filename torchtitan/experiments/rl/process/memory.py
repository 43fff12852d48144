"""What Python and malloc do with memory that this process does not need.

Garbage collection is kept away from what stays for as long as the process: modules, engine, tasks. Importing torch, torchtitan
and vLLM makes more than half a million objects, of which 2 % are garbage. Collections while they are made took a quarter of the
time, and each full one after that looks at all of them again.

Memory that was freed and that malloc keeps is given back to the system now and then. glibc returns it by itself only from the
end of a heap. A generator on CPU makes and drops oneDNN kernels of 0.3 MB all the time. What they left free between what stays
grew by some 0.3 MB in 100 steps, to 30 MB after 2,000.
"""

import ctypes
import gc

PYTHONS_THRESHOLDS = (700, 10, 10)
GIVE_BACK_EVERY_S = 60.0
"""It takes some 2 ms; the pages that are needed again cost about as much."""


def hold_collection() -> None:
    """Collect nothing until ``collect_again``: for the imports and builds that a process starts with."""
    gc.disable()


def keep_imported() -> None:
    """While collection is held: never look at what is there by now. Called between imports and what may leave large garbage."""
    if not gc.isenabled():
        gc.freeze()


def collect_again() -> None:
    """Collect what was made since ``keep_imported``, never look at the rest again, and go on as usual. Nothing happens where
    collection was not held."""
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()


def freeze_objects() -> None:
    """Take what the process has built so far out of garbage collection.

    Torch, vLLM and the tasks are a million objects. Each full collection looked at all of them and held up the event loop for
    0.3 s, every few steps. What is made later is looked at more seldom than Python does by itself: a rollout is thousands of
    objects, few of them in cycles, and a tenth of the controller's time went into looking.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


def unfreeze_objects() -> None:
    """Let garbage collection see everything again: what is frozen at exit counts as leaked."""
    gc.unfreeze()
    gc.set_threshold(*PYTHONS_THRESHOLDS)


def give_back_free_memory() -> None:
    """No effect where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
