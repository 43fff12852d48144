"""Weight synchronisation of a 500 MB model, trainer to generator, against what can't be avoided.

    python benchmarks/weight_sync.py [--layers 16] [--versions 15] [--share-cores]

1. Real actors in two processes, with threads for half of the cores each. The model is random, with a tied head. Trainer and
   generators of a run with a model of this size have threads for all cores each: --share-cores. There the canary of the
   trainer, which runs beside the load, takes cores from it.
2. Ours is the whole way: gather and copy into shared memory, fingerprint, publish, get, map, the engine's reload, digests, and
   the canary on both sides (the trainer's runs beside the load), until the generator samples with the new weights.
3. Against the engine's own ``reload_weights`` of the same tensors, already in the generator's memory, and the repacking of the
   tied head, which any correct reload needs on CPU and ours has too.
   The whole takes at most 1.5 times as long.
4. What is ours alone, without the reload and the generator's canary, against a plain copy of as many bytes between two warm
   buffers: at most 2.5 times as long.

The sides take turns; each figure is a median.
"""

import argparse
import asyncio
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
import torch  # noqa: E402
from monarch.actor import concurrent_endpoint, shutdown_context  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from torchtitan.experiments.rl.compat.vllm import repack_tied_head  # noqa: E402
from torchtitan.experiments.rl.config.run_config import ProvisionConfig  # noqa: E402
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on, start_trainer  # noqa: E402
from torchtitan.experiments.rl.generation.client import GeneratorClient  # noqa: E402
from torchtitan.experiments.rl.generation.config import GeneratorConfig  # noqa: E402
from torchtitan.experiments.rl.generation.generator import Generator  # noqa: E402
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig  # noqa: E402
from torchtitan.experiments.rl.models.policy import ModelConfig  # noqa: E402
from torchtitan.experiments.rl.plan.placement import Placement, place  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process, trainer_environment  # noqa: E402
from torchtitan.experiments.rl.training.config import TrainerConfig  # noqa: E402
from torchtitan.experiments.rl.training.trainer import PolicyTrainer  # noqa: E402
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, WeightSync  # noqa: E402

VOCABULARY = 32_000


def make_model(folder: str, layers: int) -> int:
    """Write a random checkpoint; returns its bytes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


class MeasuredGenerator(Generator):
    """A Generator that can also reload tensors it keeps to itself, and copy them."""

    @concurrent_endpoint
    async def keep(self) -> None:
        def keep() -> None:
            model = self._thread.engine._engine.model_config.model
            self._kept = {
                name: tensor.clone()
                for name, tensor in load_file(f"{model}/model.safetensors").items()
            }
            self._target = {name: torch.zeros_like(tensor) for name, tensor in self._kept.items()}

        await self._thread.call(keep)

    @concurrent_endpoint
    async def reload_seconds(self) -> tuple[float, float]:
        """Of reload_weights alone, and with the tied head repacked."""

        def reload() -> tuple[float, float]:
            engine, started = self._thread.engine._engine, time.perf_counter()
            engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(self._kept.items())}
            )
            reloaded = time.perf_counter()
            engine.apply_model(repack_tied_head)
            return reloaded - started, time.perf_counter() - started

        return await self._thread.call(reload)

    @concurrent_endpoint
    async def copy_seconds(self) -> float:
        def copy() -> float:
            started = time.perf_counter()
            for name, tensor in self._kept.items():
                self._target[name].copy_(tensor)
            return time.perf_counter() - started

        return await self._thread.call(copy)


@asynccontextmanager
async def trainer_and_generator(
    model: str,
    *,
    run_dir: str,
    placement: Placement,
    device: Literal["cpu", "cuda"],
    trainer_config: TrainerConfig,
    generator_config: GeneratorConfig,
    generator_class: type[Generator] = Generator,
    text: np.ndarray,
    row_length: int = 256,
    leaves_bytes: float = 0,
    print_to_logs: bool = False,
) -> AsyncIterator[tuple[Any, Any, WeightSync, GeneratorClient]]:
    """Start one trainer rank and one generator with the model, and yield them with what keeps them in step. A trainer of
    adapters publishes these, and the generator serves them.

    Args:
        text: the canary's.
        leaves_bytes: of a GPU that both have, what the trainer leaves to the engine.
        print_to_logs: True to have what the processes print in logs/ of ``run_dir``.
    """
    lora = trainer_config.lora
    printed = Path(run_dir) if print_to_logs else None
    client, meshes, on_device = GeneratorClient(), [], generator_config.weights == "device"
    try:
        trainers, _ = spawn_on(
            None,
            "trainer",
            placement.trainer,
            device,
            run_dir=printed,
            environment=trainer_environment(device, weights_on_devices=on_device),
        )
        generators, _ = spawn_on(None, "generator", placement.generators, device, run_dir=printed)
        trainer = trainers.spawn(
            "trainer",
            PolicyTrainer,
            trainer_config,
            model=ModelConfig(hf_assets_path=model),
            device=device,
            max_seq_len=row_length,
            total_steps=1000,
            run_dir=run_dir,
            generator_dtype=generator_config.engine.torch_dtype,
            leaves_bytes=leaves_bytes,
            weights_on_device=on_device,
        )
        generator = generators.spawn(
            "generator",
            generator_class,
            generator_config,
            model_path=model,
            device=device,
            run_dir=run_dir,
            adapters=None if lora is None else {"": lora.rank},
        )
        meshes = [(trainers, trainer), (generators, generator)]
        await start_trainer(trainers, trainer)
        await generator.setup.call()
        await client.admit(0, generator)
        bound = CanaryBound(generator_config.engine.dtype)
        yield (
            trainer,
            generator,
            WeightSync(trainer, client, text=text, bound=bound, one_buffer=on_device),
            client,
        )
    finally:
        client.close()
        await shut_down([actor for _, actor in meshes], [procs for procs, _ in meshes])


async def measure(
    model: str, share_cores: bool, versions: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds by name, one for each version after the warm-up."""
    provision = ProvisionConfig(share_cores=share_cores)
    seconds: dict[str, list[float]] = {}
    async with trainer_and_generator(
        model,
        run_dir=model,
        placement=place(dataclasses.replace(rl_grpo_qwen3_debug(), provision=provision), "cpu"),
        device="cpu",
        trainer_config=TrainerConfig(save_final_model=False),
        generator_config=GeneratorConfig(engine=VLLMEngineConfig(max_model_len=256)),
        generator_class=MeasuredGenerator,
        text=np.arange(CANARY_TOKENS, dtype=np.int32),
    ) as (trainer, generator, sync, _):
        await generator.keep.call()
        for version in range(1, versions + warmup + 1):
            await trainer.score.call(
                sync.canary_token_ids
            )  # a step comes before in a run: the trainer's core was not idle
            for name, value in (await synchronise(version, sync, generator)).items():
                if version > warmup:
                    seconds.setdefault(name, []).append(value)
    return seconds


