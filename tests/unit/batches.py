"""Samples to pack, and training batches taken apart into the samples that are packed in them."""

import numpy as np

from torchtitan.experiments.rl.types import TrainingBatch, TrainingSample

STREAMS = [
    "token_ids", "loss_mask", "generator_logprobs", "policy_versions", "replicas", "role_ids", "advantages",
    "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs",
]  # fmt: skip
"""Streams that a batch has of each sample."""


def unpack(batch: TrainingBatch) -> tuple[list[dict], list[dict]]:
    """Return the samples of a batch and its paddings, cut where positions begin anew.

    A padding is where no task is.
    """
    samples, paddings = [], []
    for row in range(batch.positions.shape[0]):
        starts = (batch.positions[row] == 0).nonzero()[:, 0].tolist() + [batch.positions.shape[1]]
        assert starts[0] == 0
        for start, end in zip(starts, starts[1:], strict=False):
            assert batch.positions[row, start:end].tolist() == list(range(end - start))
            piece = {
                name: getattr(batch, name)[row, start:end].numpy()
                for name in [*STREAMS, "temperatures", "task_ids"]
            }
            (paddings if piece["task_ids"][0] == -1 else samples).append(piece)
    return samples, paddings


def random_sample(length: int, seed: int = 0, **fields) -> TrainingSample:
    """Return a sample with all streams, at random, whose first token is a member of nothing.

    Args:
        fields: fields in place of the random ones; None for an absent stream.
    """
    rng = np.random.default_rng(seed)

    def weights() -> np.ndarray:
        values = np.where(rng.random(length) < 0.5, rng.uniform(0.5, 2, length), 0).astype(
            np.float32
        )
        values[0] = 0
        return values

    mask = rng.random(length) < 0.7
    mask[0] = False
    streams = dict(
        token_ids=rng.integers(1, 50, length, dtype=np.int32),
        loss_mask=mask,
        generator_logprobs=np.where(mask, rng.uniform(-3, -0.1, length), 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        replicas=np.where(mask, seed % 2, -1).astype(np.int16),
        role_ids=np.where(mask, 3, np.arange(length) % 4 - 1).astype(np.int8),
        advantages=rng.normal(size=length).astype(np.float32),
        rl_weights=weights(),
        ce_weights=weights(),
        ref_kl_weights=weights() * mask,
        ref_logprobs=rng.uniform(-3, -0.1, length).astype(np.float32),
        temperature=float(rng.choice([0.5, 1.0])),
        task_name=f"task{seed % 3}",
        rollout_id=f"group{seed}/0",
    )
    return TrainingSample(**(streams | fields))
