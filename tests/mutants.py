"""Changes the library in one place at a time, and checks that a test fails each time.

    make coverage                                    # which tests execute which line: build/coverage
    python -m tests.mutants --count 60 --seed 0      # 6 places in each of ten rooms

A place is an operator, a constant, a condition or a statement inside a function of a room. The seed
picks the places. Each mutant is written into a copy of the checkout, where the tests that execute
its line run until one fails: the unit tests first, then those of the zoo, then integration tests.

Prints a line for each mutant, and "N of N noticed". Exits 1 if a mutant is not noticed. A mutant
that behaves as the library does can't be noticed; --known FILE lists those, one a line.

To compare two checkouts, give both the same --seed, and the second one --first FILE, the --json of
the first: the test that noticed a mutant there then runs before the others.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("torchtitan/experiments/rl")
ROOMS = {
    "losses": ["losses/*.py"],
    "credit": ["tasks/scoring.py", "algorithms/*.py"],
    "packing": ["batching/*.py"],
    "trees": ["models/attention.py", "models/decoder.py"],
    "pacing": ["loops/pacing.py"],
    "ledger": ["loops/ledger.py", "loops/groups.py"],
    "conversation": ["envs/conversation.py", "rollouts/samples.py"],
    "gateway chains": ["gateway/chains.py", "gateway/rollout.py"],
    "weight proof": ["weights/*.py"],
    "resume": ["command/resume.py", "checkpointing/*.py", "training/checkpoints.py"],
}
COPIED = ["torchtitan", "tests", "assets", "benchmarks", "scripts", "src", "docs", "requirements"]
LIMIT_S = 900
"""Seconds after which the unit tests of a mutant, or those of another file, count as hanging. That is
noticed too."""
MOST_TESTS = 400
"""Maximum number of tests that are named on one command line."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_PHASE = re.compile(r"\|(setup|run|teardown)$| \((setup|call|teardown)\)$")
"""Phase of a test, which follows its name in a context: pytest-cov's, and pytest's in a process that the test started."""
_FAILED = ("FAILED tests/", "ERROR tests/")
"""Beginnings of the lines of pytest's summary that name a test; a log's lines may begin with ERROR too."""
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: ``before``, which begins at a line and column, becomes ``after``."""

    room: str
    path: str
    line: int
    column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line}:{self.column}: {before} -> {after}"

    def write(self, root: Path) -> None:
        """Change the file below ``root``."""
        file = root / self.path
        text = file.read_text()
        start = sum(map(len, text.splitlines(keepends=True)[: self.line - 1])) + self.column
        assert text[start:].startswith(self.before)
        file.write_text(text[:start] + self.after + text[start + len(self.before) :])


# ---- which mutants there are


def mutants_of(room: str) -> list[Mutant]:
    """Return every mutant of the room, in the order of its files and lines."""
    found = []
    for pattern in ROOMS[room]:
        for file in sorted((ROOT / LIBRARY).glob(pattern)):
            text = file.read_text()
            path = str(file.relative_to(ROOT))
            for node, after in _changes(ast.parse(text)):
                before = ast.get_source_segment(text, node)
                # Columns count bytes; a line with other characters is left alone.
                if before and text.splitlines()[node.lineno - 1].isascii():
                    found.append(Mutant(room, path, node.lineno, node.col_offset, before, after))
    return found


def _changes(module: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield each node that a mutant replaces, with its replacement."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in _nodes_inside(statement):
                for after in _replacements(node):
                    yield node, after


def _nodes_inside(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement, but not its nested functions, annotations, texts of errors and asserts."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.FunctionDef | ast.AsyncFunctionDef | ast.Raise | ast.JoinedStr
            if isinstance(child, ast.AST) and not isinstance(child, skipped):
                yield from _nodes_inside(child)


def _replacements(node: ast.AST) -> Iterator[str]:
    """Yield the texts that may stand in place of a node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            swapped = ast.Compare(node.left, [SWAPPED[type(operator)]()], node.comparators)
            yield f"({ast.unparse(swapped)})"
        case ast.BinOp(op=operator) if type(operator) in SWAPPED:
            yield f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(operator)](), node.right))})"
        case ast.BoolOp(op=operator):
            yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(operator)](), node.values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield repr(not value)
        case ast.Constant(value=int(value)):
            yield repr(value + 1)
        case ast.Constant(value=float(value)):
            yield repr(value + 0.5)
        case ast.IfExp():
            yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            opposite = ast.Name(OPPOSITES[name])
            yield f"({ast.unparse(ast.Call(opposite, node.args, node.keywords))})"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Break():
            yield "pass"
        case ast.Continue():
            yield "pass"


