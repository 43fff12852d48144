"""Runs from a script or a notebook: ``train(config)``."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import cloudpickle

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.process.modules import module_words

_VARIABLE = "TORCHTITAN_RL_CONFIG"
"""In the environment of the command: a file with the pickled config."""


def train(config: RunConfig, *words: str) -> Path:
    """Run ``config`` to its end by the command, in a process of its own, and print what that prints.

    Functions and classes of ``__main__`` go along by value; modules are found where this process finds them. Ctrl-C, also a
    notebook's "interrupt", ends the run after its step, with a checkpoint.

    Args:
        words: of the command line, such as "--steps", "50", or "--resume" and the folder that an earlier call has returned.

    Returns:
        The run's folder.

    Raises:
        ConfigError: the config asks for hosts of a scheduler, which start the command again by its words.
        RunError: the run failed or was stopped; the lines that were printed say why.
    """
    if config.provision.job.name == "slurm":
        raise ConfigError(
            "provision.job",
            "slurm",
            "put the config into a function of a module, and start it by the command",
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config"
        file.write_bytes(cloudpickle.dumps(config))
        named = [] if "--resume" in words else ["--module", __name__, "--config", script.__name__]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-u", *module_words("grpo"), *named, *words],
            env=os.environ | {_VARIABLE: str(file), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C would reach it beside ours, and twice means at once
        )
        lines = _printed(process)
    if process.returncode or (run := _folder(lines)) is None:
        raise RunError(
            f"the run ended with exit code {process.returncode}; the lines above say why (docs/operations.md)"
        )
    return run


def _printed(process: subprocess.Popen) -> list[str]:
    """Wait for the end of the command. Its lines go through ``print``: a notebook shows no others."""
    lines: list[str] = []
    assert process.stdout is not None
    while process.poll() is None or not lines or lines[-1]:
        try:
            lines.append(process.stdout.readline())
            print(lines[-1], end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    return lines


def _folder(lines: list[str]) -> Path | None:
    """Which the run's header names, from the current folder."""
    named = [line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("folder ")]
    return Path(named[-1]).absolute() if named else None


def script() -> RunConfig:
    """The config that ``train`` was given. It is the config function of such a run."""
    file = os.environ.get(_VARIABLE)
    if file is None:
        cure = "the run was started by train(config): train(config, '--resume', FOLDER) goes on with it"
        raise ConfigError("--config", script.__name__, cure)
    config: RunConfig = cloudpickle.loads(Path(file).read_bytes())
    return config
