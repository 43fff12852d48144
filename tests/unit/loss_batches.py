"""Batches for the tests of losses and their metrics."""

import torch

from torchtitan.experiments.rl.types import STREAMS, LossDenominators, TrainingBatch

ONE = LossDenominators(rl=1, ce=1, ref_kl=1)


def batch_of(shape: tuple[int, int], **streams) -> TrainingBatch:
    """A batch whose streams are the given nested lists or tensors, and otherwise empty."""
    rows, length = shape
    empty = {
        name: torch.from_numpy(stream.padding(rows * length, None))
        for name, stream in STREAMS.items()
    }
    defaults = {name: flat.view(*shape, *flat.shape[1:]) for name, flat in empty.items()} | dict(
        positions=torch.arange(length, dtype=torch.int32).expand(rows, length).clone(),
        task_ids=torch.zeros(shape, dtype=torch.int32),
        temperatures=torch.ones(shape),
    )
    given = {
        name: torch.as_tensor(values, dtype=defaults[name].dtype)
        for name, values in streams.items()
    }
    return TrainingBatch(**(defaults | given), task_names=("task",))


def random_batch(seed: int, rows: int = 3, length: int = 40) -> tuple[torch.Tensor, TrainingBatch]:
    """Log-probabilities (float64) and a batch: several samples a row, every mixture of memberships, padding, far-off ratios."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, length, generator=g)

    def some_weights() -> torch.Tensor:
        return torch.where(uniform(0, 1) < 0.5, uniform(0.5, 2), 0)

    positions = torch.zeros(rows, length, dtype=torch.int32)
    for row in range(rows):
        at = 0
        while at < length:
            size = int(torch.randint(4, 15, (1,), generator=g))
            span = positions[row, at : at + size]
            span[:] = torch.arange(len(span))
            at += size
    generator_logprobs = uniform(-3, -0.01)
    padding = torch.arange(length) >= length - 5
    batch = batch_of(
        (rows, length),
        positions=positions,
        generator_logprobs=generator_logprobs,
        loss_mask=(uniform(0, 1) < 0.7) & ~padding,
        advantages=torch.where(uniform(0, 1) < 0.1, 0, uniform(-2, 2)),
        rl_weights=some_weights(),
        ce_weights=torch.where(padding, 0, some_weights()),
        ref_kl_weights=torch.where(padding, 0, some_weights()),
        ref_logprobs=uniform(-3, -0.01),
    )
    return (generator_logprobs + uniform(-0.6, 0.6)).clamp(max=-1e-3).double(), batch
