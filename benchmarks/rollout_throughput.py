"""Tokens per second of the rollout path, against vLLM alone.

    python benchmarks/rollout_throughput.py [--rollouts 256] [--steps 8] [--repeats 7] [--model FOLDER]

1. Ours is all that happens between a data sample and a scored group: RolloutLoop and Task.run_group with RendererEnv,
   GeneratorClient, the Generator actor in its own process, the rubric, credit, training samples. Only the trainer is left out.
2. vLLM alone is its LLMEngine in a process of its own, given the same prompts, seeds and sampling parameters, ready made and
   all at once. Both engines have the same settings and a generator's number of threads; no process is bound to a core.
3. Two loads: the `sum_digits` task as the debug config runs it (answers of some 2 tokens, where the work per rollout weighs
   most), and the same with 64 tokens in every completion and no stop token.
4. The sides take turns, each turn some steps from a standing start; both sample the same tokens. A figure is a median.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
from monarch.actor import shutdown_context  # noqa: E402

from torchtitan.experiments.rl.ask.ordered import OrderedCalls  # noqa: E402
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.configurable import BuildContext  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import build_renderer  # noqa: E402
from torchtitan.experiments.rl.fleet.spawn import spawn_on  # noqa: E402
from torchtitan.experiments.rl.generation.client import GeneratorClient  # noqa: E402
from torchtitan.experiments.rl.generation.generator import Generator  # noqa: E402
from torchtitan.experiments.rl.loops.group_runner import LocalRunner  # noqa: E402
from torchtitan.experiments.rl.loops.ledger import Ledger  # noqa: E402
from torchtitan.experiments.rl.loops.loop import build_loop  # noqa: E402
from torchtitan.experiments.rl.loops.parts import Parts, Schedule  # noqa: E402
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.plan.placement import place  # noqa: E402
from torchtitan.experiments.rl.process.logs import set_up_logging  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import RolloutGroup  # noqa: E402
from torchtitan.experiments.rl.tasks.task import (
    Task,  # noqa: E402
    derive_seed,  # noqa: E402
)


class RolloutPath:
    """Ours: runs steps of groups as the controller does, with a trainer that takes no time."""

    def __init__(
        self, config: RunConfig, client: GeneratorClient, task: Task, *, rollouts_per_step: int
    ):
        self._config, self._client, self._task = config, client, task
        self._rollouts_per_step = rollouts_per_step

    async def run(self, steps: int, seed: int) -> tuple[list[RolloutGroup], float]:
        """Groups of ``steps`` steps, and seconds from the first session to the last scored group."""
        config = self._config
        self._client.version = 0
        nothing: Any = None  # no step trains, and no version is published
        ordered = OrderedCalls()
        parts = Parts(
            selection=Selection(
                ordered,
                tasks={self._task.name: self._task},
                mix=config.task_mix.build(weights={self._task.name: 1.0}),
            ),
            runner=LocalRunner(self._client, seed=seed),
            policy=self._client,
            batcher=config.batcher.build(),
            trainer=nothing,
            weights=nothing,
            ordered=ordered,
            ledger=Ledger(),
        )
        schedule = Schedule(
            steps=steps,
            rollouts_per_step=self._rollouts_per_step,
            max_offpolicy_steps=config.max_offpolicy_steps,
        )
        loop = build_loop(schedule, parts).rollouts
        groups: list[RolloutGroup] = []
        began = time.perf_counter()
        loop.fill()
        for version in range(steps):
            batch = await loop.next_groups(version)
            loop.trained(batch)
            groups += batch.groups
            self._client.version = version + 1
            loop.live(version + 1)
        seconds = time.perf_counter() - began
        await loop.close()
        return groups, seconds


class BareEngine:
    """The other side: vLLM's LLMEngine in a child process, with as many threads as the generator's."""

    def __init__(self, arguments: dict[str, Any], cores: Sequence[int], run_dir: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_bare_engine, args=(theirs, arguments, cores, run_dir), daemon=True
        )
        # Ctrl-C is for this process: the child ends when the pipe does.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()

    async def answer(self) -> Any:
        """What the child sends next; first of all that it is ready."""
        while not self._pipe.poll():
            await asyncio.sleep(0.02)
        return self._pipe.recv()

    async def run(
        self, groups: list[RolloutGroup], seed: int, sampling: SamplingConfig, stops: list[int]
    ) -> tuple[list[list[int]], float]:
        """Sample what ``groups`` sampled; returns the completions in the same order, and the seconds."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        requests = [
            (
                rollout.turns[0].prompt_token_ids.tolist(),
                derive_seed(seed, rollout.group_id, rollout.index_in_group, 0),
            )
            for rollout in rollouts
        ]
        self._pipe.send((requests, sampling, stops))
        return await self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve_bare_engine(
    pipe: Connection, arguments: dict[str, Any], cores: Sequence[int], run_dir: str
) -> None:
    torch.set_num_threads(len(cores))
    os.environ |= {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    set_up_logging(Path(run_dir), "bare-engine")
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    set_up_logging(Path(run_dir), "bare-engine")  # again: vLLM's import adds handlers
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    names = (str(index) for index in range(2**63))
    pipe.send("ready")
    try:
        while True:
            requests, sampling, stops = pipe.recv()
            ready = [
                (
                    next(names),
                    {"prompt_token_ids": prompt},
                    SamplingParams(
                        temperature=sampling.temperature,
                        max_tokens=sampling.max_tokens,
                        seed=seed,
                        stop_token_ids=stops,
                        ignore_eos=True,
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    ),
                )
                for prompt, seed in requests
            ]
            completions: dict[str, list[int]] = {}
            began = time.perf_counter()
            for request in ready:
                engine.add_request(*request)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        completions[output.request_id] = output.outputs[0].token_ids
            seconds = time.perf_counter() - began
            pipe.send(([list(completions[name]) for name, *_ in ready], seconds))
    except (EOFError, OSError):  # the parent is done
        pass


def bare_arguments(config: RunConfig) -> dict[str, Any]:
    """The generator's engine settings as vLLM calls them."""
    engine = config.generator.engine
    return {
        "model": config.model.hf_assets_path,
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_model_len, 8192),
        "enable_chunked_prefill": False,
        "block_size": 32,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "uni",
    }


