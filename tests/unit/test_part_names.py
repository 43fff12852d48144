"""Algorithms, losses, samplers and filters by name on the command line."""

import re
import shlex
from pathlib import Path

import pytest

from torchtitan.experiments.rl.algorithms import GRPO, MaxRL
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.part_names import part_named, parts_that_fit
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import IcePop, PPOClip, ProbabilityMask, RLLoss
from torchtitan.experiments.rl.rollouts.filters import Repetition, Truncated, ZeroAdvantage

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def config_of(words: str):
    return load_config(parse_command(["--config", "rl_grpo_qwen3_debug", *shlex.split(words)]))


def test_a_name_switches_the_algorithm_and_its_fields_follow():
    words = "--tasks.sum-digits.algorithm max_rl --tasks.sum-digits.algorithm.length-penalty tokens --steps 3"
    config = config_of(words)
    assert (
        config.tasks["sum_digits"].algorithm == MaxRL.Config(length_penalty="tokens")
        and config.steps == 3
    )
    assert type(config.tasks["sum_digits"].algorithm.build()) is MaxRL


@pytest.mark.parametrize("name", ["max_rl", "max-rl", "MaxRL", "maxrl"])
def test_spelling_does_not_matter(name):
    assert (
        type(config_of(f"--tasks.sum-digits.algorithm={name}").tasks["sum_digits"].algorithm)
        is MaxRL.Config
    )


def test_losses_and_samplers_are_switched_alike():
    config = config_of(
        "--trainer.loss.rl ppo_clip --trainer.loss.rl.clip-high 0.28 --tasks.sum-digits.sampler difficulty_pool"
    )
    assert config.trainer.loss.rl == PPOClip.Config(clip_high=0.28)
    assert type(config.tasks["sum_digits"].sampler) is DifficultyPool.Config


def test_the_cap_on_the_ratio_is_set_and_taken_off():
    assert config_of("--trainer.loss.rl.ratio-max 20").trainer.loss.rl.ratio_max == 20
    config = config_of("--trainer.loss.rl.ratio-max None --trainer.loss.ref-kl.ratio-max None")
    assert config.trainer.loss.rl.ratio_max is None and config.trainer.loss.ref_kl.ratio_max is None


def test_filters_and_corrections_are_lists_whose_fields_have_an_index():
    config = config_of(
        "--pre-batch-filters zero_advantage,repetition --pre-batch-filters.1.window 100 "
        "--trainer.loss.corrections ice_pop,probability_mask --trainer.loss.corrections.0.high 4"
    )
    assert config.pre_batch_filters == [ZeroAdvantage.Config(), Repetition.Config(window=100)]
    assert config.trainer.loss.corrections == [IcePop.Config(high=4.0), ProbabilityMask.Config()]
    for nothing in ("none", "[]"):
        assert (
            config_of(
                f"--post-batch-filters truncated --post-batch-filters {nothing}"
            ).post_batch_filters
            == []
        )


