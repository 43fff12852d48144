"""Models as tasks, rubrics and algorithms see them: they sample and score tokens. The policy is one whose weights change.

Implemented by ``generation/client.py`` (the policy), ``generation/endpoint.py`` (frozen models).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge, Gt, Interval, Le

from torchtitan.experiments.rl.bounds import NonEmptyStr, NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.rollouts.types import Completion

Temperature = Annotated[float, Interval(ge=0, le=2)]
"""vLLM refuses more than 2."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How completions are sampled. Truncated sampling (top_p, top_k) is for validation only: it biases the importance ratio."""

    temperature: Temperature = 1.0
    """0 is greedy."""
    max_tokens: PositiveInt = 256
    """Per turn."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(-1)] = -1
    """-1 and 0: all tokens."""
    stop: list[NonEmptyStr] = field(default_factory=list)
    """Texts that end a completion too, with the token that completes one. All that was sampled is kept and trained on: the text
    itself, and what else that token holds. Special tokens are text here."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Tokens that end a completion, beside the renderer's, and are part of it."""


@dataclass(kw_only=True, slots=True)
class ModelReference:
    """Base of the references; never used itself."""

    def validate(self, *, field: str) -> None:
        """Refuse what can't work, without looking for files, keys or servers.

        Raises:
            ConfigError: by field, value and cure.
        """

    def check_present(self, *, field: str) -> None:
        """Refuse a reference to what this machine doesn't have: asked before a run, not before a plan of one.

        Raises:
            ConfigError: by field, value and cure.
        """


class PolicySession(Protocol):
    """A model for one rollout. It holds the seed, the sampling settings and the replica that caches the prefix."""

    @property
    def stops_at_texts(self) -> bool:
        """Return whether the model's engine ends a completion at texts."""

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """Sample one completion of at most ``max_tokens`` tokens (and at most SamplingConfig.max_tokens).

        A frozen model's tokens have policy version -1.

        Args:
            stop: texts that end this completion too, as those of ``SamplingConfig.stop`` do.
            seed: seed of this completion; None: it follows from the session's and the turn.
        """

    def close(self) -> None: ...


class ModelClient(Protocol):
    """Any model, frozen or not."""

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> PolicySession:
        """Open a session for one rollout. The same seed and prompts give the same tokens, whatever else is in flight."""

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probabilities at temperature 1 of given tokens: float32 [L], entry t of token t, entry 0 is 0.

        Raises:
            RunError: the model can't be reached or can't score them; names the model.
        """


class PolicyClient(ModelClient, Protocol):
    @property
    def version(self) -> int:
        """Policy version the generators hold now."""

    def frozen(self, model: ModelReference) -> ModelClient:
        """The frozen model a config names; the same client for equal references. Ask in ``setup``, before the first rollout.

        Raises:
            RunError: it is to be hosted and the run doesn't host it.
        """
