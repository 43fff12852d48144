"""Honest user code: two tasks, "good" and "bad", whose rollouts talk for two turns. A case replaces one method in "bad".

Rewards by index in the group are 0, 1, 0.5 and 0.5. Their mean is 0.5 with and without the last two, so the first two have the
same advantages whether the others are excluded or not: what is trained of them can be compared with an honest run.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from renderers import Message

from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.data.task_mix import WeightedRoundRobin
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion, DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task

GROUP_SIZE, TURNS, EXAMPLES = 4, 2, 8
REWARDS = (0.0, 1.0, 0.5, 0.5)
LIMIT_S = 20.0
"""Of every call, so that no honest one is late on a busy machine."""
STEP_LIMIT_S, ROLLOUT_LIMIT_S = 0.2, 0.6
"""In task "bad", where a case is about being late."""


class World:
    """What happened in this process."""

    def __init__(self) -> None:
        self.envs: list[HonestEnv] = []
        self.sessions: list[HonestSession] = []
        self.tasks_set_up: list[str] = []
        self.tasks_closed: list[str] = []
        self.closing: list[str] = []
        """Tasks whose close was called and misbehaved."""
        self.calls = 0
        """Of the method that the case replaces, where it misbehaves."""


WORLD = World()


class HonestEnv(MessageEnv):
    def __init__(self, sample: DataSample, index: int | None, task_name: str):
        self.sample, self.index, self.task_name = sample, index, task_name
        self.answers = self.closed = 0
        WORLD.envs.append(self)

    async def reset(self) -> ResetOutput:
        return ResetOutput(
            messages=[{"role": "user", "content": self.sample.env_input["question"]}]
        )

    async def step_message(self, message: Message) -> StepOutput:
        self.answers += 1
        more: list[Message] = [{"role": "user", "content": "more"}]
        return StepOutput(
            env_messages=more,
            done=self.answers == TURNS,
            reward_components={"earned": REWARDS[self.index or 0] / TURNS},
        )

    async def close(self) -> None:
        self.closed += 1


class UncountedEnv(HonestEnv):
    """For a culprit whose close is counted when it is called, by ``count_close``."""

    async def close(self) -> None:
        pass


def count_close(env: HonestEnv) -> bool:
    env.closed += 1
    return True


def note_closing(task: Any) -> bool:
    WORLD.closing.append(task.name)
    return True


def forget(*envs: Any) -> None:
    """Envs that were made and not handed to the library: it has none of them to close."""
    WORLD.envs[:] = [env for env in WORLD.envs if not any(env is gone for gone in envs)]


class HonestDataset(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        task_name: str = "good"

    config: Config

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> DataSample:
        if not 0 <= index < EXAMPLES:
            raise IndexError(index)
        question = f"{self.config.task_name} question {index}"
        return DataSample(
            sample_id=str(index), env_input={"question": question}, info={"demonstration": "so"}
        )


async def honest_reward(rollout, env_input) -> float:
    return REWARDS[rollout.index_in_group]


async def honest_rewards(rollouts, env_input) -> list[float]:
    return [REWARDS[rollout.index_in_group] for rollout in rollouts]


class HonestRubric(Rubric):
    pass


class HonestAlgorithm(GRPO):
    pass


class HonestSampler(ShuffledCursor):
    pass


class HonestMix(WeightedRoundRobin):
    pass


class HonestFilter(Filter):
    def matches(self, group) -> list[bool]:
        return [False] * len(group.scored)


class HonestTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=HonestAlgorithm.Config)
        dataset: Dataset.Config = field(default_factory=HonestDataset.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: HonestRubric.Config(
                reward_fns=[RewardFn(honest_reward, takes="rollout")], timeout_s=LIMIT_S
            )
        )
        sampler: SampleStrategy.Config = field(default_factory=HonestSampler.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(
                step_timeout_s=LIMIT_S, rollout_timeout_s=LIMIT_S, max_rollout_tokens=256
            )
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=16))
        group_size: int = GROUP_SIZE
        max_retries: int = 1

    env_class = HonestEnv

    def make_env(self, sample: DataSample) -> MessageEnv:
        return HonestEnv(sample, None, self.name)

    async def make_envs(self, sample: DataSample, n: int) -> list[MessageEnv]:
        # A retry asks for one env, and only culprits are run again: envs 2 and 3 of a group.
        indices = range(n) if n == GROUP_SIZE else [GROUP_SIZE - 1] * n
        return [self.env_of(sample, index) for index in indices]

    def env_of(self, sample: DataSample, index: int) -> MessageEnv:
        return (self.env_class if index >= 2 else HonestEnv)(sample, index, self.name)

    async def setup(self, policy) -> None:
        await super().setup(policy)
        WORLD.tasks_set_up.append(self.name)

    async def close(self) -> None:
        WORLD.tasks_closed.append(self.name)


class HonestPolicy:
    """Implements rollouts.policy.PolicyClient: every rollout says a text that depends on its index and the turn."""

    session_class: "type[HonestSession]"

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.version, self.generated_tokens = tokenizer, 0, 0

    def session(self, *, rollout_id, seed, sampling, stop_token_ids) -> "HonestSession":
        WORLD.sessions.append(self.session_class(self, rollout_id, stop_token_ids[0]))
        return WORLD.sessions[-1]

    def frozen(self, model) -> "HonestPolicy":
        return self

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        await asyncio.sleep(0)
        return np.where(np.arange(len(token_ids)) > 0, -0.5, 0).astype(np.float32)


class HonestSession:
    def __init__(self, policy: HonestPolicy, rollout_id: str, stop: int):
        self.policy, self.rollout_id, self.stop = policy, rollout_id, stop
        self.turn = self.closed = 0

    @property
    def index(self) -> int:
        return int(self.rollout_id.rpartition("/")[2].partition("~")[0])

    @property
    def task_name(self) -> str:
        return self.rollout_id.partition("-")[0]

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        await asyncio.sleep(0)
        ids = [
            *self.policy.tokenizer.encode(
                f"reply {self.index} {self.turn}", add_special_tokens=False
            ),
            self.stop,
        ]
        self.turn += 1
        return Completion(
            token_ids=np.asarray(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
            policy_versions=np.full(len(ids), self.policy.version, np.int32),
            finish_reason="stop",
        )

    def close(self) -> None:
        self.closed += 1


HonestPolicy.session_class = HonestSession
