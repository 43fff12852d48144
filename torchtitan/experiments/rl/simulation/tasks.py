"""Tasks whose rollouts take turns with the policy and say nothing.

    SimulatedTask.run_group ──▶ _RolloutRun, for each rollout
                                   turn by turn: prompt ──▶ request ──▶ completion ──▶ env's answer

Only lengths, rewards and times are drawn. Sampler, algorithm, group size and limits are those of
the task's config. A prompt begins with the token of its example and with its own length, and an
engine needs no more to know what is cached (`engine.py`).
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.configurable import BuildContext, build_with
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import (
    PolicyClient,
    PolicySession,
    SamplingConfig,
)
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RolloutTurn,
)
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.simulation.lengths import Lengths, Turn
from torchtitan.experiments.rl.tasks.task import Task, derive_seed

BEFORE_REQUEST = 0.25
"""Share of a turn's computing that comes before its request. It is small, because a group renders
its first prompt once."""
EXAMPLES = 1 << 16
"""Number of examples of every simulated dataset."""
MAX_TOKEN_ID = 2**29
"""Bound of the ids that the tokens of prompts count up from, so that they stay in int32."""

ComputeTurn = Callable[[float], Awaitable[None]]
"""Function that computes a share of a turn, in the process that runs the rollouts."""


class SimulatedDataset(Dataset):
    """Dataset whose examples have ids and no content."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        name: str

    config: Config

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> DataSample:
        return DataSample(sample_id=f"{self.config.name}-{index}", env_input=None)


class SimulatedTask(Task):
    """Task without envs, in the place of a task of the config."""

    def __init__(
        self,
        config: Task.Config,
        *,
        name: str,
        context: BuildContext,
        lengths: Lengths,
        compute_turn: ComputeTurn,
        compares_group: bool,
    ):
        """Prepare to run groups.

        Args:
            lengths: source of the turns that rollouts take.
            compute_turn: computes a share of a turn, in the process that runs the rollouts.
            compares_group: True if the task that this one stands for compares the rollouts of a
                group.
        """
        super().__init__(config, name=name, context=context)
        self.open_groups: dict[str, int] = {}
        """Policy version at the start of each training group that runs, by the group's id."""
        self._lengths = lengths
        self._compute_turn = compute_turn
        self._compares_group = compares_group

    def make_env(self, sample: DataSample) -> MessageEnv:
        raise NotImplementedError("a simulated rollout has no env")

    @property
    def needs_group(self) -> bool:
        return self._compares_group

    async def run_group(  # noqa: PLR0913 - as the base class declares it
        self,
        sample: DataSample,
        policy: PolicyClient,
        *,
        group_id: str,
        seed: int,
        sampling: SamplingConfig | None = None,
        group_size: int | None = None,
        credit: bool = True,
    ) -> RolloutGroup:
        """Run the rollouts of one example side by side."""
        rollouts = [
            Rollout(
                group_id=group_id, index_in_group=index, task_name=self.name, data_sample=sample
            )
            for index in range(group_size or self.config.group_size)
        ]
        group = RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=rollouts,
            admitted_version=policy.version,
        )
        if credit:
            self.open_groups[group_id] = policy.version
        example_seed = zlib.crc32(f"{seed}/{sample.sample_id}".encode())
        sampling = sampling or self.config.sampling
        runs = [
            self._run_rollout(rollout, policy, sampling, seed=seed, example_seed=example_seed)
            for rollout in rollouts
        ]
        try:
            await asyncio.gather(*runs)
        finally:
            self.open_groups.pop(group_id, None)
        return group

    async def give_credit(self, group: RolloutGroup, *, late: bool = False) -> str | None:
        """Have the algorithm give credit. It asks no model, so that takes no virtual time."""
        failure = await super().give_credit(group, late=late)
        group.amend(credit_s=0.0)
        return failure

    async def score_rewards(self, group: RolloutGroup, *, rubric: Rubric | None = None) -> None:
        """Give each rollout the reward that was drawn for it."""
        for rollout in group.rollouts:
            rollout.amend(reward=rollout.metadata["reward"])

    async def _run_rollout(
        self,
        rollout: Rollout,
        policy: PolicyClient,
        sampling: SamplingConfig,
        *,
        seed: int,
        example_seed: int,
    ) -> None:
        """Draw the reward and the turns of a rollout, and take the turns."""
        own_seed = derive_seed(seed, rollout.group_id, rollout.index_in_group, 0)
        # Every request of the session has this list, where the engine reads a completion's length.
        length = [0]
        session = policy.session(
            rollout_id=rollout.rollout_id, seed=own_seed, sampling=sampling, stop_token_ids=length
        )
        run = _RolloutRun(
            rollout=rollout,
            session=session,
            length=length,
            limits=self.config.env,
            compute_turn=self._compute_turn,
            example_seed=example_seed,
            own_seed=own_seed,
        )
        example = np.random.default_rng(example_seed)
        own = np.random.default_rng(own_seed)
        rollout.metadata = {"reward": float(own.random() < example.random())}
        try:
            await run.take_turns(self._lengths.draw(example, own))
        finally:
            session.close()
        rollout.samples = samples_from_turns(
            rollout.turns,
            task_name=self.name,
            rollout_id=rollout.rollout_id,
            temperature=sampling.temperature,
            adapter=self.config.adapter,
        )


