"""Models as tasks, rubrics and algorithms see them: they sample and score tokens.

The policy is a model whose weights change. These protocols are implemented by
`generation/client.py` (the policy) and `generation/endpoint.py` (frozen models).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge, Gt, Interval, Le

from torchtitan.experiments.rl.bounds import NonEmptyStr, NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.rollouts.types import Completion

Temperature = Annotated[float, Interval(ge=0, le=2)]
"""Sampling temperature. vLLM refuses more than 2."""


TopP = Annotated[float, Gt(0), Le(1)]
TopK = Annotated[int, Ge(-1)]


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """Settings with which completions are sampled.

    Truncated sampling (top_p, top_k) is for validation only: it biases the importance ratio.
    """

    temperature: Temperature = 1.0
    """0 is greedy."""
    max_tokens: PositiveInt = 256
    """Maximum number of tokens of a turn."""
    top_p: TopP = 1.0
    top_k: TopK = -1
    """Number of most likely tokens to sample from; -1 and 0 for all."""
    stop: list[NonEmptyStr] = field(default_factory=list)
    """Texts that end a completion too, with the token that completes one. All that was sampled is
    kept and trained on: the text itself, and what else that token holds. Special tokens are text
    here."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Tokens that end a completion, beside the renderer's, and are part of it."""


@dataclass(kw_only=True, slots=True)
class ModelReference:
    """Base class of references to models; never used itself."""

    def validate(self, *, field: str) -> None:
        """Refuse what can't work, without looking for files, keys or servers.

        Raises:
            ConfigError: names field, value and cure.
        """

    def check_present(self, *, field: str) -> None:
        """Refuse a reference to what this machine doesn't have.

        It is asked before a run, not before a plan of one.

        Raises:
            ConfigError: names field, value and cure.
        """


class PolicySession(Protocol):
    """Session of one rollout with a model.

    It holds the seed, the sampling settings and the replica that caches the prefix.
    """

    @property
    def stops_at_texts(self) -> bool:
        """True if the model's engine ends a completion at texts."""

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """Sample one completion.

        A frozen model's tokens have policy version -1.

        Args:
            prompt_token_ids: int32 [P].
            max_tokens: maximum number of tokens, beside that of ``SamplingConfig.max_tokens``.
            stop: texts that end this completion too, as those of ``SamplingConfig.stop`` do.
            seed: seed of this completion; None for one that follows from the session's seed and
                the turn.
        """

    def close(self) -> None: ...


class ModelClient(Protocol):
    """Client of any model, frozen or not."""

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> PolicySession:
        """Open a session for one rollout.

        The same seed and prompts give the same tokens, whatever else is in flight.
        """

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of given tokens at temperature 1.

        Returns:
            float32 [L]. Entry t is that of token t; entry 0 is 0.

        Raises:
            RunError: the model can't be reached or can't score the tokens; names the model.
        """


class PolicyClient(ModelClient, Protocol):
    """Client of the policy, which also gives access to frozen models."""

    @property
    def version(self) -> int:
        """Policy version that the generators hold now."""

    def with_adapter(self, name: str) -> "PolicyClient":
        """Return the client of the policy with one of its adapters.

        A policy without adapters, such as a server that is only measured, returns itself.
        """

    def frozen(self, model: ModelReference) -> ModelClient:
        """Return the client of a frozen model that a config names.

        Equal references have the same client. Ask in ``setup``, before the first rollout.

        Raises:
            RunError: the run should host the model and doesn't.
        """
