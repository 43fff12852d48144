"""Models that are not the policy: how a config names them (models.py), and what answers for them (endpoint.py, hosted.py)."""

from torchtitan.experiments.rl.frozen.models import FrozenModel, HostedModel, LivePolicy, ModelReference

__all__ = ["FrozenModel", "HostedModel", "LivePolicy", "ModelReference"]
