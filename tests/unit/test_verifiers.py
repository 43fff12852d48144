"""Environments of the verifiers package as tasks: their loops, tools and rubrics, our tokens."""

import asyncio
import json
import logging
import signal
import sys
import threading

import numpy as np
import pytest

from tests.unit.agents import assert_accounted
from tests.unit.rollout_stubs import ScriptedPolicy, completion_of
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.verifiers import VerifiersDataset, VerifiersTask

MODULE = '''
"""What a user of verifiers writes: an environment's module, with nothing of this library in it."""

import asyncio
import sys
import threading
import time

import verifiers as vf
from datasets import Dataset

THREADS = []
CLEANED = []


def rows(count=3):
    return Dataset.from_list([{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)])


def exact(completion, answer):
    THREADS.append(threading.current_thread() is threading.main_thread())
    said = [message.content for message in completion if message.role == "assistant"]
    return float(said[-1] == answer)


async def length(completion):
    return len(completion[-1].content or "")


class Hints(vf.MultiTurnEnv):
    """Says "wrong" until the answer is right, and "right" at last."""

    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "wrong"}]

    @vf.cleanup
    async def note(self, state):
        CLEANED.append(state["trajectory_id"])


class Rewriting(Hints):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if not state["trajectory"] else [vf.UserMessage(content="Forget it."), *messages[1:]]


class Broken(Hints):
    """Does what its subclass says in the env's turn."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    async def env_response(self, messages, state, **kwargs):
        match self.how:
            case "raises":
                raise KeyError("lost")
            case "fails":
                raise vf.ToolCallError("no such tool") from ValueError("bad value")
            case "exits":
                sys.exit(3)
            case "hangs":
                await asyncio.sleep(3600)
            case "changes tools":
                state["tool_defs"] = [vf.Tool(name="new", description="", parameters={})]
                return [{"role": "user", "content": "more"}]
            case "asks twice":
                prompt = [*messages, vf.UserMessage(content="and?")]
                await asyncio.gather(*(self.get_model_response(state, prompt) for _ in range(2)))


def lookup(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    if city == "Atlantis":
        raise LookupError("under water")
    return f"{city}: sunny"


def raising(completion):
    raise ValueError("no score")


def not_a_number(completion):
    return float("nan")


def hanging(completion):
    time.sleep(3)
    return 1.0


def best(completions):
    return [1.0 for _ in completions]


def load_environment(kind="single", count=3, **kwargs):
    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0])
    common = {"dataset": rows(count), "rubric": rubric}
    match kind:
        case "single":
            return vf.SingleTurnEnv(system_prompt="Just the number.", eval_dataset=rows(2), **common)
        case "hints":
            return Hints(max_turns=3, **common)
        case "rewriting":
            return Rewriting(max_turns=3, **common)
        case "broken":
            return Broken(max_turns=3, **kwargs, **common)
        case "slow":
            return Broken(how="hangs", max_turns=3, timeout_seconds=0.2, **common)
        case "tools":
            return vf.ToolEnv(tools=[lookup], max_turns=4, **common)
        case "group":
            return vf.EnvGroup([vf.SingleTurnEnv(**common), Hints(max_turns=3, **common)], env_names=["a", "b"])
        case "unscored":
            return vf.SingleTurnEnv(score_rollouts=False, **common)
        case _:
            rubric.add_reward_func(globals()[kind])
            return vf.SingleTurnEnv(**common)
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "toy_environments.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def config(kind="single", *, env=None, sampling=None, rubric=None, **args):
    task = VerifiersTask.Config(
        algorithm=GRPO.Config(),
        group_size=2,
        max_retries=0,
        dataset=VerifiersDataset.Config(environment="toy-environments", args={"kind": kind, **args}),
        env=env or RendererEnvConfig(max_turns=8, max_rollout_tokens=2048, step_timeout_s=20),
    )
    task.sampling, task.rubric = sampling or task.sampling, rubric or task.rubric
    return task


async def run(task_config, renderer, tokenizer, replies, *, index=0, size=1):
    """A group in which every rollout gets the same replies, in turn."""
    task = task_config.build(name="v", renderer=renderer)
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    await task.setup(policy)
    group = await task.run_group(task.dataset[index], policy, group_id="g", seed=0, group_size=size)
    task.failure = await task.score_group(group)
    await task.close()
    for rollout in group.rollouts:
        assert_accounted(rollout)
    return task, policy, group.rollouts


def call(city):
    return f'<tool_call>\n{{"name": "lookup", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def assert_trained_as_sampled(rollout, session, tokenizer, replies):
    """One sample per rollout, whose trained ids, logprobs and versions are those of the session's completions, in order."""
    (sample,) = rollout.samples
    sampled = [completion_of(tokenizer, reply, version=3) for reply in replies]
    ids = np.concatenate([completion.token_ids for completion in sampled])
    assert sample.token_ids[sample.loss_mask].tolist() == ids.tolist()
    logprobs = np.concatenate([completion.logprobs for completion in sampled])
    assert sample.generator_logprobs[sample.loss_mask].tolist() == logprobs.tolist()
    assert set(sample.policy_versions[sample.loss_mask].tolist()) == {3}
    # And what the policy was given each time is what the sample has before it.
    for turn, prompt in zip(rollout.turns, session.prompts, strict=True):
        assert turn.prompt_token_ids.tolist() == prompt == sample.token_ids[: len(prompt)].tolist()


# ---- conversations


async def test_a_single_turn_is_trained_as_sampled_and_earns_what_the_rubric_says(renderer, tokenizer):
    task, policy, (right, other) = await run(config(), renderer, tokenizer, ["1"], size=2)
    assert task.failure is None and (right.status, right.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert right.reward_components == {"reward": 1.0, "env/exact": 1.0, "env/length": 1.0, "env/num_turns": 1.0}
    assert_trained_as_sampled(right, policy.sessions[0], tokenizer, ["1"])
    prompt = tokenizer.decode(policy.sessions[0].prompts[0])
    assert "system\nJust the number.<|im_end|>" in prompt and "user\nWhat is 0 + 1?<|im_end|>" in prompt
    _, _, (wrong,) = await run(config(), renderer, tokenizer, ["seven"], index=1)
    assert (wrong.reward, wrong.reward_components["env/length"]) == (0.0, 5.0)


async def test_many_turns_are_one_sample_and_the_environment_ends_them(renderer, tokenizer):
    replies = ["5", "4", "2"]
    task, policy, (rollout,) = await run(config("hints"), renderer, tokenizer, replies, index=1)
    # Its third and last turn: max_turns of the environment, so it never says "right".
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert [turn.prompt_messages[-1]["content"] for turn in rollout.turns] == ["What is 1 + 1?", "wrong", "wrong"]
    assert_trained_as_sampled(rollout, policy.sessions[0], tokenizer, replies)
    _, _, (early,) = await run(config("hints"), renderer, tokenizer, ["2"], index=1)
    assert early.reward == 1.0 and len(early.turns) == 1


async def test_tools_are_shown_called_and_answered_and_their_errors_too(renderer, tokenizer):
    replies = [call("Oslo"), call("Atlantis"), "1"]
    _, policy, (rollout,) = await run(config("tools"), renderer, tokenizer, replies)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert '"name": "lookup"' in tokenizer.decode(policy.sessions[0].prompts[0])
    answers = [message for message in rollout.turns[-1].prompt_messages if message["role"] == "tool"]
    assert [(answer["name"], answer["content"]) for answer in answers] == [("lookup", "Oslo: sunny"), ("lookup", "under water")]
    assert_trained_as_sampled(rollout, policy.sessions[0], tokenizer, replies)
    assert rollout.reward_components["env/lookup_calls"] == 2.0


async def test_thoughts_go_through_the_environment_and_back_and_no_sampled_token_is_lost(renderer, tokenizer):
    replies = ["<think>\nhm\n</think>\n\n5", "<think>\nlower\n</think>\n\n2"]
    _, _, (rollout,) = await run(config("hints"), renderer, tokenizer, replies, index=1)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert [turn.assistant_message["reasoning_content"] for turn in rollout.turns] == ["hm", "lower"]
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in rollout.samples]
    assert sum(trained, []) == [id for reply in replies for id in completion_of(tokenizer, reply).token_ids]


async def test_a_malformed_call_is_text_and_ends_the_conversation_as_verifiers_has_it(renderer, tokenizer):
    _, _, (rollout,) = await run(config("tools"), renderer, tokenizer, ["<tool_call>\n{nonsense\n</tool_call>"])
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (RolloutStatus.COMPLETED, 0.0, 1)


async def test_an_empty_answer_is_judged_like_any_other(renderer, tokenizer):
    _, _, (rollout,) = await run(config(), renderer, tokenizer, [""])
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.0)


async def test_a_group_of_environments_plays_each_rows_own(renderer, tokenizer):
    task, _, (single,) = await run(config("group"), renderer, tokenizer, ["1"])
    _, _, (hints,) = await run(config("group"), renderer, tokenizer, ["5", "1"], index=3)
    assert len(task.dataset) == 6
    assert (single.reward, len(single.turns)) == (1.0, 1) and (hints.reward, len(hints.turns)) == (1.0, 2)


async def test_many_rollouts_at_once_keep_to_their_own_conversations(renderer, tokenizer):
    task = config("hints").build(name="v", renderer=renderer)
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: f"{rollout_id} {turn}" if turn < 2 else "2")
    await task.setup(policy)
    group = await task.run_group(task.dataset[1], policy, group_id="g", seed=0, group_size=32)
    assert await task.score_group(group) is None
    await task.close()
    for rollout, session in zip(group.rollouts, policy.sessions, strict=True):
        assert_trained_as_sampled(rollout, session, tokenizer, [f"{rollout.rollout_id} {turn}" for turn in range(2)] + ["2"])
        assert rollout.reward == 1.0 and session.closed == 1


# ---- limits and failures


async def test_a_completion_cut_off_is_kept_and_earns_what_the_config_says(renderer, tokenizer):
    short = SamplingConfig(max_tokens=2)
    _, _, (rollout,) = await run(config(sampling=short), renderer, tokenizer, ["a long answer"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED_LENGTH, 0.0)
    assert rollout.samples[0].loss_mask.sum() == 2
    rubric = Rubric.Config(reward_fns=[env_component("reward")], truncation_reward=-1.0)
    _, _, (rollout,) = await run(config(sampling=short, rubric=rubric), renderer, tokenizer, ["a long answer"])
    assert rollout.reward == -1.0


async def test_our_turn_limit_ends_the_environments_loop_and_its_cleanup_runs(renderer, tokenizer):
    import toy_environments

    cleaned = len(toy_environments.CLEANED)
    env = RendererEnvConfig(max_turns=2, max_rollout_tokens=2048)
    _, _, (rollout,) = await run(config("hints", env=env), renderer, tokenizer, ["5", "4"], index=1)
    assert rollout.status is RolloutStatus.TRUNCATED_MAX_TURNS and len(rollout.turns) == 2
    assert len(toy_environments.CLEANED) == cleaned + 1


BROKEN = {
    "raises": "KeyError: 'lost'",
    "fails": "the environment's rollout failed: ToolCallError: no such tool",
    "exits": "SystemExit: 3",
}


@pytest.mark.parametrize(("how", "cause"), BROKEN.items(), ids=BROKEN)
async def test_an_environment_that_fails_is_an_error_with_its_cause_and_keeps_what_was_sampled(how, cause, renderer, tokenizer):
    _, _, (rollout,) = await run(config("broken", how=how), renderer, tokenizer, ["5", "6"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.ERROR, None) and cause in rollout.error
    assert len(rollout.turns) == 1


@pytest.mark.parametrize(("kind", "how"), [("broken", "changes tools"), ("broken", "asks twice"), ("rewriting", None)])
async def test_what_begins_another_conversation_is_another_sample(kind, how, renderer, tokenizer):
    args = {} if how is None else {"how": how}
    policy = ScriptedPolicy(tokenizer, "5")
    task = config(kind, **args, env=RendererEnvConfig(max_turns=4, max_rollout_tokens=2048)).build(name="v", renderer=renderer)
    await task.setup(policy)
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=1)
    await task.close()
    (rollout,) = group.rollouts
    assert_accounted(rollout)
    assert len(rollout.turns) >= 3 and len(rollout.samples) >= 2


async def test_an_environment_that_hangs_is_a_timeout_and_its_loop_is_ended(renderer, tokenizer):
    env = RendererEnvConfig(max_turns=8, max_rollout_tokens=2048, rollout_timeout_s=1.0)
    before = asyncio.all_tasks()
    _, _, (rollout,) = await run(config("broken", how="hangs", env=env), renderer, tokenizer, ["5"])
    assert rollout.status is RolloutStatus.TIMEOUT and "took longer than 1 s" in rollout.error
    assert asyncio.all_tasks() == before


async def test_the_environments_own_time_limit_is_an_error_that_names_it(renderer, tokenizer):
    _, _, (rollout,) = await run(config("slow"), renderer, tokenizer, ["5"])
    assert rollout.status is RolloutStatus.ERROR and "time limit (timeout_seconds) ran out" in rollout.error


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raising", "reward function 'raising': ValueError: no score"),
        ("not_a_number", "reward function 'not_a_number' returned 'nan', want a finite number"),
    ],
)
async def test_a_reward_function_that_fails_is_an_error_where_verifiers_counts_0(kind, cause, renderer, tokenizer):
    _, _, (rollout,) = await run(config(kind), renderer, tokenizer, ["1"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.ERROR, None) and cause in rollout.error


async def test_sync_reward_functions_run_in_threads_and_late_ones_time_out(renderer, tokenizer):
    import toy_environments

    toy_environments.THREADS.clear()
    await run(config(), renderer, tokenizer, ["1"])
    assert toy_environments.THREADS == [False]
    env = RendererEnvConfig(max_turns=8, max_rollout_tokens=2048, rollout_timeout_s=1.0)
    _, _, (rollout,) = await run(config("hanging", env=env), renderer, tokenizer, ["1"])
    assert rollout.status is RolloutStatus.TIMEOUT


# ---- loading


def test_rows_are_the_environments_own_and_the_eval_split_too():
    train = VerifiersDataset.Config(environment="toy-environments", args={"count": 5}).build()
    assert len(train) == 5 and train[2].info == {"demonstration": "3"}
    assert train[2].env_input["prompt"][-1] == {"role": "user", "content": "What is 2 + 1?"}
    assert len(VerifiersDataset.Config(environment="owner/toy_environments", split="eval").build()) == 2
    assert len(VerifiersDataset.Config(environment="toy-environments", count=1).build()) == 1


def test_one_environment_serves_training_and_validation(renderer):
    task_config = config()
    task_config.validation = VerifiersDataset.Config(environment="toy_environments", args={"kind": "single"}, split="eval")
    task_config.validate(field="tasks.v")
    task = task_config.build(name="v", renderer=renderer)
    assert len(task.validation) == 2 and task.config.dataset.load() is task.environment


def test_loading_leaves_the_signal_handlers_alone_and_works_in_any_thread():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loaded = []
    dataset = VerifiersDataset.Config(environment="toy-environments", args={"kind": "single", "count": 4})
    thread = threading.Thread(target=lambda: loaded.append(dataset.load()))
    thread.start()
    thread.join()
    assert len(loaded) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert logging.getLogger("verifiers").propagate


MISTAKES = {
    "compares rollouts": ({"kind": "best"}, "dataset.environment = 'toy-environments': its rubric compares rollouts"),
    "does not score": ({"kind": "unscored"}, "dataset.environment = 'toy-environments': it is set not to score rollouts"),
    "fails to load": ({"kind": "nothing"}, "dataset.environment = 'toy-environments': can't be loaded: KeyError: 'nothing'"),
}


@pytest.mark.parametrize(("args", "message"), MISTAKES.values(), ids=MISTAKES)
def test_an_environment_that_cannot_be_trained_on_is_refused_in_one_line(args, message):
    with pytest.raises(ConfigError) as error:
        VerifiersDataset.Config(environment="toy-environments", args=args).build()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_missing_eval_dataset_is_not_replaced_by_the_training_rows():
    with pytest.raises(ConfigError, match=r"dataset.split = 'eval': environment toy-environments has no such dataset"):
        VerifiersDataset.Config(environment="toy-environments", args={"kind": "hints"}, split="eval").build()


def test_what_is_missing_is_said_before_a_run(monkeypatch):
    task_config = config()
    task_config.check_present(field="tasks.v")
    task_config.dataset.environment = "owner/no-such-environment"
    task_config.validate(field="tasks.v")
    with pytest.raises(ConfigError, match=r"tasks.v.dataset.environment = .*: no module 'no_such_environment': install"):
        task_config.check_present(field="tasks.v")
    monkeypatch.setattr("torchtitan.experiments.rl.tasks.verifiers.version", lambda name: "0.4.0")
    with pytest.raises(ConfigError, match=r"verifiers 0.4.0 can't load it: pip install verifiers==0.3.1"):
        config().check_present(field="tasks.v")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": "owner/"}, "tasks.v.dataset.environment = 'owner/': name the environment's module"),
        ({"args": {"kind": json}}, "tasks.v.dataset.args = "),
        ({"count": 0}, "tasks.v.dataset.count = 0: must be at least 1"),
        (
            {"args": {"kind": "hints"}},
            "tasks.v.validation.environment = 'toy-environments': must be 'toy-environments' with the",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_a_plan(change, message):
    task_config = config()
    task_config.validation = VerifiersDataset.Config(environment="toy-environments", args={"kind": "single"}, split="eval")
    task_config.validate(field="tasks.v")
    for name, value in change.items():
        setattr(task_config.dataset, name, value)
    with pytest.raises(ConfigError) as error:
        task_config.validate(field="tasks.v")
    assert str(error.value).startswith(message)
