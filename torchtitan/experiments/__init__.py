"""Overlay of the installed ``torchtitan.experiments``: see ``torchtitan/__init__.py``."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
CHECKOUT_OF = "torchtitan-rl"
"""Tells an installed torchtitan-rl (src/torchtitan_rl/__init__.py) that a checkout is in front, and to leave its name alone."""
