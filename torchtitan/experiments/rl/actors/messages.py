"""What a client and a generator, or the controller and a rollout worker, say to each other.

Many requests to a generator travel in one actor message, and so do their results.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion, DataSample, RolloutGroup

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


@dataclass(kw_only=True, slots=True)
class ScoreRequest:
    request_id: int
    token_ids: np.ndarray
    """int32 [L], at least 2."""


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
Result = GenerateResult | ScoreResult | RequestFailed | GeneratorFailed


@dataclass(kw_only=True, slots=True)
class WeightReceipt:
    """A generator's proof of what it loaded."""

    version: int
    fingerprint: str
    canary_logprobs: np.ndarray
    """float32 [L] of the canary tokens under the loaded weights."""
    verify_s: float
    reload_s: float


@dataclass(kw_only=True, slots=True)
class GroupRequest:
    """A group for a rollout worker to run."""

    task: str
    data_sample: DataSample
    group_id: str
    policy_version: int
    """What the generators hold now."""
    sampling: SamplingConfig | None = None
    """The task's when None."""
    measured_size: int | None = None
    """Rollouts of a group that is only measured, for validation; None: a training group, of the task's size."""


@dataclass(kw_only=True, slots=True)
class GroupResult:
    group: RolloutGroup
    problem: str | None
    """Why it can't be trained on."""
    event_loop_lag_s: float
    """Longest time since the worker's last result that its event loop was held up."""
