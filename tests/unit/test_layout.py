"""The layout of the library: imports point down the floors, which `docs/architecture.md` lists too.

What tests share is in no file of tests.
"""

import ast
import functools
import re
import shutil
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "torchtitan/experiments/rl"
PACKAGE = "torchtitan.experiments.rl"
MAX_ROOT_MODULES = 15

FLOORS = (
    ("errors",),
    ("compat", "frozen", "printable"),
    ("process",),
    ("bounds", "configurable", "ask", "types"),
    ("hosts", "losses", "batching", "models", "weights"),
    ("rollouts",),
    ("observability",),
    ("checkpointing",),
    ("data", "envs", "rubrics"),
    ("generation", "gateway"),
    ("training",),
    ("algorithms",),
    ("tasks",),
    ("config",),
    ("plan",),
    ("command",),
    ("loops",),
    ("fleet",),
    ("watch",),
    ("controller",),
    ("simulation",),
    ("config_registry",),
    ("tools",),
    ("train", "evaluate", "export", "report", "play", "simulate", "script"),
    ("grpo",),
)
"""From bottom to top. A file imports from its own folder and from floors below, and from no other folder of its floor."""


def imports_of(library: Path) -> dict[str, set[str]]:
    """Module to the modules of the library it imports, wherever in the file: ``envs.conversation`` to ``{"types", ...}``."""
    files = {_module(file, library): file for file in library.rglob("*.py")}
    return {module: _imported(file, files) for module, file in files.items()}


def problems(library: Path) -> list[str]:
    """What is wrong with the layout, a line each; nothing where all is well."""
    imports = imports_of(library)
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    found = [
        f"{module}: {_room(module)} is on no floor"
        for module in sorted(imports)
        if _room(module) not in floor_of and module
    ]
    if found:
        return found
    for module, targets in sorted(imports.items()):
        for target in sorted(targets):
            if (
                _room(target) != _room(module)
                and module
                and floor_of[_room(target)] >= floor_of[_room(module)]
            ):
                found.append(f"{module} imports {target}, which is not on a floor below")
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found.append(f"files import each other in a circle: {' -> '.join(error.args[1])}")
    root = sorted(file.name for file in library.glob("*.py"))
    if len(root) > MAX_ROOT_MODULES:
        found.append(f"{len(root)} modules at the root, at most {MAX_ROOT_MODULES}: {root}")
    return found


def test_imports_point_one_way_without_circles():
    assert problems(LIBRARY) == []


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (
            "types.py",
            "from torchtitan.experiments.rl.tasks.task import Task",
            "types imports tasks.task, which is not on a floor",
        ),
        (
            "losses/loss.py",
            "import torchtitan.experiments.rl.batching.packing",
            "losses.loss imports batching.packing, which is not",
        ),
        (
            "rollouts/types.py",
            "from torchtitan.experiments.rl.rollouts.samples import turn_spans",
            "in a circle",
        ),
        (
            "envs/conversation.py",
            "def late():\n    from torchtitan.experiments.rl import train",
            "envs.conversation imports train",
        ),
        ("surprise.py", "", "surprise is on no floor"),
    ],
)
def test_layout_check_finds_what_a_copy_is_made_to_do_wrong(file, line, message, tmp_path):
    copy = tmp_path / "rl"
    shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / file).open("a") as target:
        target.write(line + "\n")
    assert any(message in problem for problem in problems(copy))


def test_the_page_on_architecture_has_every_room_on_its_floor():
    page = (LIBRARY.parents[2] / "docs/architecture.md").read_text()
    shown = [
        (int(floor), room)
        for floor, rooms in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
        for room in re.findall(r"`(\w+)`", rooms)
    ]
    built = [(floor, room) for floor, rooms in enumerate(FLOORS, 1) for room in rooms]
    assert sorted(shown) == sorted(built)


def test_layout_check_counts_the_modules_at_the_root(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MAX_ROOT_MODULES", 1)
    assert any("modules at the root" in problem for problem in problems(LIBRARY))


def names_that_stand_twice(library: Path) -> dict[str, list[str]]:
    """Return the names that several classes of the library have, each with the classes' files.

    A leading underscore makes no other name. Every part of a run has a class Config.
    """
    files: dict[str, list[str]] = {}
    for file in sorted(library.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                files.setdefault(node.name.lstrip("_"), []).append(str(file.relative_to(library)))
    return {name: found for name, found in files.items() if len(found) > 1}


def test_each_class_has_a_name_of_its_own():
    assert names_that_stand_twice(LIBRARY) == {}


def test_a_name_that_stands_twice_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class Rows:\n    class Config: ...\n")
    (tmp_path / "b.py").write_text(
        "def f():\n    class _Rows: ...\n\nclass Row:\n    class Config: ...\n"
    )
    assert names_that_stand_twice(tmp_path) == {"Rows": ["a.py", "b.py"]}


IMPORT_OF_TESTS = re.compile(
    r"""^[ ]*(
    from\s+[\w.]*\btest_\w+\s+import
    | import\s+[\w.]*\btest_\w+
    | from\s+tests[\w.]*\s+import\s+ ( \([^)]* | [^(\n]* ) \btest_\w+
    )""",
    re.VERBOSE | re.MULTILINE,
)
"""Import of a test module, or from one. Code that a test runs as a string is found too."""


def imports_of_tests(root: Path) -> list[str]:
    """Return the files beside the library that import from a test module, with the import."""
    return [
        f"{file.relative_to(root)}: {found.group().strip()}"
        for folder in ("tests", "benchmarks", "scripts")
        for file in sorted((root / folder).rglob("*.py"))
        for found in IMPORT_OF_TESTS.finditer(file.read_text())
    ]


def test_nothing_is_imported_from_a_file_of_tests():
    assert imports_of_tests(LIBRARY.parents[2]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.test_task import ListTask",
        "    from tests.zoo.test_zoo import run",
        "import tests.unit.test_task",
        "from tests.unit import agents, test_task",
        "from tests.unit import (\n    agents,\n    test_task,\n)",
        "from test_task import run",
        'CODE = """\nfrom tests.unit.test_task import run\n"""',
    ],
)
def test_an_import_from_a_file_of_tests_is_found(line, tmp_path):
    for folder in ("tests/unit", "benchmarks", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/fine.py").write_text("from tests.fakes.tasks import ListTask\n")
    (tmp_path / "tests/unit/bad.py").write_text(f"{line}\n")
    (found,) = imports_of_tests(tmp_path)
    assert found.startswith("tests/unit/bad.py: ")


def _module(file: Path, library: Path) -> str:
    parts = file.relative_to(library).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    return module.partition(".")[0]


def _imported(file: Path, files: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for name in _names_in(file.read_text()):
        if name.startswith(f"{PACKAGE}."):
            inner = name.removeprefix(f"{PACKAGE}.")
            found.add(inner if inner in files else inner.rpartition(".")[0])
    return found


@functools.cache
def _names_in(source: str) -> list[str]:
    """Names that a file imports. The copies of the library differ in one file each."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
