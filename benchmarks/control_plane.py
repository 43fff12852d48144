"""What a turn costs the process that runs rollouts, and the controller beside rollout workers, as the number of replicas grows.

    python benchmarks/control_plane.py [--replicas 8,125,500,1000] [--seconds 20] [--turns-per-s 2000] [--open-per-replica 0]

1. ``rollouts``: RolloutLoop, TrainingLoop, Pacer, Selection with its filters, ledger file, Batcher, GeneratorClient and Router,
   WeightSync, metrics: all in real time in this process, as where no rollout workers run. Replicas are stubs in this process
   that answer after four seconds; renderer and env are left out (docs/measured.md has the renderer's own time).
2. ``controller``: the same, and WorkerRunner in front of stub rollout workers, one for each 8 replicas: what comes back of a
   group is unpickled, as from a message. A message of Monarch's own costs some 0.3 ms beside that.
3. ``actors``: as 2, where workers (8) and replicas are Monarch actors in four processes: every group, and every update of a
   replica's weights, is a message. 8 to 64 replicas fit on this machine.

The recorder is on in each: all rollouts are encoded and written.
A rollout has two turns of 64 tokens. The load is the same for each number of replicas: so many turns a second, or what this
machine does. With --open-per-replica the load grows with the replicas. Printed: turns a second, this process's CPU a turn
without the stubs' own, the 99th percentile and the longest of the event loop's lag, resident memory as the time goes on. Lag
and turns a second depend on what else the machine does; CPU a turn hardly does.
"""

import argparse
import asyncio
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
from monarch.actor import Actor, concurrent_endpoint, shutdown_context, this_host  # noqa: E402

from torchtitan.experiments.rl.compat.monarch import call_actor, drop_late_faults, ranks_of  # noqa: E402
from torchtitan.experiments.rl.config_registry.qwen3 import rl_grpo_qwen3_8b  # noqa: E402
from torchtitan.experiments.rl.fleet.rollout_workers import (  # noqa: E402
    GroupResult,
    WorkerRunner,
)
from torchtitan.experiments.rl.generation.engine import GenerateResult  # noqa: E402
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, LocalRunner  # noqa: E402
from torchtitan.experiments.rl.plan.costs import EngineRates, TrainerRates  # noqa: E402
from torchtitan.experiments.rl.process.lifetime import Lifetime  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import Completion  # noqa: E402
from torchtitan.experiments.rl.simulation.engine import EngineTotals  # noqa: E402
from torchtitan.experiments.rl.simulation.lengths import Lengths, Turn  # noqa: E402
from torchtitan.experiments.rl.simulation.local_actor import LocalEndpoint  # noqa: E402
from torchtitan.experiments.rl.simulation.rates import Rates  # noqa: E402
from torchtitan.experiments.rl.simulation.run import SimulatedRun  # noqa: E402
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt  # noqa: E402

TOKENS, TURNS, GROUP, ANSWER_S, PROCESSES = 64, 2, 16, 4.0, 4
RATES = Rates(
    engine=EngineRates(
        step_s=0,
        sequence_s=0,
        context_s=0,
        prompt_s=0,
        prefill_token_s=0,
        cache_tokens=1 << 40,
        load_s=0,
    ),
    trainer=TrainerRates(
        step_s=0.1, microbatch_s=0, token_s=0, pair_s=0, publish_s=0, checkpoint_s=0
    ),
)
STUB = {"s": 0.0, "turns": 0}
"""Seconds that the stubs took, and turns that they answered."""


class TwoTurns(Lengths):
    def draw(self, example: np.random.Generator, own: np.random.Generator) -> list[Turn]:
        return [Turn(prompt=64, completion=TOKENS, env_s=0.0)] * TURNS


