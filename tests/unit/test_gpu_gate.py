"""The command on a host with GPUs, up to the first process that it would spawn. tests/fakes/gpus.py stands in for the GPUs."""

import pytest

from tests.fakes.gpus import CAPABILITIES, fake_gpus
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import folder_spec, policy_spec
from torchtitan.experiments.rl.train import main

MODEL = rl_grpo_qwen3_debug().model


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_models_are_built_for_their_shapes_without_the_flash_attention_of_the_gpu(
    monkeypatch, capability
):
    fake_gpus(monkeypatch, 1, capability=capability)
    for device in ("cpu", "cuda"):
        policy_spec(MODEL, device=device, max_seq_len=2).model.build()
    folder_spec(HubConfig.read(MODEL.hf_assets_path)).model.build()


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_debug_config_passes_the_gate_beside_a_gpu(monkeypatch, capsys, capability, device):
    fake_gpus(monkeypatch, 8, capability=capability)
    code = main(["--config", "rl_grpo_qwen3_debug", "--dry-run", "--provision.device", device])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert ("simulate --config rl_grpo_qwen3_debug" in printed.out) == (device == "auto")
    assert ("--sweep replicas,max_offpolicy_steps" in printed.out) == (device == "auto")
