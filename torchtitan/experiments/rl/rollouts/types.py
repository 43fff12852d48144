"""Records of rollouts: turns, statuses, groups.

The turn loop of an env or an agent fills them. A rollout that has ended becomes read-only
(`frozen.py`) before algorithms, rewards, filters, the recorder and the batcher read it. What is
decided later, such as its reward or that its scoring failed, is set by the code that decides it
(`Freezable.amend`).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.experiments.rl.errors import cause_text
from torchtitan.experiments.rl.frozen import Freezable
from torchtitan.experiments.rl.types import (
    TrainingSample,
    checked_stream,
    finite_float,
    first_non_finite,
)

if TYPE_CHECKING:  # readers of records need no renderer
    from renderers import Message, ToolSpec


class RolloutStatus(StrEnum):
    """State of a rollout: still open, or how it ended."""

    ONGOING = "ongoing"
    """Another turn may follow."""
    COMPLETED = "completed"
    """The env returned ``done=True``, or the agent returned."""
    TRUNCATED_LENGTH = "truncated_length"
    """A completion reached its token limit."""
    TRUNCATED_PROMPT_OVERFLOW = "truncated_prompt_overflow"
    """The next prompt leaves no room to sample within ``max_rollout_tokens``."""
    TRUNCATED_MAX_TURNS = "truncated_max_turns"
    """The env was not done after ``max_turns`` turns, or the agent's budget was spent."""
    ABORTED = "aborted"
    """The run was stopped while the rollout was open, or the generator aborted a completion."""
    TIMEOUT = "timeout"
    """A call of the env (``reset``, ``step_message``, ``metadata``), the making of the envs, or the
    rollout took longer than its limit. A late reward function or algorithm makes it an ERROR."""
    ERROR = "error"
    """An env, an agent, the generator, a reward or an algorithm raised, or returned something
    unusable. ``Rollout.error`` has the cause."""

    def is_terminal(self) -> bool:
        return self is not RolloutStatus.ONGOING

    def is_truncated(self) -> bool:
        """Return True if a token or turn limit ended the rollout.

        Its completions are valid: they may be scored and trained on.
        """
        return self.value.startswith("truncated")

    def is_error(self) -> bool:
        """Return True if the rollout was aborted, timed out or failed.

        It is left out of its group's statistics, unless the task's rubric sets an ``error_reward``.
        """
        return self in (RolloutStatus.ABORTED, RolloutStatus.TIMEOUT, RolloutStatus.ERROR)


@dataclass(kw_only=True, slots=True)
class DataSample(Freezable):
    """One example of a task's dataset, from which envs are made."""

    sample_id: str
    """Identifier, unique within the dataset."""
    env_input: Any
    """Payload of the example, in any form. Every reward function is given it, and envs are made
    from the whole DataSample (``Task.make_envs``)."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further data worth recording, such as the example's source or difficulty."""


@dataclass(kw_only=True, slots=True)
class Completion(Freezable):
    """Tokens that the generator sampled for one prompt."""

    token_ids: np.ndarray
    """int32 [T]. Includes the token that ended the completion, if one did."""
    logprobs: np.ndarray
    """float32 [T]. Log-probabilities under the logits divided by the sampling temperature."""
    policy_versions: np.ndarray
    """int32 [T]. Version of the weights that sampled each token; -1 for a frozen model."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    replica: int = -1
    """Generator replica that sampled the tokens; -1 if not known, and for a frozen model."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [N, layers, k]. Ids of the experts that the router chose for the last N input
    tokens. The inputs are the prompt, and the completion without its last token. The largest value
    of the dtype marks an unknown choice. None if the choices were not recorded."""


@dataclass(kw_only=True, slots=True)
class RolloutTurn(Freezable):
    """One prompt to the generator, its completion, and the env's answer."""

    prompt_messages: list[Message]
    """The whole conversation before this turn's completion."""
    prompt_token_ids: np.ndarray
    """int32 [P]. Token ids that the generator was given."""
    prompt_role_ids: np.ndarray
    """int8 [P]. Author of each prompt token's message, an index into ROLES; -1 on template outside
    any message, and if the renderer does not attribute roles. Tokens that earlier turns sampled are
    the assistant's."""
    prompt_is_content: np.ndarray
    """bool [P]. True on tokens of a message's content, and on sampled ones. False on the template
    around messages."""
    completion: Completion
    assistant_message: Message
    """The completion, parsed into a message."""
    prompt_message_indices: np.ndarray | None = None
    """int16 [P]. Index into ``prompt_messages`` for each prompt token; -1 as in
    ``prompt_role_ids``. None if not known."""
    tools: list[ToolSpec] | None = None
    """Tools that the model could call, with which the prompt was rendered."""
    env_messages: list[Message] = field(default_factory=list)
    """The env's answer to the completion."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Rewards that the env itself gave in this turn, by name."""
    generate_s: float = 0.0
    """Seconds that the generate request took, including its time in queues."""
    env_s: float = 0.0
    """Seconds that the env took to answer, and in the first turn also to reset."""
    untrained: str | None = None
    """Reason why the completion is left out of the training samples, such as "undelivered": it
    never reached the agent. None if the completion is trained, and if it has no tokens: no sample
    has such a completion, and none needs a reason for that."""
    call: dict[str, Any] | None = None
    """Facts of an agent's call; None for an env's turn. ``chain`` is the index of the
    conversation's branch, in the order in which branches began, and ``depth`` the number of turns
    before this one on it. ``at_s`` is in seconds since the agent began. ``dialect`` and ``model``
    are what the agent asked for."""


