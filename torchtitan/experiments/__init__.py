"""Overlay of the installed ``torchtitan.experiments``: see ``torchtitan/__init__.py``."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
