"""Tasks whose groups end as a test says.

`ListTask` and `TalkTask` are real tasks with fake envs. `StubTask` and `DatasetTask` stand in for a
task where the rollout loop is tested: they make groups without a policy, an env or a rubric.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.envs import TalkingEnv
from tests.fakes.rollouts import rollout_of, samples_of, turn_of
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.rubrics.rubric import (
    RewardFn,
    Rubric,
    env_component,
    last_assistant_text,
)
from torchtitan.experiments.rl.tasks.task import Task

QUESTION = DataSample(sample_id="0", env_input="question")
"""Example of the groups that `run_group` runs."""
DEMONSTRATION = DataSample(sample_id="7", env_input="question", info={"demonstration": "four"})
"""Example of a TalkTask."""
ROW_LENGTH = 8
"""Row length of the loops that run StubTasks."""


def length(rollout: Rollout, env_input: object) -> float:
    """Return the number of characters of the last answer, as a reward."""
    return len(last_assistant_text(rollout))


# ---- tasks with fake envs


class ListTask(Task):
    """Task that takes its envs from the list ``prepared``, and makes TalkingEnvs after that."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=Numbers.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[RewardFn(length, takes="rollout")])
        )
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(step_timeout_s=60.0, rollout_timeout_s=120.0)
        )
        group_size: int = 3

    prepared: list[Any]
    made: list[Any]
    """Envs of the rollouts that were run, in their order."""

    def make_env(self, sample: DataSample) -> Any:
        self.made.append(self.prepared.pop(0) if self.prepared else TalkingEnv())
        return self.made[-1]


def list_task(
    renderer: Any,
    config: Task.Config | None = None,
    *,
    envs: Iterable[Any] = (),
    kind: type[ListTask] = ListTask,
    **changes: Any,
) -> ListTask:
    """Return a ListTask with these envs. ``changes`` are fields of its config, if none is given."""
    task = (config or kind.Config(**changes)).build(name="talk", context=context_of(renderer))
    task.prepared = list(envs)
    task.made = []
    return task


def run_group(
    task: Task, policy: PolicyClient, *, group_id: str = "g", seed: int = 0, **options: Any
) -> Awaitable[RolloutGroup]:
    """Run a group of the example QUESTION."""
    return task.run_group(QUESTION, policy, group_id=group_id, seed=seed, **options)


class Demonstrations(Dataset):
    """Dataset of the example DEMONSTRATION."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> DataSample:
        return DEMONSTRATION


class TalkTask(Task):
    """Task of TalkingEnvs, whose rewards it sums up. The algorithm is the test's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config
        dataset: Dataset.Config = field(default_factory=Demonstrations.Config)
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[env_component("steps")])
        )
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(step_timeout_s=60.0, rollout_timeout_s=120.0)
        )
        group_size: int = 2
        turns: int = 1
        role: str = "user"

    config: Config

    def make_env(self, sample: DataSample) -> Any:
        return TalkingEnv(self.config.turns, role=self.config.role)


# ---- tasks in place of real ones


class StubTask:
    """Task whose groups end as ``outcome(number)`` says, which has one entry a rollout.

    A number is a rollout's reward and advantage, a RolloutStatus a failure of that kind, and "long"
    a rollout that fits no row. An outcome that is an exception is raised by ``run_group``; one that
    is a string is the reason why the group can't be trained on. With ``held`` a group runs until
    the test adds its number to ``released``.
    """

    def __init__(
        self,
        outcome: Callable[[int], Any],
        *,
        name: str = "stub",
        group_size: int = 2,
        held: bool = False,
    ):
        self.name = name
        self.outcome = outcome
        self.held = held
        self.needs_group = True
        self.trains_on_policy_samples = True
        self.repeats_example = True
        self.config = SimpleNamespace(group_size=group_size, adapter="")
        self.sampler: Any = SimpleNamespace(next=self.next_sample, observe=self.observe)
        self.released: set[int] = set()
        self.samples = 0
        """Number of examples that were drawn."""
        self.started: list[int] = []
        """Numbers of the groups that were started."""
        self.observed: list[str] = []
        """Ids of the groups that the sampler was told of."""
        self.cancelled: list[int] = []
        """Numbers of the groups that were cancelled while they ran."""

    def next_sample(self) -> DataSample:
        self.samples += 1
        return DataSample(sample_id=str(self.samples - 1), env_input=None)

    def observe(self, group: RolloutGroup) -> None:
        self.observed.append(group.group_id)

    async def run_group(
        self, sample: DataSample, policy: Any, *, group_id: str, seed: int, **single: Any
    ) -> RolloutGroup:
        number = number_of(group_id)
        self.started.append(number)
        try:
            while self.held and number not in self.released:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        outcome = self.outcome(number)
        if isinstance(outcome, Exception):
            raise outcome
        entries = [1.0] * self.config.group_size if isinstance(outcome, str) else outcome
        rollouts = [
            self.rollout(group_id, index, entry, policy.version)
            for index, entry in enumerate(entries)
        ]
        return RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=rollouts,
            admitted_version=policy.version,
        )

    def rollout(self, group_id: str, index: int, entry: Any, version: int) -> Rollout:
        """Return the rollout that an entry of an outcome stands for."""
        place: dict[str, Any] = {"group_id": group_id, "index": index, "task": self.name}
        if isinstance(entry, RolloutStatus):
            return rollout_of(status=entry, error="the env broke", **place)
        sampled = [3] * (ROW_LENGTH if entry == "long" else 2)
        reward = 1.0 if entry == "long" else entry
        rollout = rollout_of(
            status=RolloutStatus.COMPLETED,
            reward=reward,
            samples=samples_of([turn_of([1, 2], sampled)]),
            **place,
        )
        rollout.assign_advantages(reward)
        return rollout

    async def score_group(self, group: RolloutGroup) -> None:
        outcome = self.outcome(number_of(group.group_id))
        group.failure = outcome if isinstance(outcome, str) else None


def number_of(group_id: str) -> int:
    """Return the number of a group, which its task's name precedes in its id."""
    return int(group_id.rsplit("-", 1)[1])


class DatasetTask(StubTask):
    """StubTask with a real sampler over ``size`` examples.

    ``examples`` has the id of the example of each group that was run.
    """

    def __init__(
        self, size: int, outcome: Callable[[int], Any] = lambda number: [0.0, 1.0], **options: Any
    ):
        super().__init__(outcome, **options)
        self.dataset = [
            DataSample(sample_id=f"example {index}", env_input=(index,)) for index in range(size)
        ]
        self.sampler = ShuffledCursor(SampleStrategy.Config(), dataset=self.dataset, seed=3)
        self.examples: dict[int, str] = {}

    async def run_group(
        self, sample: DataSample, policy: Any, *, group_id: str, seed: int, **single: Any
    ) -> RolloutGroup:
        self.examples[number_of(group_id)] = sample.sample_id
        group = await super().run_group(sample, policy, group_id=group_id, seed=seed)
        for rollout in group.rollouts:
            rollout.data_sample = sample
        return group
