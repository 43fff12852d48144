"""The examples in docstrings run, and what they define does what it says.

An example is an indented block below a line ``Example::``. Each runs in a namespace of its own.
"""

import ast
import doctest
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.rollouts import EXAMPLE, blank_turn, group_of, rewarded_group, rewarded_rollout
from tests.unit.agents import run_task
from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.losses import RLTokens
from torchtitan.experiments.rl.observability.trackers import TrackedRun
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks import CommandResult
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy

LIBRARY = Path(__file__).resolve().parents[2] / "torchtitan/experiments/rl"
MARK = "Example::\n"


def examples_in(source: str) -> dict[str, str]:
    """Return the code of each example in a file, by the name of its class or function."""
    examples = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _, mark, after = (ast.get_docstring(node) or "").partition(MARK)
            if mark:
                examples[node.name] = _indented(after)
    return examples


def _indented(text: str) -> str:
    """Return the lines up to the first that is neither indented nor empty."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
    return inspect.cleandoc("\n".join(lines[:end]))


def namespace_after(code: str, name: str) -> dict:
    """Run an example, and return its names. Statements after ``>>>`` have to print what is shown.

    Raises:
        AssertionError: a statement prints something else than the example shows.
    """
    names = {"__name__": f"example_of_{name}"}
    if ">>>" not in code:
        exec(compile(code, f"example of {name}", "exec"), names)
        return names
    example = doctest.DocTestParser().get_doctest(code, names, name, None, None)
    printed = []
    failed, _ = doctest.DocTestRunner().run(example, out=printed.append, clear_globs=False)
    assert not failed, "".join(printed)
    return example.globs


EXAMPLES = {
    name: code
    for file in sorted(LIBRARY.rglob("*.py"))
    for name, code in examples_in(file.read_text()).items()
}


@pytest.fixture
def shown():
    """Runs the example under the docstring of a class or function, and gives its names."""
    return lambda name: namespace_after(EXAMPLES[name], name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_runs_by_itself(name, shown):
    shown(name)


def test_what_users_write_or_call_has_an_example():
    wanted = """MessageEnv Rubric RewardFn Task Algorithm Filter SampleStrategy TaskMix Dataset
        MadeDataset Tracker RunEvents RLLoss Correction AgentTask question_task env_task tool_task agent_command_task"""
    assert set(wanted.split()) <= set(EXAMPLES)


def test_an_example_is_found_below_its_mark_and_ends_with_its_indentation():
    source = '''
class Box:
    """Holds things.

    Example::

        def one():
            return 1

        two = 2

    It holds a few.
    """
'''
    assert examples_in(source) == {"Box": "def one():\n    return 1\n\ntwo = 2"}


def test_an_example_that_shows_another_result_fails():
    assert namespace_after(">>> n = 6 * 7\n>>> n\n42", "right")["n"] == 42
    with pytest.raises(AssertionError, match=r"Expected:\s+43\s+Got:\s+42"):
        namespace_after(">>> 6 * 7\n43", "wrong")


# ---- tasks


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"first": 6, "second": 7}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "prompt", "replies", "rewards"),
    [
        # Wrong at first, and told so; right at once; wrong in each of the turns that a rollout has.
        ("MessageEnv", "What is twice 21?", [["40", "42"], ["42"], ["40"] * 8], [1, 1, 0]),
        # 0.8 for the answer and 0.2 for its brevity: the second has 29 characters.
        ("Rubric", "6 * 7?", [["42"], ["6 times 7 is the answer of 42"], ["41"]], [1, 0.8, 0.2]),
        ("RewardFn", "6 * 7?", [["42"], ["It is surely 42."], ["41"]], [1, 0.8, 0.2]),
        ("Task", "What is twice 21?", [["42"], ["It is 42."], ["21"]], [1, 1, 0]),
        # The first example that the dataset has is that of 0.
        ("Dataset", "What is 0 * 0?", [["0"], ["It is 0."], ["1"]], [1, 1, 0]),
        ("MadeDataset", "12 * 12?", [["144"], ["It is 144."], ["24"]], [1, 1, 0]),
        ("question_task", "Calculate 6 * 7?", [[" 42\n"], ["It is 42."], ["41"]], [1, 0, 0]),
        ("env_task", "6 + 7?", [["13"], ["It is 13."], ["12"]], [1, 1, 0]),
        ("tool_task", "6 * 7?", [[CALL, "It is 42."], ["42"], [CALL, "41"]], [1, 1, 0]),
        ("AgentTask", "6 * 7?", [["42"], ["It is 42."], ["41"]], [1, 1, 0]),
    ],
)
async def test_the_task_of_an_example_asks_and_rewards(
    name, prompt, replies, rewards, shown, renderer
):
    task = shown(name)["task"]
    task.group_size = 3
    task.max_retries = 0
    policy = ScriptedPolicy(TINY_MODEL, lambda rollout, turn: replies[rollout][turn])
    group = await run_task(task, policy, renderer)
    assert prompt in policy.prompts[0]
    assert [rollout.reward for rollout in group.rollouts] == rewards


def test_the_reward_of_the_command_reads_what_it_left_in_its_folder(shown, tmp_path):
    names = shown("agent_command_task")
    assert names["task"].command == ["python", "agent.py", "{question}"]
    (tmp_path / "answer.txt").write_text("42\n")
    result = CommandResult(folder=tmp_path, exit_code=0, output="", errors="")
    rewards = [names["solved"](result, {"answer": answer}) for answer in ("42", "43")]
    assert rewards == [1.0, 0.0]


# ---- other parts of a run


def test_the_algorithm_credits_the_best_of_a_group_alone(shown):
    algorithm = shown("Algorithm")["BestOfGroup"].Config().build()
    group = group_of(*map(rewarded_rollout, (0.5, 1.0, None, 1.0)))
    algorithm.score_group(group)
    advantages = [rollout.samples[0].advantages for rollout in group.scored]
    # Of five tokens, the last three are sampled.
    assert np.array_equal(advantages, [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]])


def test_the_filter_matches_rollouts_of_many_turns(shown):
    turns_filter = shown("Filter")["ManyTurns"].Config(most=2).build()
    rollouts = [rewarded_rollout(1.0, [blank_turn(1)] * turns) for turns in (1, 2, 3)]
    assert turns_filter.matches(group_of(*rollouts)) == [False, False, True]
    assert turns_filter.name == "many_turns"


def test_the_sampler_draws_the_same_after_a_resume(shown):
    dataset = [DataSample(sample_id=str(index), env_input=None) for index in range(5)]
    config = shown("SampleStrategy")["WithReplacement"].Config()
    whole = config.build(dataset=dataset, seed=3)
    drawn = [whole.next().sample_id for _ in range(40)]
    assert set(drawn) == set("01234") and len(set(drawn[:5])) < 5  # some example came twice
    first = config.build(dataset=dataset, seed=3)
    before = [first.next().sample_id for _ in range(17)]
    resumed = config.build(dataset=dataset, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [resumed.next().sample_id for _ in range(23)] == drawn


def test_the_mix_names_the_tasks_in_turn_and_goes_on_after_a_resume(shown):
    config = shown("TaskMix")["InTurn"].Config()
    mix = config.build(weights={"a": 1.0, "b": 5.0, "c": 1.0})
    assert [mix.next() for _ in range(4)] == ["a", "b", "c", "a"]
    resumed = config.build(weights={"a": 1.0, "b": 5.0, "c": 1.0})
    resumed.load_state_dict(mix.state_dict())
    assert [resumed.next() for _ in range(2)] == ["b", "c"]


def test_the_tracker_appends_a_line_for_each_step(shown, tmp_path):
    config = shown("Tracker")["JSONLines"].Config()
    tracker = config.build(run=TrackedRun(folder=tmp_path, config={}))
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    assert (tmp_path / "tracked.jsonl").read_text().splitlines() == [
        '{"step": 1, "reward/mean": 0.25}',
        '{"step": 2, "reward/mean": 0.5}',
    ]


def test_the_observer_prints_why_a_group_is_dropped(shown, capsys):
    observer = shown("RunEvents")["Drops"]()
    group = rewarded_group(EXAMPLE, 0.0, 0.0, group_id="sums-4")
    observer.group_dropped(["zero_advantage"] * 2, group, signal=False, taken=False)
    observer.groups_taken()  # an event that it ignores
    assert capsys.readouterr().out == "sums-4 was dropped: zero_advantage\n"


def three_tokens() -> RLTokens:
    """Tokens whose log ratios are 6, 0 and 1.5."""
    return RLTokens(
        logprobs=torch.tensor([[0.0, -1.0, -1.0]], requires_grad=True),
        generator_logprobs=torch.tensor([[-6.0, -1.0, -2.5]]),
        advantages=torch.tensor([[1.0, 2.0, -1.0]]),
        member=torch.ones(1, 3, dtype=torch.bool),
        sequence_ids=torch.zeros(1, 3, dtype=torch.int64),
    )


def test_the_loss_caps_the_ratio(shown):
    tokens = three_tokens()
    losses, capped = shown("RLLoss")["PolicyGradient"].Config().build().per_token(tokens)
    # exp(6) = 403 is above the cap, exp(0) = 1, exp(1.5) = 4.4817.
    assert torch.allclose(losses, torch.tensor([[-100.0, -2.0, 4.4817]]))
    assert capped.tolist() == [[True, False, False]]
    losses.sum().backward()
    # -A·ρ, and none where the cap acts.
    assert torch.allclose(tokens.logprobs.grad, torch.tensor([[0.0, -2.0, 4.4817]]))


def test_the_correction_leaves_out_tokens_that_have_moved(shown):
    weights = shown("Correction")["Unmoved"].Config().build().weights(three_tokens())
    assert weights.tolist() == [[0.0, 1.0, 0.0]] and not weights.requires_grad
