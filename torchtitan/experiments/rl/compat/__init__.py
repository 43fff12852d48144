"""Every private API and every patch of a dependency that the library uses, by dependency.

Each file or folder names the version that it holds for, and each use why it is needed. When an
upgrade breaks one, `tests/unit/test_compat_<dependency>.py` fails by the name of the API.
"""
