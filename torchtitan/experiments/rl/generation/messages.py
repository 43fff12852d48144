"""The messages between a client and a generator. Many requests travel in one actor message, and so do their results."""

from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion

CLIENT_BITS = 40
"""A request's id says whose it is: the client's id lies above this many bits, the client's own count below."""


@dataclass(kw_only=True, slots=True)
class GenerateRequest:
    request_id: int
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    sampling: SamplingConfig
    seed: int
    stop_token_ids: list[int]
    cache_scope: str = ""
    """Requests share cached prefixes with those of the same scope only."""
    adapter: str = ""
    """Of the version's, which one samples. An engine that serves none has no choice."""
    routes_from: int = 0
    """The first token of the prompt whose route is wanted: those before it are known."""


@dataclass(kw_only=True, slots=True)
class ScoreRequest:
    request_id: int
    token_ids: np.ndarray
    """int32 [L], at least 2."""
    adapter: str = ""


@dataclass(kw_only=True, slots=True)
class GenerateResult:
    request_id: int
    completion: Completion


@dataclass(kw_only=True, slots=True)
class ScoreResult:
    request_id: int
    logprobs: np.ndarray
    """float32 [L]; entry 0 is 0."""


@dataclass(kw_only=True, slots=True)
class RequestFailed:
    request_id: int
    cause: str


@dataclass(kw_only=True, slots=True)
class GeneratorFailed:
    """The engine can't go on: every open request of this replica is lost."""

    cause: str


Request = GenerateRequest | ScoreRequest
Result = GenerateResult | ScoreResult | RequestFailed
"""How a request ends: one for each, by its request_id."""
GeneratorMessage = Result | GeneratorFailed
"""What a generator sends to its clients."""
