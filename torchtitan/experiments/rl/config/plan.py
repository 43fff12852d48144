"""Sizes of a run: counts, processes, memory. They follow from the config, before a process is spawned."""

from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan.experiments.rl.config.balance import Balance
from torchtitan.experiments.rl.config.memory import SharedGpu, TrainerMemory
from torchtitan.experiments.rl.config.placement import Placement, ranges

GIB = 2**30


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
    hosts: int
    placement: Placement
    """By what is known before the hosts are there."""
    data_parallel_size: int
    """Shares that a step's rows are divided into."""
    trainer_tensor_parallel_degree: int
    row_shapes: tuple[tuple[int, int], ...]
    """[B, L] of the batches that the trainer computes, canary aside, where they are few; empty where each has its own."""
    trainer_memory: TrainerMemory
    """Of one rank."""
    shared_gpu: SharedGpu | None
    """None: no GPU has both a trainer rank and an engine."""
    balance: Balance | None
    """None where the cost model has no numbers for the device."""
    generator_gib: float
    """Per process: weights and KV cache (CPU), or the share of the GPU it will claim (CUDA, as a part of one)."""
    shared_weights: dict[int, float]
    """Bytes of published weights in each host's shared memory, by the host's number."""
    checkpoint_gib: float
    """Weights and two Adam moments."""
    checkpoints_kept: int

    @property
    def trainer_gib(self) -> float:
        """Per rank."""
        return self.trainer_memory.total / GIB

    @property
    def gpu_gib(self) -> float:
        """Of a trainer's GPU, with the engine that shares it."""
        return self.trainer_gib if self.shared_gpu is None else self.shared_gpu.peak / GIB

    @property
    def processes(self) -> int:
        """Without the one that the command runs in."""
        return self.trainer_ranks + self.generator_replicas * max(1, self.tensor_parallel_degree) + self.hosted_processes

    @property
    def disk_gib(self) -> float:
        """At most at once: the checkpoints that stay, the one that is written before the oldest goes, and the final policy."""
        return (self.checkpoints_kept + 1) * self.checkpoint_gib + self.checkpoint_gib / 3

    def lines(self) -> list[str]:
        generators = f"{self.generator_replicas} generator(s) of {self.tensor_parallel_degree}"
        if self.hosted_processes:
            generators += f", {self.hosted_processes} for hosted models"
        on = "GPUs" if self.device == "cuda" else "CPU cores"
        share = f"{self.generator_gib:.0%} of a GPU" if self.device == "cuda" else f"{self.generator_gib:.2f} GiB"
        degrees = f"{self.trainer_ranks} trainer rank(s)"
        if self.trainer_tensor_parallel_degree > 1:
            degrees += f" ({self.data_parallel_size} data-parallel x {self.trainer_tensor_parallel_degree} tensor-parallel)"
        memory = self.trainer_memory
        parts = {
            "state": memory.state,
            "activations": memory.activations,
            "the head at work" if memory.head > memory.layer else "a layer at work": max(memory.head, memory.layer),
            "CUDA": memory.fixed,
        }
        held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        lines = [
            f"model          {self.parameters / 1e6:,.1f}M parameters",
            f"steps          {self.steps}, each on {self.groups_per_step} groups = {self.rollouts_per_step} rollouts",
            f"off-policy     at most {self.max_offpolicy_steps} versions; {self.open_groups} groups open at most",
            f"batch          at most {self.tokens_per_step:,} tokens a step, {self.microbatches_per_rank} microbatches a rank",
            f"processes      {self.processes} on {on}: {degrees}, {generators}",
            f"memory         about {self.trainer_gib:.2f} GiB a trainer rank ({held}), {share} a generator process",
            f"shared memory  two versions of the weights: {self._shared_weights()}",
            f"disk           about {self.disk_gib:.2f} GiB: {self.checkpoints_kept} checkpoints of {self.checkpoint_gib:.2f} "
            "GiB are kept, another while it is written, and the policy",
        ]
        if self.shared_gpu is not None:
            lines.append(f"shared GPUs    {self._shared_gpu(self.shared_gpu)}")
        if self.row_shapes:
            shapes = ", ".join(f"{rows} x {length}" for rows, length in self.row_shapes)
            lines.append(f"shapes         {len(self.row_shapes)} of rows x tokens: {shapes}")
        return lines + ([self.balance.line()] if self.balance is not None else [])

    def _shared_gpu(self, shared: SharedGpu) -> str:
        trainer, engine = shared.trainer.total / GIB, shared.engine / GIB
        if shared.asleep is None:
            return f"trainer {trainer:.1f} + engine {engine:.1f} = {shared.peak / GIB:.1f} GiB a GPU, both all the time"
        idle = (shared.trainer.state + shared.trainer.fixed) / GIB
        return (
            f"{shared.peak / GIB:.1f} GiB a GPU: trainer {trainer:.1f} + engine asleep {shared.asleep / GIB:.1f} in a step, "
            f"trainer {idle:.1f} + engine {engine:.1f} while it generates"
        )

    def _shared_weights(self) -> str:
        hosts: dict[str, list[int]] = {}
        for host, size in self.shared_weights.items():
            hosts.setdefault(f"{size / GIB:.2f} GiB", []).append(host)
        return ", ".join(f"{size} on {'hosts' if len(on) > 1 else 'host'} {ranges(on)}" for size, on in hosts.items())


def checkpoint_gib(*, parameters: int, dtype: str) -> float:
    """On disk: weights and two Adam moments."""
    return 3 * parameters * getattr(torch, dtype).itemsize / GIB
