"""What each way of changing weights costs a busy generator: tokens per second under a stream of updates, as a ratio to `keep`.

    python benchmarks/weight_update_modes.py [--every 1.0] [--at-once 64] [--seconds 8] [--repeats 5]

1. One real Generator (the tiny model, on the first core) with `--at-once` requests open all the time: one that is answered is
   replaced. Lengths are log-normal, their coefficient of variation is 0.8, as answers to questions of unequal difficulty have.
2. A version is published and loaded `--every` seconds. The weights are the same each time, so that every mode samples alike.
3. A figure counts the tokens of completions that ended in a window of `--seconds`, after a warm-up. The modes take turns; a
   figure is a median. `none` is the same load without updates.
4. Beside it, how long an update takes from the call to the canary, and which share of tokens was sampled after an update that
   came while their completion was under way: with `keep` those were read through older versions' keys and values.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
import torch  # noqa: E402
from monarch.actor import Channel, concurrent_endpoint, shutdown_context  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.fleet.spawn import spawn_on  # noqa: E402
from torchtitan.experiments.rl.generation.config import (
    GeneratorConfig,
    WeightUpdate,  # noqa: E402
)
from torchtitan.experiments.rl.generation.engine import GenerateRequest, GenerateResult  # noqa: E402
from torchtitan.experiments.rl.generation.generator import Generator  # noqa: E402
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig  # noqa: E402
from torchtitan.experiments.rl.plan.placement import place  # noqa: E402
from torchtitan.experiments.rl.process.host import host_identity  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher  # noqa: E402
from torchtitan.experiments.rl.weights.reader import start_store  # noqa: E402

MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "tiny_qwen3")
PROMPT_TOKENS, MEAN_TOKENS, MOST_TOKENS, VARIATION = 64, 96, 448, 0.8
CANARY = np.arange(3, 11, dtype=np.int32)


class SwitchedGenerator(Generator):
    @concurrent_endpoint
    async def switch(self, how: WeightUpdate) -> None:
        self.config.weight_update = how


class Load:
    """Keeps ``at_once`` requests open, and counts what is answered."""

    def __init__(self, generator, at_once: int):
        self._generator, self._at_once = generator, at_once
        self._ids = itertools.count()
        self._random = np.random.default_rng(0)
        self.tokens = self.after_update = 0
        """Tokens of the completions that ended, and those of them with a later version than their completion's first."""

    async def run(self) -> None:
        port, receiver = Channel.open()
        await self._generator.attach.call_one(0, port)
        self._submit(self._at_once)
        while True:
            results: list[GenerateResult] = await receiver.recv()
            self._submit(len(results))
            for result in results:
                versions = result.completion.policy_versions
                self.tokens += len(versions)
                self.after_update += int((versions > versions[0]).sum())

    def _submit(self, count: int) -> None:
        sigma = np.sqrt(np.log1p(VARIATION**2))
        lengths = (
            self._random.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma, count)
            .clip(1, MOST_TOKENS)
            .astype(int)
        )
        requests = [
            GenerateRequest(
                request_id=(request_id := next(self._ids)),
                prompt_token_ids=self._random.integers(3, 768, PROMPT_TOKENS).astype(np.int32),
                sampling=SamplingConfig(max_tokens=int(length)),
                seed=request_id,
                stop_token_ids=[],
            )
            for length in lengths
        ]
        self._generator.submit.broadcast(requests)


class Updates:
    """A version every so many seconds; the next one waits for the last."""

    def __init__(self, generator, every: float):
        self._generator, self._every = generator, every
        self._weights = load_file(f"{MODEL}/model.safetensors")
        self._publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)
        self._version = 0
        self.seconds: list[float] = []

    async def run(self) -> None:
        while True:
            started = time.perf_counter()
            self._version += 1
            self._publisher.write(self._version, self._weights)
            await self._publisher.announce(False)
            await self._publisher.prove()
            asked = time.perf_counter()
            await self._generator.update_weights.call_one(self._version, CANARY)
            self.seconds.append(time.perf_counter() - asked)
            await asyncio.sleep(max(0.0, started + self._every - time.perf_counter()))


async def measure(
    arguments: argparse.Namespace, run_dir: str
) -> dict[str, list[tuple[float, float, float]]]:
    """Tokens per second, seconds an update and share of tokens after an update, by mode, one for each repeat."""
    placement = place(rl_grpo_qwen3_debug(), "cpu")
    procs, _ = spawn_on(None, "generator", placement.generators, "cpu")
    config = GeneratorConfig(
        engine=VLLMEngineConfig(max_model_len=1024, max_num_seqs=arguments.at_once + 1)
    )
    generator = procs.spawn(
        "generator", SwitchedGenerator, config, model_path=MODEL, device="cpu", run_dir=run_dir
    )
    await start_store(procs)
    await generator.setup.call_one()
    load, updates = Load(generator, arguments.at_once), Updates(generator, arguments.every)
    figures: dict[str, list[tuple[float, float, float]]] = {
        mode: [] for mode in ("none", "keep", "recompute", "drain")
    }
    loading = asyncio.create_task(load.run())
    try:
        for mode in list(figures) * arguments.repeats:
            updating = None
            if mode != "none":
                await generator.switch.call_one(mode)
                updating = asyncio.create_task(updates.run())
            await asyncio.sleep(arguments.warmup)
            load.tokens = load.after_update = 0
            updates.seconds.clear()
            began = time.perf_counter()
            await asyncio.sleep(arguments.seconds)
            per_second = load.tokens / (time.perf_counter() - began)
            update_s = statistics.mean(updates.seconds) if updates.seconds else float("nan")
            figures[mode].append((per_second, update_s, load.after_update / load.tokens))
            for task in (updating, loading):
                if task is not None and task.done():
                    task.result()
            if updating is not None:
                updating.cancel()
                # What it has asked for is still to be loaded.
                await generator.canary.call_one(CANARY)
        return figures
    finally:
        loading.cancel()
        await generator.shutdown.call_one()
        await procs.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--every", type=float, default=1.0, help="seconds from one update to the next"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=64,
        help="requests open all the time, all of them in the batch",
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    set_up_process()
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            figures = asyncio.run(measure(arguments, run_dir))
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            shutdown_context().get()
    medians = {
        mode: [statistics.median(column) for column in zip(*rows, strict=True)]
        for mode, rows in figures.items()
    }
    print(f"{arguments.at_once} requests at once, an update every {arguments.every:g} s")
    print(f"{'':<10} {'tokens/s':>9} {'to keep':>8} {'update':>8} {'tokens after an update':>23}")
    for mode, (per_second, update_s, after) in medians.items():
        update = f"{update_s * 1e3:6.0f}ms" if mode != "none" else ""
        print(
            f"{mode:<10} {per_second:>9,.0f} {per_second / medians['keep'][0]:>8.2f} {update:>8} {after:>23.0%}"
        )
    keep, recompute, drain = (medians[mode][0] for mode in ("keep", "recompute", "drain"))
    print(f"ratio recompute / keep: {recompute / keep:.2f}, drain / keep: {drain / keep:.2f}")


if __name__ == "__main__":
    main()
