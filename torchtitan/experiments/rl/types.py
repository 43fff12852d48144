"""What flows from rollouts to the trainer: training samples, packed batches, loss denominators.

Every per-token stream is aligned with ``token_ids``: entry ``t`` describes token ``t``, never its neighbour. The
log-probability of token ``t`` is that of the token given all before it in its sample; a sample's first token has none and is
never a member of a loss.

Shape suffixes: B rows of a batch, L tokens of a row or sample.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose message a token belongs to; role_ids index into it."""

ROLE_IDS = {role: index for index, role in enumerate(ROLES)}


@dataclass(kw_only=True, slots=True)
class TrainingSample:
    """One token sequence and its per-token streams. A rollout gives one or more of them."""

    token_ids: np.ndarray
    """int32 [L]. Prompt, sampled and env-provided tokens, exactly as the generator saw or sampled them."""
    loss_mask: np.ndarray
    """bool [L]. True where the token was sampled by the policy."""
    generator_logprobs: np.ndarray
    """float32 [L]. Log-probability under the generator's weights and temperature; 0 where nothing was sampled."""
    policy_versions: np.ndarray
    """int32 [L]. Policy version the token was sampled with; -1 where nothing was sampled."""
    role_ids: np.ndarray | None = None
    """int8 [L]. Whose message the token belongs to, an index into ROLES; -1 on template outside any message. Sampled tokens are
    the assistant's. None: not known."""
    advantages: np.ndarray | None = None
    """float32 [L]. None is legal only where no token has an rl weight."""
    rl_weights: np.ndarray | None = None
    """float32 [L]. None means 1.0 on every loss-mask token."""
    ce_weights: np.ndarray | None = None
    """float32 [L]. None means 0.0 everywhere."""
    ref_kl_weights: np.ndarray | None = None
    """float32 [L]. None means 0.0 everywhere."""
    ref_logprobs: np.ndarray | None = None
    """float32 [L]. Log-probability of the same token under the reference model; needed where ref_kl_weights is not 0."""
    temperature: float = 1.0
    """Sampling temperature: the trainer divides its logits by it, as the generator did."""
    task_name: str
    rollout_id: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class TrainingBatch:
    """Rows of packed training samples. Padding has loss_mask False and every weight 0."""

    token_ids: torch.Tensor
    """int32 [B, L]."""
    positions: torch.Tensor
    """int32 [B, L]. Restarts at 0 at each sample, and at the padding that ends a row."""
    loss_mask: torch.Tensor
    """bool [B, L]."""
    generator_logprobs: torch.Tensor
    """float32 [B, L]."""
    policy_versions: torch.Tensor
    """int32 [B, L]. -1 where nothing was sampled."""
    role_ids: torch.Tensor
    """int8 [B, L]. -1 on padding and where no message is known. Only metrics read it."""
    advantages: torch.Tensor
    """float32 [B, L]. 0 where the sample had none."""
    rl_weights: torch.Tensor
    """float32 [B, L]."""
    ce_weights: torch.Tensor
    """float32 [B, L]."""
    ref_kl_weights: torch.Tensor
    """float32 [B, L]."""
    ref_logprobs: torch.Tensor
    """float32 [B, L]."""
    temperatures: torch.Tensor
    """float32 [B, L]. 1 on padding."""
    task_ids: torch.Tensor
    """int32 [B, L]. Index into task_names; -1 on padding. Only metrics read it."""
    task_names: tuple[str, ...]

    def to(self, device: torch.device | str) -> "TrainingBatch":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return TrainingBatch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in moved.items()})


@dataclass(kw_only=True, slots=True, frozen=True)
class LossDenominators:
    """Member tokens of each loss component over the whole optimizer step: all microbatches, all data-parallel ranks.

    Each is at least 1, so an empty component divides 0 by 1.
    """

    rl: int
    ce: int
    ref_kl: int
