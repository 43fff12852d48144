"""train(config): what it refuses before it starts a process. tests/integration/test_script.py has a run."""

import pytest

from torchtitan.experiments.rl import script
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_32b_32, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError, RunError


def test_a_config_for_a_scheduler_is_refused():
    with pytest.raises(
        ConfigError, match=r"provision\.job = 'slurm': put the config into a function of a module"
    ):
        script.train(rl_grpo_qwen3_32b_32())


def test_the_command_alone_does_not_go_on_with_such_a_run(refused):
    line = refused("--module", "torchtitan.experiments.rl.script", "--config", "script")
    assert "train(config, '--resume', FOLDER) goes on with it" in line


def test_a_run_that_fails_is_an_error_and_its_lines_are_printed(capsys):
    config = rl_grpo_qwen3_debug()
    config.steps = 0
    with pytest.raises(RunError, match="exit code 2; the lines above say why"):
        script.train(config)
    assert "steps = 0: must be at least 1" in capsys.readouterr().out
