"""A tool the model must call: what the calculator takes, what the env answers, what an answer is worth."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.data.dataset import split_of_text
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.tasks.examples.calculator import (
    CalculatorDataset,
    CalculatorTask,
    evaluate,
    make_examples,
)


def call(expression="47 * 86", name="calculator"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": {json.dumps(expression)}}}}}\n</tool_call>'


def config(**changes):
    return CalculatorTask.Config(**{"algorithm": GRPO.Config(), "group_size": 2} | changes)


async def play(renderer, tokenizer, *replies):
    """One rollout on "47 * 86", which is 4042, with these replies."""
    task = config().build(name="calculator", context=context_of(renderer))
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    sample = DataSample(sample_id="0", env_input="47 * 86")
    group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=1)
    assert await task.score_group(group) is None
    return group.rollouts[0], policy.sessions[0]


# ---- the calculator


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("-(1 - 8) * 2", "14"),
        ("9" * 100 + " * " + "9" * 97, str((10**100 - 1) * (10**97 - 1))),
    ],
)
def test_values_by_hand(expression, shown):
    assert str(evaluate(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("", "invalid expression"),
        ("47 *", "invalid expression"),
        ("__import__('os').getcwd()", "invalid expression"),
        ("x + 1", "invalid expression"),
        ("True + 1", "invalid expression"),
        ("'a' * 9", "invalid expression"),
        ("1, 2", "invalid expression"),
        ("[0] * 9", "invalid expression"),
        ("2j", "invalid expression"),
        ("1 if 2 else 3", "invalid expression"),
        ("1\n2", "invalid expression"),
        ("1\0", "invalid expression"),
        ("\ud800", "invalid expression"),
        ("(" * 150 + "1" + ")" * 49, "invalid expression"),
        ("7 / 2", "invalid expression"),
        ("9**9**9", "invalid expression"),
        ("1.5 + 2", "invalid expression"),
        ("1 + " * 60 + "1", "expression too long"),
    ],
)
def test_all_else_is_refused_with_a_cause(expression, cause):
    with pytest.raises(ValueError, match=f"^{cause}$"):
        evaluate(expression)


@given(st.text(alphabet="0123456789.eE+-*/%()_ jx,'", max_size=60))
def test_any_text_has_a_bounded_value_or_a_cause(text):
    try:
        assert abs(evaluate(text)) < 10**200
    except ValueError:
        pass


@given(st.text())
def test_any_unicode_has_a_bounded_value_or_a_cause(text):
    try:
        assert abs(evaluate(text)) < 10**200
    except ValueError:
        pass


# ---- data


@given(
    seed=st.integers(0, 5),
    operands=st.integers(2, 6),
    split=st.sampled_from(["train", "validation"]),
)
def test_expressions_keep_their_bounds_and_their_split(seed, operands, split):
    arguments = {
        "split": split,
        "seed": seed,
        "min_operands": 2,
        "max_operands": operands,
        "max_operand": 40,
    }
    expressions = make_examples(12, **arguments)
    assert expressions == make_examples(20, **arguments)[:12]
    for expression in expressions:
        words = expression.split(" ")
        assert 2 <= len(words[::2]) <= operands and all(0 <= int(word) <= 40 for word in words[::2])
        assert set(words[1::2]) <= set("+-*") and split_of_text(expression) == split


def test_answers_follow_the_rules_of_precedence():
    assert [evaluate("47 * 86 - 9"), evaluate("9 - 47 * 86"), evaluate("9 - 4 - 3")] == [
        4033,
        -4033,
        2,
    ]


def test_splits_share_no_expression():
    train, validation = (
        set(make_examples(3000, split=split, max_operand=30)) for split in ("train", "validation")
    )
    assert len(train) > 1500 and len(validation) > 300 and not train & validation


# ---- a conversation


async def test_a_call_and_the_answer_earn_1_and_are_one_training_sample(renderer, tokenizer):
    rollout, session = await play(renderer, tokenizer, call(), "The answer is 4042.")
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    (result,) = rollout.turns[0].env_messages
    assert result == {
        "role": "tool",
        "tool_call_id": "call_0_0",
        "name": "calculator",
        "content": "4042",
    }
    (sample,) = rollout.samples
    sampled = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert sampled == call() + "<|im_end|>The answer is 4042.<|im_end|>"
    prompt = tokenizer.decode(session.prompts[-1])
    assert '{"type": "function", "function": {"name": "calculator"' in prompt
    assert (
        "user\nWhat is 47 * 86? Use the calculator, then give the final answer as a number.<|im_end|>"
        in prompt
    )
    assert "user\n<tool_response>\n4042\n</tool_response><|im_end|>" in prompt


@pytest.mark.parametrize(
    ("replies", "right", "called"),
    [
        (("The answer is 4042.",), 1.0, 0.0),
        ((call(), "The answer is 4043."), 0.0, 1.0),
        ((call("47 * 87"), "The answer is 4042."), 1.0, 1.0),
        ((call("47 *"), "The answer is 4042."), 1.0, 0.0),
        ((call("47 *"), call(), "4042"), 1.0, 1.0),
        ((call(), "It is 4,042"), 1.0, 1.0),
        ((call(), "47 * 86 = 4042.0."), 1.0, 1.0),
        ((call(), "-4042"), 0.0, 1.0),
        ((call(), "4042 or 4043"), 0.0, 1.0),
        ((call(), "no idea"), 0.0, 1.0),
        ((call(), ""), 0.0, 1.0),
    ],
)
async def test_reward_is_for_the_answer_and_the_call_together(
    renderer, tokenizer, replies, right, called
):
    rollout, _ = await play(renderer, tokenizer, *replies)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.reward == right * called
    halves = {"solved": right * called, "right": right, "called": called}
    assert rollout.reward_components | halves == rollout.reward_components


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (call("9**9**9"), "invalid expression"),
        (call("import os"), "invalid expression"),
        (call(name="abacus"), "unknown tool"),
        (call(expression=7), "invalid arguments"),
        ('<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>', "invalid arguments"),
        (
            '<tool_call>\n{"name": "calculator", "arguments": "47 * 86"}\n</tool_call>',
            "invalid arguments",
        ),
        (
            '<tool_call>\n{"name": "calculator", "arguments": [1]}\n</tool_call>',
            "invalid arguments",
        ),
        ('<tool_call>\n{"name": "calculator"}\n</tool_call>', "invalid arguments"),
        ('<tool_call>\n{"name": "calculator", "argu\n</tool_call>', "invalid tool call"),
        ("<tool_call>\n47 * 86", "invalid tool call"),
        ('<tool_call>\n{"arguments": {"expression": "1"}}\n</tool_call>', "invalid tool call"),
    ],
)
async def test_a_bad_call_is_answered_with_its_fault_and_the_conversation_goes_on(
    renderer, tokenizer, reply, error
):
    rollout, _ = await play(renderer, tokenizer, reply, call(), "4042")
    (answered,) = rollout.turns[0].env_messages
    assert (answered["role"], answered["content"]) == ("tool", f"Error: {error}")
    assert (rollout.status, rollout.reward, len(rollout.samples)) == (
        RolloutStatus.COMPLETED,
        1.0,
        1,
    )


async def test_each_of_several_calls_is_answered_under_its_id(renderer, tokenizer):
    rollout, _ = await play(
        renderer,
        tokenizer,
        "\n".join([call("1 + 1"), call("1 +"), "<tool_call>\n{\n</tool_call>"]),
        "2",
    )
    assert [
        (answer.get("tool_call_id"), answer["content"]) for answer in rollout.turns[0].env_messages
    ] == [
        ("call_0_0", "2"),
        ("call_0_1", "Error: invalid expression"),
        (None, "Error: invalid tool call"),
    ]


async def test_a_model_that_only_calls_runs_out_of_turns_and_earns_nothing(renderer, tokenizer):
    rollout, _ = await play(renderer, tokenizer, *[call() + " 4042"] * 4)
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED_MAX_TURNS, 0.0)


# ---- config


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"min_operands": 1},
            "tasks.c.dataset.min_operands = 1: must be at least 2 and at most 20",
        ),
        ({"min_operands": 5}, "tasks.c.dataset.min_operands = 5: must be at most max_operands = 4"),
        (
            {"max_operands": 21},
            "tasks.c.dataset.max_operands = 21: must be at least 2 and at most 20",
        ),
        ({"max_operand": 5}, "tasks.c.dataset.max_operand = 5: must be at least 9 and at most 999"),
    ],
)
def test_a_dataset_that_cannot_work_says_what_to_change(dataset, message):
    config().validate(field="tasks.c")
    with pytest.raises(ConfigError) as error:
        config(dataset=CalculatorDataset.Config(**dataset)).validate(field="tasks.c")
    assert str(error.value) == message


def test_one_turn_is_too_few():
    task = config()
    task.env.max_turns = 1
    with pytest.raises(ConfigError, match="tasks.c.env.max_turns = 1"):
        task.validate(field="tasks.c")


def test_the_largest_expressions_stay_within_the_calculators_bounds():
    assert evaluate(" * ".join(["999"] * 20)) == 999**20
