"""Seconds to sample groups with long prompts on two replicas, by where the rollouts of a group go.

    python benchmarks/prefix_routing.py [--prompt 512] [--groups 16] [--repeats 7]

1. Anywhere: each rollout goes to the least loaded replica, so that both read every prompt (a bound of 0 requests).
2. Together: the rollouts of a group go to one replica, which reads their prompt once, unless it is AHEAD requests ahead.
3. Together whatever the load (no bound): also with one large group, which then leaves a replica idle.

The sides take turns. Each turn has new prompts, so that nothing is cached before. A figure is a median.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from monarch.actor import shutdown_context  # noqa: E402

from torchtitan.experiments.rl.config.run_config import ProvisionConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.fleet.spawn import spawn_on  # noqa: E402
from torchtitan.experiments.rl.generation import router  # noqa: E402
from torchtitan.experiments.rl.generation.client import GeneratorClient  # noqa: E402
from torchtitan.experiments.rl.generation.generator import Generator  # noqa: E402
from torchtitan.experiments.rl.plan.placement import (
    place,  # noqa: E402
)
from torchtitan.experiments.rl.process.logs import set_up_logging  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402

REPLICAS = 2
BOUNDS = {"anywhere": 0, "together": router.AHEAD, "no bound": 1_000_000}


async def turn(
    client: GeneratorClient, *, groups: int, size: int, prompt: int, tokens: int, seed: int
) -> float:
    """Seconds from the first session to the last completion."""
    sampling = SamplingConfig(max_tokens=tokens)
    random = np.random.default_rng(seed)
    prompts = random.integers(10, 250, (groups, prompt)).astype(np.int32)

    async def rollout(group: int, index: int) -> None:
        session = client.session(
            rollout_id=f"{seed}-{group}/{index}", seed=index, sampling=sampling, stop_token_ids=[]
        )
        await session.generate(prompts[group], max_tokens=tokens)
        session.close()

    began = time.perf_counter()
    await asyncio.gather(
        *(rollout(group, index) for group in range(groups) for index in range(size))
    )
    return time.perf_counter() - began


async def compare(args: argparse.Namespace, run_dir: str) -> None:
    config = rl_grpo_qwen3_debug()
    config.generator.engine.max_model_len = args.prompt + args.tokens + 1
    # There is no trainer here: its cores are the replicas' too.
    config.generator.replicas, config.provision = REPLICAS, ProvisionConfig(share_cores=True)
    placement = place(config, "cpu")
    client, meshes = GeneratorClient(), []
    try:
        for index, where in enumerate(placement.generators):
            procs = spawn_on(None, f"generator_{index}", [where], "cpu")[0]
            meshes.append(procs)
            actor = procs.spawn(
                f"generator_{index}",
                Generator,
                config.generator,
                model_path=config.model.hf_assets_path,
                device="cpu",
                run_dir=run_dir,
                index=index,
            )
            await actor.setup.call_one()
            await client.admit(index, actor)
        cores = [place.devices for place in placement.generators]
        print(f"prompts of {args.prompt} tokens, completions of {args.tokens}, cores {cores}")
        print(
            f"{'load':<22}"
            + "".join(f"{name:>12}" for name in BOUNDS)
            + f"{'anywhere / together':>22}"
        )
        seed = 0
        for groups, size in ((args.groups, args.size), (1, args.groups * args.size)):
            seconds: dict[str, list[float]] = {name: [] for name in BOUNDS}
            for repeat in range(args.repeats + 1):
                for name, bound in BOUNDS.items():
                    router.AHEAD, seed = bound, seed + 1
                    took = await turn(
                        client,
                        groups=groups,
                        size=size,
                        prompt=args.prompt,
                        tokens=args.tokens,
                        seed=seed,
                    )
                    if repeat:  # the first is to warm up
                        seconds[name].append(took)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            figures = "".join(f"{median:>10.2f} s" for median in medians.values())
            print(
                f"{f'{groups} groups of {size}':<22}{figures}{medians['anywhere'] / medians['together']:>22.2f}"
            )
    finally:
        client.close()
        for procs in meshes:
            await procs.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    set_up_process()
    with tempfile.TemporaryDirectory() as run_dir:
        set_up_logging(Path(run_dir), "controller")
        try:
            asyncio.run(compare(args, run_dir))
        finally:
            shutdown_context().get()


if __name__ == "__main__":
    main()
