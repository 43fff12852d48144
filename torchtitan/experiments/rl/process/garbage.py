"""Keeps garbage collection away from what stays for as long as the process: modules, engine, tasks.

Importing torch, torchtitan and vLLM makes more than half a million objects, of which 2 % are garbage. Collections while they
are made took a quarter of the time, and each full one after that looks at all of them again.
"""

import gc

PYTHONS_THRESHOLDS = (700, 10, 10)


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
