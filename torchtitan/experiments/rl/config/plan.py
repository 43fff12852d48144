"""Sizes of a run: counts, processes, memory. They follow from the config, before a process is spawned."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPlan:
    """Derived sizes of a run. ``lines`` is what ``--dry-run`` prints."""

    device: Literal["cpu", "cuda"]
    parameters: int
    steps: int
    groups_per_step: int
    rollouts_per_step: int
    open_groups: int
    """Groups in flight or buffered at most."""
    max_offpolicy_steps: int
    tokens_per_step: int
    """At most: every rollout at max_rollout_tokens."""
    microbatches_per_rank: int
    """At most, of one step."""
    trainer_ranks: int
    generator_replicas: int
    tensor_parallel_degree: int
    hosted_processes: int
    """Of frozen models the run serves itself."""
    trainer_gib: float
    """Per rank: weights, gradients, optimizer state, and the activations of one microbatch, roughly."""
    generator_gib: float
    """Per process: weights and KV cache (CPU), or the share of the GPU it will claim (CUDA, as a part of one)."""

    @property
    def processes(self) -> int:
        """Without the one that the command runs in."""
        return self.trainer_ranks + self.generator_replicas * max(1, self.tensor_parallel_degree) + self.hosted_processes

    def lines(self) -> list[str]:
        generators = f"{self.generator_replicas} generator(s) of {self.tensor_parallel_degree}"
        if self.hosted_processes:
            generators += f", {self.hosted_processes} for hosted models"
        on = "GPUs" if self.device == "cuda" else "CPU cores"
        share = f"{self.generator_gib:.0%} of a GPU" if self.device == "cuda" else f"{self.generator_gib:.2f} GiB"
        return [
            f"model          {self.parameters / 1e6:,.1f}M parameters",
            f"steps          {self.steps}, each on {self.groups_per_step} groups = {self.rollouts_per_step} rollouts",
            f"off-policy     at most {self.max_offpolicy_steps} versions; {self.open_groups} groups open at most",
            f"batch          at most {self.tokens_per_step:,} tokens a step, {self.microbatches_per_rank} microbatches a rank",
            f"processes      {self.processes} on {on}: {self.trainer_ranks} trainer rank(s), {generators}",
            f"memory         about {self.trainer_gib:.2f} GiB a trainer rank, {share} a generator process",
        ]


def trainer_memory_gib(
    *,
    parameters: int,
    shards: int,
    dtype: str,
    compute_dtype: str,
    layers: int,
    dim: int,
    microbatch_tokens: int,
    activation_checkpoint: bool,
) -> float:
    """Weights, gradients and two Adam moments, sharded; one layer gathered; activations of a microbatch.

    Activations: 17 values of width ``dim`` a token and layer (the linear part of Korthikanti et al., arXiv:2205.05198, eq. 2;
    fused attention kernels don't store the quadratic part). With checkpointing one a layer, and the 17 of a single layer.
    """
    state = 4 * parameters * _BYTES[dtype] / shards
    gathered = 2 * parameters / layers * _BYTES[compute_dtype]
    values = layers + 17 if activation_checkpoint else 17 * layers
    activations = values * microbatch_tokens * dim * _BYTES[compute_dtype]
    return (state + gathered + activations) / GIB