async def synchronise(version: int, sync: WeightSync, generator) -> dict[str, float]:
    """One version by every side: seconds by name."""
    started = time.perf_counter()
    report = await sync.update(await sync.copy_out(version))
    total = time.perf_counter() - started
    started = time.perf_counter()
    await generator.canary.call(sync.canary_token_ids)
    canary_s = time.perf_counter() - started
    reload_s, reload_and_repack_s = await generator.reload_seconds.call_one()
    copy_s = await generator.copy_seconds.call_one()
    return {
        "whole synchronisation": total,
        "  copy out, publish": report.copy_out_s,
        "  map, digests": report.verify_s,
        "  engine's reload": report.reload_s,
        "  generator's canary": canary_s,
        "  messages, and waits": total
        - report.copy_out_s
        - report.verify_s
        - report.reload_s
        - canary_s,
        "ours alone": total - report.reload_s - canary_s,
        "reload_weights": reload_s,
        "reload_weights and repack": reload_and_repack_s,
        "plain copy": copy_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="16 make 500 MB")
    parser.add_argument(
        "--share-cores",
        action="store_true",
        help="trainer and generator have threads for all cores each",
    )
    parser.add_argument("--versions", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=4)
    arguments = parser.parse_args()
    set_up_process()
    with tempfile.TemporaryDirectory() as folder:
        nbytes = make_model(folder, arguments.layers)
        try:
            seconds = asyncio.run(
                measure(folder, arguments.share_cores, arguments.versions, arguments.warmup)
            )
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            shutdown_context().get()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{nbytes / 1e6:.0f} MB, {arguments.versions} versions")
    for name, value in medians.items():
        print(f"{name:<28}{value * 1e3:8.0f} ms")
    whole, reload_s = medians["whole synchronisation"], medians["reload_weights and repack"]
    unproved = whole - medians["  generator's canary"]
    print(
        f"whole / reload_weights without the repack: {whole / medians['reload_weights']:.2f}",
        end=", ",
    )
    print(
        f"whole without the generator's canary / reload_weights and repack: {unproved / reload_s:.2f}"
    )
    print(
        f"ratio whole / reload_weights and repack: {whole / reload_s:.2f} (at most 1.5)", end=", "
    )
    print(
        f"ours alone / plain copy: {medians['ours alone'] / medians['plain copy']:.2f} (at most 2.5)"
    )


if __name__ == "__main__":
    main()
