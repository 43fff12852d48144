"""Final answers in what models write: replies as models phrase them, each scored by the rubric of its task.

``replies.jsonl`` has one JSON object a line; more can be appended:

    task, sample    the name of a task below, and the example's env_input (a dict for the classes named there)
    model           who writes so; "other" for none in particular
    reply           the last message, thinking included
    verdict         what a person gives it, 0 or 1
    cut             true: the reply ends where max_tokens cut it
    missed          true: the rubric gives 0 all the same; it finds no text within a sentence
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_0_6b, rl_questions_qwen3
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks.answers import (
    final_answer,
    final_list,
    final_number,
    last_boxed,
    last_tagged,
    right_answer,
)
from torchtitan.experiments.rl.tasks.examples.alphabet_sort import AlphabetSortTask
from torchtitan.experiments.rl.tasks.examples.calculator import CalculatorTask
from torchtitan.experiments.rl.tasks.examples.guess_number import Game, GuessNumberTask
from torchtitan.experiments.rl.tasks.examples.math import MathTask
from torchtitan.experiments.rl.tasks.examples.reasoning_gym import (
    Puzzle,
    PuzzleGenerator,
    ReasoningGymDataset,
    ReasoningGymTask,
)
from torchtitan.experiments.rl.tasks.examples.sum_digits import SumDigitsTask
from torchtitan.experiments.rl.tasks.questions import QuestionTask, question_task

REPLIES = [
    json.loads(line) for line in (Path(__file__).parent / "replies.jsonl").read_text().splitlines()
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
ROW = [{"question": "?", "answer": "1"}]


def math_config(folder):
    (folder / "rows.jsonl").write_text(json.dumps(ROW[0]) + "\n")
    return MathTask.Config(
        algorithm=GRPO.Config(), dataset=RowDataset.Config(path=str(folder / "rows.jsonl"))
    )


TASKS = {
    "sum_digits": (lambda folder: rl_grpo_qwen3_0_6b().tasks["sum_digits"], list),
    "alphabet_sort": (lambda folder: AlphabetSortTask.Config(algorithm=GRPO.Config()), list),
    "calculator": (lambda folder: CalculatorTask.Config(algorithm=GRPO.Config()), str),
    "guess_number": (
        lambda folder: GuessNumberTask.Config(algorithm=GRPO.Config()),
        lambda sample: Game(**sample),
    ),
    "questions": (
        lambda folder: question_task(ROW, rubric=rl_questions_qwen3().tasks["questions"].rubric),
        dict,
    ),
    "math": (math_config, dict),
    "reasoning_gym": (
        lambda folder: ReasoningGymTask.Config(
            algorithm=GRPO.Config(),
            dataset=ReasoningGymDataset.Config(
                generators={"leg_counting": PuzzleGenerator()}, count=1
            ),
        ),
        lambda sample: Puzzle(**sample),
    ),
}
"""Each task as configs for real models have it, and how a sample of the file becomes its env_input."""


def test_every_task_has_replies_of_each_verdict():
    assert {reply["task"] for reply in REPLIES} == set(TASKS)
    for name in TASKS:
        assert {reply["verdict"] for reply in REPLIES if reply["task"] == name} == {0, 1}, name


@pytest.mark.usefixtures("one_scoring_server")
@pytest.mark.parametrize("name", TASKS)
async def test_replies_earn_what_a_person_would_give_them(
    name, tokenizer, tokenizer_path, tmp_path
):
    make_config, env_input = TASKS[name]
    config = make_config(tmp_path)
    config.rubric.isolated_workers = 1
    config.env = RendererEnvConfig(max_turns=4, max_rollout_tokens=8192)
    renderer = build_renderer(RendererConfig(enable_thinking=True), tokenizer_path)
    task = config.build(name=name, context=context_of(renderer))
    first = [CALL] if name == "calculator" else []

    async def rewarded(reply):
        replies = [*first, reply["reply"]]
        tokens = len(tokenizer.encode(replies[-1], add_special_tokens=False))
        sampling = SamplingConfig(max_tokens=max(1, tokens) if reply.get("cut") else 4096)
        sample = DataSample(sample_id="0", env_input=env_input(reply["sample"]))
        policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
        group = await task.run_group(
            sample, policy, group_id="g", seed=0, sampling=sampling, group_size=1
        )
        assert await task.score_group(group) is None, group.failure
        (rollout,) = group.rollouts
        assert (rollout.status == "truncated_length") == reply.get("cut", False), reply
        return rollout.reward

    own = [reply for reply in REPLIES if reply["task"] == name]
    rewards = await asyncio.gather(*map(rewarded, own))
    # A generator of puzzles may give a wrong answer a part of the reward.
    given = [reply["verdict"] == 1 and not reply.get("missed") for reply in own]
    wrong = [
        (reward, reply)
        for reward, reply, right in zip(rewards, own, given, strict=True)
        if (reward == 1) != right
    ]
    assert wrong == [], f"{len(wrong)} of {len(own)}"


HUB_CONFIGS = [
    name for name in config_registry.__all__ if "_qwen3" in name and "_debug" not in name
]


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_prompts_of_every_hub_config_say_how_to_write_the_answer(name):
    """And thinking is said to be on or off by the config, not by a default."""
    config = getattr(config_registry, name)()
    assert config.renderer == RendererConfig(name="qwen3", enable_thinking=False)
    forms = {
        SumDigitsTask.Config: lambda task: task.instruction,
        QuestionTask.Config: lambda task: task.template,
        MathTask.Config: lambda task: task.template,
        ReasoningGymTask.Config: lambda task: task.template,
    }
    for task in config.tasks.values():
        assert "answer" in forms[type(task)](task).lower()
        assert not getattr(task.rubric, "exact", False)


@pytest.mark.parametrize(
    "make_config",
    [
        config_registry.rl_grpo_qwen3_debug,
        config_registry.rl_mixed_qwen3_debug,
        config_registry.rl_alphabet_sort_qwen3_debug,
        config_registry.rl_guess_number_qwen3_debug,
    ],
)
def test_tiny_models_keep_the_questions_and_the_exact_form_they_have_learned(make_config):
    for task in make_config().tasks.values():
        if isinstance(task, SumDigitsTask.Config):
            assert task.instruction == ""
        assert getattr(task.rubric, "exact", True) and getattr(task, "exact", True)


# ---- the box


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("first \\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{1} then cut off: \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{a \\boxed{b} c}", "b"),
        ("{ } } { \\boxed {7} }", "7"),
        ("\\boxed{}", ""),
        ("the answer is 42", None),
        ("\\boxed 42", None),
        ("\\\\boxed{42}", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, inside):
    assert last_boxed(text) == inside


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "x", " "]), max_size=12).map(
        "".join
    )
)
def test_a_box_found_is_balanced_and_in_the_text(text):
    inside = last_boxed(text)
    if inside is not None:
        assert inside in text
        plain = inside.replace("\\{", "").replace("\\}", "")
        assert plain.count("{") == plain.count("}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>42</answer>", "42"),
        ("<answer> 1\n2 </answer> or <answer>\n3\n</answer>.", "3"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("<answer>42", None),
        ("42", None),
    ],
)
def test_the_last_pair_of_tags_holds_the_answer(text, answer):
    assert last_tagged(text) == answer


@given(st.text(alphabet="ab {}\\", max_size=30), st.text(alphabet="ab12+-", max_size=10))
def test_a_box_at_the_end_is_found_whatever_comes_before(before, answer):
    assert last_boxed(f"{before} \\boxed{{{answer}}}") == answer


@given(
    st.lists(st.integers(0, 99), min_size=2, max_size=20, unique=True),
    st.sampled_from([" ", ", ", "\n", " or "]),
)
def test_a_list_of_numbers_is_no_answer(numbers, separator):
    assert final_number(separator.join(map(str, numbers))) is None
    assert final_number("Answer: " + " or ".join(map(str, numbers))) is None


@given(st.text(max_size=60), st.integers(-(10**9), 10**9))
def test_a_last_line_in_the_form_asked_for_is_the_answer_whatever_stands_above(text, number):
    above = text.replace("<", "").replace("\\", "")
    assert final_number(f"{above}\nAnswer: {number:,}") == number
    assert final_number(f"{above}\nAnswer: {number}.") == number


@given(st.text(alphabet="a1 .,=$*_\n\\{}<>/#:()?|", max_size=60))
def test_any_text_has_an_answer_or_none(text):
    for reply in (
        text,
        f"<think>{text}</think>{text}",
        f"Answer: {text}",
        f"<answer>{text}</answer>",
    ):
        final_answer(reply), final_number(reply), final_list(reply)
        assert right_answer(reply, {"answer": "no such answer"}) == 0


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_of_a_list_of_answers_any_is_right(kind):
    row = {"answer": kind(["42", "forty-two"])}
    for reply in ("The answer is 42.", "\\boxed{forty-two}", "#### 42"):
        assert right_answer(reply, row) == 1
    assert right_answer("The answer is 41.", row) == 0
    assert right_answer("The answer is 42.", {"answer": kind(["42"])}) == 1


@pytest.mark.parametrize("answer", [[], [""], ["42", None], [["42"], []], np.array([])])
def test_a_list_without_an_answer_or_with_an_empty_one_is_an_error(answer):
    with pytest.raises(ValueError, match="the row's answer is "):
        right_answer("The answer is 42.", {"answer": answer})


@given(st.text(alphabet="a1 .,=*\n", max_size=30))
def test_thinking_is_not_searched_and_thinking_that_never_ends_has_no_answer(text):
    assert final_number(f"<think>Answer: 21</think>{text}") == final_number(text)
    assert (
        final_answer(f"{text}<think>Answer: 21") is None
        and final_number(f"21 <think> {text} 21") is None
    )
