"""`pyproject.toml` names every package that the library imports, and a worked task's packages are in its own extra."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "torchtitan/experiments/rl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()
EXTRAS = {
    "tasks/math": "math",
    "tasks/reasoning_gym": "reasoning_gym",
    "tasks/verifiers": "verifiers",
    "compat/verifiers.py": "verifiers",
    "compat/vllm.py": "cpu",
    "generation/vllm_engine.py": "cpu",
    "generation/vllm_worker.py": "cpu",
}
"""Files that may import what an extra installs. The engine's files need vllm, from the extra cpu or gpu."""


def named(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it; the standard library and the library itself left out."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    outside = {name for name in names if not name.startswith("torchtitan.experiments.rl")}
    return {name.partition(".")[0] for name in outside} - set(sys.stdlib_module_names)


def unnamed(file: str, packages: set[str]) -> set[str]:
    """Packages imported by ``file`` that neither the dependencies nor its extra install."""
    allowed = named(PROJECT["dependencies"])
    for place, extra in EXTRAS.items():
        if file.startswith(place):
            allowed |= named(PROJECT["optional-dependencies"][extra])
    return {package for package in packages if not {normal(name) for name in DISTRIBUTIONS.get(package, [])} & allowed}


@pytest.mark.parametrize("file", sorted(str(file.relative_to(LIBRARY)) for file in LIBRARY.rglob("*.py")))
def test_what_a_file_imports_is_named_in_pyproject(file):
    missing = unnamed(file, imported(LIBRARY / file))
    assert not missing, f"{file} imports {sorted(missing)}: name it in pyproject.toml's dependencies, or in an extra"


def test_the_check_knows_a_package_that_is_not_named_and_one_of_another_extra():
    assert unnamed("types.py", {"numpy", "yaml"}) == {"yaml"}
    assert unnamed("types.py", {"reasoning_gym"}) == {"reasoning_gym"}
    assert unnamed("tasks/reasoning_gym/data.py", {"reasoning_gym"}) == set()
