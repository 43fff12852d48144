"""Takes the first compiled steps of every GPU config on a CPU: a tiny model, and everything else as the config has it.

    python -m tests.first_steps [CASE ...] [--backend inductor] [--gpu] [--list]

The learner of rank 0 is built as a run builds it, with the config's own degrees of parallelism, activation checkpointing,
adapters, reference, router replay and number of row shapes. It compiles at set-up, then takes a step at each row shape and
scores a canary while compiling anything further is an error. The other ranks are torch's fake process group, whose
collectives return without having exchanged anything: values mean nothing here, only that the step can be compiled and taken.

On a CPU, dense attention under the same block mask stands in for flex attention's kernels, and `aot_eager` for Inductor.
`--gpu` uses flex attention and Inductor on the first GPU, still with a fake process group. Prints for each case the largest
number of entries that dynamo holds for one code object, beside the limit at which it gives up.
"""

import argparse
import atexit
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import AuxOutput
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import compile as compiling
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tests.fakes.hub_families import FAMILIES, tiny_config
from tests.integration.learners import compile_by
from tests.unit.loss_batches import batch_of
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training import learner as learning
from torchtitan.experiments.rl.training import model as building
from torchtitan.experiments.rl.training.config import Parallelism
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.experiments.rl.types import TrainingBatch

ROW_LENGTH = 512
"""Tokens of the longest row: the shortest length that gives three row shapes, as the configs' 8192 does."""

LAYERS, WIDTH, VOCABULARY = 2, 64, 256
"""Sizes of the tiny models."""

TINY, TINY_MIXTURE = "debugmodel", "debugmodel_moe"
"""Names of torchtitan's flavors that the tiny models take the place of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the first steps of one case."""

    entries: int
    """Largest number of compiled entries of one code object."""
    limit: int
    """Number of entries at which dynamo gives up on a code object."""
    graphs: int
    """Number of graphs that were compiled, all at set-up."""
    seconds: float

    def line(self) -> str:
        """Return the outcome as a line of text."""
        entries = f"at most {self.entries} of {self.limit} entries"
        return f"{self.graphs:3} graphs, {entries}, {self.seconds:.0f} s"


def is_mixture(config: RunConfig) -> bool:
    """Return True if the config's model is a mixture of experts."""
    return "A3B" in str(config.model.flavor)


def _variant(base: str, /, **trainer: Any) -> Callable[[], RunConfig]:
    """Return a config factory: the registered config with other fields of its trainer."""

    def build() -> RunConfig:
        config = getattr(config_registry, base)()
        return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **trainer))

    return build


def _of_family(base: str, family: str) -> Callable[[], RunConfig]:
    """Return a config factory: the registered config with a tiny model that transformers defines."""

    def build() -> RunConfig:
        config = getattr(config_registry, base)()
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        tiny_config(family).save_pretrained(folder)
        return dataclasses.replace(config, model=ModelConfig(hf_assets_path=folder))

    return build


def _cases() -> dict[str, Callable[[], RunConfig]]:
    registered = [
        name
        for name in config_registry.__all__
        if name.startswith("rl_") and getattr(config_registry, name)().provision.device == "cuda"
    ]
    configs = {name: getattr(config_registry, name) for name in registered}
    small, large = "rl_grpo_qwen3_8b", "rl_grpo_qwen3_14b"
    mixture, shared_experts = "rl_grpo_qwen3_30b_a3b", "rl_grpo_qwen3_30b_a3b_16"
    lora, reference = LoRA.Config(rank=8), ReferenceConfig()
    configs |= {f"8b, {family}": _of_family(small, family) for family in FAMILIES}
    configs |= {
        "8b, adapters": _variant(small, lora=lora),
        "8b, reference": _variant(small, reference=reference),
        "8b, adapters and reference": _variant(small, lora=lora, reference=reference),
        "8b, two copies of two shards": _variant(
            small, parallelism=Parallelism(data_parallel_replicate_degree=2)
        ),
        "8b, divided rows, not compiled": _variant(
            small, parallelism=Parallelism(context_parallel_degree=4), compile=None
        ),
        "8b, nothing recomputed": _variant(small, activation_checkpoint="none"),
        "14b, selective": _variant(large, activation_checkpoint="selective"),
        "14b, adapters": _variant(large, lora=lora),
        "14b, reference": _variant(large, reference=reference),
        "14b, adapters and reference": _variant(large, lora=lora, reference=reference),
        "30b_a3b, replay": _variant(mixture, router_replay="ids"),
        "30b_a3b, replay and reference": _variant(
            mixture, router_replay="ids", reference=reference
        ),
        "30b_a3b_16, replay": _variant(shared_experts, router_replay="ids"),
        "30b_a3b_16, selective": _variant(shared_experts, activation_checkpoint="selective"),
    }
    return configs


