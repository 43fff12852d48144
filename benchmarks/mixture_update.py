"""Seconds and bytes of one weight update of a mixture of experts with as many tensors as Qwen3-30B-A3B, each of them tiny.

    python benchmarks/mixture_update.py [--layers 48] [--experts 128] [--versions 5]

1. The model has 18,867 tensors in a hub folder: 48 layers of 128 experts, each expert with a gate, an up and a down projection.
   Its width is 64, so almost nothing is copied: the time is what each tensor costs beside its bytes.
2. Trainer and engine live in this process and compute with one thread. The manifest passes through pickle, as it does on its
   way through the store.
3. A version is loaded in both ways that the engine has: by copying, as on a CPU, and by vLLM's own reload, as on a GPU.
4. Trainer and engine compare digests: a version that is not held exactly ends the script.

Each figure is the median of wall-clock seconds, with the median of the processor's seconds in brackets, which other programs on
the machine change less.
"""

import argparse
import contextlib
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402

from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "vocab_size": 96,
}


def make_folder(folder: str, layers: int, experts: int) -> None:
    """Write the config.json of a mixture. Engine and trainer draw their own first weights, so no weights are needed."""
    config = SIZES | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "float32",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    Path(folder, "config.json").write_text(json.dumps(config))


class Stopwatch:
    """Collects the wall-clock and processor seconds of each named part of an update."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        wall = time.perf_counter()
        processor = time.process_time()
        yield
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.processor.setdefault(name, []).append(time.process_time() - processor)

    def report(self) -> None:
        """Print the medians. The first version makes the buffers and is left out."""
        for name, seconds in self.wall.items():
            processor = self.processor[name]
            warm = slice(1 if len(seconds) > 1 else 0, None)
            print(
                f"{name:<40}{statistics.median(seconds[warm]):8.3f} s ({statistics.median(processor[warm]):.3f})"
            )


@contextlib.contextmanager
def reloaded_by_vllm() -> Iterator[None]:
    """Make loads inside it vLLM's own, which a run has on GPUs."""
    from torchtitan.experiments.rl.compat import vllm as compat

    suffices = compat.copying_suffices
    compat.copying_suffices = lambda *arguments: False
    try:
        yield
    finally:
        compat.copying_suffices = suffices


def measure(folder: str, versions: int) -> None:
    """Publish and load versions, and print what each part of an update took."""
    from torchtitan.experiments.rl.generation.engine import check_held
    from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
    from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
    from torchtitan.experiments.rl.training.hub_tensors import HubTensors
    from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
    from torchtitan.experiments.rl.weights.snapshot import Manifest

    torch.set_num_threads(
        1
    )  # the engine takes it over: two threads on busy cores wait for each other
    config = VLLMEngineConfig(
        max_model_len=64, max_num_seqs=4, cpu_kv_cache_gib=0.1, args={"load_format": "dummy"}
    )
    engine = config.build(model_path=folder, device="cpu", adapters={})
    spec = policy_spec(ModelConfig(hf_assets_path=folder), device="cpu", max_seq_len=64)
    model: Any = spec.model.build()
    assert spec.state_dict_adapter is not None
    tensors = HubTensors(model, spec.state_dict_adapter(spec.model, None).to_hf)
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.float32)
    watch = Stopwatch()
    nbytes: dict[str, int] = {}

    def through_the_store(manifest: Manifest, name: str) -> Manifest:
        with watch.part(f"manifest {name}, through pickle"):
            content = pickle.dumps(manifest)
            arrived: Manifest = pickle.loads(content)
        nbytes[name] = len(content)
        return arrived

    for version in range(1, versions + 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        with watch.part("trainer: copy out"):
            publisher.write(version, tensors)
        manifest = Manifest(
            version=version,
            shapes=publisher._shapes,
            dtype=torch.float32,
            parts=publisher._parts[version % 2],
            publication=f"publication {version}",
            digests={},
        )
        announced = through_the_store(manifest, "announced")
        with watch.part("trainer: digests"):
            digests = publisher._digests(version)
        proven = through_the_store(replace(manifest, digests=digests), "proven")
        for way, context in (
            ("copied", contextlib.nullcontext),
            ("reloaded by vLLM", reloaded_by_vllm),
        ):
            with context(), watch.part(f"engine, {way}: stands"):
                report = engine.load(announced, recompute=False)
                check_held(report, version, proven.digests)
    print(
        f"{len(publisher._shapes)} names in the manifest, {sum(map(torch.numel, model.parameters())):,} parameters"
    )
    watch.report()
    for name, size in nbytes.items():
        print(f"manifest {name}: {size:,} bytes")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--versions", type=int, default=5)
    arguments = parser.parse_args()
    set_up_process()
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder, arguments.layers, arguments.experts)
        measure(folder, arguments.versions)


if __name__ == "__main__":
    main()