@dataclass(kw_only=True, slots=True)
class _RolloutRun:
    """One rollout under way."""

    rollout: Rollout
    session: PolicySession
    length: list[int]
    """Number of tokens of the next completion, where the engine reads it."""
    limits: RendererEnvConfig
    compute_turn: ComputeTurn
    example_seed: int
    """Seed that all rollouts of the example share."""
    own_seed: int

    async def take_turns(self, turns: list[Turn]) -> None:
        """Take turns until they are over or a limit is reached, and set the rollout's status."""
        max_turns = self.limits.max_turns
        self.rollout.status = RolloutStatus.COMPLETED
        if len(turns) > max_turns:
            self.rollout.status = RolloutStatus.TRUNCATED_MAX_TURNS
        conversation = np.zeros(0, np.int32)
        for turn in turns[:max_turns]:
            prompt = self._extend(conversation, turn.prompt)
            room = self.limits.max_rollout_tokens - len(prompt)
            if room < 1:
                self.rollout.status = RolloutStatus.TRUNCATED_PROMPT_OVERFLOW
                return
            completion = await self._take_turn(turn, prompt, max_tokens=room)
            conversation = np.concatenate([prompt, completion.token_ids])
            if completion.finish_reason == "length":
                self.rollout.status = RolloutStatus.TRUNCATED_LENGTH
                return

    def _extend(self, conversation: np.ndarray, tokens: int) -> np.ndarray:
        """Return a conversation with the tokens that the env adds.

        An empty conversation gets the beginning that all rollouts of the example have: a token that
        names the example, and the length of the beginning. Later tokens are this rollout's alone.
        """
        seed = self.own_seed if len(conversation) else self.example_seed
        first_id = seed % MAX_TOKEN_ID
        added = np.arange(first_id, first_id + tokens, dtype=np.int32)
        if not len(conversation):
            added[0] = self.example_seed % 2**31
            added[1] = tokens
        return np.concatenate([conversation, added])

    async def _take_turn(self, turn: Turn, prompt: np.ndarray, *, max_tokens: int) -> Completion:
        """Have the policy answer a prompt, let the env answer, and add the turn to the rollout."""
        await self.compute_turn(BEFORE_REQUEST)
        clock = asyncio.get_running_loop().time
        self.length[0] = turn.completion
        began = clock()
        completion = await self.session.generate(prompt, max_tokens=max_tokens)
        generate_s = clock() - began
        self.rollout.turns.append(_rollout_turn(turn, prompt, completion, generate_s=generate_s))
        await self.compute_turn(1 - BEFORE_REQUEST)
        if turn.env_s:
            await asyncio.sleep(turn.env_s)
        return completion


def _rollout_turn(
    turn: Turn, prompt: np.ndarray, completion: Completion, *, generate_s: float
) -> RolloutTurn:
    """Return the record of a turn, with the token ids of the recorded one if there is one."""
    if turn.recorded is not None:
        prompt = turn.recorded.prompt_token_ids
        recorded_ids = turn.recorded.completion.token_ids
        completion = replace(completion, token_ids=recorded_ids[: len(completion.token_ids)])
    return RolloutTurn(
        prompt_messages=[],
        prompt_token_ids=prompt,
        prompt_role_ids=np.full(len(prompt), -1, np.int8),
        prompt_is_content=np.zeros(len(prompt), bool),
        completion=completion,
        assistant_message={"role": "assistant", "content": ""},
        generate_s=generate_s,
        env_s=turn.env_s,
    )


def simulated_tasks(
    configs: Mapping[str, Task.Config],
    *,
    context: BuildContext,
    lengths: Lengths,
    compute_turn: ComputeTurn,
) -> dict[str, SimulatedTask]:
    """Return a simulated task for each task of a config.

    Raises:
        ConfigError: the rollouts of a task, or their credit, need another model than the policy.
    """
    tasks = {}
    for name, config in configs.items():
        algorithm = build_with(config.algorithm, context)
        if config.algorithm.frozen_source() is not None or algorithm.asks_models:
            cure = (
                "asks another model than the policy, which is not simulated: give "
                f"tasks.{name} another algorithm"
            )
            raise ConfigError(f"tasks.{name}.algorithm", type(algorithm).__name__, cure)
        compares_group = (
            algorithm.needs_group or type(algorithm).score_group is not Algorithm.score_group
        )
        task = _without_envs(config, name).build(
            name=name,
            context=context,
            lengths=lengths,
            compute_turn=compute_turn,
            compares_group=compares_group,
        )
        tasks[name] = task
    return tasks


def _without_envs(config: Task.Config, name: str) -> SimulatedTask.Config:
    """Return the config of the simulated task that stands for a task."""
    validation = None
    if config.validation is not None:
        validation = SimulatedDataset.Config(name=f"{name}-held-out")
    return SimulatedTask.Config(
        algorithm=config.algorithm,
        dataset=SimulatedDataset.Config(name=name),
        validation=validation,
        validation_schedule=config.validation_schedule,
        sampler=config.sampler,
        env=config.env,
        sampling=config.sampling,
        group_size=config.group_size,
        min_group_size=config.min_group_size,
        weight=config.weight,
        adapter=config.adapter,
    )
