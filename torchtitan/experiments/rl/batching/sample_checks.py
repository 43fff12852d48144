"""What makes a training sample one that can be trained on, but for its numbers being finite (`rollouts/streams.py`)."""

import numpy as np

from torchtitan.experiments.rl.types import STREAMS, TrainingSample

NO_REFERENCE = "has tokens with a ref_kl weight and no ref_logprobs: its algorithm must set them"


def check_sample(sample: TrainingSample) -> None:
    """Refuse a sample whose streams do not fit each other.

    Raises:
        ValueError: no tokens, streams that are not aligned, credit that is missing or on the wrong tokens; names the rollout.
    """
    length = len(sample.token_ids)
    if not length:
        raise ValueError(f"{_named(sample)} has no tokens")
    for stream in STREAMS:
        values = getattr(sample, stream)
        if values is not None and len(values) != length:
            raise ValueError(f"{_named(sample)} has {length} token_ids and {len(values)} {stream}: they must be aligned")
    if missing := missing_credit(sample):
        raise ValueError(f"{_named(sample)} {missing}")
    if sample.reference_ids is not None and not _ends_alike(sample.reference_ids, sample):
        raise ValueError(f"{_named(sample)} has reference_ids that do not end as it does, from its first sampled token on")
    check_weights(sample)


def check_weights(sample: TrainingSample) -> None:
    """Refuse weights on tokens that no loss is computed of, and a ref_kl weight without a reference.

    Raises:
        ValueError: names the rollout.
    """
    if _lacks_reference(sample):
        raise ValueError(f"{_named(sample)} {NO_REFERENCE}")
    first_rl = sample.loss_mask[0] and (sample.rl_weights is None or sample.rl_weights[0] != 0)
    others = (sample.ce_weights, sample.ref_kl_weights)
    if first_rl or any(weights is not None and weights[0] != 0 for weights in others):
        raise ValueError(f"{_named(sample)} trains its first token, which has no log-probability: nothing comes before it")
    if sample.ref_kl_weights is not None and np.any((sample.ref_kl_weights != 0) & ~sample.loss_mask):
        raise ValueError(
            f"{_named(sample)} has a ref_kl weight on a token the policy did not sample, which has no importance ratio: "
            "weigh only sampled tokens (loss_mask)"
        )


def _named(sample: TrainingSample) -> str:
    return f"a sample of rollout {sample.rollout_id!r}"


def missing_credit(sample: TrainingSample) -> str | None:
    """What the sample's weights need and its algorithm has not set; None where nothing is missing."""
    if sample.advantages is None:
        weights = 1 if sample.rl_weights is None else sample.rl_weights
        if np.any(sample.loss_mask & (np.asarray(weights) != 0)):
            return "has tokens with an rl weight and no advantages: its algorithm must assign them"
    return NO_REFERENCE if _lacks_reference(sample) else None


def _lacks_reference(sample: TrainingSample) -> bool:
    given = sample.ref_logprobs is not None or sample.reference_ids is not None
    return not given and sample.ref_kl_weights is not None and bool(np.any(sample.ref_kl_weights))


def _ends_alike(reference_ids: np.ndarray, sample: TrainingSample) -> bool:
    """And has a token before the first that it scores."""
    count = len(sample) - int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
    tail = sample.token_ids[len(sample) - count :]
    return len(reference_ids) > count and np.array_equal(reference_ids[len(reference_ids) - count :], tail)
