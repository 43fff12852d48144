"""The private API of torchtitan that the library uses is there and does what the library needs. An upgrade that breaks one
fails here, by its name."""

import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.compat.torchtitan.models import (
    HiddenStateDecoder,
    ShardedLlama3Adapter,
)
from torchtitan.experiments.rl.compat.torchtitan.optimizers import MuonContainer, ShardedMuon

ROOT = Path(__file__).resolve().parents[2]

COPIES = """
import sys
copies = {}
for name, module in sys.modules.items():
    if name.startswith("torchtitan.") and "device_type" in vars(module):
        copies[name] = module.device_type
    if name.startswith("torchtitan.") and "device_module" in vars(module):
        copies[name + " module"] = module.device_module.__name__
print(copies)
"""


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class HeadlessLlama(HiddenStateDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass


def test_decoder_skip_lm_head_is_off_by_default_and_is_all_that_decides_about_the_head(monkeypatch):
    assert Decoder.__dict__["_skip_lm_head"] is False

    def no_layer(self, x, attention_masks, positions=None):
        return x

    config = model_registry("debugmodel", attn_backend="flex").model
    monkeypatch.setattr("torchtitan.models.llama3.model.Llama3TransformerBlock.forward", no_layer)
    headless = HeadlessLlama.Config(
        **{field.name: getattr(config, field.name) for field in fields(config)}
    ).build()
    headless.init_states(buffer_device=torch.device("cpu"))
    tokens, positions = torch.tensor([[3, 1, 4]]), torch.arange(3)[None]
    hidden = headless.hidden_states(tokens, positions, None)
    assert hidden.shape == (1, 3, config.dim)
    plain = config.build()
    plain.load_state_dict(headless.state_dict())
    torch.testing.assert_close(
        headless.lm_head(hidden), plain(tokens, positions, None), rtol=0, atol=0
    )


def test_configurable_config_owner_is_the_class_that_build_makes():
    class Part(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

        def __init__(self, config):
            pass

    assert built_class(Part.Config()) is Part is type(Part.Config().build())
    assert built_class(Configurable.Config()) is Configurable.Config


@pytest.mark.parametrize(
    "method, direction", [("_permute", "to_hf"), ("_reverse_permute", "from_hf")]
)
def test_llama3_adapter_permute_takes_the_weight_and_its_heads_first(
    monkeypatch, method, direction
):
    """8 query heads and 2 key heads of 4 rows: what the adapter passes for each, and that it uses what we override."""
    spec = model_registry("debugmodel", attn_backend="flex")
    attention = spec.model.layers[0].attention
    attention.n_heads, attention.n_kv_heads, attention.head_dim, spec.model.dim = 8, 2, 4, 32
    prefix = {
        "to_hf": "layers.0.attention.qkv_linear.w{}.weight",
        "from_hf": "model.layers.0.self_attn.{}_proj.weight",
    }
    weights = {
        prefix[direction].format(name): torch.randn(rows, 32)
        for name, rows in (("q", 32), ("k", 8))
    }
    seen = []

    def spy(self, w, *args):
        seen.append((tuple(w.shape), args[0]))
        return original(self, w, *args)

    original = getattr(ShardedLlama3Adapter, method)
    monkeypatch.setattr(ShardedLlama3Adapter, method, spy)
    ours = getattr(ShardedLlama3Adapter(spec.model, None), direction)(dict(weights))
    assert seen == [((32, 32), 8), ((8, 32), 2)]
    theirs = getattr(Llama3StateDictAdapter(spec.model, None), direction)(dict(weights))
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_torchtitan_still_assumes_cuda_where_there_is_no_accelerator():
    printed = python("import torchtitan.tools.utils" + COPIES)
    said = "torchtitan finds the CPU by itself now: use_cpu_without_accelerator can go"
    assert eval(printed) == {
        "torchtitan.tools.utils": "cuda",
        "torchtitan.tools.utils module": "torch.cuda",
    }, said


@pytest.mark.parametrize("first", ["set_up", "torchtitan"])
def test_every_copy_of_the_device_says_cpu_whatever_was_imported_first(first):
    steps = {
        "set_up": "from torchtitan.experiments.rl.process.setup import set_up_process; set_up_process()\n",
        "torchtitan": "import torchtitan.models.qwen3, torchtitan.components.metrics, torchtitan.distributed.utils\n",
    }
    printed = python(steps.pop(first) + "".join(steps.values()) + COPIES)
    copies = eval(printed)
    assert {
        "torchtitan.tools.utils",
        "torchtitan.distributed.utils",
        "torchtitan.distributed.parallel_dims",
    } < copies.keys()
    assert set(copies.values()) == {"cpu", "torch.cpu"}, copies


def test_optimizers_container_asks_by_name_for_each_optimizer_that_it_builds():
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="Muon", optimizer_kwargs={"lr": 0.1, "momentum": 0.9}
    )
    container = MuonContainer(
        OptimizersContainer.Config(param_groups=[group]),
        model_parts=[torch.nn.Linear(2, 3, bias=False)],
    )
    (optimizer,) = container
    assert isinstance(optimizer, ShardedMuon)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    with pytest.raises(NotImplementedError, match="Muon"):  # torchtitan's own has none
        OptimizersContainer(
            OptimizersContainer.Config(param_groups=[group]),
            model_parts=[torch.nn.Linear(2, 3, bias=False)],
        )
