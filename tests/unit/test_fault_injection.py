"""Five hundred groups through two slots, and every way a group can leave: nothing hangs, nothing is lost, every slot is free."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.fakes.contexts import context_of
from tests.fakes.envs import BrokenEnv, TalkingEnv, hang, raise_value_error
from tests.fakes.loops import loops_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.loops.parts import Schedule
from torchtitan.experiments.rl.rollouts.filters import Filter, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task

GROUPS, ROW_LENGTH = 500, 60
FATES = {
    "trained": 6,
    "oversized": 2,
    "ties": 2,
    "late": 2,  # dropped by the filter of the second slot
    "raises in reset": 2,
    "raises in step": 2,
    "one of two fails": 2,
    "hangs": 1,
    "rollout times out": 1,
    "reward fails": 1,
    "half oversized": 1,
}
"""What becomes of a group, and how often. Groups_per_step is 1, so a group that leaves late empties its batch."""


class Fates(Dataset):
    def __init__(self, config):
        rng = random.Random(0)
        self._fates = rng.choices(list(FATES), weights=list(FATES.values()), k=5 * GROUPS)

    def __len__(self):
        return len(self._fates)

    def __getitem__(self, index):
        return DataSample(sample_id=str(index), env_input=self._fates[index])


async def reward(rollout, fate):
    if fate == "reward fails":
        raise ValueError("no answer")
    return 1.0 if fate == "ties" else float(rollout.index_in_group)


class Late(Filter):
    def matches(self, group):
        return [group.data_sample.env_input == "late"] * len(group.scored)


class FatedTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=Fates.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[RewardFn(reward, takes="rollout")])
        )
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(step_timeout_s=0.02, rollout_timeout_s=0.1)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=200))
        group_size: int = 2
        max_retries: int = 0

    async def make_envs(self, sample, n):
        envs = [self.env_of(sample.env_input, index) for index in range(n)]
        self.made += envs
        return envs

    def env_of(self, fate, index):
        if fate == "hangs":
            return BrokenEnv("step_message", hang)
        if fate == "raises in reset" or (fate == "one of two fails" and index == 1):
            return BrokenEnv("reset", raise_value_error)
        if fate == "raises in step":
            return BrokenEnv("step_message", raise_value_error)
        return TalkingEnv(opening=f"{fate} {index}")


def build(renderer, tokenizer, *, steps):
    task = FatedTask.Config().build(name="fated", context=context_of(renderer))
    task.made = []

    def reply(rollout_id: str, turn: int):
        session = next(
            session for session in reversed(policy.sessions) if session.rollout_id == rollout_id
        )
        opening = tokenizer.decode(session.prompts[-1])
        if "rollout times out" in opening:
            return None
        return (
            "x " * 2 * ROW_LENGTH
            if "oversized 0" in opening or opening.count("oversized") > opening.count("half")
            else "ok"
        )

    policy = ScriptedPolicy(tokenizer, reply)
    policy.version = 0
    loops = loops_of(
        task,
        policy=policy,
        schedule=Schedule(steps=steps, rollouts_per_step=2, max_offpolicy_steps=1),
        row_length=ROW_LENGTH,
        filters=[ZeroAdvantage.Config()],
        post_filters=[Late.Config()],
    )
    return task, policy, loops.pacer, loops.rollouts


async def test_groups_leave_by_every_way_and_the_ledger_balances(renderer, tokenizer):
    task, policy, pacer, loop = build(renderer, tokenizer, steps=GROUPS)
    loop.fill()
    trained, version = 0, 0
    while loop.ledger.counts()["fated/dispatched"] < 2 * GROUPS:
        batch = await asyncio.wait_for(loop.next_groups(version), 60)
        assert pacer.free_places >= 0
        trained += sum(len(group.rollouts) for group in batch.groups)
        assert all(version - group.admitted_version <= 1 for group in batch.groups)
        assert {group.data_sample.env_input for group in batch.groups} <= {
            "trained",
            "half oversized",
        }
        loop.trained(batch)  # checks the ledger against what is open
        version += 1
        policy.version = version
        loop.live(version)
    running = len(loop._running)
    await asyncio.wait_for(loop.close(), 60)

    counts = loop.ledger.counts()
    assert running and counts["fated/untrained"] >= running, "the shutdown had something to cancel"
    assert counts["fated/open"] == 0 and counts["fated/trained"] == trained
    ends = Counter({key.removeprefix("fated/"): n for key, n in counts.items()})
    assert sum(ends.values()) - ends["dispatched"] == ends["dispatched"]
    columns = (
        "oversized",
        "filtered/pre/zero_advantage",
        "filtered/post/late",
        "failed/error",
        "failed/timeout",
    )
    assert all(ends[column] >= 20 for column in columns), ends
    assert ends["failed/group_too_small"] >= 20
    assert all(env.closed == 1 for env in task.made) and all(
        session.closed == 1 for session in policy.sessions
    )
    assert pacer.free_places + 2 * len(pacer._groups) == 4


async def test_places_are_all_free_when_everything_dispatched_was_trained(renderer, tokenizer):
    _, policy, pacer, loop = build(renderer, tokenizer, steps=30)
    loop.fill()
    for version in range(30):
        loop.trained(await asyncio.wait_for(loop.next_groups(version), 60))
        policy.version = version + 1
        loop.live(version + 1)
    assert pacer.free_places == 4 and loop.ledger.open("fated") == 0
    await loop.close()
    assert "fated/untrained" not in loop.ledger.counts()
