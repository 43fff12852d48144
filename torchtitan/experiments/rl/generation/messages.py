"""The messages between a client and a generator. Many requests travel in one actor message, and so do their results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
Result = GenerateResult | ScoreResult | RequestFailed
"""How a request ends: one for each, by its request_id."""
GeneratorMessage = Result | GeneratorFailed
"""What a generator sends to its clients."""


class GeneratorMessages(list[GeneratorMessage]):
    """What travels in one actor message. It arrives with the completions first, in their order, and then the others.

    Completions are pickled as columns. Pickling the three arrays of each takes 18 us of the two processes, and this takes 3.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        generated = [message for message in self if isinstance(message, GenerateResult)]
        others = [message for message in self if not isinstance(message, GenerateResult)]
        completions = [result.completion for result in generated]
        columns = (
            [result.request_id for result in generated],
            [completion.finish_reason for completion in completions],
            [completion.replica for completion in completions],
            [len(completion.token_ids) for completion in completions],
            _joined([completion.token_ids for completion in completions], np.int32),
            _joined([completion.logprobs for completion in completions], np.float32),
            _joined([completion.policy_versions for completion in completions], np.int32),
        )
        return _from_columns, (columns, others)


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> bytes:
    return b"".join(array.astype(dtype, copy=False).tobytes() for array in arrays)


def _from_columns(columns: tuple[Any, ...], others: list[GeneratorMessage]) -> GeneratorMessages:
    *fields, tokens, logprobs, versions = columns
    messages, start = GeneratorMessages(), 0
    streams = np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32), np.frombuffer(versions, np.int32)
    for request_id, finish_reason, replica, length in zip(*fields, strict=True):
        token_ids, own_logprobs, policy_versions = (stream[start : start + length].copy() for stream in streams)
        completion = Completion(
            token_ids=token_ids,
            logprobs=own_logprobs,
            policy_versions=policy_versions,
            finish_reason=finish_reason,
            replica=replica,
        )
        messages.append(GenerateResult(request_id=request_id, completion=completion))
        start += length
    messages.extend(others)
    return messages
