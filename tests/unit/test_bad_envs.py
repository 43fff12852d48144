"""Envs as bad as users' envs get, through the real task and rollout loop: the run goes on, and trains on nothing of theirs."""

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.envs import FAILURES, BrokenEnv, TalkingEnv, answer_with
from tests.fakes.loops import loops_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.loops.groups import ClaimedGroup
from torchtitan.experiments.rl.loops.parts import Schedule
from torchtitan.experiments.rl.rollouts.filters import Truncated
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task

STEP_LIMIT_S = 0.2


def million(role: str = "user") -> list[dict]:
    return [{"role": role, "content": "x" * 10**6}]


class SyncBroken(MessageEnv):
    """Plain functions; ``what`` is done in ``where``."""

    def __init__(self, where, what):
        self.where, self.what, self.closed = where, what, 0

    def reset(self):
        if self.where == "reset":
            return self.what()
        return ResetOutput(messages=[{"role": "user", "content": "start"}])

    def step_message(self, message):
        return self.what()

    def close(self):
        self.closed += 1


class CloseBroken(TalkingEnv):
    """Fails when it is closed, as it earlier did not."""

    async def close(self):
        self.closed += 1
        sys.exit("closing time")


def raise_import_error():
    import no_such_package  # noqa: F401


def failing(name: str, where: str):
    what, status, cause = FAILURES[name]
    return lambda: BrokenEnv(where, what), f"failed/{status}", cause


KINDS = {
    **{f"{name} in {where}": failing(name, where) for name in FAILURES for where in ("reset", "step_message")},
    "imports what is not there": (lambda: BrokenEnv("reset", raise_import_error), "failed/error", "no_such_package"),
    "interrupts": (lambda: BrokenEnv("step_message", lambda: (_ for _ in ()).throw(KeyboardInterrupt)), "failed/error", "Keyb"),
    "runs out of stack": (lambda: BrokenEnv("step_message", lambda: recursion()), "failed/error", "RecursionError"),
    "NaN as a reward": (
        lambda: BrokenEnv("step_message", answer_with(reward_components={"r": float("nan")})), "failed/error", "nan",
    ),
    "a string for done": (lambda: BrokenEnv("step_message", answer_with(done="no")), "failed/error", "done is 'no'"),
    "no messages": (lambda: BrokenEnv("step_message", answer_with(env_messages="hi")), "failed/error", "list of mess"),
    "a million characters in reset": (
        lambda: BrokenEnv("reset", lambda: ResetOutput(messages=million())), "failed/truncated_prompt_overflow", "",
    ),
    "a million characters in a step": (
        lambda: BrokenEnv("step_message", answer_with(env_messages=million("tool"))), "filtered/pre/truncated", "",
    ),
    "sync, raises": (lambda: SyncBroken("reset", lambda: 1 / 0), "failed/error", "ZeroDivisionError"),
    "sync, exits": (lambda: SyncBroken("step_message", lambda: sys.exit(0)), "failed/error", "SystemExit"),
    "sync, hangs": (lambda: SyncBroken("step_message", lambda: time.sleep(3 * STEP_LIMIT_S)), "failed/timeout", "no answer"),
    "make_env raises": (lambda: 1 / 0, "failed/error", "ZeroDivisionError"),
    "make_env exits": (lambda: sys.exit(1), "failed/error", "SystemExit"),
    "make_env returns no env": (lambda: "env", "failed/error", "want a list of"),
    "close exits": (CloseBroken, "trained", ""),
}  # fmt: skip
"""What a kind of env is, the ledger's column for its rollouts, and a part of the cause."""

ALL_FAIL = ("make_env raises", "make_env exits", "make_env returns no env")
"""Without envs a group has no rollouts that behave."""


def recursion():
    return recursion()


class Kinds(Dataset):
    """Each kind once, in order."""

    def __len__(self):
        return len(KINDS)

    def __getitem__(self, index):
        return DataSample(sample_id=str(index), env_input=list(KINDS)[index])


async def good_is_better(rollout, kind):
    return rollout.index_in_group / 4


