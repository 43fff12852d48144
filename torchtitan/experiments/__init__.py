"""Overlay of the installed ``torchtitan.experiments``: see ``torchtitan/__init__.py``."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
CHECKOUT_OF = "torchtitan-rl"
"""Name of the distribution that this is a checkout of.

An installed torchtitan-rl (src/torchtitan_rl/__init__.py) reads it, and leaves its name to the
checkout.
"""
