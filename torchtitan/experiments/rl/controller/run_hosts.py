"""Takes a run's hosts before its first actor is made, and checks that each sees the files that all share."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config.resume import Start
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.process.setup import quiet_libraries

MARK_FILE = ".shared"
HEAD = 64
"""Characters of a model's config.json that hosts compare."""


def take_hosts(config: RunConfig, start: Start, *, stopped: Callable[[], bool]) -> HostPool | None:
    """None: the run has this host alone.

    Args:
        stopped: whether the person has stopped the run meanwhile.

    Raises:
        RunError: hosts do not come, or one does not see the run's folder or a model.
    """
    if start.plan is None:  # a start that nothing has planned
        return None
    run_dir = Path(start.run_dir)
    with quiet_libraries():  # there is no log yet
        pool = config.provision.job.start(start.plan.device, start.plan.hosts, run_dir, stopped)
    if pool is not None:
        try:
            check_shared_files(pool, config, run_dir)
        except BaseException:
            pool.close()
            raise
    return pool


def check_shared_files(pool: Any, config: RunConfig, run_dir: Path) -> None:
    """
    Args:
        pool: answers ``check_files``.

    Raises:
        RunError: names the first host and the folder that it does not see as this one does.
    """
    mark, token = run_dir.resolve() / MARK_FILE, secrets.token_hex(16)
    mark.write_text(token)
    models = [config.model.hf_assets_path, *(model.path for model in hosted_models(config.tasks).values())]
    configs = [file for model in models if (file := Path(model).resolve() / "config.json").is_file()]
    files = [(str(mark), token), *((str(file), file.read_text(errors="replace")[:HEAD]) for file in configs)]
    try:
        for host, path in pool.check_files(files):
            folder, field = Path(path).parent, "--run-dir" if path == str(mark) else "model.hf_assets_path"
            raise RunError(
                f"{host} does not see the folder {folder} as this host does: name one that all hosts share ({field})"
            )
    finally:
        mark.unlink(missing_ok=True)