async def compare(args: argparse.Namespace, config: RunConfig, run_dir: str) -> None:
    placement = place(config, "cpu")
    bare = BareEngine(bare_arguments(config), placement.generators[0].devices, run_dir)
    (procs, _), client = spawn_on(None, "generator", placement.generators, "cpu"), GeneratorClient()
    try:
        generator = procs.spawn(
            "generator",
            Generator,
            config.generator,
            model_path=config.model.hf_assets_path,
            device="cpu",
            run_dir=run_dir,
        )
        await generator.setup.call()
        await bare.answer()
        await client.admit(0, generator)
        print(
            f"{args.rollouts} rollouts a step, {args.steps} steps a turn, medians of {args.repeats} turns; "
            f"{len(placement.generators[0].devices)} thread(s) for each engine"
        )
        print(
            f"{'load':<12}{'ours':>10}{'vLLM alone':>12}{'ratio':>8}{'tokens a rollout':>18}{'completions that differ':>25}"
        )
        ratios = []
        for load, tokens in (("answers", None), (f"{args.tokens} tokens", args.tokens)):
            ratios.append(
                (load, await compare_load(args, config, client, bare, load=load, tokens=tokens))
            )
        print(
            "ratio ours / vLLM alone: "
            + ", ".join(f"{ratio:.2f} on {load}" for load, ratio in ratios)
            + " (at least 0.9)"
        )
        await generator.shutdown.call()
    finally:
        client.close()
        bare.close()
        await procs.stop()


async def compare_load(
    args: argparse.Namespace,
    config: RunConfig,
    client: GeneratorClient,
    bare: BareEngine,
    *,
    load: str,
    tokens: int | None,
) -> float:
    """Print one line of the table and return its ratio. ``tokens``: of every completion; None lets the policy stop."""
    renderer = build_renderer(config.renderer, config.model.hf_assets_path)
    (task_config,) = config.tasks.values()
    if tokens is not None:
        renderer.get_stop_token_ids = list
        task_config = replace(
            task_config, sampling=replace(task_config.sampling, max_tokens=tokens)
        )
    task = task_config.build(
        name="sum_digits", context=BuildContext(renderer=renderer, vocab_size=1 << 31)
    )
    path = RolloutPath(config, client, task, rollouts_per_step=args.rollouts)
    speeds, differing, rollouts, total = [], 0, 0, 0
    for turn in range(args.warmup + args.repeats):
        groups, our_seconds = await path.run(args.steps, seed=turn)
        completions, their_seconds = await bare.run(
            groups, turn, task_config.sampling, renderer.get_stop_token_ids()
        )
        sampled = [
            rollout.turns[0].completion.token_ids.tolist()
            for group in groups
            for rollout in group.rollouts
        ]
        differing += sum(a != b for a, b in zip(sampled, completions, strict=True))
        rollouts, total = rollouts + len(sampled), total + sum(map(len, sampled))
        if turn >= args.warmup:
            speeds.append(
                (sum(map(len, sampled)) / our_seconds, sum(map(len, completions)) / their_seconds)
            )
            if args.verbose:
                print("  turn {}: {:,.0f} ours, {:,.0f} vLLM alone".format(turn, *speeds[-1]))
    ours, theirs = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(
        f"{load:<12}{ours:>10,.0f}{theirs:>12,.0f}{ours / theirs:>8.3f}{total / rollouts:>18.1f}{differing:>14} of {rollouts:,}"
    )
    return ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default=None, help="a tiny Qwen3 in hub format; the debug config's if left out"
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=256,
        help="of one step, and the most the engine runs at once",
    )
    parser.add_argument(
        "--max-offpolicy-steps", type=int, default=1, help="steps whose rollouts are open besides"
    )
    parser.add_argument("--steps", type=int, default=8, help="in each turn")
    parser.add_argument("--tokens", type=int, default=64, help="of the long completions")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print every turn")
    args = parser.parse_args()
    set_up_process()
    config = rl_grpo_qwen3_debug()
    if args.model:
        config.model.hf_assets_path = args.model
    config.generator.engine.max_num_seqs = args.rollouts
    config.max_offpolicy_steps = args.max_offpolicy_steps
    with tempfile.TemporaryDirectory() as run_dir:
        set_up_logging(Path(run_dir), "controller")
        try:
            asyncio.run(compare(args, config, run_dir))
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            shutdown_context().get()


if __name__ == "__main__":
    main()
