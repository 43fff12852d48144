"""What a rollout is made of: turns, statuses, groups. Plain records, filled by the turn loop and read by all after it."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.experiments.rl.batching.sample_checks import checked_stream, first_non_finite
from torchtitan.experiments.rl.types import TrainingSample

if TYPE_CHECKING:  # what reads records needs no renderer
    from renderers import Message, ToolSpec


class RolloutStatus(StrEnum):
    ONGOING = "ongoing"
    """Another turn may follow."""
    COMPLETED = "completed"
    """The env returned done=True."""
    TRUNCATED_LENGTH = "truncated_length"
    """A completion hit its token limit."""
    TRUNCATED_PROMPT_OVERFLOW = "truncated_prompt_overflow"
    """The next prompt leaves no room to sample within max_rollout_tokens."""
    TRUNCATED_MAX_TURNS = "truncated_max_turns"
    """max_turns turns were taken and the env was not done."""
    ABORTED = "aborted"
    """The run was stopped while the rollout was open."""
    TIMEOUT = "timeout"
    """An env step, or the rollout, took longer than its limit."""
    ERROR = "error"
    """Env, reward or algorithm code raised or returned something unusable; Rollout.error has the cause."""

    def is_terminal(self) -> bool:
        return self is not RolloutStatus.ONGOING

    def is_truncated(self) -> bool:
        """Ended by a limit of ours: its tokens are real and may be scored."""
        return self.value.startswith("truncated")

    def is_error(self) -> bool:
        """Ended by a failure: excluded from its group's statistics unless the rubric names an error_reward."""
        return self in (RolloutStatus.ABORTED, RolloutStatus.TIMEOUT, RolloutStatus.ERROR)


@dataclass(kw_only=True, slots=True)
class DataSample:
    """One example of a task's dataset: what an env is made from."""

    sample_id: str
    """Unique within its dataset."""
    env_input: Any
    """Handed to Task.make_envs and to every reward function."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything else worth logging: source, difficulty."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """What the generator sampled for one prompt."""

    token_ids: np.ndarray
    """int32 [T]. Includes the token that ended it, when one did."""
    logprobs: np.ndarray
    """float32 [T]. Of the logits divided by the sampling temperature."""
    policy_versions: np.ndarray
    """int32 [T]. Version of the weights each token was sampled with; -1 where a frozen model sampled it."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    replica: int = -1
    """Generator replica that sampled it; -1 where that is not known, and where a frozen model sampled it."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [R, layers, k]. The experts that computed the last R tokens of prompt and completion but one: what was
    sampled last was no input yet. The largest value of the dtype where a token's are not known. None: not recorded."""


