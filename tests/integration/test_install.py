"""The installed library beside the released torchtitan: who imports which, and what is left over.

``test_run.py`` trains with an installed one.
"""

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.integration.command_runs import ROOT
from tests.integration.installs import (
    FreshEnvironment,
    build_wheel,
    no_isolation,
    without_python_path,
)
from tests.unit.command_line import assert_one_line

LIBRARY = "torchtitan.experiments.rl"
RELEASED = ("torchtitan.models", "torchtitan.components", "torchtitan.experiments.forge")
COMMANDS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
OWN_FILES = {"torchtitan_rl", "torchtitan_rl-0.1.0.dist-info"} | COMMANDS
IMPORT = "import torchtitan_rl"
ORIGINS = """
import sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    print(find_spec(name).origin)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> FreshEnvironment:
    fresh = FreshEnvironment(tmp_path_factory.mktemp("installed"))
    before = fresh.files()
    fresh.pip("install", "--no-deps", str(wheel))
    assert fresh.files() - before == OWN_FILES
    return fresh


def origins(
    fresh: FreshEnvironment, *names: str, folder: Path, first: str = IMPORT, **variables: str
) -> list[Path]:
    """Return the file that each name is imported from by a program that begins with ``first``."""
    done = fresh.run("python", "-c", first + ORIGINS, *names, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def library_of(fresh: FreshEnvironment) -> Path:
    return fresh.packages / "torchtitan_rl/library"


def test_only_the_experiment_is_ours_and_the_rest_of_torchtitan_is_the_released_one(
    installed, tmp_path
):
    ours = library_of(installed) / "torchtitan/experiments/rl"
    library, types, *released = origins(
        installed, LIBRARY, f"{LIBRARY}.types", *RELEASED, folder=tmp_path
    )
    assert (library, types) == (ours / "__init__.py", ours / "types.py")
    for file in released:
        assert not file.is_relative_to(installed.packages)
        assert not file.is_relative_to(ROOT / "torchtitan")


def test_every_file_of_the_library_its_models_and_its_pins_is_installed(installed):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = (
        tracked.stdout.split()
        if tracked.returncode == 0
        else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    )
    wanted = {
        file
        for file in files
        if file.startswith((f"{LIBRARY.replace('.', '/')}/", "assets/", "requirements/"))
    }
    assert len(wanted) > 150
    assert {file for file in wanted if not (library_of(installed) / file).is_file()} == set()


def test_an_interpreter_that_does_not_import_it_is_untouched(installed, tmp_path):
    """An interpreter that does not import torchtitan_rl has the modules, path and finders of a bare one."""
    code = """
import os, sys
print(sorted(sys.modules), sys.meta_path, "PYTHONPATH" in os.environ)
print(*sys.path, sep="\\n")
"""
    without = FreshEnvironment(tmp_path / "without")
    printed, expected = (
        fresh.run("python", "-c", code, folder=tmp_path).stdout.replace(str(fresh.packages), "own")
        for fresh in (installed, without)
    )
    assert printed == expected and "own" in expected
    (library,) = origins(installed, LIBRARY, folder=tmp_path, first="")
    assert not library.is_relative_to(installed.packages), "the released torchtitan's own"
    old = installed.run("python", "-m", f"{LIBRARY}.grpo", "--list", folder=tmp_path)
    assert old.returncode == 1 and old.stderr.endswith(f"No module named {LIBRARY}.grpo\n")


def test_a_torchtitan_that_was_imported_before_is_refused_with_the_cure(installed, tmp_path):
    refused = installed.run("python", "-c", "import torchtitan\n" + IMPORT, folder=tmp_path)
    assert refused.stderr.splitlines()[-1].startswith("ImportError: torchtitan was imported from ")
    assert "put `import torchtitan_rl` first" in refused.stderr.splitlines()[-1]
    (library,) = origins(
        installed, LIBRARY, folder=ROOT, first="import torchtitan; import torchtitan_rl"
    )
    assert library.is_relative_to(ROOT), "it was this library's own, of the current folder"


CHILDREN = """
import torchtitan_rl
import multiprocessing, subprocess, sys
from monarch.actor import Actor, endpoint, this_host

