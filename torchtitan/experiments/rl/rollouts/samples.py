"""Turns of a rollout become training samples.

The ids that were sampled are the ids that are trained: nothing is rendered again. A completion from
outside the library passes `checked_completion` first, and a sample with credit `check_sample`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutTurn
from torchtitan.experiments.rl.types import ROLE_IDS, STREAMS, TrainingSample, first_non_finite

FINISH_REASONS = ("stop", "length", "abort")

LOGPROB_ROUNDING = 1e-2
"""Largest log-probability that is accepted: the rounding of half precision may lift one above 0.
The sample keeps such a value as it is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TurnSpan:
    """Position of one turn in its rollout's samples.

    Tokens ``[completion, end)`` of the sample are the turn's completion. Tokens
    ``[new, completion)`` are those of its prompt that the previous turn of the sample does not
    have, the completions of untrained turns in between included. ``new`` is 0 in a sample's first
    turn. A position in the turn's prompt is the same position in the sample.
    """

    sample: int
    """Index into the rollout's samples."""
    new: int
    completion: int
    end: int


def checked_completion(completion: Completion) -> Completion:
    """Return the completion, checked and read-only, with arrays of the declared dtypes.

    A completion that is read-only is taken to be checked, and is returned as it is.

    Raises:
        ValueError: the completion can't be trained on; see `check_completion`.
    """
    if isinstance(completion, Completion) and completion.frozen:
        return completion
    check_completion(completion)
    # Copies, because the engine may be the user's own, and give lists or slices of a buffer.
    return Completion(
        token_ids=np.array(completion.token_ids, np.int32),
        logprobs=np.array(completion.logprobs, np.float32),
        policy_versions=np.array(completion.policy_versions, np.int32),
        finish_reason=completion.finish_reason,
        replica=completion.replica,
        routes=None if completion.routes is None else completion.routes.copy(),
    ).freeze()


def check_completion(completion: Completion) -> None:
    """Raise if a completion can't be trained on.

    A completion without tokens passes. The number of routes is checked where the prompt is known
    (`samples_from_turns`).

    Raises:
        ValueError: the value is no Completion; its streams are not aligned or not numbers; its
            routes have another dtype or number of dimensions; there is no such finish reason; a
            log-probability is not finite in float32 or above `LOGPROB_ROUNDING`; a token id is
            below 0, a policy version below -1, or one of them more than int32 holds.
    """
    if not isinstance(completion, Completion):
        raise ValueError(f"bad completion: a {type(completion).__name__}, want a Completion")
    _check_routes(completion.routes)
    streams = {
        "token_ids": np.asarray(completion.token_ids),
        "logprobs": np.asarray(completion.logprobs),
        "policy_versions": np.asarray(completion.policy_versions),
    }
    ids, logprobs, versions = streams.values()
    aligned = ids.ndim == 1 and ids.shape == logprobs.shape == versions.shape
    if not aligned or completion.finish_reason not in FINISH_REASONS:
        shapes = [
            stream.shape[0] if stream.ndim == 1 else stream.shape for stream in streams.values()
        ]
        raise ValueError(
            f"bad completion: stream lengths {shapes}, finish_reason {completion.finish_reason!r}"
        )
    if len(ids) == 0:  # an empty list has no dtype of its own
        return
    for name, stream in streams.items():
        kinds = "fiu" if name == "logprobs" else "iu"
        if stream.dtype.kind not in kinds:
            raise ValueError(f"bad completion: its {name} are {stream.dtype}")
    lowest, highest = _extremes(ids)
    if lowest < 0:
        raise ValueError("bad completion: a token id below 0")
    if highest > _MAX_TOKEN_ID:
        raise ValueError(f"bad completion: a token id above {_MAX_TOKEN_ID}")
    lowest, highest = _extremes(logprobs)
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        wrong = first_non_finite(logprobs)
        raise ValueError(
            f"bad completion: the generator's log-probability of its token {wrong} is "
            f"{logprobs[wrong]}, want a finite number"
        )
    if highest > LOGPROB_ROUNDING:
        raise ValueError("bad completion: a log-probability above 0")
    if lowest < _MIN_LOGPROB:
        raise ValueError(f"bad completion: a log-probability below {_MIN_LOGPROB:.3g}")
    lowest, highest = _extremes(versions)
    if lowest < -1 or highest > _MAX_TOKEN_ID:
        raise ValueError(f"bad completion: a policy version below -1 or above {_MAX_TOKEN_ID}")


