"""The forward pass of a policy: a decoder that returns log-probabilities of its input tokens. Any decoder of torchtitan.

On CUDA it computes rows of a few shapes, because compiled attention compiles again for every new one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchtitan.experiments.rl.compat.torchtitan.models import HiddenStateDecoder
from torchtitan.experiments.rl.models.attention import (
    CPUVarlenAttention,
    own_part,
    packed_metadata,
    parent_columns,
    summed,
    tree_mask,
)
from torchtitan.experiments.rl.models.experts import count_agreement, routes_of, tell_rows
from torchtitan.experiments.rl.types import TrainingBatch
from torchtitan.models.common.attention import (
    AttentionMasksType,
    FlexAttention,
    create_attention_mask,
)

BLOCK = 128
"""Tokens of a block of torch's flex attention."""

Policy = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The forward pass of a LogprobDecoder."""


class LogprobDecoder(HiddenStateDecoder):
    """Mixin: ``class Policy(LogprobDecoder, SomeDecoder)`` is that decoder with this forward pass and a LogprobHead."""

    context: DeviceMesh | None = None
    """Ranks that divide each row; all of them are given whole rows, and return what is of these."""
    agreement: torch.Tensor | None = None
    """float64 [4], of passes with routes so far: choices that agree, choices, tokens that agree, tokens."""

    def forward(  # type: ignore[override]  # torchtitan's returns logits
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        needed: torch.Tensor,
        routes: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each needed token given those before it in its sample.

        Args:
            tokens, positions: int [B, L]; rows of samples or prefix trees (`attention.py`).
            temperatures: float [B, L].
            needed: bool [B, L]; or int64 [N], row * L + column of each, for which a GPU is not asked. The other tokens cost no
                logits. Never a sample's first token: nothing predicts it.
            routes: of a mixture, as ``experts.routes_of`` gives them. None: its routers choose.
            real: bool [B, L]: which tokens a mixture's load counts. None: all.

        Returns:
            logprobs and entropy [B, L]; 0 where not needed. Entropy is detached.
        """
        # Under FSDP everything runs inside this forward, so the head's weight is gathered when the head is called.
        computed, places_BL, part, missing = tokens, positions, slice(0, tokens.shape[1]), 0
        if self.context is not None:
            missing = -tokens.shape[1] % self.context.size()
            computed, places_BL = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            part = own_part(computed.shape[1], self.context)
        masks = self.get_attention_masks(places_BL)
        tell_rows(self, real, routes, missing=missing, part=part)
        hidden_BLD = self.hidden_states(computed[:, part].long(), places_BL[:, part].long(), masks)
        count_agreement(self)
        if isinstance(hidden_BLD, DTensor):
            # Tensor parallelism: every rank has all of it. The head's gradient is each rank's part of the sum.
            hidden_BLD = hidden_BLD.to_local(
                grad_placements=[Partial()] * hidden_BLD.device_mesh.ndim
            )
        places = places_of(needed)
        rows, columns = places // tokens.shape[1], places % tokens.shape[1]
        parents = parent_columns(positions)[rows, columns]
        if self.context is not None:
            own = ((parents >= part.start) & (parents < part.stop)).nonzero().squeeze(-1)
            rows, columns, parents = rows[own], columns[own], parents[own] - part.start
        logprobs_N, entropy_N = self.lm_head(
            hidden_BLD[rows, parents],
            tokens[rows, columns],
            temperatures[rows, columns],
            # Short rows fit one chunk whole; a quarter of a row at a time bounds the logits of these too. Each chunk reads the
            # head's whole weight, so it has 32 tokens at least: the canary has 8, and reads it once.
            chunk_tokens=max(32, tokens.shape[1] // 4),
        )
        zeros = logprobs_N.new_zeros(tokens.shape)
        logprobs, entropy = (
            zeros.index_put((rows, columns), values) for values in (logprobs_N, entropy_N)
        )
        if self.context is not None:
            logprobs, entropy = summed(logprobs, self.context), summed(entropy, self.context)
        return logprobs, entropy

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMasksType | None:
        attention = self.config.first_attention
        inner = None if attention is None else attention.inner_attention
        if isinstance(inner, CPUVarlenAttention.Config):
            return packed_metadata(positions)
        if isinstance(inner, FlexAttention.Config):
            rows, length = positions.shape
            return create_attention_mask(
                tree_mask(positions),
                rows,
                None,
                length,
                length,
                device=positions.device,
                BLOCK_SIZE=inner.block_size,
            )
        return super().get_attention_masks(positions)


def places_of(needed: torch.Tensor) -> torch.Tensor:
    """int64 [N]: row * L + column of each token where ``needed``, bool [B, L], is True. Places are returned as they are."""
    return needed.flatten().nonzero().squeeze(-1) if needed.dtype == torch.bool else needed


def needed_places(batch: TrainingBatch) -> torch.Tensor:
    """Of the tokens that a loss or a metric reads, in the rows that the model computes. Take them of a batch on the CPU."""
    needed = (batch.loss_mask | (batch.ce_weights != 0) | (batch.ref_kl_weights != 0)) & (
        batch.positions != 0
    )
    return places_of(needed if batch.trees is None else batch.trees.mask_to_trees(needed))


def batch_logprobs(
    policy: Policy,
    batch: TrainingBatch,
    places: torch.Tensor | None = None,
    *,
    replay: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Log-probability and entropy of the tokens of a batch that a loss or a metric reads, each given its own sample.

    Args:
        policy: a LogprobDecoder. It computes what samples share once.
        places: the batch's ``needed_places``, on its device.
        replay: compute its tokens by the experts that the batch names, where it names any.

    Returns:
        logprobs and entropy [B, L]. Those of other tokens are 0, or what another sample needs of a token they share.
    """
    places = needed_places(batch) if places is None else places
    trees, real, routes = batch.trees, batch.task_ids >= 0, routes_of(batch) if replay else None
    rows = trees or batch
    real = real if trees is None else trees.mask_to_trees(real)
    values = policy(rows.token_ids, rows.positions, rows.temperatures, places, routes, real)
    return values if trees is None else tuple(map(trees.values_to_batch, values))


def conditioned_logprobs(policy: Policy, batch: TrainingBatch) -> torch.Tensor:
    """[B, L]: the batch's ref_logprobs, those of tokens with a place in ``batch.conditioned`` computed by ``policy`` there."""
    rows = batch.conditioned
    assert rows is not None, "the batcher gives all batches of a step conditioned rows, or none"
    wanted = rows.slots >= 0
    values, _ = policy(
        rows.token_ids,
        rows.positions,
        rows.temperatures,
        rows.mask_to_trees(wanted & (batch.ref_kl_weights != 0)),
    )
    return torch.where(
        wanted, rows.values_to_batch(values).to(batch.ref_logprobs.dtype), batch.ref_logprobs
    )


@dataclass(frozen=True, slots=True)
class RowShapes:
    shapes: tuple[tuple[int, int], ...]
    """[B, L], smallest first: a quarter, a half or all of the longest row."""

    @classmethod
    def of(cls, rows: int, row_length: int) -> "RowShapes":
        """Of batches of at most ``rows`` rows of at most ``row_length`` tokens."""
        lengths = sorted({-(-row_length // (part * BLOCK)) * BLOCK for part in (4, 2, 1)})
        return cls(tuple((rows, length) for length in lengths))

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
        routes: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``policy`` of a [B, L] batch that is padded to one of the shapes. Arguments and results are as the policy's own.

        Each token of the padding is a sample by itself: it attends to nothing, and nothing to it.
        """
        rows, length = tokens.shape
        places = places_of(needed)
        to_rows, to_length = self.smallest(rows, length)
        padding = (0, to_length - length, 0, to_rows - rows)
        if (
            real is None
        ):  # the same graph then serves passes that name the real tokens and passes that don't
            real = torch.ones_like(tokens, dtype=torch.bool)
        logprobs, entropy = policy(
            F.pad(tokens, padding),
            F.pad(positions, padding),
            F.pad(temperatures, padding, value=1.0),
            places // length * to_length + places % length,
            None if routes is None else F.pad(routes, (0, 0, 0, 0, *padding), value=-1),
            F.pad(real, padding),
        )
        return logprobs[:rows, :length], entropy[:rows, :length]
