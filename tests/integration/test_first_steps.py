"""First compiled steps of GPU configs; `python -m tests.first_steps` takes those of all."""

import pytest

from tests.forkserver import run_module

CASES = {
    "30b_a3b, replay": 6,
}
MORE_CASES = {
    "rl_grpo_qwen3_14b": 8,
    "rl_grpo_qwen3_0_6b": 4,
    "rl_grpo_qwen3_0_6b_1gpu": 4,
    "rl_grpo_qwen3_1_7b": 4,
    "rl_questions_qwen3": 4,
    "rl_math_qwen3": 4,
    "rl_reasoning_gym_qwen3_1_7b": 4,
    "rl_grpo_qwen3_30b_a3b_16": 4,
    "8b, adapters and reference": 9,
    "8b, gemma3_text": 8,
    "8b, olmo2": 4,
}
"""Number of compiled entries of a transformer block, by case.

A dense model has 4: a training pass at each of three row shapes, and the canary at the shortest.
Tensor parallelism has twice as many, because the first block is given a plain tensor and the others
one of an exchange that may not have ended. Replay computes each shape without routes too, and without
gradients: 3 + 3. With adapters the first block's input needs no gradient and the others' does: 2 x 3,
and 3 for the reference. Gemma 3's layers are of two kinds, with a window and without.
"""


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)], ids=["one", "more"]
)
def test_gpu_configs_take_their_first_steps_compiled_at_set_up(cases):
    # A process of its own: compiling changes settings of the process.
    ended = run_module("tests.first_steps", *cases)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    lines = ended.stdout.splitlines()
    for case, entries in cases.items():
        (line,) = [line for line in lines if line.startswith(f"{case}  ")]
        assert f"at most {entries} of 64 entries" in line
