"""Private names of dependencies are used in `compat/` only, where each has a test of its own.

A name counts as private to a dependency if it begins with one underscore and no file of the library defines it. So a private
name of a dependency that the library happens to define too is not seen.
"""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "torchtitan/experiments/rl"

ALLOWED = {
    ("controller/signals.py", "os._exit"),  # public and documented, underscore and all
    ("process/finalization.py", "os._exit"),
    ("ask/stacks.py", "sys._current_frames"),
    ("ask/child_server.py", "os._exit"),
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Every name this file defines, assigns, declares as a field or slot, or takes as an argument."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and own_object(node.value)
        ):
            names.add(node.attr)
    return names


def own_object(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_uses(source: str, file: str, ours: set[str]) -> list[str]:
    """Uses of a private name that no file of the library defines: a line each, ``file:line expression``.

    Seen: attributes of any object, `self` included (a private name inherited from a dependency), names given as strings to
    getattr, setattr, hasattr, delattr and vars()[...], imports of private modules or names, ``__wrapped__``, and assignments to
    an attribute of an imported module of a dependency.
    """
    tree = ast.parse(source)
    found = []
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("torchtitan.experiments.rl")
        if alias.name.partition(".")[0] not in sys.stdlib_module_names
    }
    for node in ast.walk(tree):
        bad = False
        if isinstance(node, ast.Attribute):
            bad = (private(node.attr) and node.attr not in ours) or node.attr == "__wrapped__"
            bad |= isinstance(node.ctx, ast.Store) and root_of(node) in modules
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(
                node.args[1], ast.Constant
            ):
                bad = private(node.args[1].value) and node.args[1].value not in ours
            if node.func.id == "setattr" and root_of(node.args[0]) in modules:
                bad = True
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            in_vars = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "vars"
            bad = in_vars and private(node.slice.value) and node.slice.value not in ours
        elif isinstance(node, ast.ImportFrom):
            inner = (node.module or "").startswith("torchtitan.experiments.rl")
            bad = not inner and any(private(part) for part in (node.module or "").split("."))
            bad |= not inner and any(private(alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            bad = any(private(part) for alias in node.names for part in alias.name.split("."))
        if bad and (file, ast.unparse(node)) not in ALLOWED:
            found.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    return found


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def sources() -> dict[str, str]:
    return {
        str(file.relative_to(LIBRARY)): file.read_text() for file in sorted(LIBRARY.rglob("*.py"))
    }


def names_of_the_library() -> set[str]:
    outside = {file: source for file, source in sources().items() if not file.startswith("compat/")}
    return set().union(*(defined_names(ast.parse(source)) for source in outside.values()))


def test_no_private_name_of_a_dependency_is_used_outside_compat():
    ours = names_of_the_library()
    uses = [
        use
        for file, source in sources().items()
        if not file.startswith("compat/")
        for use in private_uses(source, file, ours)
    ]
    assert uses == []


def test_the_scan_sees_what_compat_does():
    ours = names_of_the_library()
    seen = {
        file: private_uses(source, file, ours)
        for file, source in sources().items()
        if file.startswith("compat/")
    }
    for file in (
        "compat/torch.py",
        "compat/torchstore.py",
        "compat/monarch.py",
        "compat/torchtitan/models.py",
    ):
        assert seen[file], f"the scan no longer sees the private names in {file}"


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer._tokenizer.encode('x')",
        "getattr(config, '_owner', None)",
        "setattr(engine, '_closed', True)",
        "from torch.distributed.tensor._utils import compute",
        "from tyro import _errors",
        "import vllm._custom_ops",
        "function.__wrapped__",
        "vars(engine)['_loop']",
        "import torchstore.api\ntorchstore.api.Controller = None",
        "import vllm.envs as envs\nsetattr(envs, 'LEVEL', 1)",
        "class Mine(Theirs):\n    def forward(self):\n        return self._inherited",
    ],
)
def test_the_scan_finds(line):
    assert private_uses(line, "file.py", set())


@pytest.mark.parametrize(
    "line",
    [
        "self._mine\nother._mine",
        "value.__class__.__name__",
        "module.public",
        "import os\nos.environ['A'] = 'b'",
    ],
)
def test_the_scan_leaves_alone(line):
    assert private_uses(line, "file.py", {"_mine"}) == []


def test_every_file_of_compat_has_a_contract_test_and_is_named_after_a_dependency():
    tests = Path(__file__).parent
    for file in (LIBRARY / "compat").glob("[!_]*"):
        assert (tests / f"test_compat_{file.stem}.py").exists(), f"{file.name} has no test"
        assert importlib.util.find_spec(file.stem) is not None, f"{file.stem} is no dependency"
