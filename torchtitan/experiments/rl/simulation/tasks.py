"""Tasks whose rollouts take turns with the policy and say nothing: only lengths, rewards and times are drawn.

Sampler, algorithm, group size and limits are the config's. A prompt begins with a token that its example alone has and with its
own length; an engine needs no more to know what is cached (`engine.py`).
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.configurable import BuildContext, build_with
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RolloutTurn,
)
from torchtitan.experiments.rl.tasks.task import Task, derive_seed

BEFORE_REQUEST = 0.25
"""Share of a turn's time that comes before its request. A group renders its first prompt once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    prompt: int
    """Tokens that the env adds before it."""
    completion: int
    env_s: float
    """Of the env's answer; in the first turn its reset too."""
    recorded: RolloutTurn | None = None
    """It has the token ids, which decide what samples of a row share."""


class Lengths:
    """Draws a rollout's turns."""

    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        """
        Args:
            example: gives all rollouts of an example the same numbers.
        """
        raise NotImplementedError


@dataclass(kw_only=True, slots=True, frozen=True)
class LogNormal(Lengths):
    """``--lengths lognormal:mean=800,sigma=1``. Half of the logarithm's variance is the example's, half the rollout's."""

    mean: float = 512.0
    """Tokens of a completion, without the tail and the task's limits."""
    sigma: float = 0.8
    tail: float = 0.0
    """Share of the rollouts that are ``times`` as long."""
    times: float = 8.0
    prompt: float = 200.0
    """Tokens that each turn's prompt adds."""
    turns: float = 1.0
    """Of a rollout, on average; geometric above 1."""
    env_s: float = 0.0
    """Of a turn, on average; exponential."""

    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        half = self.sigma / 2**0.5
        scale = self.mean * np.exp(half * example.standard_normal() - self.sigma**2 / 2)
        scale *= self.times if own.random() < self.tail else 1.0
        return [
            Turn(
                prompt=max(2, round(self.prompt)),
                completion=max(1, round(scale * np.exp(half * own.standard_normal()))),
                env_s=float(own.exponential(self.env_s)) if self.env_s else 0.0,
            )
            for _ in range(int(own.geometric(1 / self.turns)))
        ]


class Recorded(Lengths):
    """``--lengths outputs/RUN``: rollouts that a run recorded, for each example those of one of its groups."""

    def __init__(self, folder: str):
        """
        Raises:
            ConfigError: nothing was recorded there.
        """
        groups: dict[str, list[list[Turn]]] = {}
        with suppress(OSError):
            for rollout in (record.rollout for record in read_rollouts(folder)):
                if turns := _turns(rollout):
                    groups.setdefault(rollout.group_id, []).append(turns)
        self._groups = list(groups.values())
        if not groups:
            cure = "has no recorded rollouts: name a run with rollouts.jsonl.gz, or lognormal:..."
            raise ConfigError("--lengths", folder, cure)

    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        group = self._groups[int(example.integers(len(self._groups)))]
        return group[int(own.integers(len(group)))]


def _turns(rollout: Rollout) -> list[Turn]:
    turns, before = [], 0
    for turn in rollout.turns:
        prompt, completion = len(turn.prompt_token_ids), len(turn.completion.token_ids)
        if completion:  # a prompt that was rendered anew counts as one that goes on
            turns.append(
                Turn(
                    prompt=max(2, prompt - before),
                    completion=completion,
                    env_s=turn.env_s,
                    recorded=turn,
                )
            )
            before = prompt + completion
    return turns


def lengths_of(words: str) -> Lengths:
    """What ``--lengths`` names.

    Raises:
        ConfigError: no distribution, no such field of it, or no run.
    """
    kind, _, fields = words.partition(":")
    if kind != "lognormal":
        return Recorded(words)
    try:
        given = {
            name: float(value)
            for name, value in (pair.split("=") for pair in fields.split(",") if pair)
        }
        drawn = LogNormal(**given)
    except (TypeError, ValueError):
        cure = f"want lognormal:NAME=NUMBER,... of {', '.join(LogNormal.__dataclass_fields__)}, or the folder of a run"
        raise ConfigError("--lengths", words, cure) from None
    if (
        drawn.mean < 1
        or drawn.turns < 1
        or drawn.sigma < 0
        or not 0 <= drawn.tail <= 1
        or drawn.env_s < 0
        or drawn.times <= 0
    ):
        raise ConfigError(
            "--lengths",
            words,
            "want mean and turns of at least 1, tail from 0 to 1, and nothing below 0",
        )
    return drawn


