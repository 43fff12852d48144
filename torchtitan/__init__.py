"""Overlay: the installed torchtitan supplies every module this checkout does not hold.

The installed ``torchtitan`` is a regular package, so a folder of the same name that is found first
on ``sys.path`` would hide it. Extending ``__path__`` makes both folders one package, with this
checkout in front.
"""

from importlib.metadata import version
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__version__ = version("torchtitan")