@dataclass(kw_only=True, slots=True)
class RolloutTurn:
    """One prompt to the generator, its completion, and the env's answer."""

    prompt_messages: list[Message]
    """The whole conversation before this turn's completion."""
    prompt_token_ids: np.ndarray
    """int32 [P]. What the generator was given."""
    prompt_role_ids: np.ndarray
    """int8 [P]. Whose message each prompt token belongs to, an index into ROLES; -1 on template outside any message, and where
    the renderer does not attribute roles. Where a prompt repeats the turn before, what that sampled is the assistant's."""
    prompt_is_content: np.ndarray
    """bool [P]. True where the token comes from a message's body, or was sampled; not from the template around it."""
    completion: Completion
    assistant_message: Message
    """The completion, parsed."""
    prompt_message_indices: np.ndarray | None = None
    """int16 [P]. Which of ``prompt_messages`` each prompt token belongs to; -1 as in ``prompt_role_ids``. None: not known."""
    tools: list[ToolSpec] | None = None
    """What the model could call; the prompt was rendered with them."""
    env_messages: list[Message] = field(default_factory=list)
    """The env's answer."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """What the env itself rewarded in this turn."""
    generate_s: float = 0.0
    """Seconds from the prompt to its completion, waiting for a place in the engine included."""
    env_s: float = 0.0
    """Seconds the env took to answer; in the first turn its reset too."""
    untrained: str | None = None
    """Why what it sampled is in no training sample, such as "undelivered"; None where it is in one."""
    call: dict[str, Any] | None = None
    """Of an agent's turn: its ``chain`` (0, 1, ... in the order they began), ``depth`` (turns before it in the tree), ``at_s``
    (seconds since the agent began), and the ``dialect`` and ``model`` that it asked in."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One env from reset to a terminal status.

    Its text (``str``) leaves out the example, with its answer, and what was said: ``"42" in str(rollout)`` measures nothing.
    """

    group_id: str
    index_in_group: int
    task_name: str
    data_sample: DataSample | None = field(default=None, repr=False)
    """What its env was made from; the group's."""
    turns: list[RolloutTurn] = field(default_factory=list, repr=False)
    status: RolloutStatus = RolloutStatus.ONGOING
    reward: float | None = None
    """None until scored, and for good on a rollout excluded from its group."""
    reward_components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""
    traceback: str = field(default="", repr=False)
    """Traceback of the error, with the frames of the user's code alone; empty where no such code raised it."""
    metadata: dict[str, Any] = field(default_factory=dict, repr=False)
    """What its env said of it at its end (``MessageEnv.metadata``), for rewards and credit."""
    static: bool = False
    """A conversation of a dataset: nothing was sampled, and its reward says nothing."""
    samples: list[TrainingSample] = field(default_factory=list, repr=False)
    answer: Any = field(default=None, repr=False)
    """What an agent returned."""
    calls: dict[str, int] = field(default_factory=dict)
    """Number of an agent's calls by what became of them: "answered", "undelivered", "auxiliary", "frozen model", "aborted",
    "lost", "refused"; "retried" counts repeats, which are no calls of their own. Then "wish/FIELD" and "unmet/FIELD"
    (gateway/request.py, WISHES), "noise/NAME", and "control_tokens": calls whose messages hold the text of a control token."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index_in_group}"

    @property
    def completion_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def assign_advantages(self, value: float | Sequence[float]) -> None:
        """Give every sampled token its advantage.

        A scalar broadcasts over the sampled tokens; a sequence holds one value per sampled token, in the order sampled.

        Raises:
            ValueError: not a number or a sequence of one for each sampled token, or not finite in float32.
        """
        counts = [int(np.count_nonzero(sample.loss_mask)) for sample in self.samples]
        sampled = sum(counts)
        broadcast = isinstance(value, numbers.Real | np.bool_) or (
            isinstance(value, np.ndarray) and value.ndim == 0
        )
        try:
            per_token = checked_stream(
                "advantages", np.full(sampled, value) if broadcast else value, sampled
            )
        except ValueError as error:
            raise ValueError(
                f"rollout {self.rollout_id}: {error} sampled, or one number for all of them"
            ) from None
        wrong = first_non_finite(per_token)
        if wrong is not None:
            given = np.broadcast_to(np.asarray(value), sampled)[wrong]
            raise ValueError(
                f"rollout {self.rollout_id}: the advantage {given} is not a finite number that float32 holds"
            )
        start = 0
        for sample, count in zip(self.samples, counts, strict=True):
            sample.advantages = np.zeros(len(sample), np.float32)
            sample.advantages[sample.loss_mask] = per_token[start : start + count]
            start += count


@dataclass(kw_only=True, slots=True)
class RolloutGroup:
    """The rollouts of one example, scored against each other."""

    group_id: str
    task_name: str
    data_sample: DataSample = field(repr=False)
    rollouts: list[Rollout]
    admitted_version: int = 0
    """Policy version the generators held when the group was admitted."""
    failure: str | None = None
    """Why the group can't be trained on, in one line; None on one that can."""
    credit_s: float = 0.0
    """Seconds that the algorithm took for credit, calls to reference models included; of rollouts that it scored side by side,
    the sum."""
    costs: dict[str, float] = field(default_factory=dict)
    """What else the group cost, by name: calls and tokens of judges (`costs.py`)."""

    @property
    def scored(self) -> list[Rollout]:
        """Rollouts with a reward: the group's statistics are of these alone."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def rewards(self) -> list[float]:
        """Of the scored rollouts, in their order."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]


_COSTS: ContextVar[dict[str, float] | None] = ContextVar("costs", default=None)


@contextmanager
def counted_in(costs: dict[str, float]) -> Iterator[None]:
    """Inside, also in asyncio tasks and threads that are started inside, ``add_cost`` adds to ``costs``."""
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)


def add_cost(name: str, amount: float) -> None:
    """Count for the group that is run or scored; nothing outside one."""
    costs = _COSTS.get()
    if costs is not None:
        costs[name] = costs.get(name, 0.0) + amount