class StubReplica:
    """Answers each message as a whole, ANSWER_S later."""

    def __init__(self, version: int):
        self.totals = EngineTotals()
        self._version = version
        self._port = None
        self.attach = LocalEndpoint(self._attach)
        self.submit = LocalEndpoint(self._submit)
        self.abort = LocalEndpoint(lambda ids: None)
        self.update_weights = LocalEndpoint(self._update)
        self.canary = LocalEndpoint(self._canary)

    async def _attach(self, client_id: int, port: Any) -> None:
        self._port = port

    def _submit(self, requests: list[Any]) -> None:
        asyncio.get_running_loop().call_later(ANSWER_S, self._answer, requests)

    def _answer(self, requests: list[Any]) -> None:
        began, results = time.perf_counter(), []
        for request in requests:
            first = request.seed % 2**30
            completion = Completion(
                token_ids=np.arange(first, first + TOKENS, dtype=np.int32),
                logprobs=np.full(TOKENS, -0.5, np.float32),
                policy_versions=np.full(TOKENS, self._version, np.int32),
                finish_reason="stop",
            )
            results.append(GenerateResult(request_id=request.request_id, completion=completion))
        STUB["turns"] += len(requests)
        STUB["s"] += time.perf_counter() - began
        self._port.send(results)

    async def _update(self, version: int, canary: np.ndarray):
        self._version = version
        return receipt(version, canary)

    async def _canary(self, canary: np.ndarray) -> np.ndarray:
        return np.zeros(len(canary), np.float32)

    def kill(self) -> int:
        return 0


def receipt(version: int, canary: np.ndarray) -> WeightReceipt:
    proof = np.zeros(len(canary), np.float32)
    return WeightReceipt(
        version=version, fingerprint=str(version), canary_logprobs=proof, verify_s=0.0, reload_s=0.0
    )


def answered(pickled: bytes, request: Any, version: int) -> GroupResult:
    """A group that was run before, as the answer to ``request``."""
    group = pickle.loads(pickled)
    group.group_id, group.data_sample, group.admitted_version = (
        request.group_id,
        request.data_sample,
        version,
    )
    for rollout in group.rollouts:
        rollout.group_id, rollout.data_sample = request.group_id, request.data_sample
        for sample in rollout.samples:
            sample.rollout_id = rollout.rollout_id
            sample.policy_versions = np.where(sample.loss_mask, np.int32(version), np.int32(-1))
        for turn in rollout.turns:
            turn.completion = replace(
                turn.completion, policy_versions=np.full(TOKENS, version, np.int32)
            )
    return GroupResult(group=group, event_loop_lag_s=0.0)


class StubActor(Actor):
    """A rollout worker, or a replica behind workers."""

    @concurrent_endpoint
    async def hold(self, pickled: bytes) -> None:
        self._group = pickled

    @concurrent_endpoint
    async def run(self, task: str, request: Any) -> GroupResult:
        await asyncio.sleep(ANSWER_S * TURNS)
        return answered(self._group, request, request.policy_version)

    @concurrent_endpoint
    async def update_weights(self, version: int, canary: np.ndarray) -> WeightReceipt:
        return receipt(version, canary)


class StubWorker:
    """Gives each group what one that was run before has, under its own ids, from a message; or has ``actor`` do so."""

    def __init__(self, pickled: bytes, policy: Any, actor: Any = None):
        self._pickled, self._policy, self._actor = pickled, policy, actor
        self.run = LocalEndpoint(self._run)

    async def _run(self, task: str, request: Any) -> GroupResult:
        if self._actor is not None:
            result = await call_actor(self._actor.run, task, request)
        else:
            await asyncio.sleep(ANSWER_S * TURNS)
            began = time.perf_counter()
            result = answered(self._pickled, request, self._policy.version)
            STUB["s"] += time.perf_counter() - began
        STUB["turns"] += TURNS * len(result.group.rollouts)
        return result


class MixedRunner(WorkerRunner):
    """The first group runs here, and gives the workers what they answer; then they take over."""

    def __init__(self, policy: Any, *, seed: int, workers: Sequence[Any]):
        super().__init__(policy)
        self._local, self._policy, self._actors = LocalRunner(policy, seed=seed), policy, workers
        self._first = asyncio.Lock()

    async def run(self, task: Any, request: Any) -> Any:
        async with self._first:
            if not self._workers:
                group = await self._local.run(task, request)
                pickled = pickle.dumps(group, protocol=5)
                for index, actor in enumerate(self._actors):
                    if actor is not None:
                        await call_actor(actor.hold, pickled)
                    self.admit(
                        index,
                        StubWorker(pickled, self._policy, actor),
                        Lifetime(f"rollout worker {index}"),
                    )
                return group
        return await super().run(task, request)


