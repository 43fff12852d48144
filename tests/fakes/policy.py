"""Models that answer as a test says, without an engine."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.policy import (
    ModelReference,
    PolicyClient,
    PolicySession,
    SamplingConfig,
)
from torchtitan.experiments.rl.rollouts.types import Completion

CLOSE = "<|im_end|>"
"""Text of the token that closes a turn in the tiny model's template."""
TEACHER = FrozenModel(name="teacher", base_url="http://localhost:1/v1")
"""Reference to a frozen model that no test connects to."""


def completion_of(
    tokenizer: Any, text: str, *, finish_reason: str = "stop", version: int = 0
) -> Completion:
    """Return the text as if it was sampled, with the turn's closing token if it stopped.

    Token i has log-probability -(i + 1) / 8.
    """
    ids = tokenizer.encode(text + CLOSE * (finish_reason == "stop"), add_special_tokens=False)
    return Completion(
        token_ids=np.asarray(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=finish_reason,
    )


def tokens_to_stop(tokenizer: Any, ids: np.ndarray, stops: Sequence[str]) -> int:
    """Return the number of tokens that complete the first of the texts; all if none is there."""
    found = (
        count
        for count in range(1, len(ids) + 1)
        if any(stop in tokenizer.decode(ids[:count]) for stop in stops)
    )
    return next(found, len(ids)) if stops else len(ids)


class ScriptedPolicy:
    """Policy (`PolicyClient`) that says what a test tells it to say.

    ``reply(rollout_id, turn)`` returns what a rollout says in a turn: a text, an exception to
    raise, or None to hang. A text in place of the function is the reply of every turn. ``frozen``
    is the client of every frozen model.
    """

    def __init__(
        self,
        tokenizer: Any,
        reply: Callable[[str, int], object] | str = "ok",
        *,
        frozen: "ScriptedPolicy | None" = None,
    ):
        self.tokenizer = tokenizer
        self.reply = reply if callable(reply) else lambda rollout_id, turn: reply
        self.version = 3
        self.sessions: list[ScriptedSession] = []
        self.asked_for: list[ModelReference] = []
        """References of which the task asked for a client."""
        self._frozen = frozen

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> "ScriptedSession":
        session = ScriptedSession(
            self,
            rollout_id=rollout_id,
            seed=seed,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
        )
        self.sessions.append(session)
        return session

    def with_adapter(self, name: str) -> "ScriptedPolicy":
        return self

    def frozen(self, model: ModelReference) -> "ScriptedPolicy":
        self.asked_for.append(model)
        assert self._frozen is not None, f"the test gave no client of {model}"
        return self._frozen

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        raise AssertionError("only a Scorer scores tokens")


class ScriptedSession:
    """Session (`PolicySession`) of a ScriptedPolicy. It ends a completion where an engine would."""

    stops_at_texts = True

    def __init__(
        self,
        policy: ScriptedPolicy,
        *,
        rollout_id: str,
        seed: int,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
    ):
        self.policy: Any = policy
        self.rollout_id = rollout_id
        self.seed = seed
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.prompts: list[list[int]] = []
        self.closed = 0

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        assert isinstance(prompt_token_ids, np.ndarray) and prompt_token_ids.dtype == np.int32
        self.prompts.append(prompt_token_ids.tolist())
        await asyncio.sleep(0)
        reply = self.policy.reply(self.rollout_id, len(self.prompts) - 1)
        if isinstance(reply, BaseException):
            raise reply
        if reply is None:
            await asyncio.sleep(3600)
        sampled = completion_of(self.policy.tokenizer, reply, version=self.policy.version)
        limit = min(max_tokens, self.sampling.max_tokens)
        at_text = tokens_to_stop(self.policy.tokenizer, sampled.token_ids, stop)
        if at_text < len(sampled.token_ids) and at_text <= limit:
            return first_tokens(sampled, at_text, finish_reason="stop")
        if len(sampled.token_ids) > limit:
            return first_tokens(sampled, limit, finish_reason="length")
        return sampled

    def close(self) -> None:
        self.closed += 1


def first_tokens(completion: Completion, count: int, *, finish_reason: str) -> Completion:
    """Return a completion that was ended after its first ``count`` tokens."""
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        policy_versions=completion.policy_versions[:count],
        finish_reason=finish_reason,
    )


class HeldPolicy(ScriptedPolicy):
    """Policy whose completions wait until the test sets ``released``.

    ``holds(rollout_id)`` is True for a rollout that waits; by default every rollout does.
    """

    def __init__(
        self,
        tokenizer: Any,
        reply: Callable[[str, int], object] | str = "ok",
        *,
        holds: Callable[[str], bool] = lambda rollout_id: True,
    ):
        super().__init__(tokenizer, reply)
        self.released = asyncio.Event()
        self.begun = 0
        """Number of completions that were asked for."""
        self.ended = 0
        """Number of completions that were returned."""
        self._holds = holds

    def session(self, **options: Any) -> "HeldSession":
        session = HeldSession(self, **options)
        self.sessions.append(session)
        return session

    async def wait(self, rollout_id: str) -> None:
        """Return when a rollout may have its completion."""
        if self._holds(rollout_id):
            await self.released.wait()


class HeldSession(ScriptedSession):
    """Session of a HeldPolicy."""

    async def generate(self, prompt_token_ids: np.ndarray, **options: Any) -> Completion:
        self.policy.begun += 1
        await self.policy.wait(self.rollout_id)
        completion = await super().generate(prompt_token_ids, **options)
        self.policy.ended += 1
        return completion


class Scorer(ScriptedPolicy):
    """Policy that also scores: token t of a sequence has log-probability -t."""

    def __init__(
        self,
        tokenizer: Any,
        reply: Callable[[str, int], object] | str = "ok",
        *,
        frozen: ScriptedPolicy | None = None,
    ):
        super().__init__(tokenizer, reply, frozen=frozen)
        self.scored: list[list[int]] = []
        """Sequences that were scored."""
        self.open = 0
        """Number of sequences that are being scored now."""
        self.most_open = 0
        """Maximum number of sequences that were being scored at once."""

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(100):  # others ask meanwhile
            await asyncio.sleep(0)
        self.open -= 1
        self.scored.append(np.asarray(token_ids).tolist())
        return -np.arange(len(token_ids), dtype=np.float32)


if TYPE_CHECKING:  # mypy checks that the fakes have what the protocols ask for
    POLICIES: tuple[type[PolicyClient], ...] = (ScriptedPolicy, HeldPolicy, Scorer)
    SESSIONS: tuple[type[PolicySession], ...] = (ScriptedSession, HeldSession)
