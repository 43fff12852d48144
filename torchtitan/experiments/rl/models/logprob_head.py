"""The output head of a policy: log-probabilities of given tokens, with little memory.

The full-vocabulary logits of a row are never held at once: the head computes them chunk by chunk,
and again in the backward pass. Ranks that share a vocabulary exchange a few numbers a token.

Letters of shapes: N tokens, C tokens of a chunk, V this rank's rows of the vocabulary, D size of a
hidden state.
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
    """A rank's share of the vocabulary: consecutive token ids, or all of them without a group."""

    offset: int = 0
    """First token id of the shard."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the shards of the vocabulary."""

    @classmethod
    def of(cls, vocabulary: int, group: dist.ProcessGroup | None) -> "VocabularyShard":
        """Return this rank's shard.

        Args:
            vocabulary: number of token ids.
            group: ranks over which DTensor's ``Shard(0)`` has divided the weight [vocabulary, D].
        """
        if group is None:
            return cls()
        size = -(-vocabulary // dist.get_world_size(group))
        return cls(offset=min(dist.get_rank(group) * size, vocabulary), group=group)

    def statistics(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return statistics of each token's logits over the whole vocabulary. Collective.

        Args:
            logits_CV: this rank's logits.
            targets_C: target token ids, the same on every rank.

        Returns:
            [C] each: the target's logit, the log-normaliser, and the mean logit under the
            distribution.
        """
        shard_size = logits_CV.shape[-1]
        if shard_size:
            largest_C = logits_CV.amax(-1)
        else:
            largest_C = logits_CV.new_full(targets_C.shape, -torch.inf)
        if self.group is not None:
            dist.all_reduce(largest_C, dist.ReduceOp.MAX, self.group)

        local_C = targets_C - self.offset
        is_here_C = (local_C >= 0) & (local_C < shard_size)
        weights_CV = torch.exp(logits_CV - largest_C[:, None])
        target_C = torch.zeros_like(largest_C)
        if shard_size:
            index_C1 = local_C.clamp(0, shard_size - 1)[:, None]
            target_C = logits_CV.gather(-1, index_C1).squeeze(-1).where(is_here_C, 0)
        sums_3C = torch.stack([target_C, weights_CV.sum(-1), (weights_CV * logits_CV).sum(-1)])
        if self.group is not None:
            dist.all_reduce(sums_3C, group=self.group)
        target_C, total_C, weighted_C = sums_3C
        return target_C, largest_C + total_C.log(), weighted_C / total_C

    def add_to_target(
        self, values_CV: torch.Tensor, targets_C: torch.Tensor, amounts_C1: torch.Tensor
    ) -> None:
        """Add each token's amount to the value of its target, if the target is in this shard."""
        shard_size = values_CV.shape[-1]
        if not shard_size:
            return
        local_C = targets_C - self.offset
        is_here_C1 = ((local_C >= 0) & (local_C < shard_size))[:, None]
        index_C1 = local_C.clamp(0, shard_size - 1)[:, None]
        values_CV.scatter_add_(-1, index_C1, amounts_C1.where(is_here_C1, 0))


class LogprobHead(Linear):
    """A linear head that returns log-probabilities of given tokens instead of logits.

    The weight keeps its place and name (``lm_head.weight``), so tying, sharding and checkpoints
    work as for the plain head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: PositiveInt = 1024
        """Number of tokens whose logits are held at once."""
        scale: float = 1.0
        """Factor of the logits."""
        softcap: float | None = None
        """Bound of the logits, which tanh approaches. None leaves them as they are."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.scale = config.scale
        self.softcap = config.softcap
        self.compile_chunks = False
        """True to compile what follows each chunk's product.

        Five passes over float32 logits, forward and backward, become one or two. All chunks are
        then padded to one length."""
        self._shard = VocabularyShard()

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        mesh = parallel_dims.get_optional_mesh("tp")
        group = None if mesh is None else mesh.get_group()
        self._shard = VocabularyShard.of(self.out_features, group)
        super().parallelize(parallel_dims)

    def forward(  # type: ignore[override]  # it shares only the weight with Linear
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        chunk_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each target, and the entropy of each distribution.

        Both are those of the logits divided by the temperature.

        Ranks that share the vocabulary pass the same tokens. Each computes the logits of its own
        rows of the weight, and gives ``hidden_ND`` its term of the gradient: the gradient is the
        sum over these ranks.

        Args:
            hidden_ND: hidden states that predict the targets.
            targets_N: token ids.
            temperatures_N: temperature of each token.
            chunk_tokens: maximum number of tokens whose logits are held at once. The config's
                bound holds too.

        Returns:
            logprobs [N], float32 (float64 for float64 weights), differentiable; entropy [N],
            detached.
        """
        chunk_size = min(self.chunk_tokens, chunk_tokens or self.chunk_tokens)
        weight_VD = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        count = len(targets_N)
        padding = -count % chunk_size if self.compile_chunks else 0
        if padding:
            hidden_ND = F.pad(hidden_ND, (0, 0, 0, padding))
            targets_N = F.pad(targets_N, (0, padding))
            temperatures_N = F.pad(temperatures_N, (0, padding), value=1.0)
        logprobs_N, entropy_N = _ChunkedLogprobs.apply(
            hidden_ND,
            weight_VD,
            targets_N.long(),
            temperatures_N,
            chunk_size,
            self._shard,
            _Logits(self.scale, self.softcap),
            self.compile_chunks,
        )
        if padding:
            # FSDP waits for the gradient of what a module returns, and that must be no view.
            logprobs_N = logprobs_N[:count].clone()
            entropy_N = entropy_N[:count].clone()
        return logprobs_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities, chunk by chunk.

    The forward pass keeps one log-normaliser a token; the backward pass computes the logits of each
    chunk again.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes positional arguments alone
        ctx, hidden_ND, weight_VD, targets_N, temperatures_N, chunk_size, shard, logits, is_compiled
    ):
        logprobs = []
        entropies = []
        normalisers = []
        statistics = _compiled(_statistics) if is_compiled else _statistics
        for chunk in _chunks(len(targets_N), chunk_size):
            target_C, normaliser_C, mean_C = statistics(
                hidden_ND[chunk], weight_VD, temperatures_N[chunk], targets_N[chunk], shard, logits
            )
            logprobs.append(target_C - normaliser_C)
            entropies.append(normaliser_C - mean_C)
            normalisers.append(normaliser_C)
        ctx.chunk_size = chunk_size
        ctx.shard = shard
        ctx.logits = logits
        ctx.is_compiled = is_compiled
        normaliser_N = _concatenate(normalisers, hidden_ND)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, temperatures_N, normaliser_N)
        entropy_N = _concatenate(entropies, hidden_ND)
        ctx.mark_non_differentiable(entropy_N)
        return _concatenate(logprobs, hidden_ND), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, _):
        hidden_ND, weight_VD, targets_N, temperatures_N, normaliser_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = None
        if ctx.needs_input_grad[1]:  # the weight is frozen under adapters
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_N.dtype)
        gradient = _compiled(_gradient) if ctx.is_compiled else _gradient
        for chunk in _chunks(len(targets_N), ctx.chunk_size):
            # d logp / d logits = onehot(target) - softmax, and the logits were divided by the
            # temperature.
            scale_C1 = (grad_N[chunk] / temperatures_N[chunk])[:, None].to(normaliser_N.dtype)
            grad_logits_CV = gradient(
                hidden_ND[chunk],
                weight_VD,
                temperatures_N[chunk],
                targets_N[chunk],
                normaliser_N[chunk],
                scale_C1,
                ctx.shard,
                ctx.logits,
            )
            grad_hidden_ND[chunk] = grad_logits_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_logits_CV.T @ hidden_ND[chunk]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def _statistics(hidden_CD, weight_VD, temperatures_C, targets_C, shard, logits):
    """Return ``VocabularyShard.statistics`` of a chunk."""
    return shard.statistics(logits.of(hidden_CD, weight_VD, temperatures_C), targets_C)


def _gradient(  # noqa: PLR0913 - a chunk's part of each argument of the forward pass
    hidden_CD, weight_VD, temperatures_C, targets_C, normaliser_C, scale_C1, shard, logits
):
    """Return the gradient of the head's product for a chunk, in the weight's dtype.

    Args:
        hidden_CD, weight_VD, temperatures_C, targets_C, shard, logits: those of the forward pass.
        normaliser_C: log-normaliser of each token.
        scale_C1: gradient of each token's log-probability, divided by its temperature.
    """
    logits_CV = logits.of(hidden_CD, weight_VD, temperatures_C)
    slope_CV = logits.slope(logits_CV, temperatures_C)
    grad_logits_CV = logits_CV.sub_(normaliser_C[:, None]).exp_()
    grad_logits_CV.mul_(-scale_C1)
    shard.add_to_target(grad_logits_CV, targets_C, scale_C1)
    if slope_CV is not None:
        grad_logits_CV.mul_(slope_CV)
    return grad_logits_CV.to(weight_VD.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@dataclass(frozen=True, slots=True)
class _Logits:
    """Operations that make logits of the head's product: a scale, then a cap."""

    scale: float
    softcap: float | None

    def of(
        self, hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperatures_C: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits divided by the temperature, in the precision that the generator uses.

        The product is computed in the weight's dtype, and everything after it in float32 (or
        float64).
        """
        logits_CV = F.linear(hidden_CD, weight_VD)
        logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
        if self.scale != 1:
            logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV.div_(temperatures_C[:, None])

    def slope(self, logits_CV: torch.Tensor, temperatures_C: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of the logits by the product, but for the temperature.

        None stands for 1.

        Args:
            logits_CV, temperatures_C: result and argument of ``of``.
        """
        if self.softcap is not None:
            tanh_CV = logits_CV * temperatures_C[:, None] / self.softcap
            return self.scale * (1 - tanh_CV.square())
        return None if self.scale == 1 else torch.full_like(logits_CV[:1, :1], self.scale)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _concatenate(chunks: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate what the chunks gave.

    A rank whose batch needs no token has no chunks, and still needs a tensor in the graph.
    """
    if chunks:
        return torch.cat(chunks)
    return like.new_zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
