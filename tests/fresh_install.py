"""Installs the library into an environment made from nothing, as README says, and trains with it. Prints seconds of each step.

    python tests/fresh_install.py [--plain | --dockerfile] [--folder FOLDER]

It downloads every package (4 GB on disk), so the suite does not run it: tests/integration/test_install.py uses the packages
that are there. With --plain it types ``pip install .`` alone, and then the command that the first run prints. With --dockerfile
it does what the Dockerfile does, with cpu.txt in place of gpu.txt and without what needs another system (tests/dockerfile.py).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.dockerfile import follow  # noqa: E402

RUN = "--config rl_grpo_qwen3_debug --steps 2".split()


def timed(what: str, command: list[str] | str, folder: Path, *, fails: bool = False) -> str:
    """What the command wrote on stderr. Its seconds are printed."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shell = isinstance(command, str)
    done = subprocess.run(
        command, shell=shell, cwd=folder, env=environment, capture_output=True, text=True
    )
    print(f"{what:<24}{time.monotonic() - began:8.1f} s", flush=True)
    if (done.returncode != 0) != fails:
        sys.exit(
            f"{command}\nended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="type `pip install .` alone, then what the first run says",
    )
    parser.add_argument("--dockerfile", action="store_true", help="do what the Dockerfile does")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to make the environment; it stays (default: a temporary folder)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        empty = folder / "empty"
        empty.mkdir(parents=True)
        image = folder / "rl"  # where the Dockerfile has its WORKDIR
        environment = image / ".venv" if options.dockerfile else folder / "env"
        if not options.dockerfile:
            timed("make the environment", [sys.executable, "-m", "venv", str(environment)], folder)
        pip = [str(environment / "bin/python"), "-m", "pip", "install"]
        rl_train = str(environment / "bin/rl-train")
        if options.dockerfile:
            began = time.monotonic()
            image.mkdir()
            for command in follow(image, pins="cpu.txt"):
                print(command, flush=True)
            print(f"{'the Dockerfile':<24}{time.monotonic() - began:8.1f} s", flush=True)
        elif options.plain:
            timed("pip install .", [*pip, str(ROOT)], empty)
            said = timed("rl-train, refused", [rl_train, *RUN], empty, fails=True)
            print(said, end="")
            cure = said.partition("; ")[2].partition(" installs all")[0]
            timed("what it says", cure, empty)
        else:
            pins = ROOT / "requirements/cpu.txt"
            torch = next(
                line for line in pins.read_text().splitlines() if line.startswith("torch==")
            )
            timed(f"pip install {torch}", [*pip, torch], empty)
            timed("pins and the library", [*pip, "--no-deps", "-r", str(pins), str(ROOT)], empty)
        timed("rl-train, 2 steps", [rl_train, *RUN], empty)
        print(f"{'policy':<24}{next(empty.glob('outputs/*/policy/step-2')).relative_to(empty)}")


if __name__ == "__main__":
    main()
