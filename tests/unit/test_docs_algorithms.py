"""What docs/algorithms.md shows works as written."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.rollout_stubs import ScriptedPolicy
from torchtitan.experiments.rl import algorithms, losses
from torchtitan.experiments.rl.config.checks import checked_plan
from torchtitan.experiments.rl.config.command_line import load_config, parse_command
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.fixture
def my_algorithms(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_algorithms.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_algorithms", None)


def config_of(*words: str):
    return load_config(parse_command(["--module", "my_algorithms", "--config", "rl_best_of_group", *words]))


async def test_the_algorithm_in_twenty_lines_gives_its_credit(my_algorithms, renderer, tokenizer):
    config = config_of("--tasks.sum-digits.algorithm.least-reward", "1.0")
    checked_plan(config)
    task = config.tasks["sum_digits"].build(name="sum_digits", renderer=renderer)
    right = str(sum(task.dataset[0].env_input))
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: right if rollout_id.endswith("0") else "x")
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=2)
    assert await task.score_group(group) is None
    for rollout, learned in zip(group.rollouts, (True, False), strict=True):
        (sample,) = rollout.samples
        assert np.array_equal(sample.ce_weights, (sample.loss_mask & learned).astype(np.float32))
        assert not sample.rl_weights.any() and sample.ce_weights.dtype == np.float32


def test_the_algorithm_in_twenty_lines_is_checked_like_the_librarys(my_algorithms):
    config = config_of()
    config.tasks["sum_digits"].group_size = 1
    with pytest.raises(ConfigError, match="BestOfGroup compares"):
        checked_plan(config)


def test_every_algorithm_and_loss_is_in_its_table():
    for name in set(algorithms.__all__) - {"Algorithm"}:
        assert f"| `{name}` |" in PAGE
    for name in ("DPPO", "PPOClip", "CISPO", "GSPO", "CustomRLLoss"):
        assert name in losses.__all__ and f"| rl: `{name}`" in PAGE


def test_the_frozen_models_shown_are_valid():
    (lines,) = re.findall(r"```python\n(FrozenModel.*?)```", PAGE, re.DOTALL)
    models = [
        eval(line.partition("  #")[0], {"FrozenModel": FrozenModel, "HostedModel": HostedModel})
        for line in lines.split("\n")[:2]
    ]
    for model in models:
        model.validate(field="teacher")
