"""Shared by algorithms that compare with a reference model: checks of its config, its client, and the streams it sets."""

from typing import Annotated

import numpy as np

from torchtitan.experiments.rl.batching.sample_checks import checked_stream
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient
from torchtitan.experiments.rl.types import TrainingSample

Teacher = Annotated[ModelReference, Cure("name a FrozenModel (a server) or a HostedModel (a checkpoint)")]


def check_frozen(model: ModelReference, *, field: str, why: str, max_rollout_tokens: int | None) -> None:
    """Refuse a reference that names no frozen model, or one that can't score the longest sample.

    Args:
        why: what goes wrong with the policy in the frozen model's place.

    Raises:
        ConfigError: by field, value and cure.
    """
    if not isinstance(model, FrozenModel | HostedModel):
        raise ConfigError(field, model, f"{why}: name a FrozenModel (a server) or a HostedModel (a checkpoint)")
    model.validate(field=field)
    if isinstance(model, HostedModel) and max_rollout_tokens is not None and model.engine.max_model_len <= max_rollout_tokens:
        cure = f"must be above the task's env.max_rollout_tokens = {max_rollout_tokens}, to score a sample of that length"
        raise ConfigError(f"{field}.engine.max_model_len", model.engine.max_model_len, cure)


async def connect(policy: PolicyClient, model: ModelReference) -> ModelClient:
    """The frozen model's client, after one answered request: a model that can't be reached ends the run before the first group.

    Raises:
        RunError: it did not answer; names the model.
    """
    client = policy.frozen(model)
    await client.score(np.array([0, 1], np.int32))
    return client


def set_ref_kl_streams(sample: TrainingSample, ref_logprobs: np.ndarray) -> None:
    """Give every sampled token a ref_kl weight of 1 and an rl weight of 0.

    Args:
        ref_logprobs: float32 [L], of the sample's tokens under the reference; what lies on other tokens is not used.

    Raises:
        ValueError: not one number for each token.
    """
    ref_logprobs = checked_stream("ref_logprobs", ref_logprobs, len(sample))
    sample.ref_logprobs = np.where(sample.loss_mask, ref_logprobs, 0).astype(np.float32)
    sample.ref_kl_weights = sample.loss_mask.astype(np.float32)
    sample.rl_weights = np.zeros(len(sample), np.float32)
