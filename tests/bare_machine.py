"""Makes a bare Debian from nothing, types README's commands there, and prints what each ended in.

    python tests/bare_machine.py [--suite SUITE]... [--folder FOLDER] [COMMAND ...]

    python tests/bare_machine.py                                  # make demo and make test, on Debian 12 and 13
    python tests/bare_machine.py --suite trixie 'make demo ARGS="--steps 10"' 'make test ARGS=tests/unit'

1. ``debootstrap`` makes the smallest Debian of the suite, and ``apt-get`` installs in it what README names, and no more.
2. The newest commit of this checkout is laid into it, in ``/rl``. What is not committed is not there.
3. Each command runs in it as root, in a shell whose root folder, mounts and processes are its own: they end with the
   command, and with this script, however that ends. pip finds the indexes and certificates that it finds on this machine.

Prints a line for each command: its exit code, its seconds, and the last line that it wrote. Exits 1 if one failed, with
the end of what it wrote. The whole is in ``SUITE-N.log`` of the folder.

A folder that is named stays. Its systems are used again: they get the newest commit, and the ``.venv`` that is there. Needs
root, ``debootstrap``, the network, and for each suite 5 GB of disk (8 GB with PyTorch's CUDA build).
"""

import argparse
import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SUITES = ("bookworm", "trixie")
"""Debian 12, whose Python is 3.11, and Debian 13, whose Python is 3.13."""
COMMANDS = ("make demo", "make test")
OWN_NAMESPACES = "unshare --mount --pid --fork --kill-child --mount-proc".split()
"""Mounts and processes of what it starts vanish with it, and can't be seen on this machine."""
ENTER = """
set -e
root=$1
command=$2
shift 2
mount --bind "$root" "$root"  # only a mount can become the root folder
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
for folder; do
    mkdir -p "$root$folder"
    mount --bind --options ro "$folder" "$root$folder"
done
cd "$root"
pivot_root . mnt  # a root folder changed by chroot alone would forbid user namespaces
exec chroot . sh -c 'umount --lazy /mnt; eval "$0"' "$command"
"""
"""Shell script that makes a folder the root folder, with read-only folders of this machine, and runs a command there."""
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
HANDED_ON = re.compile(r"(https?|no|all)_proxy|SSL_CERT_FILE|REQUESTS_CA_BUNDLE", re.IGNORECASE)
"""Environment variables without which the network can't be reached where this machine has them."""
SHOWN_LINES = 40
"""Lines of a failed command that are printed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "commands",
        nargs="*",
        metavar="COMMAND",
        default=COMMANDS,
        help="shell commands, typed in the checkout",
    )
    parser.add_argument(
        "--suite",
        action="append",
        dest="suites",
        help=f"release of Debian; once for each (default: {SUITES})",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the systems are made; it stays (default: a temporary folder)",
    )
    options = parser.parse_args()
    if lack := what_is_lacking():
        print(f"error: {lack}", file=sys.stderr)
        return 2
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The command that runs is killed on the way, and the temporary folder removed.
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="bare-machine-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ended = [
            ran
            for suite in options.suites or SUITES
            for ran in run_in_suite(suite, folder, options.commands)
        ]
    print(f"{sum(ended)} of {len(ended)}")
    return 0 if all(ended) else 1


def what_is_lacking() -> str | None:
    """Return what this machine lacks for the script, and the cure."""
    if os.geteuid() != 0:
        return "tests/bare_machine.py makes a Debian by debootstrap, which needs root: run it with sudo"
    for tool, package in {
        "debootstrap": "debootstrap",
        "unshare": "util-linux",
        "git": "git",
    }.items():
        if shutil.which(tool) is None:
            return f"tests/bare_machine.py needs {tool}: apt-get install {package}"
    return None


def run_in_suite(suite: str, folder: Path, commands: list[str]) -> Iterator[bool]:
    """Run the commands in a system of the suite, which is made where it is not there yet.

    Yields:
        For each command, whether it succeeded.
    """
    root = folder / suite
    if not root.is_dir():
        made = folder / f"{suite}.partial"
        shutil.rmtree(made, ignore_errors=True)
        make_system(suite, made, log=folder / f"{suite}.log")
        made.rename(root)
    lay_checkout(root / "rl")
    for number, command in enumerate(commands, start=1):
        yield succeeds(
            f"{suite}  {command}",
            inside(root, f"cd /rl && {command}"),
            folder / f"{suite}-{number}.log",
        )


def make_system(suite: str, root: Path, *, log: Path) -> None:
    """Make a bare system of the suite, and install in it what README names."""
    bare = [*OWN_NAMESPACES, "debootstrap", "--variant=minbase", suite, str(root)]
    if not succeeds(f"{suite}  debootstrap", bare, log):
        sys.exit(1)
    packages = readme_packages()
    if not succeeds(
        f"{suite}  {packages}", inside(root, f"apt-get update && {packages} --yes"), log
    ):
        sys.exit(1)


def readme_packages() -> str:
    """Return README's command that installs what a bare Debian lacks."""
    found = re.search(r"^apt-get install .+$", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("error: README.md has no line that begins with 'apt-get install'")
    return found[0]


def lay_checkout(folder: Path) -> None:
    """Lay the newest commit of this checkout into the folder. Files that git ignores stay there."""
    folder.mkdir(exist_ok=True)
    for words in (
        "init --quiet",
        f"fetch --quiet {shlex.quote(str(CHECKOUT))} HEAD",
        "checkout --quiet --force --detach FETCH_HEAD",
    ):
        subprocess.run(["git", *shlex.split(words)], cwd=folder, check=True)


def succeeds(name: str, command: list[str], log: Path) -> bool:
    """Run the command, and print its exit code, its seconds and its last line. Return True if it exits with 0."""
    began = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(
        f"{name}: exit {code}, {time.monotonic() - began:.0f} s: {lines[-1].strip() if lines else ''}",
        flush=True,
    )
    if code != 0:
        print("\n".join(f"    {line}" for line in lines[-SHOWN_LINES:]), flush=True)
    return code == 0


def inside(root: Path, command: str) -> list[str]:
    """Return the command line that runs a shell command in the system below ``root``."""
    settings = pip_settings()
    (root / "etc/pip.conf").write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    handed_on = {name: value for name, value in os.environ.items() if HANDED_ON.fullmatch(name)}
    variables = [f"{name}={value}" for name, value in (ENVIRONMENT | handed_on).items()]
    folders = []
    for path in named_paths([*settings.values(), *handed_on.values()]):
        if path.is_dir():
            folders.append(str(path))
            continue
        # apt's certificates could not take the place of a mounted file.
        copied = root / path.relative_to("/")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    enter = ["sh", "-c", ENTER, "sh", str(root), command, *folders]
    return ["env", "-i", *variables, *OWN_NAMESPACES, *enter]


def pip_settings() -> dict[str, str]:
    """Return what pip's files and environment tell it on this machine. The environment wins."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    files, environment = {}, {}
    for line in told.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        target = environment if section == ":env:" else files
        target[option] = " ".join(ast.literal_eval(value).split())
    return files | environment


def named_paths(values: list[str]) -> set[Path]:
    """Return the files and folders that settings name: certificates, constraints, folders of packages."""
    found = set()
    for word in " ".join(values).split():
        path = Path(word.removeprefix("file://"))
        if word.startswith("file://"):
            path = path.parent  # the pages of an index link to files in folders beside it
        if path.is_absolute() and path.exists():
            found.add(path)
    return found


if __name__ == "__main__":
    sys.exit(main())
