"""The viewer shows a person the recorded rollouts."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.observability.rollouts import lines_of
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks.examples.calculator import CalculatorTask

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "47 * 86"}}\n</tool_call>'


@pytest.fixture
async def run_folder(tmp_path, tokenizer_path, tokenizer):
    """Three rollouts: right by the tool, wrong without it, and one whose generator failed."""
    renderer = build_renderer(RendererConfig(enable_thinking=True), tokenizer_path)
    task = CalculatorTask.Config(algorithm=GRPO.Config(), max_retries=0).build(
        name="calculator", context=context_of(renderer)
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


async def test_conversation_reads_from_top_to_bottom(run_folder):
    shown = "\n".join(lines_of(next(read_rollouts(run_folder))))
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


async def test_a_completions_tokens_are_shown_with_their_log_probabilities(run_folder, tokenizer):
    record = list(read_rollouts(run_folder))[1]
    ids = tokenizer.encode("40<|im_end|>", add_special_tokens=False)
    pairs = " ".join(
        f"{token}:{-(i + 1) / 8:.2f}" for i, token in enumerate(ids)
    )  # as the stub samples
    assert f"   tokens {pairs}" in lines_of(record, tokens=True)
    assert not any(line.startswith("   tokens ") for line in lines_of(record))


async def test_a_rollout_that_failed_is_shown_with_its_error(run_folder):
    shown = "\n".join(lines_of(list(read_rollouts(run_folder))[2]))
    assert "calculator-0/2" in shown and "no reward" in shown and "the engine is gone" in shown
