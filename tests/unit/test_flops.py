"""Model FLOPs by hand, and the share of a device's peak."""

from dataclasses import replace

import pytest
import torch

from tests.fakes.clock import Clock
from tests.unit.loss_batches import batch_of
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training import flops as flops_module
from torchtitan.experiments.rl.training.flops import ModelFlops, peak_flops
from torchtitan.experiments.rl.types import PrefixTrees

# Two samples of 4 and 3 tokens that share 2, and a token of padding: as PrefixTrees' docstring shows them.
BATCH = batch_of((1, 8), positions=[[0, 1, 2, 3, 0, 1, 2, 0]], task_ids=[[0, 0, 0, 0, 0, 0, 0, -1]])
TREES = PrefixTrees(
    token_ids=torch.zeros((1, 7), dtype=torch.int32),
    positions=torch.tensor([[0, 1, 2, 3, 2, 0, 1]], dtype=torch.int32),
    temperatures=torch.ones(1, 7),
    slots=torch.tensor([[0, 1, 2, 3, 0, 1, 4, 0]]),
)


def test_each_token_of_a_sample_of_n_counts_n_places_and_padding_counts_nothing():
    assert ModelFlops(per_token=10, per_place=1, peak=None).of_batch(BATCH) == 10 * 7 + (
        4 * 4 + 3 * 3
    )


def test_what_samples_share_is_computed_once():
    # 5 tokens; the places up to the one of b2, which is at position 2, are 2 * 2 + 1 by the same convention.
    assert ModelFlops(per_token=10, per_place=1, peak=None).of_batch(
        replace(BATCH, trees=TREES)
    ) == 10 * 5 + (4 * 4 + 5)


def test_utilisation_is_of_the_time_since_the_last_lap_and_of_a_ranks_share_of_the_work(
    monkeypatch,
):
    clock = Clock(100.0)
    monkeypatch.setattr(flops_module.time, "monotonic", clock)
    counted = ModelFlops(per_token=10, per_place=1, peak=100.0, ranks=2)
    counted.add(BATCH)
    counted.add(BATCH)
    clock.now += 4
    assert counted.lap_utilisation() == pytest.approx(2 * 95 / 2 / 4 / 100)
    clock.now += 1
    assert counted.lap_utilisation() == 0.0


def test_a_lap_that_comes_while_a_batch_is_counted_counts_nothing_twice(monkeypatch):
    clock = Clock(100.0)
    monkeypatch.setattr(flops_module.time, "monotonic", clock)
    laps = []

    class Interrupted(ModelFlops):
        """The other thread asks for a lap at this moment."""

        def of_batch(self, batch):
            flops = super().of_batch(batch)
            clock.now += 1
            laps.append(self.lap_utilisation())
            return flops

    counted = Interrupted(per_token=10, per_place=1, peak=95.0)
    for _ in range(3):
        counted.add(BATCH)
    clock.now += 1
    laps.append(counted.lap_utilisation())
    assert laps == [0.0, 1.0, 1.0, 1.0]


def test_a_device_whose_peak_is_not_known_has_no_utilisation(monkeypatch):
    assert peak_flops(torch.device("cpu")) is None
    assert ModelFlops(per_token=10, per_place=1, peak=None).lap_utilisation() is None
    for name, peak in {
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA GeForce GTX 1080": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak, name


def test_a_tokens_flops_are_6_for_each_parameter_of_a_tied_model_and_6_for_each_layers_places(
    tokenizer_path,
):
    spec = policy_spec(
        ModelConfig(hf_assets_path=str(tokenizer_path)), device="cpu", max_seq_len=64
    )
    with torch.device("meta"):
        model = spec.model.build()
    hub = HubConfig.read(str(tokenizer_path))
    counted = ModelFlops.of(spec.model, model, peak=None, ranks=1)
    one_token = batch_of((1, 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = (
        6
        * hub.size("num_hidden_layers")
        * hub.size("num_attention_heads")
        * 2
        * hub.size("head_dim")
    )
    assert hub["tie_word_embeddings"] and counted.of_batch(one_token) == 6 * parameters + attention