CODE = "import torchtitan.experiments.rl as library; print(library.__file__)"

class Place(Actor):
    @endpoint
    def file(self):
        from torchtitan.experiments import rl
        return rl.__file__

def print_file():
    exec(CODE)

if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", CODE], check=True)
    spawned = multiprocessing.get_context("spawn").Process(target=print_file)
    spawned.start()
    spawned.join()
    print(this_host().spawn_procs().spawn("place", Place).file.call_one().get())
"""


def test_a_child_process_and_an_actor_import_the_same_library(installed, tmp_path):
    (tmp_path / "script").mkdir()
    (tmp_path / "script/children.py").write_text(CHILDREN)
    done = installed.run("python", "script/children.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = library_of(installed) / "torchtitan/experiments/rl/__init__.py"
    assert done.stdout.splitlines() == [str(ours)] * 3


def test_a_checkout_in_the_current_folder_wins_as_its_child_processes_take_it(installed, tmp_path):
    checkout = ROOT / "torchtitan/experiments/rl/__init__.py"
    (tmp_path / "checkout.py").write_text(CHILDREN)
    assert origins(installed, LIBRARY, folder=ROOT) == [checkout]
    assert origins(installed, LIBRARY, folder=ROOT, first="") == [checkout]
    done = installed.run("python", str(tmp_path / "checkout.py"), folder=ROOT)
    assert done.stdout.splitlines() == [str(checkout)] * 3, done.stderr
    elsewhere = origins(installed, LIBRARY, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert elsewhere == [library_of(installed) / "torchtitan/experiments/rl/__init__.py"]


def test_another_torchtitan_in_the_current_folder_is_refused_by_the_commands(installed, tmp_path):
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("")
    for words in (["rl-train"], ["python", "-m", "torchtitan_rl", "grpo"]):
        refused = installed.run(*words, "--list", folder=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert_one_line(refused.stderr, f"error: {tmp_path / 'torchtitan'} would be imported in")
    accepted = installed.run("rl-train", "--list", folder=tmp_path, PYTHONSAFEPATH="1")
    assert accepted.returncode == 0, "Python then looks into no current folder"


def test_each_command_is_also_a_word_after_python_m_torchtitan_rl(installed, tmp_path):
    python = ("python", "-m", "torchtitan_rl")
    used = installed.run(*python, "report", "--help", folder=tmp_path)
    assert used.stdout.startswith(f"usage: {installed.bin / 'python'} -m torchtitan_rl report\n")
    agent = installed.run(*python, "hosts.agent", "--help", folder=tmp_path)
    assert agent.returncode == 0 and "--socket" in agent.stdout
    for words, given in (([], "''"), (["grppo"], "'grppo'")):
        refused = installed.run(*python, *words, folder=tmp_path)
        assert refused.returncode == 2
        assert_one_line(refused.stderr, f"error: no command {given}; there are grpo, evaluate, ")


def test_an_editable_install_gives_the_checkout_and_uninstalling_leaves_nothing(wheel, tmp_path):
    fresh = FreshEnvironment(tmp_path / "environment")
    empty = tmp_path / "empty"
    empty.mkdir()
    before = fresh.files()
    fresh.pip("install", "--no-deps", *no_isolation(), "--editable", str(ROOT))
    assert origins(fresh, LIBRARY, "torchtitan_rl", folder=empty) == [
        ROOT / "torchtitan/experiments/rl/__init__.py",
        ROOT / "src/torchtitan_rl/__init__.py",
    ]
    released = origins(fresh, "torchtitan.models", folder=empty)[0]
    assert not released.is_relative_to(ROOT / "torchtitan")
    fresh.pip("install", "--no-deps", str(wheel))
    assert fresh.files() - before == OWN_FILES, "the wheel replaces the editable install"
    fresh.pip("uninstall", "--yes", "torchtitan-rl")
    assert fresh.files() == before
    assert origins(fresh, LIBRARY, folder=empty, first="")[0].parents[2] == released.parents[1], (
        "the released one's own is back"
    )


def checkout_with_packages(folder: Path) -> FreshEnvironment:
    """Make a checkout of this one's files, whose .venv has the packages that ``make`` installs."""
    folder.mkdir()
    for name in (
        "Makefile",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "requirements",
        "src",
        "torchtitan",
        "assets",
    ):
        (folder / name).symlink_to(ROOT / name)
    fresh = FreshEnvironment(folder / ".venv")
    pins = b"".join((ROOT / "requirements" / name).read_bytes() for name in ("cpu.txt", "dev.txt"))
    stamp = (
        subprocess.run(["cksum"], input=pins, capture_output=True, check=True)
        .stdout.split()[0]
        .decode()
    )
    (folder / ".venv" / f"installed-{stamp}").touch()
    return fresh


