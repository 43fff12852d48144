"""The forward pass of a policy: any torchtitan decoder, returning log-probabilities of its input.

    TrainingBatch ──▶ batch_logprobs ──▶ RowShapes.compute ──▶ LogprobDecoder ──▶ logprobs, entropy
                      rows or trees      padded, on CUDA       only needed tokens reach the head

On CUDA the rows are padded to one of a few shapes, because compiled attention compiles again for
every new one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchtitan.experiments.rl.compat.torchtitan.models import HiddenStateDecoder
from torchtitan.experiments.rl.models.attention import (
    CPUVarlenAttention,
    packed_metadata,
    parent_columns,
    rank_columns,
    sum_over_ranks,
    tree_mask,
)
from torchtitan.experiments.rl.models.experts import count_agreement, routes_of, tell_rows
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
from torchtitan.experiments.rl.types import TrainingBatch
from torchtitan.models.common.attention import (
    AttentionMasksType,
    FlexAttention,
    create_attention_mask,
)

BLOCK = 128
"""Number of tokens in a block of torch's flex attention."""

MIN_CHUNK_TOKENS = 32
"""Minimum number of tokens whose logits the head computes at once.

Each chunk reads the head's whole weight. The canary has 8 tokens, and so reads it once."""

Policy = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The forward pass of a LogprobDecoder."""


class LogprobModel:
    """Mixin that gives a model this forward pass: log-probabilities of its input, not logits.

    The model has the attributes that are declared here; `LogprobDecoder` and `TransformersPolicy`
    are such models.
    """

    lm_head: LogprobHead
    hidden_states: Callable[..., torch.Tensor]
    """``(tokens, positions, attention_masks)`` to the hidden states after the last norm, [B, L,
    dim]."""
    get_attention_masks: Callable[..., Any]
    """``(positions)`` to what ``hidden_states`` takes as its ``attention_masks``."""

    context: DeviceMesh | None = None
    """Ranks that divide each row. All are given whole rows, and all return values of whole rows."""
    agreement: torch.Tensor | None = None
    """Router agreement since ``experts.count_load``, in passes with routes. float64 [4]: choices
    that agree, choices, tokens that agree, tokens."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        needed: torch.Tensor,
        routes: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each needed token given those before it in its sample.

        Args:
            tokens: int [B, L], rows of samples or of prefix trees (`attention.py`).
            positions: int [B, L], place of each token in its sample.
            temperatures: float [B, L], by which the logits are divided.
            needed: bool [B, L], or int64 [N] with row * L + column of each needed token, which
                spares a GPU the count. Other tokens cost no logits. Never name the first token of a
                sample: nothing predicts it.
            routes: experts of each token in a mixture, from ``experts.routes_of``. None lets its
                routers choose.
            real: bool [B, L], the tokens that count for a mixture's load. None counts all.

        Returns:
            logprobs and entropy, [B, L] each, 0 where not needed. Entropy is detached.
        """
        # Under FSDP everything runs inside this forward, so the head's weight is gathered when the
        # head is called.
        length = tokens.shape[1]
        padding = 0
        columns = slice(0, length)
        if self.context is not None:
            padding = -length % self.context.size()
            columns = rank_columns(length + padding, self.context)
        hidden_BLD = self._hidden_states_of_columns(
            tokens, positions, routes, real, padding=padding, columns=columns
        )

        indices_N = indices_of(needed)
        rows_N = indices_N // length
        columns_N = indices_N % length
        parents_N = parent_columns(positions)[rows_N, columns_N]
        if self.context is not None:
            # This rank has the hidden states of its columns, and predicts from these.
            is_here = (parents_N >= columns.start) & (parents_N < columns.stop)
            here = is_here.nonzero().squeeze(-1)
            rows_N = rows_N[here]
            columns_N = columns_N[here]
            parents_N = parents_N[here] - columns.start

        logprobs_N, entropy_N = self.lm_head(
            hidden_BLD[rows_N, parents_N],
            tokens[rows_N, columns_N],
            temperatures[rows_N, columns_N],
            # A quarter of a row at a time bounds the logits that short rows hold at once: these
            # would fit one chunk whole.
            chunk_tokens=max(MIN_CHUNK_TOKENS, length // 4),
        )
        zeros = logprobs_N.new_zeros(tokens.shape)
        logprobs = zeros.index_put((rows_N, columns_N), logprobs_N)
        entropy = zeros.index_put((rows_N, columns_N), entropy_N)
        if self.context is not None:
            logprobs = sum_over_ranks(logprobs, self.context)
            entropy = sum_over_ranks(entropy, self.context)
        return logprobs, entropy

    def _hidden_states_of_columns(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        routes: torch.Tensor | None,
        real: torch.Tensor | None,
        *,
        padding: int,
        columns: slice,
    ) -> torch.Tensor:
        """Return the hidden states of these columns, [B, columns, dim].

        Args:
            tokens, positions, routes, real: those of ``forward``.
            padding: number of tokens to add to each row, so that the ranks divide it evenly.
            columns: columns of the padded rows that this rank computes.
        """
        padded_tokens = tokens
        padded_positions = positions
        if self.context is not None:
            padded_tokens = F.pad(tokens, (0, padding))
            padded_positions = F.pad(positions, (0, padding))
        masks = self.get_attention_masks(padded_positions)
        tell_rows(self, real, routes, padding=padding, columns=columns)
        hidden_BLD = self.hidden_states(
            padded_tokens[:, columns].long(), padded_positions[:, columns].long(), masks
        )
        count_agreement(self)
        if isinstance(hidden_BLD, DTensor):
            # Tensor parallelism: every rank has all hidden states, and the head of each rank gives
            # them one term of the sum that is their gradient.
            hidden_BLD = hidden_BLD.to_local(
                grad_placements=[Partial()] * hidden_BLD.device_mesh.ndim
            )
        return hidden_BLD


class LogprobDecoder(LogprobModel, HiddenStateDecoder):
    """Mixin that gives a decoder of torchtitan the forward pass of `LogprobModel`.

    Write ``class Policy(LogprobDecoder, SomeDecoder)``.
    """

    forward = LogprobModel.forward  # type: ignore[assignment]  # torchtitan's returns logits

    def pieces(self) -> dict[str, nn.Module]:
        """Return embedding, layers, last norm and head, by the prefix of their tensors' names."""
        layers = {f"layers.{name}.": layer for name, layer in self.layers.named_children()}
        others = {f"{name}.": child for name, child in self.named_children() if name != "layers"}
        embedding = others.pop("tok_embeddings.")
        return {"tok_embeddings.": embedding, **layers, **others}

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


