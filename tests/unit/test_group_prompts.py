"""A group's first prompt is rendered once, and equal answers to it are parsed once; nothing else is shared."""

import asyncio

import numpy as np
import pytest
from renderers import RenderedTokens

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.envs import TalkingEnv
from tests.fakes.policy import ScriptedPolicy, completion_of
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.envs.conversation import SHORT_COMPLETION
from torchtitan.experiments.rl.envs.prompt import GroupPrompts, first_prompt
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.task import Task


class CountingRenderer:
    """The renderer, with the calls that reach it."""

    def __init__(self, renderer):
        self._renderer, self.calls = renderer, []

    def __getattr__(self, name):
        method = getattr(self._renderer, name)
        if name not in ("render", "parse_response"):
            return method

        def call(*args, **kwargs):
            self.calls.append(name)
            return method(*args, **kwargs)

        return call


@pytest.fixture
def group(renderer):
    """Makes the RendererEnvs of a group, which share a renderer that counts."""
    counting, prompts = CountingRenderer(renderer), GroupPrompts()

    def make(*envs):
        config = RendererEnvConfig(step_timeout_s=30.0)
        return [
            RendererEnv(message_env=env, renderer=counting, config=config, group=prompts)
            for env in envs
        ], counting.calls

    return make


async def test_equal_conversations_are_rendered_once_and_others_by_themselves(group):
    envs, calls = group(*(TalkingEnv(opening=text) for text in ("one", "two", "one", "one", "two")))
    await asyncio.gather(*(env.initial_prompt() for env in envs))
    assert calls == ["render", "render"]
    assert envs[0].prompt_token_ids is envs[2].prompt_token_ids is envs[3].prompt_token_ids
    assert envs[1].prompt_token_ids is envs[4].prompt_token_ids
    assert envs[0].prompt_token_ids.tolist() != envs[1].prompt_token_ids.tolist()


async def test_shared_prompt_is_the_one_that_each_rollout_would_have_rendered_and_read_only(
    group, renderer
):
    (first, second), _ = group(TalkingEnv(), TalkingEnv())
    alone = RendererEnv(message_env=TalkingEnv(), renderer=renderer, config=RendererEnvConfig())
    for env in (first, second, alone):
        await env.initial_prompt()
    assert second.prompt_token_ids.tolist() == alone.prompt_token_ids.tolist()
    with pytest.raises(ValueError, match="read-only"):
        second.prompt_token_ids[0] = 0


async def test_equal_answers_are_parsed_once_and_nobody_can_change_the_message_they_share(
    group, tokenizer
):
    envs, calls = group(*(TalkingEnv() for _ in range(4)))
    texts = ("a", "b", "a", "a")
    for env, text in zip(envs, texts, strict=True):
        await env.initial_prompt()
        await env.step_completion(completion_of(tokenizer, text))
    assert calls.count("parse_response") == 2
    messages = [env.turns[0].assistant_message for env in envs]
    assert [message["content"] for message in messages] == list(texts)
    with pytest.raises(TypeError, match="read-only"):
        messages[0]["content"] = "changed"


async def test_long_answers_and_later_turns_are_parsed_one_by_one(group, tokenizer):
    envs, calls = group(TalkingEnv(turns=2), TalkingEnv(turns=2))
    long = "x" * (SHORT_COMPLETION + 1)
    for env in envs:
        await env.initial_prompt()
        await env.step_completion(completion_of(tokenizer, long))
        assert env.status is RolloutStatus.ONGOING
        await env.step_completion(completion_of(tokenizer, "a"))
    assert calls.count("parse_response") == 4


async def test_renderer_that_fails_is_asked_again_by_the_next_rollout(group):
    class Fails(CountingRenderer):
        def render(self, *args, **kwargs):
            self.calls.append("render")
            if len(self.calls) == 1:
                raise RuntimeError("busy")
            return self._renderer.render(*args, **kwargs)

    (first, second), calls = group(TalkingEnv(), TalkingEnv())
    failing = Fails(first._conversation._renderer)
    first._conversation._renderer = second._conversation._renderer = failing
    await first.initial_prompt()
    await second.initial_prompt()
    assert first.status is RolloutStatus.ERROR and second.status is RolloutStatus.ONGOING
    assert failing.calls == ["render", "render"] and isinstance(second.prompt_token_ids, np.ndarray)


RUBRIC = Rubric.Config(reward_fns=[env_component("steps")])


class NotedTask(Task):
    def make_env(self, sample):
        self.noted.append("env")
        return TalkingEnv()


async def test_first_requests_leave_before_the_envs_of_many_other_groups_are_made(
    renderer, tokenizer
):
    config = NotedTask.Config(
        algorithm=GRPO.Config(), dataset=Numbers.Config(), rubric=RUBRIC, group_size=2
    )
    task = config.build(name="talk", context=context_of(renderer))
    noted = task.noted = []

    def reply(rollout_id, turn):
        noted.append("request")
        return "ok"

    policy = ScriptedPolicy(tokenizer, reply)
    groups = (
        task.run_group(task.dataset[0], policy, group_id=f"talk-{number}", seed=0)
        for number in range(40)
    )
    await asyncio.gather(*groups)
    assert len(noted) == 160
    assert noted[: noted.index("request")].count("env") < 40  # of 80


def test_a_prompt_with_fewer_roles_than_tokens_is_refused():
    rendered = RenderedTokens(
        token_ids=[5, 6], message_indices=[0], is_content=[True, True], message_roles=["user"]
    )
    with pytest.raises(ValueError, match="1 roles for 2 token ids"):
        first_prompt(rendered)
