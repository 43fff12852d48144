"""Makes the library importable as ``torchtitan.experiments.rl``. Import it before ``torchtitan``.

The released torchtitan has a package ``torchtitan.experiments.rl`` of its own, so this library is
installed in a folder apart. Importing ``torchtitan_rl`` puts that folder first on ``sys.path``, and
in PYTHONPATH, so that the processes which this one starts import the same library. All other
modules of ``torchtitan`` are the released ones (``torchtitan/__init__.py`` in that folder).
"""

import os
import sys
from pathlib import Path

DISTRIBUTION = "torchtitan-rl"


def installed_folder() -> Path:
    """Return the folder of the installed library, which holds torchtitan, assets and requirements.

    A wheel has it beside this file. An editable install uses the checkout that this file lies in.
    """
    here = Path(__file__).absolute().parent
    in_wheel = here / "library"
    return in_wheel if in_wheel.is_dir() else here.parents[1]


def library_folder() -> Path:
    """Return the folder to import the library from.

    A checkout in the current folder comes before the installed library: the processes of a run are
    started by ``python -m``, which looks into the current folder before it reads PYTHONPATH.
    """
    current = Path.cwd()
    is_checkout = (current / "src/torchtitan_rl").is_dir() and (current / "torchtitan").is_dir()
    return current if is_checkout and not sys.flags.safe_path else installed_folder()


def put_first(folder: Path) -> None:
    """Import from ``folder`` first, in this process and in those that it starts.

    Raises:
        ImportError: torchtitan was imported from another folder already.
    """
    torchtitan = sys.modules.get("torchtitan")
    if torchtitan is not None:
        origin = next(iter(torchtitan.__path__), "an unknown folder")
        if os.path.realpath(origin) != os.path.realpath(folder / "torchtitan"):
            raise ImportError(
                f"torchtitan was imported from {origin} already, which is not this library's: "
                "put `import torchtitan_rl` first, before torchtitan and all that imports it"
            )
    name = str(folder)
    sys.path[:] = [name, *(entry for entry in sys.path if entry != name)]
    inherited = os.environ.get("PYTHONPATH")
    entries = inherited.split(os.pathsep) if inherited else []
    os.environ["PYTHONPATH"] = os.pathsep.join([name, *(e for e in entries if e != name)])


put_first(library_folder())
