"""Says how Python is told to run a module of this library."""

import sys


def module_words(module: str) -> list[str]:
    """Return the words for Python that run a module of this library, such as "train".

    They name the library as this process found it. If it imported ``torchtitan_rl``, the library is
    an installed one, which another process finds by that package alone. Else this process stands in
    a checkout's folder, where the library has its own name.
    """
    if "torchtitan_rl" in sys.modules:
        return ["-m", "torchtitan_rl", module]
    return ["-m", f"torchtitan.experiments.rl.{module}"]
