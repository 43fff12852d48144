"""The Dockerfile and docs/gpu.md install the same, and the image gets every file it needs."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.gpu_smoke import OFFERED_COMMIT, parser
from tests.dockerfile import ROOT, Ignored, context_files, instructions, shell_commands
from torchtitan.experiments.rl.command.command_line import load_config, parse_command

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PAGE = (ROOT / "docs/gpu.md").read_text()
IGNORED = Ignored((ROOT / ".dockerignore").read_text())


def documented(start: str) -> list[str]:
    """Return the words of the one command in docs/gpu.md that begins with ``start``."""
    lines = PAGE.replace("\\\n", " ").splitlines()
    (command,) = [line for line in lines if line.startswith(start)]
    return shlex.split(command)


def option(words: list[str], name: str) -> list[str]:
    return [value for flag, value in zip(words, words[1:], strict=False) if flag == name]


def test_a_dockerfile_is_read_as_docker_reads_it():
    text = "# note\nFROM a\nRUN x \\\n    && y -z \\\n# note\n    && w\n\nCOPY p q\n"
    found = [(instruction.name, instruction.words) for instruction in instructions(text)]
    assert found == [("FROM", "a"), ("RUN", "x && y -z && w"), ("COPY", "p q")]
    assert shell_commands(text) == ["x", "y -z", "w"]
    with pytest.raises(ValueError, match="ADD"):
        instructions("ADD a b")


def test_patterns_leave_out_what_docker_leaves_out():
    ignored = Ignored("# note\n.venv\nassets/hf\n**/__pycache__\n**/*.egg-info\n")
    for path in (".venv", ".venv/bin/python", "assets/hf/m/config.json", "a/b/__pycache__/c.pyc"):
        assert path in ignored, path
    for path in ("__pycache__/c.pyc", "x.egg-info/top", "src/x.egg-info"):
        assert path in ignored, path
    for path in ("a/.venv", "assets/hfx", "assets", "venv", "xegg-info", "hf"):
        assert path not in ignored, path
    with pytest.raises(ValueError, match="!keep"):
        Ignored("!keep")


def test_the_base_image_has_the_cuda_version_of_the_pins():
    (base,) = [step.words for step in instructions(DOCKERFILE) if step.name == "FROM"]
    pins = (ROOT / "requirements/gpu.txt").read_text()
    version = re.search(r"^cuda-toolkit==(\d+\.\d+\.\d+)", pins, re.MULTILINE)
    assert version is not None
    assert re.fullmatch(r"nvidia/cuda:([\d.]+)-base-ubuntu22\.04", base)[1] == version[1]


def test_the_image_installs_what_the_page_installs():
    pip = [shlex.split(line) for line in shell_commands(DOCKERFILE) if line.startswith("pip ")]
    assert all(words[:3] == ["pip", "install", "--no-deps"] for words in pip)
    assert [word for words in pip for word in words[3:]] == documented(".venv/bin/pip")[3:]
    assert documented(".venv/bin/pip")[2:3] == ["--no-deps"]
    commands = shell_commands(DOCKERFILE)
    # The base image's own Python is too old: the image has another beside it, which has its version in its name.
    assert "python3.11 -m venv .venv" in commands and "python3 -m venv .venv" in PAGE
    wanted = (
        re.search(r"`apt-get install ([^`]*)`", PAGE)[1].replace("python3", "python3.11").split()
    )
    apt = [shlex.split(command) for command in commands if "apt-get install" in command]
    assert set(wanted) <= {word for words in apt for word in words}


def test_the_command_is_on_the_path_of_the_image():
    settings = [step.words.split() for step in instructions(DOCKERFILE) if step.name == "ENV"]
    (work_dir,) = [step.words for step in instructions(DOCKERFILE) if step.name == "WORKDIR"]
    assert f"PATH={work_dir}/.venv/bin:$PATH" in settings[0]


def test_every_file_that_is_copied_or_installed_is_in_the_build_context():
    sources = [step.words.split()[0] for step in instructions(DOCKERFILE) if step.name == "COPY"]
    assert all((ROOT / source).exists() and source not in IGNORED for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["only-include"], "README.md", "LICENSE"]
    assert all((ROOT / path).exists() and path not in IGNORED for path in needed)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    sent = set(context_files(IGNORED))
    # Whoever tests an unpacked archive has no git, and the files that are named above.
    assert {file for file in listed.stdout.splitlines() if (ROOT / file).is_file()} <= sent


def test_what_is_made_in_a_checkout_stays_out_of_the_build_context():
    patterns = (ROOT / ".gitignore").read_text().split()
    made = [pattern.strip("/").replace("*", "x") for pattern in patterns]
    assert all(path in IGNORED for path in (*made, ".git", "assets/hf", "gpu_smoke.json"))


def test_the_image_knows_the_commit_that_it_was_built_from():
    """scripts/gpu_smoke.py reads the variable where there is no .git, which the context leaves out."""
    names = [
        step.words.partition("=")[0] for step in instructions(DOCKERFILE) if step.name == "ARG"
    ]
    given = option(documented("docker build"), "--build-arg")
    assert [argument.partition("=")[0] for argument in given] == names == ["COMMIT"]
    settings = [step.words for step in instructions(DOCKERFILE) if step.name == "ENV"]
    assert f"{OFFERED_COMMIT}=$COMMIT" in settings
    assert ".git" in IGNORED


def test_the_smoke_test_of_the_container_writes_where_the_host_keeps_it():
    out = parser().get_default("out")
    volumes = option(documented("docker run"), "-v")
    assert f"./{out.parent}:/rl/{out.parent}" in volumes


def test_the_container_is_started_with_the_memory_and_the_folders_that_a_run_needs():
    image = option(documented("docker build"), "--tag")
    words = documented("docker run")
    assert option(words, "--gpus") == ["all"]
    assert option(words, "--ulimit") == ["memlock=-1"]
    assert option(words, "--shm-size") == re.findall(r"docker: `--shm-size (\w+)`", PAGE)
    targets = [volume.partition(":")[2] for volume in option(words, "-v")]
    assert targets == ["/rl/assets/hf", "/rl/outputs"]
    command = words[words.index(image[0]) + 1 :]
    assert command[0] == "rl-train"
    config = load_config(parse_command(command[1:]))
    assert config.model.hf_assets_path.startswith("assets/hf/")
    assert Path(config.output_dir).parts[0] == "outputs"
    # docker sends SIGTERM, and kills later.
    assert float(option(words, "--stop-timeout")[0]) > config.checkpoint.grace_s
