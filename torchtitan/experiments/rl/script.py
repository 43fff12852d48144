"""Starts a run from a script or a notebook: ``train(config)``."""

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
"""Environment variable of the command that names a file with the pickled config."""


def train(config: RunConfig, *words: str) -> Path:
    """Run ``config`` to its end by the command, in a process of its own, and print what it prints.

    The command gets functions and classes of ``__main__`` by value, and finds modules where this
    process finds them. Ctrl-C, or a notebook's "interrupt", ends the run after its step, with a
    checkpoint.

    Args:
        words: words of the command line, such as "--steps", "50", or "--resume" and the folder that
            an earlier call returned.

    Returns:
        The run's folder.

    Raises:
        ConfigError: the config asks for Slurm, which starts the command again by its words.
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
        source = [] if "--resume" in words else ["--module", __name__, "--config", script.__name__]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-u", *module_words("train"), *source, *words],
            env=os.environ | {_VARIABLE: str(file), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A terminal's Ctrl-C would reach the command beside the one that is sent on, and two
            # end a run at once.
            start_new_session=True,
        )
        lines = _print_lines(process)
    run_dir = _run_folder(lines)
    if process.returncode or run_dir is None:
        raise RunError(
            f"the run ended with exit code {process.returncode}; "
            "the lines above say why (docs/operations.md)"
        )
    return run_dir


def _print_lines(process: subprocess.Popen) -> list[str]:
    """Print the command's lines until it ends, and return them.

    A notebook shows only what goes through ``print``.
    """
    lines: list[str] = []
    assert process.stdout is not None
    while process.poll() is None or not lines or lines[-1]:
        try:
            lines.append(process.stdout.readline())
            print(lines[-1], end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    return lines


def _run_folder(lines: list[str]) -> Path | None:
    """Return the folder that the run's header names, relative to the current one."""
    folders = [line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("folder ")]
    return Path(folders[-1]).absolute() if folders else None


def script() -> RunConfig:
    """Return the config that ``train`` was given: the config function of a run that it starts.

    Raises:
        ConfigError: this process was not started by ``train``.
    """
    file = os.environ.get(_VARIABLE)
    if file is None:
        cure = (
            "the run was started by train(config): "
            "train(config, '--resume', FOLDER) goes on with it"
        )
        raise ConfigError("--config", script.__name__, cure)
    config: RunConfig = cloudpickle.loads(Path(file).read_bytes())
    return config