CASES = _cases()
"""Configs by the names that the command takes. Those whose trainers are alike take the same steps, once."""


def take_first_steps(
    config: RunConfig, *, device: Literal["cpu", "cuda"] = "cpu", backend: str = "aot_eager"
) -> Outcome:
    """Build rank 0's learner for a tiny model, and take one step at each row shape and a canary's score.

    Raises:
        Exception: the learner can't be built, a step fails, or something compiles after set-up.
    """
    check(config)
    rows = config.batcher.rows_per_microbatch
    model = config.model
    if model.flavor is not None:
        flavor = TINY_MIXTURE if is_mixture(config) else TINY
        model = dataclasses.replace(model, flavor=f"qwen3/{flavor}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    started = time.monotonic()
    with (
        _process_group(config.trainer.ranks),
        _stand_ins(device, backend),
        tempfile.TemporaryDirectory() as run_dir,
    ):
        learner = learning.Learner(
            config.trainer,
            model=model,
            device=device,
            max_seq_len=ROW_LENGTH,
            rows=rows,
            total_steps=10,
            run_dir=run_dir,
        )
        graphs = _compiled_graphs()
        with torch.compiler.set_stance(
            "fail_on_recompile" if config.trainer.compile is not None else "default"
        ):
            for row_rows, length in learner._row_shapes.shapes:
                batch = _batch(learner, row_rows, length)
                learner.forward_backward([batch, batch], 0)
                learner.optim_step()
            learner.canary(np.arange(8, dtype=np.int32))
        # A GPU compiles its attention at set-up also where the model is not compiled; on a CPU nothing is compiled there then.
        if config.trainer.compile is not None or device == "cuda":
            assert _compiled_graphs() == graphs, "a step compiled what set-up had not"
        return Outcome(
            entries=_most_entries(learner),
            limit=torch._dynamo.config.recompile_limit,
            graphs=graphs,
            seconds=time.monotonic() - started,
        )


def _batch(learner: learning.Learner, rows: int, length: int) -> TrainingBatch:
    """Return a batch of rows of samples of 48 tokens, whose second half was sampled."""
    positions = (torch.arange(length) % 48).expand(rows, length)
    streams: dict[str, Any] = dict(
        token_ids=torch.randint(0, 256, (rows, length)),
        positions=positions,
        loss_mask=positions >= 24,
        advantages=torch.ones(rows, length),
        generator_logprobs=torch.full((rows, length), -5.0),
        policy_versions=torch.zeros(rows, length),
    )
    if learner.config.router_replay != "off":
        routers = [moe.router for moe in learning.mixtures_of(learner.model).values()]
        streams["routes"] = torch.zeros(
            rows, length, len(routers), routers[0].top_k
        ) + torch.arange(routers[0].top_k)
    return batch_of((rows, length), **streams)


def _compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _most_entries(learner: learning.Learner) -> int:
    """Return the largest number of compiled entries over the code objects that a step runs."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    codes = {type(module).forward.__code__ for module in learner.model.modules()}
    codes |= {learning.Learner.forward_backward.__code__}
    return max(len(_debug_get_cache_entry_list(code)) for code in codes)


@contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _stand_ins(device: str, backend: str) -> Iterator[None]:
    """Shrink the model, give it values, and on a CPU replace what only a GPU has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(qwen3.qwen3_configs, TINY, _tiny_model)
        patch.setitem(qwen3.qwen3_configs, TINY_MIXTURE, _tiny_mixture)
        patch.setattr(
            building,
            "policy_spec",
            lambda model, *, device, **rest: policy_spec(model, device="cuda", **rest),
        )
        patch.setattr(learning, "TrainerCheckpoints", _no_checkpoints)
        compile_by(backend, patch.setattr)
        if device == "cpu":
            patch.setattr(FlexAttention, "_compiled_flex_attn", _dense_attention)
            # What the fake process group "receives" is uninitialised memory: counts would be no counts, and norms no numbers.
            patch.setattr(AllToAllTokenDispatcher, "_token_count_exchange", _own_token_counts)
            patch.setattr(learning, "check_finite", lambda *_: None)
            patch.setattr(
                compiling, "_maybe_regional_inductor_backend", lambda model, backend: backend
            )
        yield


def _tiny_model(attn_backend: str) -> qwen3.Qwen3Model.Config:
    """Return a dense model of the layers that torchtitan's flavors have, of tiny widths."""
    layers = qwen3._build_qwen3_layers(hidden_dim=64, **_attention_sizes(attn_backend))
    return dataclasses.replace(_around(qwen3.qwen3_configs["0.6B"]), layers=layers)


def _tiny_mixture(attn_backend: str, moe_comm_backend: str = "standard") -> qwen3.Qwen3Model.Config:
    """Return a mixture of experts of the layers that torchtitan's flavors have, of tiny widths."""
    layers = qwen3._build_qwen3_moe_layers(
        moe_hidden_dim=32,
        num_experts=16,
        top_k=2,
        moe_comm_backend=moe_comm_backend,
        **_attention_sizes(attn_backend),
    )
    return dataclasses.replace(_around(qwen3.qwen3_configs["30B-A3B"]), layers=layers)


def _attention_sizes(attn_backend: str) -> dict[str, Any]:
    rope = CosSinRoPE.Config(dim=16, max_seq_len=ROW_LENGTH, theta=1e6)
    heads = dict(n_heads=8, n_kv_heads=4, head_dim=16)
    return dict(
        n_layers=LAYERS, dim=WIDTH, attn_backend=attn_backend, rope=rope, fuse_qkv=True, **heads
    )


def _around(flavor: Callable[..., Any]) -> qwen3.Qwen3Model.Config:
    """Return a flavor's embedding, norm and head, in tiny."""
    config = flavor(attn_backend="flex")
    return dataclasses.replace(
        config,
        vocab_size=VOCABULARY,
        dim=WIDTH,
        norm=dataclasses.replace(config.norm, normalized_shape=WIDTH),
        tok_embeddings=dataclasses.replace(
            config.tok_embeddings, num_embeddings=VOCABULARY, embedding_dim=WIDTH
        ),
        lm_head=dataclasses.replace(config.lm_head, in_features=WIDTH, out_features=VOCABULARY),
    )


def _no_checkpoints(*, model: Any, **_: Any) -> Any:
    """Give the model values, as loading a checkpoint would, and save nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02)
    return SimpleNamespace()


def _own_token_counts(
    dispatcher: Any, counts: torch.Tensor, group: Any, ranks: int
) -> torch.Tensor:
    """Return as each rank's counts of tokens for this rank's experts what this rank counts for theirs."""
    return counts.view(ranks, -1) + 0


def _dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **_: Any
) -> tuple[torch.Tensor, AuxOutput]:
    """Attend as flex attention does, [B, heads, L, head_dim], by computing every pair of places."""
    rows, length = torch.arange(query.shape[0]), torch.arange(query.shape[2])
    sees = block_mask.mask_mod(
        rows[:, None, None, None], torch.zeros((), dtype=torch.int64), length[:, None], length
    )
    shared = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (query @ keys.transpose(-2, -1)).masked_fill(~sees, float("-inf"))
    return scores.softmax(-1) @ values, AuxOutput(lse=scores.logsumexp(-1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by default all of --list")
    parser.add_argument("--backend", choices=["aot_eager", "inductor"])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    device: Literal["cpu", "cuda"] = "cuda" if options.gpu else "cpu"
    backend = options.backend or ("inductor" if options.gpu else "aot_eager")
    lines: dict[str, str] = {}
    names, failures = options.cases or list(CASES), 0
    for name in names:
        config = CASES[name]()
        rows = config.batcher.rows_per_microbatch
        family = None if config.model.flavor else config.model.hf_assets_path
        same = repr((config.trainer, is_mixture(config), rows, family))
        if same not in lines:
            try:
                lines[same] = take_first_steps(config, device=device, backend=backend).line()
            except Exception as error:
                lines[same] = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        failures += lines[same].startswith("FAILED")
        print(f"{name:34} {lines[same]}", flush=True)
    print(f"{len(names) - failures} of {len(names)} take their first steps")
    sys.exit(failures > 0)


if __name__ == "__main__":
    set_up_process()
    main()
