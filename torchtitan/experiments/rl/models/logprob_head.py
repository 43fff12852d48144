"""The output head of a policy: log-probabilities of given tokens, without ever holding a row's full-vocabulary logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.models.common.linear import Linear


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

    def forward(  # type: ignore[override]  # it shares only the weight with Linear, and returns log-probabilities
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor, chunk_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target, and entropy of each distribution, both of the logits divided by the temperature.

        Returns:
            logprobs [N], float32 (float64 for float64 weights), differentiable; entropy [N], detached.
        """
        chunk = min(self.chunk_tokens, chunk_tokens or self.chunk_tokens)
        return _ChunkedLogprobs.apply(hidden_ND, self.weight, targets_N.long(), temperatures_N, chunk)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps one log-normaliser per token; backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperatures_N, chunk):
        logprobs, entropies, normalisers = [], [], []
        for part in _chunks(len(targets_N), chunk):
            logits_CV = _logits(hidden_ND[part], weight_VD, temperatures_N[part])
            normaliser_C = logits_CV.logsumexp(-1)
            logprobs.append(logits_CV.gather(-1, targets_N[part, None]).squeeze(-1) - normaliser_C)
            entropies.append(normaliser_C - (torch.exp(logits_CV - normaliser_C[:, None]) * logits_CV).sum(-1))
            normalisers.append(normaliser_C)
        ctx.chunk = chunk
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, temperatures_N, _cat(normalisers, hidden_ND))
        entropy_N = _cat(entropies, hidden_ND)
        ctx.mark_non_differentiable(entropy_N)
        return _cat(logprobs, hidden_ND), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, _):
        hidden_ND, weight_VD, targets_N, temperatures_N, normaliser_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_N.dtype)
        for part in _chunks(len(targets_N), ctx.chunk):
            # d logp / d logits = onehot(target) - softmax, and the logits were divided by the temperature.
            scale_C1 = (grad_N[part] / temperatures_N[part])[:, None].to(normaliser_N.dtype)
            grad_logits_CV = _logits(hidden_ND[part], weight_VD, temperatures_N[part]).sub_(normaliser_N[part, None]).exp_()
            grad_logits_CV.mul_(-scale_C1).scatter_add_(-1, targets_N[part, None], scale_C1)
            grad_logits_CV = grad_logits_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_logits_CV @ weight_VD
            grad_weight_VD += grad_logits_CV.T @ hidden_ND[part]
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperatures_C: torch.Tensor) -> torch.Tensor:
    """In the precision the generator uses: the product in the weights' dtype, all after it in float32 (or float64)."""
    logits_CV = F.linear(hidden_CD, weight_VD)
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    return logits_CV.div_(temperatures_C[:, None])


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cat(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A rank without a member token has no parts, and still needs a tensor in the graph."""
    return torch.cat(parts) if parts else like.new_zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