class StubbedRun(SimulatedRun):
    """With ``StubReplica``s, which ``replica_actors`` load weights for; and ``workers`` behind which groups run, with actors of
    their own or none."""

    def __init__(
        self,
        *args: Any,
        workers: Sequence[Any] = (),
        replica_actors: Iterator[Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._workers, self._replica_actors = workers, replica_actors

    def replica(self, version: int, cores: Any) -> Any:
        stub = StubReplica(version)
        if self._replica_actors is not None:
            stub.update_weights = next(self._replica_actors).update_weights
        return stub

    def runner(self, policy: Any) -> GroupRunner:
        if not self._workers:
            return super().runner(policy)
        return MixedRunner(policy, seed=self.config.seed, workers=self._workers)


async def measured(
    mode: str, replicas: int, seconds: float, open_rollouts: int
) -> dict[str, float]:
    config = rl_grpo_qwen3_8b()
    task = config.tasks["sum_digits"]
    task.validation, task.group_size, task.env.max_turns = None, GROUP, TURNS
    config.generator.replicas, config.max_offpolicy_steps, config.steps = replicas, 1, 1 << 20
    config.rollouts_per_step = max(GROUP, open_rollouts // 2 // GROUP * GROUP)
    config.trainer.ranks = 1
    STUB.update(s=0.0, turns=0)
    workers: Sequence[Any] = [None] * (0 if mode == "rollouts" else max(1, replicas // 8))
    replica_actors = None
    if mode == "actors":
        procs, actors = (
            this_host().spawn_procs(per_host={"procs": PROCESSES}, name="stubs"),
            list[Any](),
        )
        for number in range((8 + replicas) // PROCESSES):
            actors += ranks_of(procs.spawn(f"stub_{number}", StubActor))
        await asyncio.gather(
            *(call_actor(actor.hold, b"") for actor in actors)
        )  # their processes are there
        workers, replica_actors = actors[:8], iter(actors[8:])
    with tempfile.TemporaryDirectory() as folder:
        recorder = RolloutRecorder.Config().build(run_dir=Path(folder))
        run = StubbedRun(
            config,
            RATES,
            TwoTurns(),
            run_dir=Path(folder),
            recorder=recorder,
            workers=workers,
            replica_actors=replica_actors,
        )
        running = asyncio.create_task(run.run())
        warm = 2 * ANSWER_S * TURNS
        await asyncio.wait({running}, timeout=warm)
        cpu, stub, turns, began, lags = (
            time.process_time(),
            STUB["s"],
            STUB["turns"],
            time.perf_counter(),
            [],
        )
        memory, steps = [resident()], len(run.result.steps)
        while time.perf_counter() - began < seconds and not running.done():
            if time.perf_counter() - began > seconds * len(memory) / 5:
                memory.append(resident())
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - before - 0.005)
        took, count = time.perf_counter() - began, STUB["turns"] - turns
        own = time.process_time() - cpu - (STUB["s"] - stub)
        memory.append(resident())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        recorder.close()
        if (
            mode == "actors"
        ):  # they still answer, and a mesh that does can't be stopped: the command's end does that
            drop_late_faults()
    return {
        "turns/s": count / took,
        "CPU us/turn": own / max(1, count) * 1e6,
        "steps": len(run.result.steps) - steps,
        "rollouts recorded": recorder.recorded,
        "not recorded": recorder.not_recorded,
        "lag p99 ms": float(np.quantile(lags, 0.99)) * 1e3,
        "lag max ms": max(lags) * 1e3,
    } | {f"MiB after {part}/5": value for part, value in enumerate(memory)}


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="8,125,500,1000")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--turns-per-s", type=int, default=1000)
    parser.add_argument("--open-per-replica", type=int, default=0)
    parser.add_argument("--modes", default="rollouts,controller")
    options = parser.parse_args()
    set_up_process()
    for mode in options.modes.split(","):
        first = None
        for replicas in map(int, options.replicas.split(",")):
            # Little's law: a turn is open for ANSWER_S. A step takes half of what is open, so some ANSWER_S: all replicas load
            # new weights in each, which costs the controller so much a replica, and not a turn.
            rollouts = options.open_per_replica * replicas or round(options.turns_per_s * ANSWER_S)
            found = asyncio.run(measured(mode, replicas, options.seconds, rollouts))
            first = first or found
            print(
                f"{mode:10} {replicas:5} replicas, {rollouts:6} open: "
                + ", ".join(f"{name} {value:,.0f}" for name, value in found.items())
                + f"; CPU a turn {found['CPU us/turn'] / first['CPU us/turn']:.2f} of the first's",
                flush=True,
            )
    if "actors" in options.modes:  # Monarch waits for their answers
        with suppress(TimeoutError):
            shutdown_context(host_timeout=1.0).get(timeout=10.0)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
