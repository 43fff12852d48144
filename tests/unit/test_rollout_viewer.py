"""What a person sees of recorded rollouts."""

import pytest

from tests.unit.rollout_stubs import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.observability.rollouts import main
from torchtitan.experiments.rl.rollouts.recorder import ROLLOUTS_FILE, RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.tasks.calculator import CalculatorTask

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "47 * 86"}}\n</tool_call>'


@pytest.fixture
async def run_folder(tmp_path, tokenizer_path, tokenizer):
    """Three rollouts: right by the tool, wrong without it, and one whose generator failed."""
    renderer = build_renderer(RendererConfig(enable_thinking=True), tokenizer_path)
    task = CalculatorTask.Config(algorithm=GRPO.Config(), max_retries=0).build(
        name="calculator", renderer=renderer
    )

    def reply(rollout_id, turn):
        if rollout_id.endswith("2"):
            return RuntimeError("the engine is gone")
        return (
            [f"<think>\nlarge\nnumbers\n</think>\n\nLet me see.\n{CALL}", "4042"][turn]
            if rollout_id.endswith("0")
            else "40"
        )

    sample = DataSample(sample_id="s", env_input="47 * 86")
    group = await task.run_group(
        sample, ScriptedPolicy(tokenizer, reply), group_id="calculator-0", seed=0, group_size=3
    )
    assert await task.score_group(group) is None
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    outcomes = ["trained", "trained", "failed/error"]
    recorder.record(
        group, {rollout.rollout_id: outcomes[rollout.index_in_group] for rollout in group.rollouts}
    )
    recorder.close()
    return tmp_path


async def test_conversation_reads_from_top_to_bottom(run_folder, capsys):
    assert main([str(run_folder), "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    parts = [
        "calculator-0/0 · completed · reward 1 · trained · policy 3",
        "user │ What is 47 * 86?",
        "assistant │ (thinks) large\n          │ numbers\n          │ Let me see.\n",
        '│ (calls) calculator({"expression": "47 * 86"})',
        "env rewards calculated 1",
        "tool │ 4042",
        "assistant │ 4042",
        "1 training sample, advantage",
        "made from 47 * 86",
    ]
    places = [shown.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), shown
    assert shown.count("user │") == shown.count("tool │") == 1


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "012"),
        (["--limit", "2"], "01"),
        (["--outcome", "failed"], "2"),
        (["--min-reward", "0.5"], "0"),
        (["--max-reward", "0.5"], "1"),
        (["--task", "calculator", "--outcome", "trained"], "01"),
        (["--group", "calculator-0"], "012"),
        (["--step", "3", "--limit", "1"], "0"),
        (["--last", "--limit", "2"], "12"),
    ],
)
async def test_options_choose_rollouts(run_folder, capsys, options, shown):
    assert main([str(run_folder / ROLLOUTS_FILE), *options]) == 0
    text = capsys.readouterr().out
    assert [number for number in "012" if f"calculator-0/{number}" in text] == list(shown)
    assert ("the engine is gone" in text) == ("2" in shown)


async def test_options_order_rollouts(run_folder, capsys):
    """The rewards are 1, 0 and none; the second samples least of those that sampled."""
    for key, order in (("reward", [0, 1, 2]), ("tokens", [0, 1, 2]), ("turns", [0, 1, 2])):
        assert main([str(run_folder), "--last", "--sort", key]) == 0
        shown = capsys.readouterr().out
        assert sorted(range(3), key=lambda number: shown.find(f"calculator-0/{number} ")) == order
    assert main([str(run_folder), "--last", "--limit", "2", "--sort", "reward"]) == 0
    shown = capsys.readouterr().out
    assert (
        -1 < shown.find("calculator-0/1 ") < shown.find("calculator-0/2 ")
        and "calculator-0/0 " not in shown
    )


async def test_a_rollout_is_shown_with_the_mean_of_its_group_its_weights_and_its_tokens(
    run_folder, tokenizer, capsys
):
    assert main([str(run_folder), "--max-reward", "0.5", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert (
        "reward 0 · trained · policy 3 · group's mean 0.5 " in shown
    )  # of 1 and 0; the third has none
    ids = tokenizer.encode("40<|im_end|>", add_special_tokens=False)
    pairs = " ".join(
        f"{token}:{-(i + 1) / 8:.2f}" for i, token in enumerate(ids)
    )  # as the stub samples
    assert f"   tokens {pairs}\n" in shown
    assert main([str(run_folder), "--max-reward", "0.5"]) == 0
    assert "   tokens " not in capsys.readouterr().out


async def test_nothing_to_show_is_said(run_folder, tmp_path, capsys):
    assert main([str(run_folder), "--task", "other"]) == 1
    assert "no rollout matches" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "no such file" in capsys.readouterr().err


async def test_long_messages_are_cut(run_folder, capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.experiments.rl.observability.rollouts.MOST", 5)
    assert main([str(run_folder), "--limit", "1"]) == 0
    assert "What … (" in capsys.readouterr().out


async def test_rollouts_of_evaluations_are_shown_where_they_are_asked_for_and_only_they(
    run_folder, capsys
):
    assert main([str(run_folder), "--validation"]) == 1
    rollout = Rollout(
        group_id="validation-calculator-0@40", index_in_group=0, task_name="calculator"
    )
    rollout.status, rollout.reward = RolloutStatus.COMPLETED, 0.25
    sample = DataSample(sample_id="s", env_input="1 + 1")
    group = RolloutGroup(
        group_id=rollout.group_id,
        task_name="calculator",
        data_sample=sample,
        rollouts=[rollout],
        admitted_version=40,
    )
    recorder = RolloutRecorder.Config().build(run_dir=run_folder)
    recorder.record(group, {rollout.rollout_id: "validation"}, kind="validation")
    recorder.close()
    capsys.readouterr()
    assert main([str(run_folder), "--validation"]) == 0
    shown = capsys.readouterr().out
    assert (
        "validation-calculator-0@40/0 · completed · reward 0.25 · validation · policy 40" in shown
        and "trained" not in shown
    )
    assert main([str(run_folder), "--outcome", "validation"]) == 1 and main([str(run_folder)]) == 0
    assert "validation" not in capsys.readouterr().out
