"""Every private API and every patch of a dependency that the library uses: one file or folder per dependency.

Each use names the version it holds for and why it is needed. `tests/unit/test_compat_<dependency>.py` fails by the name of the
API when an upgrade breaks it.
"""
