"""What the ranks that share a vocabulary tell each other of their parts of a token's logits: a few numbers a token."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


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

    def statistics(self, logits_CV: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
            target_C = logits_CV.gather(-1, local_C.clamp(0, parts - 1)[:, None]).squeeze(-1).where(owned_C, 0)
        sums_3C = torch.stack([target_C, weights_CV.sum(-1), (weights_CV * logits_CV).sum(-1)])
        if self.group is not None:
            dist.all_reduce(sums_3C, group=self.group)
        target_C, total_C, weighted_C = sums_3C
        return target_C, largest_C + total_C.log(), weighted_C / total_C

    def add_to_target(self, values_CV: torch.Tensor, targets_C: torch.Tensor, amounts_C1: torch.Tensor) -> None:
        """Add to each token's own entry of this rank's part, where it is in it."""
        local_C = targets_C - self.offset
        parts = values_CV.shape[-1]
        owned_C1 = ((local_C >= 0) & (local_C < parts))[:, None]
        if parts:
            values_CV.scatter_add_(-1, local_C.clamp(0, parts - 1)[:, None], amounts_C1.where(owned_C1, 0))