def indices_of(needed: torch.Tensor) -> torch.Tensor:
    """Return row * L + column of each token where ``needed``, bool [B, L], is True, as int64 [N].

    Indices are returned as they are.
    """
    return needed.flatten().nonzero().squeeze(-1) if needed.dtype == torch.bool else needed


def needed_indices(batch: TrainingBatch) -> torch.Tensor:
    """Return the indices of the tokens that a loss or a metric reads, int64 [N].

    They index the tokens of the rows that are computed. Call this while the batch is on the CPU: on
    a GPU, their number would wait for the device.
    """
    needed = batch.loss_mask | (batch.ce_weights != 0) | (batch.ref_kl_weights != 0)
    needed = needed & (batch.positions != 0)
    return indices_of(needed if batch.trees is None else batch.trees.mask_to_trees(needed))


def batch_logprobs(
    policy: Policy,
    batch: TrainingBatch,
    indices: torch.Tensor | None = None,
    *,
    replay: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return log-probability and entropy of the tokens of a batch that a loss or a metric reads.

    Each token is conditioned on its own sample. Tokens that samples share are computed once.

    Args:
        policy: forward pass of a LogprobDecoder.
        indices: the batch's ``needed_indices``, on the device of the batch.
        replay: True to compute each token with the experts that the batch names for it, if any.

    Returns:
        logprobs and entropy, [B, L] each. Tokens that nothing reads have 0, or the value that
        another sample needs of a token that they share.
    """
    if indices is None:
        indices = needed_indices(batch)
    routes = routes_of(batch) if replay else None
    real = batch.task_ids >= 0
    trees = batch.trees
    if trees is None:
        return policy(batch.token_ids, batch.positions, batch.temperatures, indices, routes, real)
    real = trees.mask_to_trees(real)
    values = policy(trees.token_ids, trees.positions, trees.temperatures, indices, routes, real)
    return tuple(map(trees.values_to_batch, values))


def conditioned_logprobs(policy: Policy, batch: TrainingBatch) -> torch.Tensor:
    """Return the batch's reference log-probabilities, computed by ``policy`` on conditioned rows.

    Tokens without a place in ``batch.conditioned`` keep the value that the batch has for them.

    Returns:
        [B, L].
    """
    rows = batch.conditioned
    assert rows is not None, "the batcher gives all batches of a step conditioned rows, or none"
    is_conditioned = rows.slots >= 0
    needed = is_conditioned & (batch.ref_kl_weights != 0)
    values, _ = policy(
        rows.token_ids, rows.positions, rows.temperatures, rows.mask_to_trees(needed)
    )
    computed = rows.values_to_batch(values).to(batch.ref_logprobs.dtype)
    return torch.where(is_conditioned, computed, batch.ref_logprobs)


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The shapes to which batches are padded before the policy computes them."""

    shapes: tuple[tuple[int, int], ...]
    """[B, L] of each shape, smallest first: a quarter, a half and all of the longest row."""

    @classmethod
    def of(cls, rows: int, row_length: int) -> "RowShapes":
        """Return the shapes for at most ``rows`` rows of at most ``row_length`` tokens."""
        lengths = {-(-row_length // (divisor * BLOCK)) * BLOCK for divisor in (4, 2, 1)}
        return cls(tuple((rows, length) for length in sorted(lengths)))

    def smallest(self, rows: int, length: int) -> tuple[int, int]:
        """Return the smallest shape that holds so many rows of this length.

        A batch that is larger than every shape keeps its own.
        """
        for shape in self.shapes:
            if rows <= shape[0] and length <= shape[1]:
                return shape
        return rows, length

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
        """Pad a [B, L] batch to one of the shapes, and call ``policy``.

        Arguments and results are those of ``LogprobDecoder.forward``. Each token of the padding is
        a sample of its own: it attends to no other token, and no other token to it.
        """
        rows, length = tokens.shape
        indices_N = indices_of(needed)
        to_rows, to_length = self.smallest(rows, length)
        padding = (0, to_length - length, 0, to_rows - rows)
        if real is None:
            # The same compiled graph then serves passes that name the real tokens and passes that
            # do not.
            real = torch.ones_like(tokens, dtype=torch.bool)
        logprobs, entropy = policy(
            F.pad(tokens, padding),
            F.pad(positions, padding),
            F.pad(temperatures, padding, value=1.0),
            indices_N // length * to_length + indices_N % length,
            None if routes is None else F.pad(routes, (0, 0, 0, 0, *padding), value=-1),
            F.pad(real, padding),
        )
        return logprobs[:rows, :length], entropy[:rows, :length]