def _extremes(stream: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value of a stream; NaN for both if it holds one.

    They are exact numbers of Python: numpy would round a bound to the dtype of the stream. Of a
    short stream they take a third of the time of ``min`` and ``max``.
    """
    return stream.item(stream.argmin()), stream.item(stream.argmax())


_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
_MIN_LOGPROB = float(np.finfo(np.float32).min)


def _check_routes(routes: np.ndarray | None) -> None:
    if routes is None:
        return
    if not isinstance(routes, np.ndarray):
        raise ValueError(f"bad completion: its routes are a {type(routes).__name__}, want an array")
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
        raise ValueError(
            f"bad completion: its routes are {routes.dtype} {routes.shape}, want uint8 or uint16 "
            "[R, layers, k]"
        )


def turn_spans(turns: Sequence[RolloutTurn]) -> Iterator[tuple[RolloutTurn, TurnSpan]]:
    """Lay turns out in samples, by the extension property.

    A turn joins the sample before it if its prompt starts with exactly that sample's tokens. If it
    doesn't, because the prompt was rendered anew or history was cut, a new sample starts.

    A turn that sampled nothing (aborted before its first token), or that is not to be trained, is
    in no sample and is left out.
    """
    sample = -1
    before: RolloutTurn | None = None
    for turn in turns:
        sampled = len(turn.completion.token_ids)
        if sampled == 0 or turn.untrained is not None:
            continue
        prompt = turn.prompt_token_ids
        new = 0
        if before is not None:
            tokens = np.concatenate([before.prompt_token_ids, before.completion.token_ids])
            if np.array_equal(prompt[: len(tokens)], tokens):
                new = len(tokens)
        if new == 0:
            sample += 1
        before = turn
        end = len(prompt) + sampled
        yield turn, TurnSpan(sample=sample, new=new, completion=len(prompt), end=end)


def samples_from_turns(
    turns: Sequence[RolloutTurn],
    *,
    task_name: str,
    rollout_id: str,
    temperature: float,
    adapter: str = "",
) -> list[TrainingSample]:
    """Make one sample of each run of turns that extend each other.

    Every sampled token of a turn that is trained (``RolloutTurn.untrained`` is None) is in exactly
    one sample's loss mask. Where a later prompt repeats it in a new sample, it is context.

    The route of a token is that of the first turn with routes that had the token as an input: the
    log-probabilities after it were computed with that route. A later turn may have computed the
    token again, because the cache had lost it or the weights had changed. Of that turn, only the
    routes of new tokens are used. So a route that the first turn left out stays unknown.

    Raises:
        ValueError: the streams of a completion differ in length, or it has routes of more tokens
            than there are.
    """
    for index, turn in enumerate(turns):  # numpy would spread a stream of one entry over many
        completion = turn.completion
        streams = (completion.token_ids, completion.logprobs, completion.policy_versions)
        lengths = [len(stream) for stream in streams]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"rollout {rollout_id}, turn {index}: completion streams of lengths {lengths}"
            )

    runs: dict[int, list[tuple[RolloutTurn, TurnSpan]]] = {}
    for turn, span in turn_spans(turns):
        runs.setdefault(span.sample, []).append((turn, span))
    return [
        _sample_of_run(
            run,
            task_name=task_name,
            rollout_id=rollout_id,
            temperature=temperature,
            adapter=adapter,
        )
        for run in runs.values()
    ]


def _sample_of_run(
    run: Sequence[tuple[RolloutTurn, TurnSpan]], **fields: str | float
) -> TrainingSample:
    """Return the sample of turns that extend each other.

    Args:
        fields: values of the fields that don't follow from the turns.
    """
    last, last_span = run[-1]
    length = last_span.end
    role_ids = np.empty(length, np.int8)
    role_ids[: last_span.completion] = last.prompt_role_ids
    token_ids = np.concatenate([last.prompt_token_ids, last.completion.token_ids])
    turn_routes = [(turn.completion.routes, span.end - 1) for turn, span in run]
    sample = TrainingSample(
        token_ids=token_ids.astype(np.int32, copy=False),
        loss_mask=np.zeros(length, bool),
        generator_logprobs=np.zeros(length, np.float32),
        policy_versions=np.full(length, -1, np.int32),
        replicas=np.full(length, -1, np.int16),
        role_ids=role_ids,
        routes=_sample_routes(turn_routes, length),
        **fields,  # type: ignore[arg-type]
    )
    assert sample.replicas is not None
    for turn, span in run:
        sampled = slice(span.completion, span.end)
        sample.loss_mask[sampled] = True
        sample.generator_logprobs[sampled] = turn.completion.logprobs
        sample.policy_versions[sampled] = turn.completion.policy_versions
        sample.replicas[sampled] = turn.completion.replica
        role_ids[sampled] = ROLE_IDS["assistant"]
    return sample


def _sample_routes(
    turn_routes: Sequence[tuple[np.ndarray | None, int]], length: int
) -> np.ndarray | None:
    """Return the routes [length, layers, k] of a sample; None if no turn has any.

    Args:
        turn_routes: each turn's routes, and the position in the sample at which they end.
    """
    given = [(routes, end) for routes, end in turn_routes if routes is not None]
    if not given:
        return None
    sample_routes = STREAMS["routes"].padding(length, given[0][0])
    filled = 0
    for routes, end in given:
        if len(routes) > end:
            raise ValueError(f"routes of {len(routes)} tokens, and only {end} were inputs")
        start = max(filled, end - len(routes))
        sample_routes[start:end] = routes[len(routes) - (end - start) :]
        filled = end
    return sample_routes


# ---- samples that an algorithm has given credit

NO_REFERENCE = "has tokens with a ref_kl weight and no ref_logprobs: its algorithm must set them"


def check_samples(rollouts: Iterable[Rollout]) -> None:
    """Raise if a sample of the rollouts can't be trained on; see `check_sample`."""
    for rollout in rollouts:
        for sample in rollout.samples:
            check_sample(sample)


def check_sample(sample: TrainingSample) -> None:
    """Raise if the streams of a sample do not fit each other.

    Raises:
        ValueError: the sample has no tokens, its streams are not aligned, or credit is missing or
            on the wrong tokens. Names the rollout.
    """
    length = len(sample.token_ids)
    if not length:
        raise ValueError(f"{_named(sample)} has no tokens")
    for stream in STREAMS:
        values = getattr(sample, stream)
        if values is not None and len(values) != length:
            raise ValueError(
                f"{_named(sample)} has {length} token_ids and {len(values)} {stream}: "
                "they must be aligned"
            )
    if missing := missing_credit(sample):
        raise ValueError(f"{_named(sample)} {missing}")
    if sample.reference_ids is not None and not _ends_alike(sample.reference_ids, sample):
        raise ValueError(
            f"{_named(sample)} has reference_ids that do not end as it does, from its first "
            "sampled token on"
        )
    check_weights(sample)


def check_weights(sample: TrainingSample) -> None:
    """Raise if a token without a loss has a weight, or a ref_kl weight has no reference.

    Raises:
        ValueError: names the rollout.
    """
    if _lacks_reference(sample):
        raise ValueError(f"{_named(sample)} {NO_REFERENCE}")
    first_rl = sample.loss_mask[0] and (sample.rl_weights is None or sample.rl_weights[0] != 0)
    others = (sample.ce_weights, sample.ref_kl_weights)
    if first_rl or any(weights is not None and weights[0] != 0 for weights in others):
        raise ValueError(
            f"{_named(sample)} trains its first token, which has no log-probability: "
            "nothing comes before it"
        )
    weights = sample.ref_kl_weights
    if weights is not None and np.any((weights != 0) & ~sample.loss_mask):
        raise ValueError(
            f"{_named(sample)} has a ref_kl weight on a token the policy did not sample, which has "
            "no importance ratio: weigh only sampled tokens (loss_mask)"
        )


def _named(sample: TrainingSample) -> str:
    return f"a sample of rollout {sample.rollout_id!r}"


def missing_credit(sample: TrainingSample) -> str | None:
    """Return what the sample's weights need and its algorithm has not set; None if all is there."""
    if sample.advantages is None:
        weights = 1 if sample.rl_weights is None else sample.rl_weights
        if np.count_nonzero(sample.loss_mask & (np.asarray(weights) != 0)):
            return "has tokens with an rl weight and no advantages: its algorithm must assign them"
    return NO_REFERENCE if _lacks_reference(sample) else None


def _lacks_reference(sample: TrainingSample) -> bool:
    given = sample.ref_logprobs is not None or sample.reference_ids is not None
    return not given and sample.ref_kl_weights is not None and bool(np.any(sample.ref_kl_weights))


def _ends_alike(reference_ids: np.ndarray, sample: TrainingSample) -> bool:
    """Return True if the reference's tokens end as the sample does, with a token before these."""
    count = len(sample) - int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
    tail = sample.token_ids[len(sample) - count :]
    return len(reference_ids) > count and np.array_equal(
        reference_ids[len(reference_ids) - count :], tail
    )
