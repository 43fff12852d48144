"""Each parameter is moved by its optimizer, and Muon's step equals that of an independent one in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.compat.torchtitan.optimizers import ShardedMuon
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training.config import OptimizerConfig
from torchtitan.experiments.rl.training.optimizers import build_optimizers

MOE_FLAVOR = "qwen3/debugmodel_moe"


def model_of(flavor: str = "qwen3/debugmodel", lora: LoRA.Config | None = None) -> torch.nn.Module:
    config = ModelConfig(hf_assets_path="/nowhere", flavor=flavor)
    with torch.device("meta"):
        return policy_spec(config, device="cpu", max_seq_len=64, lora=lora).model.build()


def names_by_optimizer(model: torch.nn.Module, name: str) -> dict[str, set[str]]:
    """Ends of the parameters' names in each optimizer, without the layer's number."""
    return {
        type(optimizer).__name__: {
            name.split(".", 2)[-1] if name.startswith("layers.") else name
            for group in optimizer.param_groups
            for name in group["param_names"]
        }
        for optimizer in build_optimizers(OptimizerConfig(name=name, lr=1e-3), model)
    }


def test_muon_moves_the_matrices_of_the_layers_and_adamw_the_rest():
    found = names_by_optimizer(model_of(), "muon")
    assert found["ShardedMuon"] == {
        "attention.qkv_linear.wqkv.weight",
        "attention.wo.weight",
        "feed_forward.w1.weight",
        "feed_forward.w2.weight",
        "feed_forward.w3.weight",
    }
    assert {"tok_embeddings.weight", "norm.weight", "attention_norm.weight"} < found["AdamW"]
    assert names_by_optimizer(model_of(), "adamw").keys() == {"AdamW"}


def test_adamw_moves_stacks_of_experts_and_muon_their_router():
    found = names_by_optimizer(model_of(MOE_FLAVOR), "muon")
    assert "moe.router.gate.weight" in found["ShardedMuon"]
    experts = {"w1_EFD", "w2_EDF", "w3_EFD"}
    assert {f"moe.routed_experts.inner_experts.{name}" for name in experts} < found["AdamW"]


def test_every_adapter_is_moved_by_muon():
    found = names_by_optimizer(model_of(lora=LoRA.Config(rank=2)), "muon")
    assert found.keys() == {"ShardedMuon"}
    assert {name.rpartition(".lora_")[2] for name in found["ShardedMuon"]} == {
        "a.weight",
        "b.weight",
    }


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic iteration on the singular values alone, in float64."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_a_step_of_muon_is_the_one_worked_out_from_singular_values(shape):
    random = np.random.default_rng(0)
    weights = before = random.normal(size=shape)
    parameter = torch.nn.Parameter(torch.tensor(weights))
    optimizer = ShardedMuon(
        [parameter], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    momentum = np.zeros(shape)
    for _ in range(3):
        gradient = random.normal(size=shape)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        direction = orthogonalized(0.1 * gradient + 0.9 * momentum)
        scale = 0.2 * max(shape) ** 0.5
        weights = weights * (1 - 0.01 * 0.1) - 0.01 * scale * direction
    moved = parameter.detach().numpy() - before
    expected = weights - before
    # The iteration is computed in bfloat16, which has 8 bits.
    assert np.linalg.norm(moved - expected) < 0.025 * np.linalg.norm(expected)


def test_a_rank_alone_takes_torchs_own_steps_bit_for_bit():
    def stepped(optimizer: type[torch.optim.Muon]) -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(5, 7, generator=random))
        built = optimizer([parameter], lr=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            parameter.grad = torch.randn(5, 7, generator=random)
            built.step()
        return parameter.detach()

    torch.testing.assert_close(stepped(ShardedMuon), stepped(torch.optim.Muon), rtol=0, atol=0)


def test_the_plan_counts_one_moment_of_each_matrix():
    words = ["--config", "rl_grpo_qwen3_8b", "--trainer.optimizer.name"]
    plans = {
        name: plan_run(
            load_config(parse_command([*words, name])), device="cuda", available=list(range(8))
        )
        for name in ("adamw", "muon")
    }
    adamw, muon = plans["adamw"], plans["muon"]
    assert adamw.sizes.by_muon == 0
    # Of the model card: 36 layers of width 4096, 32 and 8 heads of 128, feed-forward 12288.
    matrices = 36 * (2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 12288)
    assert muon.sizes.by_muon == matrices
    ranks = muon.config.trainer.ranks
    assert adamw.trainer_memory.state - muon.trainer_memory.state == 4 * matrices / ranks
    assert round((adamw.checkpoint_gib - muon.checkpoint_gib) * 2**30) == 4 * matrices


def test_muon_is_refused_where_the_parameters_are_in_the_hosts_memory():
    config = rl_grpo_qwen3_debug()
    config.trainer = replace(config.trainer, enable_cpu_offload=True)
    config.trainer.optimizer = OptimizerConfig(name="muon")
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert str(raised.value) == (
        "trainer.optimizer.name = 'muon': muon gathers whole matrices on the GPUs: set "
        "trainer.enable_cpu_offload to False"
    )
