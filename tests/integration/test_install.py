"""The installed library beside the released torchtitan: each name is imported from where it should be, nothing is left over.

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
RELEASED = ("torchtitan", "torchtitan.experiments", "torchtitan.models", "torchtitan.components")
COMMANDS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
OWN_FILES = {"torchtitan_rl", "torchtitan_rl.pth", "torchtitan_rl-0.1.0.dist-info"} | COMMANDS
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


def origins(fresh: FreshEnvironment, *names: str, folder: Path, **variables: str) -> list[Path]:
    """The file that each name is imported from."""
    done = fresh.run("python", "-c", ORIGINS, *names, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_only_the_experiment_is_ours_and_the_rest_of_torchtitan_is_the_released_one(
    installed, tmp_path
):
    ours = installed.packages / "torchtitan_rl" / "torchtitan" / "experiments" / "rl"
    library, types, *released = origins(
        installed, LIBRARY, f"{LIBRARY}.types", *RELEASED, folder=tmp_path
    )
    assert (library, types) == (ours / "__init__.py", ours / "types.py")
    for file in released:
        assert not file.is_relative_to(
            installed.packages / "torchtitan_rl"
        ) and not file.is_relative_to(ROOT / "torchtitan")


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
    assert {
        file for file in wanted if not (installed.packages / "torchtitan_rl" / file).is_file()
    } == set()


def test_a_checkout_in_front_wins(installed, tmp_path):
    checkout = ROOT / "torchtitan/experiments/rl/__init__.py"
    assert origins(installed, LIBRARY, folder=ROOT) == [checkout]
    assert origins(installed, LIBRARY, folder=tmp_path, PYTHONPATH=str(ROOT)) == [checkout]


def test_another_torchtitan_in_front_does_not_hide_ours(installed, tmp_path):
    for package in ("torchtitan", "torchtitan/experiments", "torchtitan/experiments/rl"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    library, torchtitan = origins(installed, LIBRARY, "torchtitan", folder=tmp_path)
    assert (
        library.is_relative_to(installed.packages)
        and torchtitan == tmp_path / "torchtitan/__init__.py"
    )


def test_the_start_of_an_interpreter_imports_two_names_more(installed, tmp_path):
    code = "import sys; print(*sorted(sys.modules))"
    with_it, without = (
        installed.run("python", *words, "-c", code, folder=tmp_path).stdout.split()
        for words in ([], ["-S"])
    )
    assert "torchtitan_rl" in with_it
    assert {name for name in with_it if "torch" in name} == {"torchtitan_rl"}
    assert not {"importlib.util", "importlib.metadata", "pathlib", "re"} & (
        set(with_it) - set(without)
    )


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
    assert origins(fresh, LIBRARY, folder=empty)[0].parents[2] == released.parents[1], (
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
    for words in (["rl-train"], ["python", "-m", f"{LIBRARY}.grpo"]):
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
        bare.packages / "torchtitan_rl/requirements/cpu.txt",
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