def make_install(folder: Path) -> str:
    done = subprocess.run(
        ["make", "install"], cwd=folder, env=without_python_path(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_make_installs_the_commands_once_and_they_take_a_task_of_any_folder(tmp_path):
    fresh = checkout_with_packages(tmp_path / "checkout")
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.py").write_text('def rl_mine():\n    "Mine."\n')
    installed = make_install(tmp_path / "checkout")
    assert fresh.files() >= COMMANDS and "-r requirements" not in installed, (
        "no package is downloaded again"
    )
    assert "Nothing to be done" in make_install(tmp_path / "checkout")
    for words in (["rl-train"], ["python", "-m", "torchtitan_rl", "grpo"]):
        listed = fresh.run(*words, "--module", "mine", "--list", folder=own)
        assert (listed.returncode, listed.stdout) == (0, "rl_mine  Mine.\n"), listed.stderr

    (tmp_path / "checkout").rename(tmp_path / "moved")
    assert "--editable" in make_install(tmp_path / "moved")
    fresh.bin, fresh.packages = (
        tmp_path / "moved/.venv/bin",
        tmp_path / "moved" / fresh.packages.relative_to(tmp_path / "checkout"),
    )
    assert origins(fresh, LIBRARY, folder=own) == [
        tmp_path / "moved/torchtitan/experiments/rl/__init__.py"
    ]
    assert fresh.run("rl-train", "--module", "mine", "--list", folder=own).returncode == 0


def test_the_command_says_in_one_line_what_is_missing_and_what_installs_it(
    wheel, installed, tmp_path
):
    bare = FreshEnvironment(tmp_path / "bare", with_packages=False)
    bare.pip("install", "--no-deps", str(wheel))
    refused = bare.run("rl-train", "--list", folder=tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    pip, pins = (
        f"{bare.bin / 'python'} -m pip install",
        library_of(bare) / "requirements/cpu.txt",
    )
    cure = f"; {pip} torch==2.13.0 && {pip} --no-deps -r {pins} installs all (on GPUs: gpu.txt)\n"
    assert refused.stderr.startswith("error: not installed: ") and refused.stderr.endswith(cure)
    assert_one_line(refused.stderr, " numpy,", " torchtitan==0.3.0,", " torchstore==0.1.2;")
    assert "vllm" not in refused.stderr and pins.is_file()

    # As `pip install torchstore` leaves an environment: with the version of monarch that it asks for.
    other = tmp_path / "other" / "torchmonarch-0.1.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torchmonarch\nVersion: 0.1.2\n")
    refused = installed.run("rl-train", "--list", folder=tmp_path, PYTHONPATH=str(other.parent))
    assert refused.returncode == 2
    assert_one_line(
        refused.stderr,
        "not installed: torchmonarch==0.7.0 (here: 0.1.2); ",
        "-m pip install --no-deps -r ",
    )


def test_the_command_finds_a_module_of_the_current_folder_in_any_locale(installed, tmp_path):
    (tmp_path / "mine.py").write_text('def rl_mine():\n    "Größer."\n', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    listed = installed.run("rl-train", "--module", "mine", "--list", folder=tmp_path, **ascii_only)
    assert (listed.returncode, listed.stdout) == (0, "rl_mine  Größer.\n"), listed.stderr
