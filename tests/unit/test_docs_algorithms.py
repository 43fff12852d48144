"""The code of docs/algorithms.md works as written."""

import ast
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.unit.loss_batches import ONE, batch_of
from torchtitan.experiments.rl import algorithms, config_registry, losses
from torchtitan.experiments.rl.algorithms import OPD
from torchtitan.experiments.rl.command.checks import check, checked_plan, plan_run
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.losses import Correction, compute_loss
from torchtitan.experiments.rl.models.policy import ModelConfig, parameter_count, policy_spec
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.rollouts.filters import (
    Gibberish,
    Repetition,
    ZeroAdvantage,
    combine,
    matches_of,
)
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy as ScriptedModels
from torchtitan.experiments.rl.train import main

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.fixture
def my_algorithms(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_algorithms.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_algorithms", None)


def config_of(*words: str):
    return load_config(
        parse_command(["--module", "my_algorithms", "--config", "rl_best_of_group", *words])
    )


async def test_the_algorithm_in_twenty_lines_gives_its_credit(my_algorithms, renderer, tokenizer):
    config = config_of("--tasks.sum-digits.algorithm.least-reward", "1.0")
    checked_plan(config)
    task = config.tasks["sum_digits"].build(name="sum_digits", context=context_of(renderer))
    right = str(sum(task.dataset[0].env_input))
    policy = ScriptedPolicy(
        tokenizer, lambda rollout_id, turn: right if rollout_id.endswith("0") else "x"
    )
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


def test_the_loss_shown_caps_its_ratio_and_reports_it(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_loss.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(parse_command(["--module", "my_loss", "--config", "rl_policy_gradient"]))
    sys.modules.pop("my_loss")
    checked_plan(config)
    # Ratios 1e5 and 2, advantage 3: the first is capped at 100, and has no gradient.
    logprobs = torch.tensor([[0.1, 0.2]], dtype=torch.float64).log().requires_grad_()
    batch = batch_of((1, 2), loss_mask=[[True] * 2], rl_weights=[[1.0] * 2], advantages=[[3.0] * 2])
    batch.generator_logprobs = torch.tensor([[1e-6, 0.1]], dtype=torch.float64).log()
    loss, metrics = compute_loss(logprobs, batch, ONE, config.trainer.loss)
    loss.backward()
    assert loss.item() == pytest.approx(-3 * 100 - 3 * 2)
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-6.0)]]
    found = metrics.compute()
    assert found["rl/own/ratio_capped"] == 0.5 and "rl/ratio_capped_fraction" not in found


async def test_the_filter_shown_drops_what_it_matches(tmp_path, monkeypatch, renderer, tokenizer):
    (code,) = re.findall(r"```python\n# my_filters.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_filters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(
        parse_command(
            ["--module", "my_filters", "--config", "rl_short_answers"]
            + ["--post-batch-filters.3.most-tokens", "5"]
        )
    )
    sys.modules.pop("my_filters")
    checked_plan(config)
    long_answer = config.post_batch_filters[3].build()
    assert long_answer.name == "long_answer" and long_answer.config.most_tokens == 5
    task = config.tasks["sum_digits"].build(name="sum_digits", context=context_of(renderer))
    policy = ScriptedPolicy(
        tokenizer, lambda rollout_id, turn: "1 2 3 4" if rollout_id.endswith("0") else "12"
    )
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=2)
    assert await task.score_group(group) is None
    result = combine([(long_answer, "post/long_answer")], group, [matches_of(long_answer, group)])
    assert [rollout.index_in_group for rollout, _ in result.dropped] == [0]
    assert [rollout.index_in_group for rollout in result.kept] == [1]


@pytest.mark.parametrize("slot", ["pre_batch_filters", "post_batch_filters"])
def test_the_index_of_each_shipped_filter_is_the_one_named(slot):
    named = "0 for `Gibberish`, 1 for `Repetition` and 2 for `ZeroAdvantage`"
    assert named in " ".join(PAGE.split())
    for name in config_registry.__all__:
        if name.startswith("rl_"):
            filters = getattr(getattr(config_registry, name)(), slot)
            kinds = [Gibberish.Config, Repetition.Config, ZeroAdvantage.Config]
            expected = kinds[:2] if name.endswith("_smollm2") else kinds
            assert [type(entry) for entry in filters] == expected, name


def test_every_algorithm_and_loss_is_in_its_table():
    for name in set(algorithms.__all__) - {"Algorithm"}:
        assert f"| `{name}` |" in PAGE
    for name in ("DPPO", "PPOClip", "CISPO", "GSPO", "CustomRLLoss"):
        assert name in losses.__all__ and f"| rl: `{name}`" in PAGE
    for kind in Correction.__subclasses__():
        if kind.__module__.startswith("torchtitan."):
            assert kind.__name__ in losses.__all__ and f"| `{kind.__name__}` |" in PAGE


