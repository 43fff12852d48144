"""The output head of a policy: log-probabilities of given tokens, without ever holding a row's full-vocabulary logits.

Ranks that share a vocabulary tell each other a few numbers a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchtitan.distributed import ParallelDims
from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.models.common.linear import Linear


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """A rank's consecutive part of the vocabulary. Without a group, the whole of it."""

    offset: int = 0
    """Token id of the part's first row."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other parts."""

    @classmethod
    def of(cls, vocabulary: int, group: dist.ProcessGroup | None) -> "VocabularyShard":
        """This rank's part, where DTensor's ``Shard(0)`` has divided [vocabulary, dim] over ``group``."""
        if group is None:
            return cls()
        size = -(-vocabulary // dist.get_world_size(group))
        return cls(offset=min(dist.get_rank(group) * size, vocabulary), group=group)

    def statistics(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each token's logits over the whole vocabulary, from this rank's part of them. Collective.

        Returns:
            [C] each: the target's logit, the log-normaliser, and the mean logit under the distribution.
        """
        parts = logits_CV.shape[-1]
        largest_C = logits_CV.amax(-1) if parts else logits_CV.new_full(targets_C.shape, -torch.inf)
        if self.group is not None:
            dist.all_reduce(largest_C, dist.ReduceOp.MAX, self.group)
        local_C = targets_C - self.offset
        owned_C = (local_C >= 0) & (local_C < parts)
        weights_CV = torch.exp(logits_CV - largest_C[:, None])
        target_C = torch.zeros_like(largest_C)
        if parts:
            target_C = (
                logits_CV.gather(-1, local_C.clamp(0, parts - 1)[:, None])
                .squeeze(-1)
                .where(owned_C, 0)
            )
        sums_3C = torch.stack([target_C, weights_CV.sum(-1), (weights_CV * logits_CV).sum(-1)])
        if self.group is not None:
            dist.all_reduce(sums_3C, group=self.group)
        target_C, total_C, weighted_C = sums_3C
        return target_C, largest_C + total_C.log(), weighted_C / total_C

    def add_to_target(
        self, values_CV: torch.Tensor, targets_C: torch.Tensor, amounts_C1: torch.Tensor
    ) -> None:
        """Add to each token's own entry of this rank's part, where it is in it."""
        local_C = targets_C - self.offset
        parts = values_CV.shape[-1]
        owned_C1 = ((local_C >= 0) & (local_C < parts))[:, None]
        if parts:
            values_CV.scatter_add_(
                -1, local_C.clamp(0, parts - 1)[:, None], amounts_C1.where(owned_C1, 0)
            )


class LogprobHead(Linear):
    """A linear head that gives log-probabilities of tokens instead of logits.

    The weight keeps its place and name (``lm_head.weight``), so tying, sharding and checkpoints work as for the plain head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: PositiveInt = 1024
        """Tokens whose logits are held at once."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.compile_chunks = False
        """Fuse what follows each chunk's product: five passes over float32 logits, forward and backward, become one or two. All
        chunks are then filled up to one length."""
        self._shard = VocabularyShard()

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        mesh = parallel_dims.get_optional_mesh("tp")
        self._shard = VocabularyShard.of(
            self.out_features, None if mesh is None else mesh.get_group()
        )
        super().parallelize(parallel_dims)

    def forward(  # type: ignore[override]  # it shares only the weight with Linear, and returns log-probabilities
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        chunk_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target, and entropy of each distribution, both of the logits divided by the temperature.

        Ranks that share the vocabulary give the same tokens. Each computes the logits of its own rows of the weight, and the
        gradient that it gives to ``hidden_ND`` is its part of a sum over these ranks.

        Returns:
            logprobs [N], float32 (float64 for float64 weights), differentiable; entropy [N], detached.
        """
        chunk = min(self.chunk_tokens, chunk_tokens or self.chunk_tokens)
        weight_VD = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        count, missing = len(targets_N), -len(targets_N) % chunk if self.compile_chunks else 0
        if missing:
            hidden_ND, targets_N = (
                F.pad(hidden_ND, (0, 0, 0, missing)),
                F.pad(targets_N, (0, missing)),
            )
            temperatures_N = F.pad(temperatures_N, (0, missing), value=1.0)
        logprobs_N, entropy_N = _ChunkedLogprobs.apply(
            hidden_ND,
            weight_VD,
            targets_N.long(),
            temperatures_N,
            chunk,
            self._shard,
            self.compile_chunks,
        )
        # FSDP waits for the gradient of what a module returns, and wants no views of it.
        return (
            (logprobs_N[:count].clone(), entropy_N[:count].clone())
            if missing
            else (logprobs_N, entropy_N)
        )


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps one log-normaliser per token; backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperatures_N, chunk, shard, compiled):
        logprobs, entropies, normalisers = [], [], []
        statistics = _compiled(_statistics) if compiled else _statistics
        for part in _chunks(len(targets_N), chunk):
            target_C, normaliser_C, mean_C = statistics(
                hidden_ND[part], weight_VD, temperatures_N[part], targets_N[part], shard
            )
            logprobs.append(target_C - normaliser_C)
            entropies.append(normaliser_C - mean_C)
            normalisers.append(normaliser_C)
        ctx.chunk, ctx.shard, ctx.compiled = chunk, shard, compiled
        ctx.save_for_backward(
            hidden_ND, weight_VD, targets_N, temperatures_N, _cat(normalisers, hidden_ND)
        )
        entropy_N = _cat(entropies, hidden_ND)
        ctx.mark_non_differentiable(entropy_N)
        return _cat(logprobs, hidden_ND), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, _):
        hidden_ND, weight_VD, targets_N, temperatures_N, normaliser_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        trained = ctx.needs_input_grad[1]  # not with adapters
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_N.dtype) if trained else None
        gradient = _compiled(_gradient) if ctx.compiled else _gradient
        for part in _chunks(len(targets_N), ctx.chunk):
            # d logp / d logits = onehot(target) - softmax, and the logits were divided by the temperature.
            scale_C1 = (grad_N[part] / temperatures_N[part])[:, None].to(normaliser_N.dtype)
            grad_logits_CV = gradient(
                hidden_ND[part],
                weight_VD,
                temperatures_N[part],
                targets_N[part],
                normaliser_N[part],
                scale_C1,
                ctx.shard,
            )
            grad_hidden_ND[part] = grad_logits_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_logits_CV.T @ hidden_ND[part]
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None, None, None, None


def _statistics(hidden_CD, weight_VD, temperatures_C, targets_C, shard):
    """``VocabularyShard.statistics`` of a chunk."""
    return shard.statistics(_logits(hidden_CD, weight_VD, temperatures_C), targets_C)


def _gradient(hidden_CD, weight_VD, temperatures_C, targets_C, normaliser_C, scale_C1, shard):
    """[C, V], of a chunk's logits before the temperature, in the weight's dtype."""
    grad_logits_CV = (
        _logits(hidden_CD, weight_VD, temperatures_C).sub_(normaliser_C[:, None]).exp_()
    )
    grad_logits_CV.mul_(-scale_C1)
    shard.add_to_target(grad_logits_CV, targets_C, scale_C1)
    return grad_logits_CV.to(weight_VD.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperatures_C: torch.Tensor
) -> torch.Tensor:
    """In the precision the generator uses: the product in the weights' dtype, all after it in float32 (or float64)."""
    logits_CV = F.linear(hidden_CD, weight_VD)
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    return logits_CV.div_(temperatures_C[:, None])


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cat(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A rank without a member token has no parts, and still needs a tensor in the graph."""
    return (
        torch.cat(parts)
        if parts
        else like.new_zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
    )