class SimulatedDataset(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        name: str

    def __init__(self, config: Config):
        super().__init__(config)
        self._config = config

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> DataSample:
        return DataSample(sample_id=f"{self._config.name}-{index}", env_input=None)


class SimulatedTask(Task):
    """``simulate`` before the first group."""

    def simulate(
        self, lengths: Lengths, *, turn: Callable[[float], Awaitable[None]], needs_group: bool
    ) -> None:
        """
        Args:
            turn: takes a share of the time that the process which runs the rollouts needs for a turn.
            needs_group: of the task that this one stands for.
        """
        self._lengths, self._turn, self._needs_group = lengths, turn, needs_group
        self.open: dict[str, int] = {}
        """Policy version at the start of each training group that runs."""

    def make_env(self, sample: DataSample) -> MessageEnv:
        raise NotImplementedError("a simulated rollout has no env")

    @property
    def needs_group(self) -> bool:
        return self._needs_group

    async def run_group(
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
            self.open[group_id] = policy.version
        try:
            family = zlib.crc32(f"{seed}/{sample.sample_id}".encode())
            await asyncio.gather(
                *(
                    self._run(each, family, policy, seed, sampling or self.config.sampling)
                    for each in rollouts
                )
            )
        finally:
            self.open.pop(group_id, None)
        return group

    async def give_credit(self, group: RolloutGroup, *, late: bool = False) -> str | None:
        """Have the algorithm give credit. It asks no model, so that takes no virtual time."""
        failure = await super().give_credit(group, late=late)
        group.amend(credit_s=0.0)
        return failure

    async def score_rewards(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            rollout.amend(reward=rollout.metadata["reward"])

    async def _run(
        self,
        rollout: Rollout,
        family: int,
        policy: PolicyClient,
        seed: int,
        sampling: SamplingConfig,
    ) -> None:
        limits, own_seed = (
            self.config.env,
            derive_seed(seed, rollout.group_id, rollout.index_in_group, 0),
        )
        length: list[int] = [0]
        session = policy.session(
            rollout_id=rollout.rollout_id, seed=own_seed, sampling=sampling, stop_token_ids=length
        )
        example, own = np.random.default_rng(family), np.random.default_rng(own_seed)
        rollout.metadata = {"reward": float(own.random() < example.random())}
        turns = self._lengths.draw(example, own)
        rollout.status = (
            RolloutStatus.COMPLETED
            if len(turns) <= limits.max_turns
            else RolloutStatus.TRUNCATED_MAX_TURNS
        )
        prompt = np.zeros(0, np.int32)
        try:
            for turn in turns[: limits.max_turns]:
                prompt = _prompt(prompt, turn.prompt, family, own_seed)
                room = limits.max_rollout_tokens - len(prompt)
                if room < 1:
                    rollout.status = RolloutStatus.TRUNCATED_PROMPT_OVERFLOW
                    break
                await self._turn(BEFORE_REQUEST)
                length[0], began = turn.completion, asyncio.get_running_loop().time()
                completion = await session.generate(prompt, max_tokens=room)
                ids, sampled = prompt, completion
                if turn.recorded is not None:
                    ids, own_ids = (
                        turn.recorded.prompt_token_ids,
                        turn.recorded.completion.token_ids,
                    )
                    sampled = replace(completion, token_ids=own_ids[: len(completion.token_ids)])
                rollout.turns.append(
                    RolloutTurn(
                        prompt_messages=[],
                        prompt_token_ids=ids,
                        prompt_role_ids=np.full(len(ids), -1, np.int8),
                        prompt_is_content=np.zeros(len(ids), bool),
                        completion=sampled,
                        assistant_message={"role": "assistant", "content": ""},
                        generate_s=asyncio.get_running_loop().time() - began,
                        env_s=turn.env_s,
                    )
                )
                prompt = np.concatenate([prompt, completion.token_ids])
                await self._turn(1 - BEFORE_REQUEST)
                if turn.env_s:
                    await asyncio.sleep(turn.env_s)
                if completion.finish_reason == "length":
                    rollout.status = RolloutStatus.TRUNCATED_LENGTH
                    break
        finally:
            session.close()
        rollout.samples = samples_from_turns(
            rollout.turns,
            task_name=self.name,
            rollout_id=rollout.rollout_id,
            temperature=sampling.temperature,
        )


def _prompt(before: np.ndarray, tokens: int, family: int, own: int) -> np.ndarray:
    """What an env adds to a conversation: to an empty one its example's beginning, else tokens that no other rollout has."""
    if len(before):
        return np.concatenate(
            [before, np.arange(own % 2**29, own % 2**29 + tokens, dtype=np.int32)]
        )
    first = np.arange(family % 2**29, family % 2**29 + tokens, dtype=np.int32)
    first[:2] = family % 2**31, tokens
    return first


def simulated_tasks(
    tasks: Mapping[str, Task.Config],
    *,
    context: BuildContext,
    lengths: Lengths,
    turn: Callable[[float], Awaitable[None]],
) -> dict[str, SimulatedTask]:
    """One for each task of a config.

    Raises:
        ConfigError: its rollouts or their credit need another model than the policy.
    """
    built = {}
    for name, config in tasks.items():
        algorithm = build_with(config.algorithm, context)
        if config.algorithm.frozen_source() is not None or algorithm.asks_models:
            cure = f"asks another model than the policy, which is not simulated: give tasks.{name} another algorithm"
            raise ConfigError(f"tasks.{name}.algorithm", type(algorithm).__name__, cure)
        task = SimulatedTask.Config(
            algorithm=config.algorithm,
            dataset=SimulatedDataset.Config(name=name),
            validation=config.validation and SimulatedDataset.Config(name=f"{name}-held-out"),
            validation_schedule=config.validation_schedule,
            sampler=config.sampler,
            env=config.env,
            sampling=config.sampling,
            group_size=config.group_size,
            min_group_size=config.min_group_size,
            weight=config.weight,
            adapter=config.adapter,
        ).build(name=name, context=context)
        compares = algorithm.needs_group or type(algorithm).score_group is not Algorithm.score_group
        task.simulate(lengths, turn=turn, needs_group=compares)
        built[name] = task
    return built