@pytest.fixture
def shown_models():
    (lines,) = re.findall(r"```python\n# a vLLM server anywhere\n(.*?)```", PAGE, re.DOTALL)
    names = {
        "FrozenModel": FrozenModel,
        "HostedModel": HostedModel,
        "VLLMEngineConfig": VLLMEngineConfig,
    }
    tree = ast.parse(lines)
    return [
        eval(compile(ast.Expression(line.value), "docs", "eval"), dict(names)) for line in tree.body
    ]


def test_the_frozen_models_shown_are_valid(shown_models):
    assert [type(model) for model in shown_models] == [FrozenModel, HostedModel]
    for model in shown_models:
        model.validate(field="teacher")


def test_the_hosted_model_shown_serves_a_task_of_the_shipped_gpu_configs(shown_models):
    hosted = shown_models[1]
    config = config_registry.rl_grpo_qwen3_1_7b()
    config.tasks["sum_digits"].algorithm = OPD.Config(teacher=hosted)
    check(config)
    plan = plan_run(config, device="cuda", available=list(range(8)))
    assert (
        needed_gpus(config) == plan.processes == 6
    )  # a trainer rank, 3 generators, 2 GPUs of the teacher
    # The default engine can't score this task's samples: its context is 2,048 tokens, and they have up to 4,096.
    config.tasks["sum_digits"].algorithm = OPD.Config(teacher=HostedModel(path=hosted.path))
    with pytest.raises(ConfigError, match="teacher.engine.max_model_len = 2048: must be above"):
        check(config)


def test_the_hosted_model_shown_fits_its_gpus(shown_models):
    engine = shown_models[1].engine
    flavor = ModelConfig(hf_assets_path="/nowhere", flavor="qwen3/32B")
    parameters = parameter_count(policy_spec(flavor, device="cpu", max_seq_len=1))
    weights = parameters * engine.torch_dtype.itemsize / engine.tensor_parallel_degree
    # Qwen3-32B: 64 layers, 8 heads of 128 for keys and as many for values.
    longest = (
        engine.max_model_len
        * 64
        * 2
        * 8
        * 128
        * engine.torch_dtype.itemsize
        / engine.tensor_parallel_degree
    )
    share = engine.gpu_memory_utilization * 80e9
    assert round(weights / 2**30) == 31 and weights + 8 * longest < share, (
        "the weights, and eight rollouts of full length"
    )
    assert 4 * parameters > share, "float32 on one GPU does not"


# ---- a judge and a reward model


@pytest.fixture
def shown_in(tmp_path, monkeypatch):
    """Return a function that writes a block of the page as a module, and imports it."""
    imported = []

    def load(name: str, **replaced: str):
        (code,) = re.findall(rf"```python\n# {name}.py\n(.*?)```", PAGE, re.DOTALL)
        for text, other in replaced.items():
            code = re.sub(rf'^{text} = ".*"$', f'{text} = "{other}"', code, flags=re.MULTILINE)
        (tmp_path / f"{name}.py").write_text(code)
        imported.append(name)
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield load
    for name in imported:
        sys.modules.pop(name, None)


async def test_the_judge_shown_grades_answers_and_an_unread_verdict_fails_the_rollout(
    shown_in, tmp_path, renderer, tokenizer
):
    (tmp_path / "mine.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    task = (
        shown_in("judged")
        .rl_graded()
        .tasks["mine"]
        .build(name="mine", context=context_of(renderer))
    )
    verdicts = iter(["", "7", "no idea"])  # the first answers the greeting of setup
    policy = ScriptedModels(tokenizer, lambda rollout, turn: next(verdicts))
    await task.setup(policy)
    policy.reply = lambda rollout, turn: "42"
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=1)
    policy.reply = lambda rollout, turn: next(verdicts)
    await task.score_rewards(group)
    assert group.rollouts[0].reward == 0.7
    with pytest.raises(ValueError, match="no grade in 'no idea'"):
        await task.rubric.grade("43", {"question": "6 * 7?"})


def test_a_judge_has_no_warning_about_the_rows_own_answers(shown_in, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n' * 20)
    shown_in("judged")
    assert main(["--module", "judged", "--config", "rl_graded", "--dry-run"]) == 0
    assert "own answer" not in capsys.readouterr().err


def test_the_reward_model_shown_scores_an_answer_as_the_classifier_does(
    shown_in, tmp_path, tokenizer
):
    torch.manual_seed(0)
    folder = tmp_path / "classifier"
    tiny = Qwen3ForSequenceClassification(
        Qwen3Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=len(tokenizer),
            num_labels=1,
            pad_token_id=0,
        )
    )
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    module = shown_in("reward_model", FOLDER=str(folder))
    score = module.preferred("42", {"question": "6 * 7?"})
    text = (
        "<|im_start|>user\n6 * 7?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n42<|im_end|>\n"
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert score == pytest.approx(tiny.eval()(ids).logits[0, 0].item(), abs=1e-6)
    assert score != module.preferred("43", {"question": "6 * 7?"})
