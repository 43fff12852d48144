"""Whether trainer or generators take longer for a step, by a cost model of their GPUs. It compares; it predicts no speed."""

import math
from dataclasses import dataclass

FLOPS = 989e12 * 0.4
"""bfloat16 operations a second and GPU: an H100's published dense peak, of which large matrices reach some 40 %."""
BANDWIDTH = 3.35e12 * 0.6
"""Bytes of memory read a second and GPU: an H100's published peak, of which decoding reaches some 60 %."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Balance:
    """Seconds of one optimizer step on each side, with every rollout as long as it may be."""

    train_s: float
    """For each token 6 operations a parameter of a layer, 8 of the head, which always computes its logits again, and 7 products
    of attention with what the token sees, half of its rollout on average. Where activations are computed again 2 more of each,
    the head aside. Shared by all trainer ranks."""
    generate_s: float
    """Each step of an engine reads the weights and the keys and values of its sequences once, shared by its GPUs. A sequence
    takes a step a token. Prompts cost 2 operations a parameter and token."""

    def line(self) -> str:
        if max(self.train_s, self.generate_s) < 1.25 * min(self.train_s, self.generate_s):
            side = "even"
        else:
            side = "the trainer" if self.train_s > self.generate_s else "the generators"
        ratio = max(self.train_s, self.generate_s) / min(self.train_s, self.generate_s)
        shares = f"{ratio:.1f} : 1" if self.train_s > self.generate_s else f"1 : {ratio:.1f}"
        return f"bottleneck     {side}: modelled costs of a step, trainer : generators = {shares} (config/balance.py)"


def balance(
    *,
    parameters: int,
    layer_parameters: int,
    head_parameters: int,
    attention_width: int,
    kv_bytes_per_token: int,
    engine_itemsize: int,
    rollouts: int,
    rollout_tokens: int,
    sampled_tokens: int,
    trainer_ranks: int,
    recompute: bool,
    replicas: int,
    tensor_parallel: int,
    sequences_at_once: int,
) -> Balance:
    """
    Args:
        layer_parameters: of all layers.
        attention_width: of the queries of all layers.
        kv_bytes_per_token: keys and values that a token leaves in an engine.
        rollouts: of one optimizer step.
        rollout_tokens, sampled_tokens: of one rollout; the difference is prompt.
        sequences_at_once: that an engine steps together.
    """
    matrices = (8 if recompute else 6) * layer_parameters + 8 * head_parameters
    attention = (9 if recompute else 7) * 2 * attention_width * rollout_tokens / 2
    train = (matrices + attention) * rollouts * rollout_tokens / (trainer_ranks * FLOPS)
    mine = math.ceil(rollouts / replicas)
    at_once = min(mine, sequences_at_once)
    engine_steps = sampled_tokens * math.ceil(mine / at_once)
    mean_length = rollout_tokens - sampled_tokens / 2
    step_bytes = parameters * engine_itemsize + at_once * mean_length * kv_bytes_per_token
    decode = engine_steps * step_bytes / (tensor_parallel * BANDWIDTH)
    prefill = 2 * parameters * mine * (rollout_tokens - sampled_tokens) / (tensor_parallel * FLOPS)
    return Balance(train_s=train, generate_s=decode + prefill)
