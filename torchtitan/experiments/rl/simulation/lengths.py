"""Lengths of simulated rollouts: drawn from a distribution, or those that a run has recorded."""

import abc
from dataclasses import dataclass, fields

import numpy as np

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutTurn

MIN_PROMPT_TOKENS = 2
"""Minimum number of tokens that a turn's prompt adds. The first two tokens of a conversation say
what the prefix cache may share (`engine.py`)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """Sizes and times of one turn of a rollout."""

    prompt: int
    """Number of tokens that the env adds to the conversation before the completion."""
    completion: int
    """Number of tokens that the policy samples."""
    env_s: float
    """Seconds that the env takes to answer; in the first turn its reset too."""
    recorded: RolloutTurn | None = None
    """Turn of a recorded run, whose token ids the rollout takes: they decide what samples of a row
    share. None for a turn that was drawn."""


class Lengths(abc.ABC):
    """Source of the turns that simulated rollouts take."""

    @abc.abstractmethod
    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        """Return the turns of one rollout.

        Args:
            example: random numbers that are the same for every rollout of an example.
            own: random numbers of this rollout.
        """


@dataclass(kw_only=True, slots=True, frozen=True)
class LogNormal(Lengths):
    """Log-normal lengths of completions: ``--lengths lognormal:mean=800,sigma=1``.

    Half of the logarithm's variance is between examples, and half between rollouts of an example.
    """

    mean: float = 512.0
    """Mean number of tokens of a completion, without ``tail`` and without the task's limits."""
    sigma: float = 0.8
    """Standard deviation of the logarithm."""
    tail: float = 0.0
    """Share of the rollouts whose completions are ``times`` as long."""
    times: float = 8.0
    prompt: float = 200.0
    """Number of tokens that each turn's prompt adds."""
    turns: float = 1.0
    """Mean number of turns of a rollout, which is geometrically distributed."""
    env_s: float = 0.0
    """Mean seconds of an env's answer, which are exponentially distributed."""

    def __post_init__(self) -> None:
        """Refuse numbers that no distribution has.

        Raises:
            ValueError: a number is out of its bounds.
        """
        is_possible = (
            self.mean >= 1
            and self.turns >= 1
            and self.sigma >= 0
            and 0 <= self.tail <= 1
            and self.env_s >= 0
            and self.times > 0
        )
        if not is_possible:
            raise ValueError(
                "want mean and turns of at least 1, tail from 0 to 1, and nothing below 0"
            )

    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        half_sigma = self.sigma / 2**0.5
        scale = self.mean * np.exp(half_sigma * example.standard_normal() - self.sigma**2 / 2)
        if own.random() < self.tail:
            scale *= self.times
        return [
            Turn(
                prompt=max(MIN_PROMPT_TOKENS, round(self.prompt)),
                completion=max(1, round(scale * np.exp(half_sigma * own.standard_normal()))),
                env_s=float(own.exponential(self.env_s)) if self.env_s else 0.0,
            )
            for _ in range(int(own.geometric(1 / self.turns)))
        ]


class Recorded(Lengths):
    """Lengths of the rollouts that a run has recorded: ``--lengths outputs/RUN``.

    The rollouts of an example are those of one recorded group.
    """

    def __init__(self, folder: str):
        """Read the rollouts of a run's folder.

        Raises:
            ConfigError: the folder has no recorded rollouts, or they can't be read.
        """
        turns_by_group: dict[str, list[list[Turn]]] = {}
        cure = "has no recorded rollouts: name a run with rollouts.jsonl.gz, or lognormal:..."
        try:
            for record in read_rollouts(folder):
                turns = _turns_of(record.rollout)
                if turns:
                    turns_by_group.setdefault(record.rollout.group_id, []).append(turns)
        except OSError as error:
            raise ConfigError("--lengths", folder, cure) from error
        if not turns_by_group:
            raise ConfigError("--lengths", folder, cure)
        self._groups = list(turns_by_group.values())

    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        group = self._groups[int(example.integers(len(self._groups)))]
        return group[int(own.integers(len(group)))]


def _turns_of(rollout: Rollout) -> list[Turn]:
    """Return the turns of a recorded rollout that have a completion.

    A prompt that was rendered anew counts as one that goes on with the conversation.
    """
    turns = []
    tokens_before = 0
    for turn in rollout.turns:
        prompt = len(turn.prompt_token_ids)
        completion = len(turn.completion.token_ids)
        if completion:
            added = max(MIN_PROMPT_TOKENS, prompt - tokens_before)
            turns.append(Turn(prompt=added, completion=completion, env_s=turn.env_s, recorded=turn))
            tokens_before = prompt + completion
    return turns


def lengths_of(words: str) -> Lengths:
    """Return the lengths that the option ``--lengths`` names.

    Raises:
        ConfigError: the words name no distribution, no field that it has, or no recorded run.
    """
    kind, _, assignments = words.partition(":")
    if kind != "lognormal":
        return Recorded(words)
    names = [field.name for field in fields(LogNormal)]
    cure = f"want lognormal:NAME=NUMBER,... of {', '.join(names)}, or the folder of a run"
    unreadable = ConfigError("--lengths", words, cure)
    values: dict[str, float] = {}
    for assignment in filter(None, assignments.split(",")):
        name, _, number = assignment.partition("=")
        if name not in names:
            raise unreadable
        try:
            values[name] = float(number)
        except ValueError:
            raise unreadable from None
    try:
        return LogNormal(**values)
    except ValueError as error:
        raise ConfigError("--lengths", words, str(error)) from None
