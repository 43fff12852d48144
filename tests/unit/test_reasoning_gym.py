"""Puzzles of any generator, alone or mixed, scored by the generator itself in processes that can be killed."""

import numpy as np
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.tasks.examples.reasoning_gym import (
    PuzzleGenerator,
    PuzzleRubric,
    ReasoningGymDataset,
    ReasoningGymTask,
    solved,
)

pytestmark = pytest.mark.usefixtures("one_scoring_server")

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def dataset(generators=None, **changes):
    generators = generators or {"chain_sum": PuzzleGenerator(config=SMALL_SUMS)}
    return ReasoningGymDataset.Config(**{"generators": generators, "count": 20} | changes)


def config(**changes):
    return ReasoningGymTask.Config(
        **{"algorithm": GRPO.Config(), "group_size": 4, "dataset": dataset()} | changes
    )


async def run(task_config, renderer, tokenizer, reply):
    """One group on the first puzzle; ``reply(entry)`` gives what each rollout says."""
    task = task_config.build(name="gym", context=context_of(renderer))
    sample = task.dataset[0]
    replies = reply(sample.env_input.entry)
    policy = ScriptedPolicy(
        tokenizer, lambda rollout_id, turn: replies[int(rollout_id.rpartition("/")[2])]
    )
    group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=len(replies))
    assert await task.score_group(group) is None
    return group, policy


def said(message) -> Rollout:
    """A rollout that ended in this message."""
    completion = Completion(
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1),
        policy_versions=np.zeros(1, np.int32),
        finish_reason="stop",
    )
    turn = RolloutTurn(
        prompt_messages=[],
        prompt_token_ids=np.zeros(1, np.int32),
        prompt_role_ids=np.full(1, -1, np.int8),
        prompt_is_content=np.zeros(1, bool),
        completion=completion,
        assistant_message=message,
    )
    return Rollout(group_id="g", index_in_group=0, task_name="gym", turns=[turn])


# ---- data


def test_puzzles_are_those_the_package_makes_of_the_same_name_config_and_seed():
    built = dataset(seed=7).build()
    made = reasoning_gym.create_dataset("chain_sum", seed=7, size=20, **SMALL_SUMS)
    assert [sample.env_input.entry for sample in built] == list(made)
    assert built[3].info == {"generator": "chain_sum", "demonstration": made[3]["answer"]}
    assert len({sample.sample_id for sample in built}) == len(built) == 20


def test_a_mixture_follows_its_weights_and_is_the_same_every_time():
    generators = {
        "chain_sum": PuzzleGenerator(weight=3.0),
        "leg_counting": PuzzleGenerator(weight=1.0),
    }
    first, again = (dataset(generators, count=2000, seed=5).build() for _ in range(2))
    names = [first[i].info["generator"] for i in range(2000)]
    # 1500 expected, with a standard deviation of sqrt(2000 * 0.75 * 0.25) = 19.4.
    assert abs(names.count("chain_sum") - 1500) < 4 * 19.4
    order = np.random.default_rng(0).permutation(2000)[:20].tolist()
    assert [again[i].env_input for i in order] == [first[i].env_input for i in order]


@pytest.mark.parametrize("name", ["graph_color", "rush_hour"])
def test_a_puzzle_with_many_solutions_names_none(name):
    assert dataset({name: PuzzleGenerator()}).build()[0].info == {"generator": name}


# ---- answers and scores


WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""They have many solutions and name none."""


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"} - WITHOUT_ANSWER))
def test_every_generator_gives_its_own_answer_full_score(name):
    puzzle = dataset({name: PuzzleGenerator()}, count=1).build()[0].env_input
    message = {"role": "assistant", "content": f"<answer>{puzzle.entry['answer']}</answer>"}
    assert solved(said(message), puzzle, exact=False) == 1.0


async def test_right_partly_right_wrong_and_untagged_answers_earn_what_the_generator_says(
    renderer, tokenizer
):
    def reply(entry):
        right = entry["answer"]
        return [
            f"<answer>{right}</answer>",
            f"<answer>it is {right}</answer>",
            "<answer>none</answer>",
            right,
        ]

    task_config = config(rubric=PuzzleRubric.Config(isolated_workers=1))
    group, policy = await run(task_config, renderer, tokenizer, reply)
    entry = group.data_sample.env_input.entry
    # The package's rule for an answer with words around it: the share of characters that are the answer.
    share = len(entry["answer"]) / len("it is " + entry["answer"])
    assert [rollout.reward for rollout in group.rollouts] == [1.0, pytest.approx(share), 0.0, 1.0]
    assert [rollout.reward_components["tagged"] for rollout in group.rollouts] == [
        1.0,
        1.0,
        1.0,
        0.0,
    ]
    prompt = tokenizer.decode(policy.sessions[0].prompts[0])
    assert entry["question"] in prompt and "between <answer> and </answer>.<|im_end|>" in prompt


async def test_where_the_form_is_exact_the_whole_message_is_the_answer(renderer, tokenizer):
    rubric = PuzzleRubric.Config(exact=True, isolated_workers=1)
    task_config = config(rubric=rubric, template="{question}")
    group, _ = await run(
        task_config, renderer, tokenizer, lambda entry: [entry["answer"], entry["answer"] + "0"]
    )
    assert group.rollouts[0].reward == 1.0 and group.rollouts[1].reward < 1.0


async def test_an_answer_that_is_evaluated_can_hang_or_exit_and_only_its_rollout_is_lost(
    renderer, tokenizer
):
    """string_insertion hands the answer to eval; countdown to sympy, which is eval too."""
    task_config = config(
        dataset=dataset({"string_insertion": PuzzleGenerator()}),
        rubric=PuzzleRubric.Config(timeout_s=1.0, isolated_workers=1),
    )

    def reply(entry):
        hang, leave = "[''.join('' for _ in iter(int, 1))]", "[__import__('os')._exit(3)]"
        return [f"<answer>{answer}</answer>" for answer in (hang, leave, entry["answer"], "x")]

    group, _ = await run(task_config, renderer, tokenizer, reply)
    hung, left, right, wrong = group.rollouts
    assert hung.status is left.status is RolloutStatus.ERROR and hung.reward is left.reward is None
    assert hung.error == "reward function 'solved': no answer within 1 s; its process was killed"
    assert left.error == "reward function 'solved': its process died (exit status 3)"
    assert (right.reward, wrong.reward) == (1.0, 0.0)


# ---- config


MISTAKES = {
    "no generators": (
        {"dataset": ReasoningGymDataset.Config(generators={})},
        "tasks.t.dataset.generators = {}: must not be empty; name",
    ),
    "no puzzles": ({"dataset": dataset(count=0)}, "tasks.t.dataset.count = 0: must be at least 1"),
    "no weight": (
        {"dataset": dataset({"chain_sum": PuzzleGenerator(weight=0.0)})},
        "tasks.t.dataset.generators.chain_sum.weight = 0.0: must be above 0",
    ),
    "no question": (
        {"template": "Solve it."},
        "tasks.t.template = 'Solve it.': must be a text that contains {question}",
    ),
    "validation among the training's seeds": (
        {
            "validation": dataset(
                {"chain_sum": PuzzleGenerator(config=SMALL_SUMS, weight=2.0)}, seed=1
            )
        },
        "tasks.t.validation.seed = 1: puzzle i is made from seed + i, and training has seeds 0 to 19: take 20 or more",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_config_that_cannot_work_is_refused_in_one_line_before_a_plan(changes, message):
    with pytest.raises(ConfigError) as error:
        config(**changes).validate(field="tasks.t")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["dataset", "validation"])
@pytest.mark.parametrize(
    ("name", "own", "cause"),
    [
        ("chain_sums", {}, "ValueError: Dataset 'chain_sums' not registered"),
        ("chain_sum", {"terms": 3}, "TypeError: "),
        ("chain_sum", {"min_terms": 0}, "AssertionError: min_terms must be positive"),
        (
            "chain_sum",
            {"seed": 3},
            "TypeError: dict() got multiple values for keyword argument 'seed'",
        ),
        (
            "chain_sum",
            {"size": 3},
            "TypeError: dict() got multiple values for keyword argument 'size'",
        ),
    ],
)
def test_what_the_package_refuses_is_refused_in_one_line_when_the_task_is_built(
    renderer, name, own, cause, part
):
    task_config = config(**{part: dataset({name: PuzzleGenerator(config=own)}, seed=100)})
    with pytest.raises(ConfigError) as error:
        task_config.build(name="gym", context=context_of(renderer))
    cure = "want a name of reasoning_gym.factory.DATASETS, and fields of its config but seed and size, which are the dataset's"
    assert str(error.value).startswith(f"{part}.generators.{name} = {own}: {cure}: {cause}")
    assert "\n" not in str(error.value)


def test_seeds_next_to_each_other_share_puzzles_and_seeds_apart_do_not():
    first, next_to_it, apart = (dataset(seed=seed).build() for seed in (0, 1, 20))
    assert next_to_it[0].env_input.entry["question"] == first[1].env_input.entry["question"]
    config(validation=dataset(seed=20)).validate(field="tasks.t")
    assert apart[0].env_input.entry["question"] != first[19].env_input.entry["question"]


def test_without_the_package_a_plan_is_made_and_a_run_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "torchtitan.experiments.rl.tasks.examples.reasoning_gym.find_spec", lambda name: None
    )
    task_config = config(dataset=dataset({"no_such_generator": PuzzleGenerator()}))
    task_config.validate(field="tasks.t")
    with pytest.raises(
        ConfigError,
        match=r"generators = 'no_such_generator': need reasoning-gym: pip install reasoning-gym",
    ):
        task_config.check_present(field="tasks.t")
