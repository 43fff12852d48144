"""The few shapes of rows that a policy computes on CUDA: compiled attention compiles again for every new one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128
"""Tokens of a block of torch's flex attention."""

Policy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The forward pass of a LogprobDecoder."""


@dataclass(frozen=True, slots=True)
class RowShapes:
    shapes: tuple[tuple[int, int], ...]
    """[B, L], smallest first. The first is the canary's; training rows are a quarter, a half or all of the longest."""

    @classmethod
    def of(cls, rows: int, row_length: int) -> "RowShapes":
        """Of batches of at most ``rows`` rows of at most ``row_length`` tokens."""
        lengths = sorted({-(-row_length // (part * BLOCK)) * BLOCK for part in (4, 2, 1)})
        return cls(tuple(dict.fromkeys([(1, BLOCK), *((rows, length) for length in lengths)])))

    def smallest(self, rows: int, length: int) -> tuple[int, int]:
        """The first that holds so much; what is larger than all keeps its shape."""
        fitting = [shape for shape in self.shapes if rows <= shape[0] and length <= shape[1]]
        return fitting[0] if fitting else (rows, length)

    def compute(
        self,
        policy: Policy,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        needed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``policy`` of a [B, L] batch that is padded to one of the shapes. Arguments and results are as the policy's own.

        Each token of the padding is a sample by itself: it attends to nothing, and nothing to it.
        """
        rows, length = tokens.shape
        to_rows, to_length = self.smallest(rows, length)
        padding = (0, to_length - length, 0, to_rows - rows)
        logprobs, entropy = policy(
            F.pad(tokens, padding),
            F.pad(positions, padding),
            F.pad(temperatures, padding, value=1.0),
            F.pad(needed, padding, value=False),
        )
        return logprobs[:rows, :length], entropy[:rows, :length]
