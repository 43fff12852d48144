"""Has Python find the installed library as ``torchtitan.experiments.rl``.

``torchtitan_rl.pth`` imports this whenever an interpreter starts, so it imports nothing that Python has not. The released
torchtitan has an experiment of that name, which is then not found; everything else of ``torchtitan`` is the released one's. A
checkout of the library that is in front on ``sys.path`` is taken instead.
"""

import sys

DISTRIBUTION = "torchtitan-rl"
LIBRARY = "torchtitan.experiments.rl"


def root() -> str:
    """The folder that holds torchtitan/experiments/rl, assets and requirements: this one, or the checkout that it is in."""
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    return (
        here
        if os.path.isdir(os.path.join(here, "torchtitan"))
        else os.path.dirname(os.path.dirname(here))
    )


class LibraryFinder:
    """Answers for the one name; all others, its submodules included, are left to Python."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != LIBRARY:
            return None
        # Set by the checkout's torchtitan/experiments/__init__.py.
        if getattr(sys.modules.get("torchtitan.experiments"), "CHECKOUT_OF", None) == DISTRIBUTION:
            return None
        import os
        from importlib.util import spec_from_file_location

        folder = os.path.join(root(), *LIBRARY.split("."))
        return spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


sys.meta_path.insert(0, LibraryFinder)