class BadTask(Task):
    """Of four envs of a group the first two behave."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=Kinds.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(
                reward_fns=[RewardFn(good_is_better, takes="rollout")]
            )
        )
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(step_timeout_s=STEP_LIMIT_S)
        )
        group_size: int = 4

    async def make_envs(self, sample, n):
        make = KINDS[sample.env_input][0]
        # A rollout that failed is run again, alone, in an env that is as bad.
        envs = [TalkingEnv() if n == 4 and index < 2 else make() for index in range(n)]
        self.made += [env for env in envs if isinstance(env, MessageEnv)]
        return envs


@pytest.fixture
def loop(renderer, tokenizer, tmp_path):
    task = BadTask.Config().build(name="bad", context=context_of(renderer))
    task.made = []
    # In the order of KINDS.
    task.sampler.next = iter(task.dataset[index] for index in range(len(KINDS))).__next__
    policy = ScriptedPolicy(tokenizer)
    policy.version = 0
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    rollouts_per_step = 4 * (len(KINDS) - len(ALL_FAIL))
    loop = loops_of(
        task,
        policy=policy,
        schedule=Schedule(steps=1, rollouts_per_step=rollouts_per_step, max_offpolicy_steps=0),
        row_length=1024,
        filters=[Truncated.Config()],
        recorder=recorder,
    ).rollouts
    loop.task, loop.session_policy, loop.recorder = task, policy, recorder
    return loop


async def test_each_is_counted_under_its_cause_closed_once_and_never_trained_on(loop, tmp_path):
    loop.fill()
    batch = await asyncio.wait_for(loop.next_groups(0), 60)
    loop.trained(batch)
    counts = loop.ledger.counts()
    await loop.close()
    loop.recorder.close()

    columns = Counter(
        column
        for kind, (_, column, _) in KINDS.items()
        for _ in range(4 if kind in ALL_FAIL else 2)
    )
    columns["trained"] += 2 * (len(KINDS) - len(ALL_FAIL))
    assert {key.removeprefix("bad/"): n for key, n in counts.items()} == {
        **columns, "dispatched": 4 * len(KINDS), "open": 0
    }  # fmt: skip

    for group in batch.groups:
        kind = group.data_sample.env_input
        trained = [0, 1, 2, 3] if kind == "close exits" else [0, 1]
        assert [rollout.index_in_group for rollout in group.rollouts] == trained, kind
        # The mean is of the rollouts that count: 0 and 1/4, whose advantages are minus and plus 1/8.
        if kind not in ("close exits", "a million characters in a step"):
            advantages = [rollout.samples[0].advantages[-1].item() for rollout in group.rollouts]
            assert advantages == [-0.125, 0.125], kind

    records = list(read_rollouts(tmp_path))
    assert len(records) == 4 * len(KINDS)
    for record in records:
        _, column, cause = KINDS[record.rollout.data_sample.env_input]
        if record.rollout.index_in_group >= 2:
            assert record.outcome == column and cause in (record.rollout.error or ""), record
            assert (
                column == "filtered/pre/truncated"
                or column == "trained"
                or record.rollout.reward is None
            )

    assert all(env.closed == 1 for env in loop.task.made)
    assert all(session.closed == 1 for session in loop.session_policy.sessions)


async def test_opening_prompt_that_overflows_is_in_no_statistic_even_with_a_truncation_reward(
    renderer, tokenizer
):
    task = BadTask.Config(
        rubric=Rubric.Config(
            reward_fns=[RewardFn(good_is_better, takes="rollout")], truncation_reward=-1.0
        )
    ).build(name="bad", context=context_of(renderer))
    task.made = []
    index = list(KINDS).index("a million characters in reset")
    group = await task.run_group(
        task.dataset[index], ScriptedPolicy(tokenizer), group_id="g", seed=0
    )
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 0.25, None, None]
    index = list(KINDS).index("a million characters in a step")
    group = await task.run_group(
        task.dataset[index], ScriptedPolicy(tokenizer), group_id="g", seed=0
    )
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 0.25, -1.0, -1.0]


async def test_env_that_hangs_holds_up_no_other(loop):
    loop.task.config.env.step_timeout_s = 30.0
    hanging = [kind for kind in KINDS if "hang" in kind]
    others = [kind for kind in KINDS if kind not in hanging]
    loop.task.sampler.next = iter(
        [DataSample(sample_id=kind, env_input=kind) for kind in [*hanging, *others]]
    ).__next__
    loop.fill()
    async with asyncio.timeout(20):
        while sum(isinstance(group, ClaimedGroup) for group in loop._buffer) > len(hanging):
            await asyncio.sleep(0.01)
    await loop.close()
    loop.recorder.close()
    assert all(env.closed == 1 for env in loop.task.made)