def picked(count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants, as many from each room, by the seed alone."""
    generator = random.Random(seed)
    each = -(-count // len(ROOMS))
    mutants = []
    for room in ROOMS:
        mutants += generator.sample(mutants_of(room), each)
    return mutants[:count]


# ---- which tests execute a line


def tests_by_line(data: Path, paths: set[str]) -> dict[tuple[str, int], list[str]]:
    """Read from coverage's file which tests execute each line of the files.

    Raises:
        ImportError: coverage is not installed.
        FileNotFoundError: there is no such file; `make coverage` writes it.
    """
    from coverage import CoverageData

    if not data.is_file():
        raise FileNotFoundError(f"{data}: run make coverage first")
    recorded = CoverageData(str(data))
    recorded.read()
    tests: dict[tuple[str, int], list[str]] = {}
    for measured in recorded.measured_files():
        (path,) = [path for path in paths if measured.endswith(f"/{path}")] or [None]
        if path is None:
            continue
        for line, contexts in recorded.contexts_by_lineno(measured).items():
            names = {_test_in(context) for context in contexts if context}
            tests[path, line] = sorted(names | set(tests.get((path, line), [])))
    return tests


def _test_in(context: str) -> str:
    """Return the test that a context of coverage names.

    A process that was forked for a test has two, joined by "|": that of its server comes first.
    """
    _, joined, own = context.rpartition("|tests/")
    return _PHASE.sub("", f"tests/{own}" if joined else context)


# ---- running them


def copy_of_checkout(folder: Path) -> Path:
    """Copy what tests need; big folders that no test writes to are links."""
    for name in COPIED:
        if name in ("assets", "requirements"):
            (folder / name).symlink_to(ROOT / name)
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def first_failure(folder: Path, tests: list[str], left_out: list[str]) -> str:
    """Run the tests, but for those left out, until one fails. Return its name, or "" if all pass."""
    unit = [test for test in tests if test.startswith("tests/unit")]
    # So many parametrized cases are named by their files.
    if len(unit) > MOST_TESTS:
        unit = sorted({test.partition("::")[0] for test in unit})
    others = [test for test in tests if not test.startswith("tests/unit")]
    others.sort(key=lambda test: test.startswith("tests/integration"))
    files = itertools.groupby(others, key=lambda test: test.partition("::")[0])
    for named in [unit, *(list(group) for _, group in files)]:
        if named and (failed := _failure_of(folder, named, left_out)):
            return failed
    return ""


def _failure_of(folder: Path, named: list[str], left_out: list[str] | None = None) -> str:
    """Run tests in one process until one fails. Return its name, or what happened, or "".

    Args:
        named: tests, or files of tests.
        left_out: tests that do not run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    own = {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hyp")}
    own["PYTHONPATH"] = f"{folder}{os.pathsep}{folder / 'src'}"
    with tempfile.TemporaryFile("w+") as output:
        tests = subprocess.Popen(
            [*command, *named, *(f"--deselect={test}" for test in left_out or ())],
            cwd=folder,
            env=os.environ | own,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = tests.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    failed = [line for line in lines if line.startswith(_FAILED)]
    if not failed:
        return f"exit code {code}"
    # A name may hold the " - " that pytest puts between a name and its cause.
    kind, _, rest = failed[0].partition(" ")
    whole = [test for test in named if rest == test or rest.startswith(f"{test} - ")]
    return f"{kind} {whole[0]}" if whole else failed[0].split(" - ")[0]


def verdict_on(mutant: Mutant, folder: Path, tests: list[str], first: str = "") -> str:
    """Return the test that fails with the mutant and passes without it, or "" if there is none.

    Args:
        first: one of the tests, which runs before the others.
    """
    original = (folder / mutant.path).read_text()
    left_out: list[str] = []
    while True:
        try:
            mutant.write(folder)
            found = _failure_of(folder, [first], left_out) if first in tests else ""
            found = found or first_failure(folder, tests, left_out)
        finally:
            (folder / mutant.path).write_text(original)
        if not found.startswith(_FAILED):
            return found
        _, _, test = found.partition(" ")
        if not _failure_of(folder, [test]):
            return found
        # It fails without the mutant too, as a test that is not steady may, or one that needs a file
        # which the copy lacks.
        if test in left_out:
            return ""
        left_out.append(test)


def run(
    mutants: list[Mutant], data: Path, workers: int, elsewhere: dict[str, str]
) -> dict[str, str]:
    """Return, by the name of each mutant, the test that noticed it, or "" where none did.

    Args:
        elsewhere: what this has returned in another checkout.
    """
    tests = tests_by_line(data, {mutant.path for mutant in mutants})
    noticed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(workers):
            (Path(temporary) / str(index)).mkdir()
            copies.put(copy_of_checkout(Path(temporary) / str(index)))

        def try_one(mutant: Mutant) -> tuple[Mutant, int, str, float]:
            folder, started = copies.get(), time.monotonic()
            named = tests.get((mutant.path, mutant.line), [])
            first = elsewhere.get(mutant.name, "").partition(" ")[2]
            try:
                found = verdict_on(mutant, folder, named, first)
            finally:
                copies.put(folder)
            return mutant, len(named), found, time.monotonic() - started

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for mutant, count, found, seconds in pool.map(try_one, mutants):
                noticed[mutant.name] = found
                verdict = found or "NOT NOTICED"
                print(
                    f"{mutant.room}: {mutant.name}: {verdict} ({count} tests, {seconds:.0f} s)",
                    flush=True,
                )
    return noticed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=ROOT / "build/coverage")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write which test noticed each mutant")
    parser.add_argument("--only", default="", help="mutants whose names hold this text")
    parser.add_argument("--first", type=Path, help="--json of a run in another checkout")
    parser.add_argument("--known", type=Path, help="names of mutants that no test can notice")
    options = parser.parse_args()
    known = set(options.known.read_text().splitlines()) if options.known else set()
    elsewhere = json.loads(options.first.read_text()) if options.first else {}
    mutants = [m for m in picked(options.count, options.seed) if options.only in m.name]
    if not mutants:
        parser.error(f"--only {options.only!r}: the name of no mutant that is picked holds it")
    noticed = run(mutants, options.data, options.workers, elsewhere)
    if options.json:
        options.json.write_text(json.dumps(noticed, indent=1))
    # pytest's other exit codes, as of a test that is no longer there, show nothing.
    shown = (*_FAILED, "no end within ")
    missed = [name for name, end in noticed.items() if not end.startswith(shown)]
    missed = [name for name in missed if name not in known]
    print(f"{len(noticed) - len(missed)} of {len(noticed)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
