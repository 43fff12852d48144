"""Training batches taken apart into the samples that are packed in them."""

from torchtitan.experiments.rl.types import TrainingBatch

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