def test_the_part_that_the_config_has_keeps_its_fields():
    words = "--tasks.sum-digits.algorithm.normalize-std"
    assert config_of(f"{words} --tasks.sum-digits.algorithm grpo").tasks[
        "sum_digits"
    ].algorithm == GRPO.Config(normalize_std=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--tasks.sum-digits.sampling.stop x --pre-batch-filters zero_advantage repetition",
            "pre-batch-filters = 'zero_advantage': takes one word, and 'repetition' follows",
        ),
        (
            "--tasks.sum-digits.algorithm ppo",
            "tasks.sum-digits.algorithm = 'ppo': name one of dapo, echo, grpo, max_rl, opd",
        ),
        (
            "--trainer.loss.rl max_rl",
            "trainer.loss.rl = 'max_rl': name one of cispo, custom_rl_loss, dppo, gspo, ppo_clip, or",
        ),
        (
            "--pre-batch-filters zero_advantage,x",
            "pre-batch-filters = 'zero_advantage,x': name one of gibberish, repetition, tru",
        ),
        (
            "--tasks.sum-digits.sampler x",
            "tasks.sum-digits.sampler = 'x': name one of difficulty_pool, example_replay, in_order, shuffled_cursor, or",
        ),
        (
            "--trainer.loss.rl custom_rl_loss",
            "trainer.loss.rl = 'custom_rl_loss': its Config can't be made without arguments",
        ),
        ("--tasks.sum-digits.algorithm", "--tasks.sum-digits.algorithm = '': it wants a value"),
        (
            "--tasks.sum-digits.algorithm max_rl --tasks.sum-digits.algorithm.normalize-std",
            "no option --tasks.sum-digits.algorithm.normalize-std",
        ),
    ],
)
def test_an_unknown_name_is_refused_in_one_line_with_the_list(words, message):
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_parts_of_ones_own_are_named_by_their_place(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "from torchtitan.experiments.rl.algorithms import GRPO\n"
        "from torchtitan.experiments.rl.rollouts.filters import Truncated\n"
        "class Mine(GRPO): pass\nclass Cut(Truncated): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(
        "--tasks.sum-digits.algorithm my_parts:Mine --pre-batch-filters truncated,my_parts:Cut"
    )
    assert type(config.tasks["sum_digits"].algorithm.build()).__name__ == "Mine"
    assert (
        config.pre_batch_filters[0] == Truncated.Config()
        and type(config.pre_batch_filters[1].build()).__name__ == "Cut"
    )
    with pytest.raises(ConfigError, match="pre-batch-filters = 'my_parts:Mine': Mine is no Filter"):
        config_of("--pre-batch-filters my_parts:Mine")


def test_a_function_of_ones_own_is_named_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "my_filter.py").write_text("def keep(rollout, turn): return True\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(
        "--tasks.sum-digits.algorithm echo --tasks.sum-digits.algorithm.keep my_filter:keep"
    )
    assert config.tasks["sum_digits"].algorithm.keep(None, None) is True
    for place, cure in (
        ("my_filter:limit", "is no class with a Config"),
        ("my_filter:no", "my_filter has no 'no'"),
    ):
        with pytest.raises(ConfigError, match=cure):
            config_of(
                f"--tasks.sum-digits.algorithm echo --tasks.sum-digits.algorithm.keep {place}"
            )


FLAG = "--tasks.sum_digits.algorithm.normalize_std"


@pytest.mark.parametrize(
    "words, value",
    [
        (f"{FLAG} True --steps 3", True),
        (f"{FLAG} --steps 3", True),
        (f"{FLAG} False --steps 3", False),
        (f"{FLAG} false --steps 3", False),
        (f"--steps 3 {FLAG}=False", False),
        (f"{FLAG} True --tasks.sum-digits.algorithm.no-normalize-std --steps 3", False),
        (f"--tasks.sum-digits.algorithm grpo {FLAG} True --steps 3", True),
    ],
)
def test_a_flag_takes_true_and_false_as_python_and_other_libraries_write_them(words, value):
    config = config_of(words)
    assert config.tasks["sum_digits"].algorithm.normalize_std is value and config.steps == 3


def test_a_flag_in_a_list_at_the_top_and_of_three_values_takes_them_too():
    config = config_of(
        "--trainer.enable-cpu-offload True --provision.share-cores False --recorder.trainer-logprobs=true"
    )
    assert (
        config.trainer.enable_cpu_offload
        and config.provision.share_cores is False
        and config.recorder.trainer_logprobs
    )
    with pytest.raises(ConfigError, match="normalize-std = 'maybe': must be True or False"):
        config_of(f"{FLAG} maybe")


def test_every_part_can_be_named_and_a_name_is_of_one_part():
    parts = parts_that_fit(RLLoss.Config)
    assert all(part_named(name, parts) is part for name, part in parts.items())
    assert part_named("DPPO", parts) is parts["dppo"]


def test_the_commands_shown_are_right():
    page = PAGE.replace("\\\n", " ")  # a command of two lines
    shown = re.findall("^rl-train --config rl_grpo_qwen3_debug (.*)$", page, re.MULTILINE)
    assert len(shown) == 5
    for words in shown:
        check(config_of(words.replace(" --tasks.sum-digits.algorithm my_module:MyAlgorithm", "")))
