"""A simulated run: the real controller, and simulated parts behind the protocols of those that it drives.

    real        TrainingLoop, RolloutLoop, Pacer, Selection, samplers, algorithm, filters, Validator, Ledger, Batcher,
                LocalRunner, GeneratorClient and its Router, WeightSync, Restarts, the state of a checkpoint and the way back
                from it, metrics
    simulated   replicas (`engine.py`), trainer, network, envs (`tasks.py`), hosts that fail and come back
    left out    Monarch's messages, rollout workers, the recorder, files of checkpoints, replayed groups

A host that dies ends the run, which goes on from its newest checkpoint, as the library has it; or, to see what that costs, only
its own parts are made again. Either way the ledger balances, no token is older than the bound, and no group is left behind: a
simulation in which that does not hold ends with an error.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.configurable import BuildContext, build_with
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.restarts import Restarts
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, LocalRunner
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.loop import Parts, Schedule, build_loop
from torchtitan.experiments.rl.loops.saved_state import RolloutLoopState
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.plan.costs import GPUS_PER_HOST
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.trace import LoopLag
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.simulation.clock import Cores, InlineThread
from torchtitan.experiments.rl.simulation.engine import (
    DEATH_SEEN_S,
    Endpoint,
    Rates,
    SimulatedReplica,
    open_channel,
)
from torchtitan.experiments.rl.simulation.tasks import Lengths, simulated_tasks
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, WeightSync

EVENTS_FILE = "events.jsonl"


@dataclass(kw_only=True, slots=True, frozen=True)
class Failures:
    per_day: float = 0.0
    """Of all hosts together."""
    hosts: int = 1
    """That die at once."""
    end_run: bool = True
    """False: a host of generators that dies costs its replicas, and nothing else."""
    repair_s: float = 600.0
    """Until there is a host again."""
    seen_s: float = DEATH_SEEN_S
    """Until a death is known."""


class SimulatedTrainer:
    """Implements HostCopies, and what a TrainingLoop asks of a TrainerClient and a WeightSync of the trainer's mesh."""

    lost = 0

    def __init__(
        self,
        rates: Rates,
        cores: Cores,
        data_parallel_size: int,
        *,
        heard: Callable[[], Awaitable[None]],
    ):
        """``heard`` returns when the controller takes an answer up."""
        self._rates, self._cores, self.data_parallel_size, self._heard = (
            rates,
            cores,
            data_parallel_size,
            heard,
        )
        self.busy_s = 0.0
        self._published = 0
        self.copy_weights = Endpoint(self._copy)
        self.proof, self.score = Endpoint(self._proof), Endpoint(self._score)

    async def step(self, packed: BatchPlan, step: int) -> dict[str, float]:
        rates = self._rates.trainer
        await self._work(
            rates.step_s
            + max(
                sum(
                    max(
                        rates.microbatch_s,
                        rates.token_s * (batch.trees or batch).token_ids.numel()
                        + rates.pair_s
                        * sum(len(sample) ** 2 / 2 for row in rows for sample in row),
                    )
                    for batch, rows in zip(batches, of_rank, strict=True)
                )
                for batches, of_rank in zip(packed.microbatches, packed.samples, strict=True)
            )
        )
        return {}

    async def _work(self, seconds: float) -> None:
        began = asyncio.get_running_loop().time()
        await self._cores.use(seconds)
        self.busy_s += asyncio.get_running_loop().time() - began
        await self._heard()

    def size(self, dimension: str) -> int:
        return 1  # one stands for all ranks, which publish side by side

    def slice(self, **dimensions: int) -> "SimulatedTrainer":
        return self

    async def _copy(self, version: int, canary_token_ids: np.ndarray, remote_readers: bool) -> None:
        await self._work(self._rates.trainer.publish_s)
        self._published = version

    async def _proof(self) -> tuple[str, np.ndarray]:
        return str(self._published), np.zeros(CANARY_TOKENS, np.float32)

    async def _score(self, canary_token_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(canary_token_ids), np.float32)

    async def fetch(self, version: int) -> None:
        await asyncio.sleep(self._rates.fetch_s)

    def take_fetched_bytes(self) -> dict[str, int]:
        return {}


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a run has shown. Seconds are virtual."""

    gpus: int
    seconds: float = 0.0
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each step; of one that was repeated, the last time."""
    ledger: dict[str, int] = field(default_factory=dict)
    replicas: int = 0
    engines: Any = field(default_factory=Counter)
    """``SimulatedReplica.totals`` of all replicas together."""
    engine_down_s: float = 0.0
    """Replicas' seconds without a process."""
    trainer_busy_s: float = 0.0
    deaths: int = 0
    down_s: float = 0.0
    """From a death that ended the run until it went on."""
    repeated_s: float = 0.0
    """Of the steps since the newest checkpoint."""
    lost_tokens: int = 0
    """Sampled, and gone with a process."""

    def mean(self, name: str) -> float:
        """Of a metric over the steps, without the first tenth: the pipeline fills."""
        steps = sorted(self.steps)[len(self.steps) // 10 :]
        values = [self.steps[step][name] for step in steps if name in self.steps[step]]
        return sum(values) / max(1, len(values))

    @property
    def trained_tokens(self) -> float:
        return sum(metrics["batch/sampled_tokens"] for metrics in self.steps.values())

    @property
    def step_s(self) -> float:
        return self.mean("time/step_s")

    @property
    def generators_idle(self) -> float:
        return 1 - self.engines["busy_s"] / max(1e-9, self.seconds * self.replicas)

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trainer_busy_s / max(1e-9, self.seconds)

    @property
    def gpu_hours_per_million(self) -> float:
        """Of tokens that were sampled and trained on."""
        return self.gpus * self.seconds / 3600 / max(1.0, self.trained_tokens) * 1e6


@dataclass(kw_only=True, slots=True)
class Saved:
    """A checkpoint."""

    step: int
    rollouts: RolloutLoopState
    groups: Sequence[RolloutGroup]
    offsets: dict[Path, int]
    time: float


class SimulatedRun:
    """``run`` once, in virtual time."""

    def __init__(
        self,
        config: RunConfig,
        rates: Rates,
        lengths: Lengths,
        *,
        failures: Failures | None = None,
        run_dir: Path | None = None,
        recorder: RolloutRecorder | None = None,
    ):
        """``run_dir`` gets metrics, ledger and events; None: nothing is written."""
        self._config, self._rates, self._lengths = config, rates, lengths
        self._failures, self._run_dir, self._recorder = failures or Failures(), run_dir, recorder
        engine, ranks = config.generator.engine, config.trainer.ranks
        self._gpus_of_engine = engine.tensor_parallel_degree
        self._trainer_hosts = -(-ranks // GPUS_PER_HOST)
        self._hosts = self._trainer_hosts + -(
            -config.generator.replicas * self._gpus_of_engine // GPUS_PER_HOST
        )
        self.outcome = Outcome(
            gpus=ranks + config.generator.replicas * self._gpus_of_engine,
            replicas=config.generator.replicas,
        )
        self._random = np.random.default_rng([config.seed, 33])
        self._restarts = Restarts(
            config.supervision, clock=lambda: asyncio.get_running_loop().time()
        )
        self._saved: Saved | None = None
        self._events = (
            None if run_dir is None else (run_dir / EVENTS_FILE).open("w", encoding="utf-8")
        )
        self._files = [] if run_dir is None else [run_dir / METRICS_FILE, run_dir / LEDGER_FILE]

    async def run(self) -> Outcome:
        """
        Raises:
            RunError: a part died too often, or an invariant does not hold.
        """
        loop = asyncio.get_running_loop()
        while True:
            died_at = await self.attempt(self._saved).run()
            self.outcome.seconds = loop.time()
            if died_at is None:
                break
            outcome = self.outcome
            outcome.repeated_s += died_at - (0.0 if self._saved is None else self._saved.time)
            await asyncio.sleep(
                self._failures.seen_s + self._failures.repair_s + self._rates.start_s
            )
            outcome.down_s += loop.time() - died_at
            for file in self._files:
                if file.exists():
                    os.truncate(
                        file, 0 if self._saved is None else self._saved.offsets.get(file, 0)
                    )
            if self._saved is not None:
                self._saved.time = loop.time()
            self._tell("goes on", step=0 if self._saved is None else self._saved.step)
        if self._events is not None:
            self._events.close()
        return self.outcome

    # Parts that a benchmark replaces.

    def attempt(self, saved: Saved | None) -> "Attempt":
        return Attempt(self, saved, Cores())

    def replica(self, version: int, cores: Cores) -> SimulatedReplica:
        generator = self._config.generator
        return SimulatedReplica(
            self._rates.engine,
            max_num_seqs=getattr(generator.engine, "max_num_seqs", 1 << 30),
            weight_update=generator.weight_update,
            prefix_caching=getattr(generator.engine, "enable_prefix_caching", True),
            version=version,
            cores=cores,
        )

    def runner(self, policy: GeneratorClient) -> GroupRunner:
        return LocalRunner(policy, seed=self._config.seed)

    def _tell(self, event: str, **values: Any) -> None:
        if self._events is not None:
            line = {"t": round(asyncio.get_running_loop().time(), 6), "event": event} | values
            self._events.write(json.dumps(line) + "\n")


class Attempt(RunEvents):
    """From the start, or a checkpoint, to the end or a death that ends the run."""

    trainer = SimulatedTrainer

    def __init__(self, whole: SimulatedRun, saved: Saved | None, cores: Cores):
        self._whole, self._saved, self._cores = whole, saved, cores
        self._config, self._rates = whole._config, whole._rates
        config = self._config
        self._lap_at = asyncio.get_running_loop().time()
        self._lap_busy = (0.0, 0.0)
        self._died: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        synchronous = config.max_offpolicy_steps == 0
        self._client = GeneratorClient(
            lockstep=synchronous, on_failure=self._fail, open_channel=open_channel
        )
        size = config.trainer.parallelism.data_parallel_size(config.trainer.ranks)
        self._threads = asyncio.Semaphore(max(1, config.rollout_workers))
        """Of the processes that run rollouts."""
        trainer: Any = self.trainer(self._rates, self._cores, size, heard=self._heard)
        self._trainer = (
            trainer  # the loop's TrainerClient, the weights' mesh and the copies of hosts
        )
        text = np.arange(CANARY_TOKENS, dtype=np.int32)
        self._weights = WeightSync(
            self._trainer,
            self._client,
            text=text,
            bound=CanaryBound("float32"),
            copies=self._trainer,
        )
        self._replicas: dict[int, SimulatedReplica] = {}
        self._gone: Any = Counter()
        """Of replicas that died."""
        self._beside: set[asyncio.Task[None]] = set()
        ordered = OrderedCalls(thread=InlineThread())
        # Nothing is rendered, and simulated ids are of no vocabulary, so that none is rare.
        nothing: Any = None
        context = BuildContext(renderer=nothing, vocab_size=1 << 31, seed=config.seed)
        self._tasks = simulated_tasks(
            config.tasks,
            context=context,
            lengths=whole._lengths,
            turn=self._turn,
        )
        selection = Selection(
            ordered,
            mix=config.task_mix.build(
                weights={name: task.weight for name, task in config.tasks.items()}
            ),
            tasks=dict(self._tasks),
            pre_batch_filters=[build_with(entry, context) for entry in config.pre_batch_filters],
            post_batch_filters=[build_with(entry, context) for entry in config.post_batch_filters],
        )
        step, run_dir = (0 if saved is None else saved.step), whole._run_dir
        self._metrics = None
        if run_dir is not None:
            own = MetricsLogger.Config(tensorboard=False, samples=0)
            self._metrics = own.build(run_dir=run_dir, resume_step=step or None)
        schedule = Schedule.of_config(config, steps_done=step)
        parts = Parts(
            selection=selection,
            runner=whole.runner(self._client),
            policy=self._client,
            batcher=config.batcher.build(),
            trainer=self._trainer,
            weights=self._weights,
            ordered=ordered,
            ledger=Ledger(None if run_dir is None else run_dir / LEDGER_FILE),
            recorder=whole._recorder,
            generated_tokens=lambda: self._client.generated_tokens,
            # Always 0. At the usual 10 ms the measurements were most of what there is to simulate.
            lag=LoopLag(interval_s=3600.0),
        )
        loops = build_loop(schedule, parts, watchers=[self])
        self._rollouts = loops.rollouts
        self._training = loops.training

    async def run(self) -> float | None:
        """Returns when it died; None at its end."""
        step = 0 if self._saved is None else self._saved.step
        if step:
            await self._weights.publish_start(step)
            self._client.version = step
        await asyncio.gather(
            *(self._start_replica(index) for index in range(self._config.generator.replicas))
        )
        if self._saved is not None:
            finished = {group.group_id: group for group in self._saved.groups}
            await self._rollouts.restore(self._saved.rollouts, finished, step)
        self._beside_run(self._let_hosts_fail())
        training = asyncio.create_task(self._training.run())
        try:
            either: set[asyncio.Future[Any]] = {training, self._died}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._died.done():
                training.result()
        finally:
            lost = sum(replica.kill() for _, replica in sorted(self._replicas.items()))
            if self._died.done():
                self._whole.outcome.lost_tokens += lost
            for task in [*self._beside, training]:
                task.cancel()
            await asyncio.wait({training})
            await self._training.close()
            await self._rollouts.close()
            self._client.close()
            if self._metrics is not None:
                self._metrics.close()
            self._whole.outcome.trainer_busy_s += self._trainer.busy_s
            self._whole.outcome.engines += self._totals()
        return self._died.result() if self._died.done() else None

    # Its parts.

    async def _turn(self, share: float) -> None:
        """A share of what is to be done for a turn."""
        if self._rates.turn_s:
            async with self._threads:
                await self._cores.use(self._rates.turn_s * share)

    async def _heard(self) -> None:
        """Where the controller's event loop runs the rollouts too, an answer waits behind what is ready there."""
        if self._config.rollout_workers == 0:
            async with self._threads:
                pass

    def _fail(self, error: Exception) -> None:
        self._rollouts.fail(error)

    def _beside_run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._ended_beside)

    def _ended_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RunError(str(error)))

    async def _start_replica(self, index: int) -> None:
        replica = self._whole.replica(self._client.version, self._cores)

        async def take_requests() -> None:
            self._replicas[index] = replica
            await self._client.admit(index, replica, Lifetime(f"generator {index}"))

        await self._weights.admit(index, replica, take_requests)

    async def _let_hosts_fail(self) -> None:
        """For as long as the run goes on."""
        whole, failures = self._whole, self._whole._failures
        while failures.per_day:
            await asyncio.sleep(float(whole._random.exponential(86_400 / failures.per_day)))
            hosts = sorted(
                int(host)
                for host in whole._random.choice(
                    whole._hosts, min(failures.hosts, whole._hosts), replace=False
                )
            )
            whole.outcome.deaths += 1
            whole._tell("hosts die", hosts=hosts)
            if failures.end_run or hosts[0] < whole._trainer_hosts:
                self._died.set_result(asyncio.get_running_loop().time())
                return
            for index in sorted(self._replicas):
                if self._host_of(index) in hosts:
                    self._lose(index)

    def _host_of(self, replica: int) -> int:
        return self._whole._trainer_hosts + replica * self._whole._gpus_of_engine // GPUS_PER_HOST

    def _lose(self, index: int) -> None:
        self._beside_run(self._replace(index, self._replicas.pop(index)))

    async def _replace(self, index: int, dead: SimulatedReplica) -> None:
        outcome, began = self._whole.outcome, asyncio.get_running_loop().time()
        outcome.lost_tokens += dead.kill()
        self._gone += dead.totals
        await asyncio.sleep(self._whole._failures.seen_s)
        self._whole._restarts.count(f"generator_{index}", f"generator {index}", "its host died")
        self._client.lose(index)
        await asyncio.sleep(self._whole._failures.repair_s)
        await self._cores.use(self._rates.start_s)
        await self._start_replica(index)
        outcome.engine_down_s += asyncio.get_running_loop().time() - began
        self._whole._tell("replica is back", replica=index)

    # What it hears of the loops.

    def group_arrived(self, group: RolloutGroup) -> None:
        tokens = sum(rollout.completion_tokens for rollout in group.rollouts)
        self._whole._tell("group", id=group.group_id, tokens=tokens, failure=group.failure)

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        now, replicas = asyncio.get_running_loop().time(), self._config.generator.replicas
        engines, elapsed = self._totals(), max(1e-9, now - self._lap_at)
        busy = (engines["busy_s"] + engines["loading_s"]) / replicas, self._trainer.busy_s
        for name, until, before in zip(
            ("generators", "trainer"), busy, self._lap_busy, strict=True
        ):
            metrics[f"perf/{name}/busy"] = (until - before) / elapsed
        metrics["time/virtual_s"] = now
        self._lap_at, self._lap_busy = now, busy

    def step_recorded(self, record: StepRecord) -> None:
        """
        Raises:
            RunError: a token is too old, or a group was left behind.
        """
        bound, metrics = self._config.max_offpolicy_steps, record.metrics
        if metrics["policy/age_max"] > bound:
            raise RunError(
                f"step {record.step} trained a token of age {metrics['policy/age_max']}, and the bound is {bound}"
            )
        for task in self._tasks.values():
            for group_id, version in task.open.items():
                if version < record.step - bound:
                    raise RunError(
                        f"group {group_id} of version {version} still runs after step {record.step}"
                    )
        if self._metrics is not None:
            self._metrics.log(record.step, metrics)
        self._whole.outcome.steps[record.step] = metrics
        self._whole.outcome.ledger = self._rollouts.ledger.counts()
        self._whole._tell(
            "step", step=record.step, tokens=metrics["batch/tokens"], age=metrics["policy/age_mean"]
        )

    async def step_ended(self, step: int) -> None:
        every = self._config.checkpoint.interval
        if not every or step % every:
            return
        state, groups, offsets = await self._rollouts.capture(
            lambda: {file: file.stat().st_size for file in self._whole._files if file.exists()}
        )
        await asyncio.sleep(self._rates.trainer.checkpoint_s)
        now = asyncio.get_running_loop().time()
        self._whole._saved = Saved(
            step=step, rollouts=state, groups=groups, offsets=offsets, time=now
        )

    def _totals(self) -> Any:
        return sum((replica.totals for replica in self._replicas.values()), self._gone)
