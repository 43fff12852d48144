"""A simulated run: the real loops, and simulated actors behind the protocols that they call.

    SimulatedRun ──▶ Attempt, from the start ──▶ hosts die ──▶ Attempt, from a checkpoint ──▶ end

    real        training and rollout loop, pacer, selection, samplers, algorithm, filters,
                validation, ledger, batcher, LocalRunner, GeneratorClient and its router,
                WeightSync, restarts, the state of a checkpoint and the way back from it, metrics
    simulated   replicas (`engine.py`), trainer (`trainer.py`), network, envs (`tasks.py`), hosts
                that fail and come back
    left out    Monarch's messages, rollout workers, the recorder, files of checkpoints, replayed
                groups

A host that dies ends the run, which goes on from its newest checkpoint, as in the library. With
``Failures.end_run=False`` only the replicas of the host are made again, which shows what ending the
run costs. The simulation ends with an error if the ledger does not balance, if a trained token is
older than the bound, or if a group is left behind.
"""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO

import numpy as np

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.configurable import BuildContext, build_with
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.restarts import Restarts
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, LocalRunner
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.loop import Loops, build_loop
from torchtitan.experiments.rl.loops.parts import Parts, Schedule
from torchtitan.experiments.rl.loops.saved_state import RolloutLoopState
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.plan.costs import GPUS_PER_HOST
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.simulation.clock import Cores, InlineThread
from torchtitan.experiments.rl.simulation.engine import EngineTotals, SimulatedReplica
from torchtitan.experiments.rl.simulation.lengths import Lengths
from torchtitan.experiments.rl.simulation.local_actor import open_channel
from torchtitan.experiments.rl.simulation.rates import DEATH_SEEN_S, Rates
from torchtitan.experiments.rl.simulation.result import SimulationResult
from torchtitan.experiments.rl.simulation.tasks import simulated_tasks
from torchtitan.experiments.rl.simulation.trainer import SimulatedTrainer
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, WeightSync

EVENTS_FILE = "events.jsonl"
"""File in the run folder with a line for each event of the simulation."""
VOCABULARY = 1 << 31
"""Number of token ids: simulated ones are of no vocabulary, and none of them counts as rare."""
DAY_S = 86_400


@dataclass(kw_only=True, slots=True, frozen=True)
class Failures:
    """Hosts that die, and what becomes of the run then."""

    per_day: float = 0.0
    """Mean number of failures a day, of all hosts together."""
    hosts: int = 1
    """Number of hosts that die at once."""
    end_run: bool = True
    """False if a host of generators that dies costs its replicas and nothing else."""
    repair_s: float = 600.0
    """Seconds until there is another host."""
    seen_s: float = DEATH_SEEN_S
    """Seconds until the death is known."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Hosts:
    """Hosts of a run, by number: those of the trainer come first."""

    trainer_hosts: int
    hosts: int
    """Number of all hosts."""
    gpus_of_replica: int

    @classmethod
    def of_config(cls, config: RunConfig) -> Self:
        gpus_of_replica = config.generator.engine.tensor_parallel_degree
        trainer_hosts = math.ceil(config.trainer.ranks / GPUS_PER_HOST)
        replica_hosts = math.ceil(config.generator.replicas * gpus_of_replica / GPUS_PER_HOST)
        return cls(
            trainer_hosts=trainer_hosts,
            hosts=trainer_hosts + replica_hosts,
            gpus_of_replica=gpus_of_replica,
        )

    def of_replica(self, index: int) -> int:
        """Return the number of the host that a replica runs on."""
        return self.trainer_hosts + index * self.gpus_of_replica // GPUS_PER_HOST


@dataclass(kw_only=True, slots=True, frozen=True)
class Saved:
    """A checkpoint."""

    step: int
    rollouts: RolloutLoopState
    groups: Sequence[RolloutGroup]
    offsets: dict[Path, int]
    """Size of each of the run's files when the checkpoint was made."""


