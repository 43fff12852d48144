"""From turns to training samples: the ids that were sampled are the ids that are trained; nothing is rendered again."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.batching.sample_checks import first_non_finite
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutTurn
from torchtitan.experiments.rl.types import ROLE_IDS, STREAMS, TrainingSample

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnSpan:
    """Where one turn lies in its rollout's samples.

    Tokens ``[new, completion)`` of the sample are what the turn's prompt added to the turn before, tokens ``[completion, end)``
    its completion. A position in the turn's prompt is the same position in the sample.
    """

    sample: int
    """Index into the rollout's samples."""
    new: int
    completion: int
    end: int


LOGPROB_ROUNDING = 1e-2
"""How far above 0 the rounding of half precision may lift a log-probability."""


def check_completion(completion: Completion) -> None:
    """Refuse a completion that can't be trained on.

    Raises:
        ValueError: no Completion, streams that are not aligned or not of numbers, a finish reason there is not, a
            log-probability that is not finite or above 0.
    """
    if not isinstance(completion, Completion):
        raise ValueError(f"bad completion: a {type(completion).__name__}, want a Completion")
    if (routes := completion.routes) is not None and (
        routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3
    ):
        raise ValueError(
            f"bad completion: its routes are {routes.dtype} {routes.shape}, want uint8 or uint16 [R, layers, k]"
        )
    ids, logprobs, versions = map(
        np.asarray, (completion.token_ids, completion.logprobs, completion.policy_versions)
    )
    aligned = ids.ndim == 1 and ids.shape == logprobs.shape == versions.shape
    if not aligned or completion.finish_reason not in FINISH_REASONS:
        shapes = [
            stream.shape[0] if stream.ndim == 1 else stream.shape
            for stream in (ids, logprobs, versions)
        ]
        raise ValueError(
            f"bad completion: stream lengths {shapes}, finish_reason {completion.finish_reason!r}"
        )
    if not len(ids):  # an empty list has no dtype of its own
        return
    for name, stream, kinds in (
        ("token_ids", ids, "iu"),
        ("logprobs", logprobs, "fiu"),
        ("policy_versions", versions, "iu"),
    ):
        if stream.dtype.kind not in kinds:
            raise ValueError(f"bad completion: its {name} are {stream.dtype}")
    # argmin and item take a tenth of the time of min; NaN is the least and the greatest.
    if ids.item(ids.argmin()) < 0:
        raise ValueError("bad completion: a token id below 0")
    if (
        not math.isfinite(logprobs.item(logprobs.argmin()))
        or not logprobs.item(logprobs.argmax()) <= LOGPROB_ROUNDING
    ):
        if (wrong := first_non_finite(logprobs)) is not None:
            seen = f"the generator's log-probability of its token {wrong} is {logprobs[wrong]}, want a finite number"
            raise ValueError(f"bad completion: {seen}")
        raise ValueError("bad completion: a log-probability above 0")


def turn_spans(turns: Sequence[RolloutTurn]) -> Iterator[tuple[RolloutTurn, TurnSpan]]:
    """Lay turns out in samples by the extension property: a turn joins the sample before it while its prompt starts with that
    sample's tokens exactly; where it doesn't (the prompt was rendered anew, history was cut), a new sample starts.

    Left out: a turn that sampled nothing (aborted before its first token), or that is not to be trained. It is in no sample.
    """
    sample, before = -1, None
    for turn in turns:
        sampled = len(turn.completion.token_ids)
        if not sampled or turn.untrained is not None:
            continue
        prompt, new = turn.prompt_token_ids, 0
        if before is not None:
            tokens = np.concatenate([before.prompt_token_ids, before.completion.token_ids])
            new = len(tokens) if np.array_equal(prompt[: len(tokens)], tokens) else 0
        sample, before = sample if new else sample + 1, turn
        yield (
            turn,
            TurnSpan(sample=sample, new=new, completion=len(prompt), end=len(prompt) + sampled),
        )


def samples_from_turns(
    turns: Sequence[RolloutTurn], *, task_name: str, rollout_id: str, temperature: float
) -> list[TrainingSample]:
    """One sample per run of turns that extend each other.

    Every sampled token is in exactly one sample's loss mask: where a later prompt repeats it in a new sample, it is context.

    A token's route is that of the first turn that had it as an input: with it the log-probabilities after it were computed. A
    later turn that computed it again, because the cache had lost it or the weights had changed, gives those of new tokens only.

    Raises:
        ValueError: a completion whose streams differ in length, or with routes of more tokens than there are.
    """
    for index, turn in enumerate(turns):
        streams = (
            turn.completion.token_ids,
            turn.completion.logprobs,
            turn.completion.policy_versions,
        )
        if len({len(stream) for stream in streams}) > 1:
            raise ValueError(
                f"rollout {rollout_id}, turn {index}: completion streams of lengths {[len(s) for s in streams]}"
            )

    runs: dict[int, list[tuple[RolloutTurn, TurnSpan]]] = {}
    for turn, span in turn_spans(turns):
        runs.setdefault(span.sample, []).append((turn, span))

    samples = []
    for run in runs.values():
        last, last_span = run[-1]
        replicas, versions = np.empty(last_span.end, np.int16), np.empty(last_span.end, np.int32)
        replicas[:] = versions[:] = -1
        role_ids = np.empty(last_span.end, np.int8)
        role_ids[: last_span.completion] = last.prompt_role_ids
        sample = TrainingSample(
            token_ids=np.concatenate([last.prompt_token_ids, last.completion.token_ids]).astype(
                np.int32, copy=False
            ),
            loss_mask=np.zeros(last_span.end, bool),
            generator_logprobs=np.zeros(last_span.end, np.float32),
            policy_versions=versions,
            replicas=replicas,
            role_ids=role_ids,
            routes=_routes(
                [(turn.completion.routes, span.end - 1) for turn, span in run], last_span.end
            ),
            temperature=temperature,
            task_name=task_name,
            rollout_id=rollout_id,
        )
        for turn, span in run:
            sampled = slice(span.completion, span.end)
            sample.loss_mask[sampled] = True
            sample.generator_logprobs[sampled] = turn.completion.logprobs
            versions[sampled] = turn.completion.policy_versions
            replicas[sampled] = turn.completion.replica
            role_ids[sampled] = ROLE_IDS["assistant"]
        samples.append(sample)
    return samples


def _routes(turns: Sequence[tuple[np.ndarray | None, int]], length: int) -> np.ndarray | None:
    """[L, layers, k] of a sample of ``length`` tokens, of its turns' routes and the place where each ends."""
    given = [(routes, end) for routes, end in turns if routes is not None]
    if not given:
        return None
    found, filled = STREAMS["routes"].padding(length, given[0][0]), 0
    for routes, end in given:
        if len(routes) > end:
            raise ValueError(f"routes of {len(routes)} tokens, and only {end} were inputs")
        start = max(filled, end - len(routes))
        found[start:end], filled = routes[len(routes) - (end - start) :], end
    return found