@dataclass(kw_only=True, slots=True)
class Rollout(Freezable):
    """One env from its reset to a terminal status.

    A rollout that has ended is read-only. While an algorithm gives credit, ``samples`` of the
    rollout that it is given are drafts, which can be written (`tasks/scoring.py`).

    ``str(rollout)`` leaves out the example and the turns, so don't look for an answer in it.
    """

    group_id: str
    index_in_group: int
    task_name: str
    data_sample: DataSample | None = field(default=None, repr=False)
    """Example that the env was made from, shared by the group."""
    turns: list[RolloutTurn] = field(default_factory=list, repr=False)
    status: RolloutStatus = RolloutStatus.ONGOING
    reward: float | None = None
    """Total reward. None until the rollout is scored. It stays or becomes None if the rubric gives
    none, if a reward function or ``Algorithm.score_group`` fails, or if the rollout got no credit.
    The group's statistics leave out a rollout without a reward."""
    reward_components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """Cause of an ERROR, TIMEOUT or ABORTED status, in one line."""
    traceback: str = field(default="", repr=False)
    """Traceback of the error, with only the frames of the user's code; empty if the error was not
    raised in user code."""
    metadata: dict[str, Any] = field(default_factory=dict, repr=False)
    """Data that the env attached at its end (``MessageEnv.metadata``), for rewards and credit."""
    static: bool = False
    """True if the rollout is a conversation of a dataset: the policy sampled nothing of it, and its
    reward has no meaning."""
    samples: list[TrainingSample] = field(default_factory=list, repr=False)
    """Training samples made of the turns."""
    answer: Any = field(default=None, repr=False)
    """Return value of the agent function; None for an env."""
    calls: dict[str, int] = field(default_factory=dict)
    """Number of an agent's calls by outcome: "answered", "undelivered", "auxiliary", "frozen
    model", "aborted", "lost", "refused".

    Beside these, "retried" counts repeats of a call. "wish/FIELD" counts calls in which a field
    that need not be honoured (WISHES in gateway/request.py) asks for something else than the task's
    setting. "unmet/FIELD" counts the calls among these whose answer shows that the field was not
    honoured. "noise/NAME" counts texts left out of prompts, and "special_texts" calls whose
    new messages hold the text of a special token, which the model is shown as text. "ignored/NAME"
    counts calls with a field that nothing reads. "completed_after_overflow" is 1 if the last call
    was refused for the length of its prompt, and the rollout counts as completed all the same."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Number of an agent's refused calls by the text of the refusal, for its first 8 texts."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index_in_group}"

    @property
    def last_turn(self) -> RolloutTurn | None:
        """Turn in which the policy spoke last; None if there is none.

        It need not be ``turns[-1]``. An agent's turns are in the order of its conversations, so the
        last one may have been sampled before others. Turns with a reason in ``untrained``, such as
        those of a frozen model, are passed over. A turn whose completion was aborted before its
        first token counts.
        """
        spoken = [turn for turn in self.turns if turn.untrained is None]
        return max(
            reversed(spoken),  # an env's turns are in the order of time
            key=lambda turn: turn.call["at_s"] if turn.call is not None else 0.0,
            default=None,
        )

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in the completions of all turns, whether they are trained or not."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def fail(
        self, cause: str, *, status: RolloutStatus = RolloutStatus.ERROR, traceback: str = ""
    ) -> None:
        """Mark the rollout as failed, with no reward, also after it has ended.

        A rubric calls it for a rollout that can't be scored, and an algorithm in ``score_rollout``
        for one that can't be credited.

        Args:
            cause: text of one line, not an exception; begins with the name of what failed.
            status: ``RolloutStatus.ERROR``, ``TIMEOUT`` or ``ABORTED``. Another status, such as
                ``COMPLETED``, would be wrong, but is not refused.
            traceback: frames of the user's code, if it raised.

        Raises:
            ValueError: ``status`` is no RolloutStatus.
        """
        self.amend(
            status=RolloutStatus(status),
            error=cause_text(cause),
            traceback=traceback,
            reward=None,
        )

    def assign_advantages(self, value: float | Sequence[float]) -> None:
        """Give every sampled token its advantage.

        Only an algorithm can call this, because the samples are read-only outside of it.

        Args:
            value: one number for all sampled tokens, or a sequence with a number for each, in the
                order of ``samples``, which is that of ``turns``: of an env's in the order of
                sampling, of an agent's in the order of its conversations.

        Raises:
            ValueError: ``value`` is neither one number nor one for each sampled token, or a number
                is not finite in float32. The samples stay as they were.
            AttributeError: the samples are read-only.
        """
        if isinstance(value, numbers.Real | np.bool_):
            advantage = finite_float(value)
            if advantage is None:
                raise self._not_finite(value)
            for sample in self.samples:
                sample.advantages = np.zeros(len(sample), np.float32)
                sample.advantages[sample.loss_mask] = advantage
            return
        counts = [int(np.count_nonzero(sample.loss_mask)) for sample in self.samples]
        advantages = self._checked_advantages(value, sum(counts))
        start = 0
        for sample, count in zip(self.samples, counts, strict=True):
            sample.advantages = np.zeros(len(sample), np.float32)
            sample.advantages[sample.loss_mask] = advantages[start : start + count]
            start += count

    def _checked_advantages(self, value: float | Sequence[float], sampled: int) -> np.ndarray:
        """Return the advantages of the rollout's ``sampled`` tokens; see `assign_advantages`."""
        is_array_scalar = isinstance(value, np.ndarray) and value.ndim == 0
        values = np.full(sampled, value) if is_array_scalar else value
        try:
            advantages = checked_stream("advantages", values, sampled)
        except ValueError as error:  # which ends with "want 5 numbers, one for each token"
            raise ValueError(
                f"rollout {self.rollout_id}: {error} sampled, or one number for all of them"
            ) from None
        wrong = first_non_finite(advantages)
        if wrong is not None:
            raise self._not_finite(np.broadcast_to(np.asarray(value), sampled)[wrong])
        return advantages

    def _not_finite(self, value: object) -> ValueError:
        return ValueError(
            f"rollout {self.rollout_id}: the advantage {value} is not a finite number that "
            "float32 holds"
        )


@dataclass(kw_only=True, slots=True)
class RolloutGroup(Freezable):
    """Rollouts of one example that are credited together.

    It has a single rollout if nothing compares the task's rollouts (``Task.needs_group``).
    """

    group_id: str
    task_name: str
    data_sample: DataSample = field(repr=False)
    rollouts: list[Rollout]
    admitted_version: int = 0
    """Policy version that the generators held when the group's rollouts began.

    The pacer counts the group's age from ``PacedGroup.admitted_version`` (`loops/pacing.py`), which
    may be older: the pacer admits the group first, and the group then waits for its example."""
    failure: str | None = None
    """Reason why the group can't be trained on, in one line; None if it can."""
    credit_s: float = 0.0
    """Seconds that the algorithm took to give credit, including calls to reference models. Times of
    rollouts that were credited concurrently are added up."""
    costs: dict[str, float] = field(default_factory=dict)
    """Further costs by name, such as calls and tokens of judges (`rollouts/costs.py`)."""

    @property
    def scored(self) -> list[Rollout]:
        """Rollouts with a reward. The group's statistics are taken over these alone."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored rollouts, in their order."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