class SimulatedRun:
    """A run in virtual time. Call ``run`` once; ``result`` fills meanwhile."""

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
        """Prepare the run.

        Args:
            failures: hosts that die; None for none.
            run_dir: folder for metrics, ledger and events; None writes none.
        """
        self.config = config
        self.rates = rates
        self.lengths = lengths
        self.failures = failures or Failures()
        self.run_dir = run_dir
        self.recorder = recorder
        self.files: list[Path] = []
        """Files that are cut back to a checkpoint when the run goes on from it."""
        if run_dir is not None:
            self.files = [run_dir / METRICS_FILE, run_dir / LEDGER_FILE]
        self.hosts = Hosts.of_config(config)
        replicas = config.generator.replicas
        self.result = SimulationResult(
            gpus=config.trainer.ranks + replicas * self.hosts.gpus_of_replica, replicas=replicas
        )
        self.random = np.random.default_rng([config.seed, 33])
        """Random numbers of the failures."""
        self.restarts = Restarts(
            config.supervision, clock=lambda: asyncio.get_running_loop().time()
        )
        self.saved: Saved | None = None
        """Newest checkpoint."""
        self.unsaved_since = 0.0
        """Time from which on the run's work is in no checkpoint."""
        self._events: TextIO | None = None

    async def run(self) -> SimulationResult:
        """Run until the last step, as often as hosts die.

        Raises:
            RunError: a replica died too often, or an invariant does not hold.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as files:
            if self.run_dir is not None:
                events_file = (self.run_dir / EVENTS_FILE).open("w", encoding="utf-8")
                self._events = files.enter_context(events_file)
            while True:
                died_at = await self.attempt(self.saved).run()
                self.result.seconds = loop.time()
                if died_at is None:
                    return self.result
                await self._repair(died_at)

    async def _repair(self, died_at: float) -> None:
        """Wait until the run can go on from its newest checkpoint, or from the start."""
        clock = asyncio.get_running_loop().time
        self.result.repeated_s += died_at - self.unsaved_since
        await asyncio.sleep(self.failures.seen_s + self.failures.repair_s + self.rates.start_s)
        self.result.down_s += clock() - died_at
        self.unsaved_since = clock()
        offsets = {} if self.saved is None else self.saved.offsets
        for file in self.files:
            if file.exists():
                os.truncate(file, offsets.get(file, 0))
        self.record_event("goes on", step=0 if self.saved is None else self.saved.step)

    def record_event(self, event: str, **values: object) -> None:
        """Write a line of JSON to the file of events, if the run has a folder."""
        if self._events is not None:
            line = {"t": round(asyncio.get_running_loop().time(), 6), "event": event} | values
            self._events.write(json.dumps(line) + "\n")

    # What a benchmark overrides.

    def attempt(self, saved: Saved | None) -> "Attempt":
        """Return an attempt that goes on from a checkpoint, or from the start."""
        return Attempt(self, saved, Cores())

    def replica(self, version: int, cores: Cores) -> SimulatedReplica:
        """Return a new replica, which holds a version of the weights."""
        generator = self.config.generator
        return SimulatedReplica(
            self.rates.engine,
            max_num_seqs=getattr(generator.engine, "max_num_seqs", 1 << 30),
            weight_update=generator.weight_update,
            prefix_caching=getattr(generator.engine, "enable_prefix_caching", True),
            version=version,
            cores=cores,
        )

    def runner(self, policy: GeneratorClient) -> GroupRunner:
        """Return what runs the rollout groups of an attempt."""
        return LocalRunner(policy, seed=self.config.seed)


class Attempt(RunEvents):
    """Part of a run, from its start or a checkpoint to its end or a death that ends it."""

    trainer_class: ClassVar[type[SimulatedTrainer]] = SimulatedTrainer

    def __init__(self, simulation: SimulatedRun, saved: Saved | None, cores: Cores):
        """Build the loops.

        Args:
            simulation: run that this is a part of.
            saved: checkpoint to go on from; None for the start.
        """
        self.simulation = simulation
        self._saved = saved
        self._cores = cores
        self._config = simulation.config
        self._rates = simulation.rates
        self._died_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Time at which hosts died and ended the run."""
        self._processes = asyncio.Semaphore(max(1, self._config.rollout_workers))
        """Processes that run rollouts: each computes one turn at a time."""
        self._background: set[asyncio.Task[None]] = set()
        self._replicas: dict[int, SimulatedReplica] = {}
        self._lost_totals = EngineTotals()
        """Totals of the replicas that died."""
        self._last_step_at = asyncio.get_running_loop().time()
        self._last_busy_s = {"generators": 0.0, "trainer": 0.0}
        """Seconds that a replica, on average, and the trainer were busy until the last step."""
        self._metrics = self._build_metrics()
        self._client = GeneratorClient(
            lockstep=self._config.max_offpolicy_steps == 0,
            on_failure=self._fail,
            open_channel=open_channel,
        )
        self._trainer = self._build_trainer()
        self._weights = WeightSync(
            self._trainer,
            self._client,
            text=np.arange(CANARY_TOKENS, dtype=np.int32),
            bound=CanaryBound("float32"),
            copies=self._trainer,
        )
        nothing: Any = None  # nothing is rendered
        context = BuildContext(renderer=nothing, vocab_size=VOCABULARY, seed=self._config.seed)
        self._tasks = simulated_tasks(
            self._config.tasks,
            context=context,
            lengths=simulation.lengths,
            compute_turn=self._compute_turn,
        )
        self._loops = self._build_loops(context)

    @property
    def _steps_done(self) -> int:
        """Number of steps that were taken before this attempt, and stay."""
        return 0 if self._saved is None else self._saved.step

    def _build_metrics(self) -> MetricsLogger | None:
        """Open the run's file of metrics, if the run has a folder."""
        run_dir = self.simulation.run_dir
        if run_dir is None:
            return None
        config = MetricsLogger.Config(tensorboard=False, samples=0)
        return config.build(run_dir=run_dir, resume_step=self._steps_done or None)

    def _build_trainer(self) -> Any:  # noqa: ANN401 - a client, a mesh and hosts' copies in one
        """Build the trainer, which stands for its client, its mesh and the copies of its hosts."""
        trainer = self._config.trainer
        return self.trainer_class(
            self._rates,
            self._cores,
            trainer.parallelism.data_parallel_size(trainer.ranks),
            take_up_reply=self._take_up_reply,
        )

    def _build_loops(self, context: BuildContext) -> Loops:
        """Build the loops of a run around the simulated actors, with this as their observer."""
        config = self._config
        run_dir = self.simulation.run_dir
        ordered = OrderedCalls(thread=InlineThread())
        weights = {name: task.weight for name, task in config.tasks.items()}

        def filters(slot: str) -> list[Filter]:
            return [build_with(part, context) for part in config.filters_of(slot)]

        selection = Selection(
            ordered,
            mix=config.task_mix.build(weights=weights),
            tasks=dict(self._tasks),
            pre_batch_filters=filters("pre_batch_filters"),
            post_batch_filters=filters("post_batch_filters"),
        )
        parts = Parts(
            selection=selection,
            runner=self.simulation.runner(self._client),
            policy=self._client,
            batcher=config.batcher.build(),
            trainer=self._trainer,
            weights=self._weights,
            ordered=ordered,
            ledger=Ledger(None if run_dir is None else run_dir / LEDGER_FILE),
            recorder=self.simulation.recorder,
            generated_tokens=lambda: self._client.generated_tokens,
        )
        schedule = Schedule.of_config(config, steps_done=self._steps_done)
        return build_loop(schedule, parts, watchers=[self])

    async def run(self) -> float | None:
        """Run until the last step, or until hosts die and end the run.

        Returns:
            Time at which the hosts died; None if the run is complete.
        """
        await self._start()
        self._run_in_background(self._let_hosts_fail())
        training = asyncio.create_task(self._loops.training.run())
        try:
            ends: set[asyncio.Future[Any]] = {training, self._died_at}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._died_at.done():
                return self._died_at.result()
            training.result()
            return None
        finally:
            await self._close(training)

    async def _start(self) -> None:
        """Bring up the replicas, and restore the checkpoint."""
        if self._saved is not None and self._saved.step:
            await self._weights.publish_start(self._saved.step)
            self._client.version = self._saved.step
        replicas = range(self._config.generator.replicas)
        await asyncio.gather(*(self._start_replica(index) for index in replicas))
        if self._saved is not None:
            finished = {group.group_id: group for group in self._saved.groups}
            await self._loops.rollouts.restore(self._saved.rollouts, finished, self._saved.step)

    async def _close(self, training: asyncio.Task[None]) -> None:
        """Stop everything, and add up what the actors have done."""
        result = self.simulation.result
        lost_tokens = sum(replica.kill() for _, replica in sorted(self._replicas.items()))
        if self._died_at.done():
            result.lost_tokens += lost_tokens
        for task in [*self._background, training]:
            task.cancel()
        await asyncio.wait({training})
        await self._loops.training.close()
        await self._loops.rollouts.close()
        self._client.close()
        if self._metrics is not None:
            self._metrics.close()
        result.trainer_busy_s += self._trainer.busy_s
        result.engines += self._engine_totals()

    # Processes of the controller's host.

    async def _compute_turn(self, share: float) -> None:
        """Compute a share of a turn, in a process that runs rollouts."""
        if self._rates.turn_s:
            async with self._processes:
                await self._cores.use(self._rates.turn_s * share)

    async def _take_up_reply(self) -> None:
        """Return when the controller takes up a reply of the trainer.

        Where its event loop runs the rollouts too, the reply waits behind what is ready there.
        """
        if self._config.rollout_workers == 0:
            async with self._processes:
                pass

    def _fail(self, error: Exception) -> None:
        """End the run with an error."""
        self._loops.rollouts.fail(error)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the loops. If the work fails, the run ends with its error."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._end_background)

    def _end_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error if isinstance(error, Exception) else RunError(str(error)))

    # Hosts and replicas.

    async def _start_replica(self, index: int) -> None:
        """Start a replica, have it load the current version, and let it take requests."""
        replica = self.simulation.replica(self._client.version, self._cores)

        async def take_requests() -> None:
            self._replicas[index] = replica
            await self._client.admit(index, replica, Lifetime(f"generator {index}"))

        await self._weights.admit(index, replica, take_requests)

    async def _let_hosts_fail(self) -> None:
        """Let hosts die at random times, until a death ends the run."""
        simulation = self.simulation
        failures = simulation.failures
        hosts = simulation.hosts
        count = min(failures.hosts, hosts.hosts)
        while failures.per_day:
            pause_s = float(simulation.random.exponential(DAY_S / failures.per_day))
            await asyncio.sleep(pause_s)
            dead = sorted(map(int, simulation.random.choice(hosts.hosts, count, replace=False)))
            simulation.result.deaths += 1
            simulation.record_event("hosts die", hosts=dead)
            has_trainer = dead[0] < hosts.trainer_hosts
            if failures.end_run or has_trainer:
                self._died_at.set_result(asyncio.get_running_loop().time())
                return
            self._lose([index for index in self._replicas if hosts.of_replica(index) in dead])

    def _lose(self, replicas: Iterable[int]) -> None:
        """Have replicas die, and others take their places later."""
        for index in sorted(replicas):
            self._run_in_background(self._replace(index, self._replicas.pop(index)))

    async def _replace(self, index: int, dead: SimulatedReplica) -> None:
        """Kill a replica, and start another one when its host is repaired."""
        simulation = self.simulation
        failures = simulation.failures
        clock = asyncio.get_running_loop().time
        died_at = clock()
        simulation.result.lost_tokens += dead.kill()
        self._lost_totals += dead.totals
        await asyncio.sleep(failures.seen_s)
        simulation.restarts.count(f"generator_{index}", f"generator {index}", "its host died")
        self._client.lose(index)
        await asyncio.sleep(failures.repair_s)
        await self._cores.use(self._rates.start_s)
        await self._start_replica(index)
        simulation.result.engine_down_s += clock() - died_at
        simulation.record_event("replica is back", replica=index)

    def _engine_totals(self) -> EngineTotals:
        """Return the totals of all replicas, dead ones included."""
        totals = self._lost_totals
        for replica in self._replicas.values():
            totals += replica.totals
        return totals

    # Events of the loops.

    def group_arrived(self, group: RolloutGroup) -> None:
        tokens = sum(rollout.completion_tokens for rollout in group.rollouts)
        self.simulation.record_event(
            "group", id=group.group_id, tokens=tokens, failure=group.failure
        )

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """Add the shares of the step in which generators and trainer were busy."""
        now = asyncio.get_running_loop().time()
        elapsed_s = max(1e-9, now - self._last_step_at)
        engines = self._engine_totals()
        replicas_s = engines.busy_s + engines.loading_s
        busy_s = {
            "generators": replicas_s / self._config.generator.replicas,
            "trainer": self._trainer.busy_s,
        }
        for name, seconds in busy_s.items():
            metrics[f"perf/{name}/busy"] = (seconds - self._last_busy_s[name]) / elapsed_s
        metrics["time/virtual_s"] = now
        self._last_step_at = now
        self._last_busy_s = busy_s

    def step_recorded(self, record: StepRecord) -> None:
        """Check the invariants, and record the step.

        Raises:
            RunError: a token is too old, or a group was left behind.
        """
        self._check_staleness(record)
        metrics = record.metrics
        if self._metrics is not None:
            self._metrics.log(record.step, metrics)
        result = self.simulation.result
        result.steps[record.step] = metrics
        result.ledger = self._loops.rollouts.ledger.counts()
        self.simulation.record_event(
            "step",
            step=record.step,
            tokens=metrics["batch/tokens"],
            age=metrics["policy/age_mean"],
        )

    def _check_staleness(self, record: StepRecord) -> None:
        bound = self._config.max_offpolicy_steps
        age = record.metrics["policy/age_max"]
        if age > bound:
            raise RunError(
                f"step {record.step} trained a token of age {age}, and the bound is {bound}"
            )
        for task in self._tasks.values():
            for group_id, version in task.open_groups.items():
                if version < record.step - bound:
                    raise RunError(
                        f"group {group_id} of version {version} still runs after step {record.step}"
                    )

    async def step_ended(self, step: int) -> None:
        """Take a checkpoint if one is due."""
        interval = self._config.checkpoint.interval
        if not interval or step % interval:
            return
        state, groups, offsets = await self._loops.rollouts.capture(self._file_sizes)
        await asyncio.sleep(self._rates.trainer.checkpoint_s)
        self.simulation.saved = Saved(step=step, rollouts=state, groups=groups, offsets=offsets)
        self.simulation.unsaved_since = asyncio.get_running_loop().time()

    def _file_sizes(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in self.simulation.files if file.exists()}
