"""Predicted against measured: the simulator's constants from some real runs on this machine, and its word on others.

    python benchmarks/calibrate.py --folder outputs/calibration [--steps 50] [--only NAME,...] [--no-runs]

1. Each scenario is the command itself with the 1M-parameter model: ``rl_grpo_qwen3_debug`` with another number of replicas,
   other prompts, group size and bound, or with a generator that is killed in its middle. A run takes 35 s on two quiet cores,
   the whole set ten minutes; one whose folder is there already is not run again. While it runs, the CPU time of each of its
   threads is read, and how much of the cores other jobs take (``cpu.json``).
2. Those marked FIT give the constants. What an engine's step, a sequence in it and a token of a prompt take, and a trainer's
   step and a token in it, come by least squares from the CPU time of their processes, run by run. The engine's three are then
   multiplied so that simulated engines compute as long as the real ones did: vLLM takes a step more than the tokens need. A
   turn is the CPU time of the controller's event loop. Copying, loading, packing and the way of a version are medians of
   synchronous runs. A restart is what a FIT run with a kill took longer.
3. The others are predicted: by their config, and the rollouts that a FIT run with the same prompts has recorded. All
   processes share the cores, less what other jobs took of them.
4. A step's time, and each side's idle share of the time, are of all steps after the first five.

Printed: the constants, each scenario's predicted and measured values, and the median of the errors over those not fitted.
"""

import argparse
import asyncio
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.batching.batcher import BatchPlan  # noqa: E402
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.loops.step_metrics import StepRecord  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402
from torchtitan.experiments.rl.plan.costs import EngineRates, TrainerRates  # noqa: E402
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts  # noqa: E402
from torchtitan.experiments.rl.simulation.clock import Cores, run_virtually  # noqa: E402
from torchtitan.experiments.rl.simulation.lengths import Recorded  # noqa: E402
from torchtitan.experiments.rl.simulation.rates import Rates  # noqa: E402
from torchtitan.experiments.rl.simulation.result import SimulationResult  # noqa: E402
from torchtitan.experiments.rl.simulation.run import (  # noqa: E402
    Attempt,
    Failures,
    Saved,
    SimulatedRun,
)
from torchtitan.experiments.rl.simulation.trainer import SimulatedTrainer  # noqa: E402

WARM_UP = 5
CPU_FILE = "cpu.json"
CORES = 2
SLICE_S = 0.005
"""sys.getswitchinterval()."""
SHORT, LONG = (2, 5), (20, 24)
"""Digits of a prompt."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scenario:
    replicas: int = 1
    digits: tuple[int, int] = SHORT
    group_size: int = 8
    bound: int = 1
    kill: bool = False

    @property
    def name(self) -> str:
        prompts = "long" if self.digits == LONG else "short"
        return f"{self.replicas}-{prompts}-g{self.group_size}-b{self.bound}" + (
            "-kill" if self.kill else ""
        )

    def words(self, steps: int, folder: Path) -> list[str]:
        low, high = map(str, self.digits)
        task = "--tasks.sum-digits"
        return [
            *("--config", "rl_grpo_qwen3_debug", "--steps", str(steps), "--run-dir", str(folder)),
            *("--generator.replicas", str(self.replicas), "--max-offpolicy-steps", str(self.bound)),
            *(
                f"{task}.group-size",
                str(self.group_size),
                f"{task}.dataset.min-digits",
                low,
                f"{task}.dataset.max-digits",
                high,
            ),
            # Nothing is learned of long prompts, and nobody is to mind.
            *("--post-batch-filters", "gibberish", "--max-drops-in-a-row", "1000000"),
            *(
                "--validation.every",
                "0",
                "--trainer.no-save-final-model",
                "--checkpoint.interval",
                "0",
            ),
        ]


FIT = (
    Scenario(bound=0),
    Scenario(digits=LONG, group_size=16, bound=0),
    Scenario(),
    Scenario(digits=LONG),
    Scenario(replicas=2, bound=0),
    Scenario(bound=2, kill=True),
)
HELD_OUT = (
    Scenario(digits=LONG, bound=0),
    Scenario(group_size=16),
    Scenario(digits=LONG, group_size=16),
    Scenario(bound=2),
    Scenario(replicas=2),
    Scenario(replicas=2, digits=LONG),
    Scenario(replicas=2, digits=LONG, group_size=16, bound=0),
    Scenario(replicas=4),
    Scenario(replicas=4, digits=LONG, bound=0),
    Scenario(replicas=4, kill=True),
)


@dataclass(slots=True, eq=False)
class Job:
    when: float
    callback: Callable[[], None]
    cancel: Callable[[], None] = lambda: None


class SharedCores(Cores):
    """Of one host, which all that runs there shares evenly. It tells the seconds that each has had a core for; with more cores
    than jobs they are the loop's."""

    def __init__(self, count: float):
        self._loop, self._count = asyncio.get_running_loop(), count
        self._jobs: list[Job] = []
        self._had, self._told = 0.0, self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def time(self) -> float:
        now = self._loop.time()
        self._had += (now - self._told) * self._share
        self._told = now
        return self._had

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        self.time()
        job = Job(when, callback)
        job.cancel = functools.partial(self._end, job)
        self._jobs.append(job)
        self._plan()
        return job

    async def use(self, seconds: float) -> None:
        done = asyncio.Event()
        job = self.call_at(self.time() + seconds, done.set)
        try:
            await done.wait()
        finally:
            job.cancel()

    @property
    def _share(self) -> float:
        return min(1.0, self._count / max(1, len(self._jobs)))

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._jobs:
            first = min(self._jobs, key=lambda job: job.when)
            self._timer = self._loop.call_later(
                max(0.0, first.when - self._had) / self._share, self._run, first
            )

    def _run(self, job: Job) -> None:
        self._end(job)
        job.callback()

    def _end(self, job: Job) -> None:
        if job in self._jobs:
            self.time()
            self._jobs.remove(job)
            self._plan()


@dataclass(kw_only=True, slots=True, frozen=True)
class HostRates(Rates):
    """Of one host without GPUs."""

    cores: float
    """That trainer, engines and rollouts share."""
    pack_token_s: float = 0.0
    """Of the controller, before the step: packing and pickling a token's streams, in a thread beside the rollouts."""
    digest_s: float = 0.0
    """Seconds that the trainer takes digests for, beside its next step and the generators' loads.
    A version is live once both are done."""
    report_s: float = 0.0
    """Of the other threads of the process that runs the rollouts, for each step: recording rollouts, messages. A thread holds
    the interpreter for at most ``SLICE_S`` where another waits for it."""


class HostTrainer(SimulatedTrainer):
    async def forward_backward(self, packed: BatchPlan, step: int) -> BatchPlan:
        await self._cores.use(self._rates.pack_token_s * packed.tokens)
        return await super().forward_backward(packed, step)

    async def _proof(self) -> tuple[str, np.ndarray]:
        await self._cores.use(self._rates.digest_s)
        return await super()._proof()


class HostAttempt(Attempt):
    trainer_class = HostTrainer

    def step_recorded(self, record: StepRecord) -> None:
        super().step_recorded(record)
        if self._rates.report_s:
            self._run_in_background(self._report())
        if record.step == self.simulation.replica_dies_after:
            self._lose([0])

    async def _report(self) -> None:
        left = self._rates.report_s
        while left > 0:
            async with self._processes:
                await self._cores.use(min(left, SLICE_S))
            left -= SLICE_S


class HostRun(SimulatedRun):
    """On a host whose cores all parts share. ``replica_dies_after``: the step after which replica 0 dies, and its host does
    not; 0: never."""

    def __init__(self, *args: Any, replica_dies_after: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.replica_dies_after = replica_dies_after

    def attempt(self, saved: Saved | None) -> Attempt:
        return HostAttempt(self, saved, SharedCores(self.rates.cores))


def run(scenario: Scenario, folder: Path, steps: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torchtitan.experiments.rl.train",
        *scenario.words(steps, folder),
    ]
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    killed, first = not scenario.kill, None
    while process.poll() is None:
        time.sleep(0.2)
        file = folder / "metrics.jsonl"
        taken = len(read_metrics(file)) if file.exists() else 0
        if not killed and taken >= steps // 2:
            killed = kill_generator(process)
        # Not in the last steps: the processes end.
        if first is None and taken >= WARM_UP:
            first = taken, cpu_seconds(process)
        elif first is not None and first[0] < taken < steps - 1:
            (folder / CPU_FILE).write_text(
                json.dumps(used_between(*first, taken, cpu_seconds(process)))
            )
    if process.returncode or not killed:
        raise SystemExit(
            f"{scenario.name}: exit code {process.returncode}, generator killed: {killed}"
        )


def role(process: psutil.Process) -> str:
    """As its log is called."""
    logs = [
        Path(file.path)
        for file in process.open_files()
        if file.path.endswith(".jsonl") and "/logs/" in file.path
    ]
    return logs[0].stem if logs else ""


def cpu_seconds(command: psutil.Process) -> dict[tuple[str, int], float]:
    """Of each thread of the run so far, by the kind of its process; and of the whole machine, and its clock."""
    machine, found = psutil.cpu_times(), {}
    for process in [command, *command.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            kind = "controller" if process == command else role(process).partition("-")[0]
            found |= {
                (kind, thread.id): thread.user_time + thread.system_time
                for thread in process.threads()
            }
    own = psutil.Process().cpu_times()
    busy = (
        sum(machine)
        - machine.idle
        - machine.iowait
        - machine.guest
        - machine.guest_nice
        - own.user
        - own.system
    )
    return found | {("machine", 0): busy, ("clock", 0): time.monotonic()}


def used_between(
    taken: int,
    before: dict[tuple[str, int], float],
    now_taken: int,
    now: dict[tuple[str, int], float],
) -> Any:
    """Seconds of CPU a step: ``controller`` and so on of the thread that computes most, ``controller beside`` of all others of
    such processes, and ``others``, the cores that other jobs took. The command's own reading is left out."""
    used: dict[str, list[float]] = {}
    for (kind, thread), seconds in now.items():
        used.setdefault(kind, []).append(seconds - before.get((kind, thread), 0.0))
    (machine,), (elapsed,) = used.pop("machine"), used.pop("clock")
    others = max(0.0, machine - sum(map(sum, used.values()))) / elapsed
    count = now_taken - taken
    each = {kind: max(seconds) / count for kind, seconds in used.items() if kind}
    return (
        each
        | {f"{kind} beside": sum(used[kind]) / count - each[kind] for kind in each}
        | {"others": others}
    )


def kill_generator(command: psutil.Process) -> bool:
    for child in command.children(recursive=True):
        if role(child) == "generator-0":
            child.kill()
            return True
    return False


def measured(folder: Path, replicas: int) -> dict[str, float]:
    records = read_metrics(folder / "metrics.jsonl")[WARM_UP:]
    seconds = np.array([record["time/step_s"] for record in records])
    # A replica that is gone tells nothing, and does nothing.
    engines = [
        sum(record.get(f"perf/generator_{i}/busy", 0.0) for i in range(replicas)) / replicas
        for record in records
    ]
    return shares(
        seconds, engines, [record.get("perf/trainer_rank_0/busy", 0.0) for record in records]
    )


def shares(seconds: Any, generators: Any, trainer: Any) -> dict[str, float]:
    whole = float(np.sum(seconds))
    found = {"step": float(np.mean(seconds))}
    return found | {
        f"{side} idle": 1 - float(np.dot(busy, seconds) / whole)
        for side, busy in (("generators", generators), ("trainer", trainer))
    }


def nonnegative(rows: np.ndarray) -> np.ndarray:
    """Factors of all columns but the last, none below 0, whose sum is nearest to the last; by leaving out what falls below."""
    used = list(range(rows.shape[1] - 1))
    while True:
        factors = np.linalg.lstsq(rows[:, used], rows[:, -1], rcond=None)[0]
        if (factors >= 0).all():
            return np.array(
                [
                    factors[used.index(column)] if column in used else 0.0
                    for column in range(rows.shape[1] - 1)
                ]
            )
        used.pop(int(factors.argmin()))


def fitted(folders: dict[Scenario, Path]) -> HostRates:
    """Least squares over runs, of what their processes computed, and not of how long that took where they shared a core."""
    engine, trainer, syncs, each = [], [], [], []
    for scenario, folder in folders.items():
        prompt = np.mean([len(r.rollout.turns[0].prompt_token_ids) for r in read_rollouts(folder)])
        records = read_metrics(folder / "metrics.jsonl")[WARM_UP:]
        cpu = json.loads((folder / CPU_FILE).read_text())
        rows = []
        for record in records:
            replicas = range(scenario.replicas)
            cached = np.mean(
                [record.get(f"perf/generator_{i}/prompts_cached", 0.0) for i in replicas]
            )
            slots = (
                record["batch/tokens"]
                * (1 - record["batch/shared_fraction"])
                / record["batch/packing_efficiency"]
            )
            copy, load, verify, reload = (
                record.get(f"time/sync_{part}_s", 0.0)
                for part in ("copy_out", "load", "verify", "reload")
            )
            computing = record["perf/trainer_rank_0/busy"] * record["time/step_s"] - copy
            rows.append(
                {
                    "steps": sum(record.get(f"perf/generator_{i}/steps", 0.0) for i in replicas),
                    "sampled": record["perf/generated_tokens_per_s"] * record["time/step_s"],
                    "prompts": record["rollout/count"] * prompt * (1 - cached),
                    "slots": slots,
                    "rollouts": record["rollout/count"],
                    "tokens": record["batch/tokens"],
                    "pack": max(0.0, record["time/train_s"] - computing),
                    "copy": copy,
                    "load": verify + reload,
                    "way": load - verify - reload,
                }
            )
        run = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} | cpu
        each.append(run)
        loading = np.median([row["load"] for row in rows])
        engine.append(
            (
                run["steps"],
                run["sampled"],
                run["prompts"],
                cpu["generator"] + cpu["generator beside"] - scenario.replicas * loading,
            )
        )
        trainer.append((1.0, run["slots"], cpu["trainer"] - run["copy"]))
        if scenario.bound == 0:
            syncs.append(
                [np.median([row[name] for row in rows]) for name in ("copy", "load", "way", "pack")]
            )
    publish, load, way, pack = np.median(np.array(syncs), axis=0)
    step_s, sequence_s, prefill_token_s = nonnegative(np.array(engine))
    trainer_step_s, token_s = nonnegative(np.array(trainer))
    digest, beside, turns = (
        np.mean([run[name] for run in each])
        for name in ("trainer beside", "controller beside", "controller")
    )
    return HostRates(
        engine=EngineRates(
            step_s=step_s,
            sequence_s=sequence_s,
            context_s=0.0,
            prompt_s=0.0,
            prefill_token_s=prefill_token_s,
            cache_tokens=131_072,
            load_s=load,
        ),
        trainer=TrainerRates(
            step_s=trainer_step_s,
            microbatch_s=0.0,
            token_s=token_s,
            pair_s=0.0,
            publish_s=publish,
            checkpoint_s=0.0,
        ),
        pack_token_s=pack / np.mean([run["tokens"] for run in each]),
        digest_s=digest,
        fetch_s=max(0.0, way - step_s),  # less the canary's step
        start_s=0.0,
        turn_s=turns / np.mean([run["rollouts"] for run in each]),
        report_s=max(0.0, beside - pack),
        cores=CORES,
    )


def levelled(
    rates: HostRates, folders: dict[Scenario, Path], lengths: dict[Any, Recorded], steps: int
) -> HostRates:
    """With the engine's constants such that the simulated engines of ``folders`` compute as long as the real ones did."""
    for _ in range(2):
        real = simulated = 0.0
        for scenario, folder in folders.items():
            cpu = json.loads((folder / CPU_FILE).read_text())
            real += (
                cpu["generator"] + cpu["generator beside"] - rates.engine.load_s * scenario.replicas
            )
            simulated += (
                simulate(
                    scenario, folder, rates, lengths[scenario.digits], steps
                ).engines.computed_s
                / steps
            )
        engine, factor = rates.engine, real / simulated
        names = ("step_s", "sequence_s", "prefill_token_s")
        rates = replace(
            rates,
            engine=replace(engine, **{name: getattr(engine, name) * factor for name in names}),
        )
    return rates


def simulate(
    scenario: Scenario, folder: Path, rates: HostRates, lengths: Recorded, steps: int
) -> SimulationResult:
    config = rl_grpo_qwen3_debug()
    config.steps, config.max_offpolicy_steps = steps, scenario.bound
    config.generator.replicas, config.tasks["sum_digits"].group_size = (
        scenario.replicas,
        scenario.group_size,
    )
    config.post_batch_filters = []
    config.checkpoint.interval, config.tasks["sum_digits"].validation = 0, None
    others = json.loads((folder / CPU_FILE).read_text())["others"]
    rates = replace(rates, cores=max(0.5, CORES - others))
    failures, after = Failures(repair_s=0.0, seen_s=0.0), steps // 2 if scenario.kill else 0
    return run_virtually(
        HostRun(config, rates, lengths, failures=failures, replica_dies_after=after).run
    )


def predicted(result: SimulationResult) -> dict[str, float]:
    records = [metrics for step, metrics in sorted(result.steps.items()) if step > WARM_UP]
    names = ("time/step_s", "perf/generators/busy", "perf/trainer/busy")
    return shares(*([record[name] for record in records] for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--only", default="", help="scenarios to run beside those that are fitted, by name"
    )
    parser.add_argument("--no-runs", action="store_true", help="use the folders that are there")
    options = parser.parse_args()
    chosen = [each for each in HELD_OUT if not options.only or each.name in options.only.split(",")]
    folders = {each: options.folder / each.name for each in (*FIT, *chosen)}
    for scenario, folder in folders.items():
        if not (folder / CPU_FILE).exists() and not options.no_runs:
            run(scenario, folder, options.steps)
    known = {
        scenario: folder for scenario, folder in folders.items() if (folder / CPU_FILE).exists()
    }
    undisturbed = {
        scenario: folder
        for scenario, folder in known.items()
        if scenario in FIT and not scenario.kill
    }
    rates = fitted(undisturbed)
    seen = {scenario: measured(folder, scenario.replicas) for scenario, folder in known.items()}
    lengths = {scenario.digits: Recorded(str(folder)) for scenario, folder in undisturbed.items()}

    def said_of(scenario: Scenario) -> dict[str, float]:
        steps = len(read_metrics(known[scenario] / "metrics.jsonl"))
        return predicted(
            simulate(scenario, known[scenario], rates, lengths[scenario.digits], steps)
        )

    rates = levelled(rates, undisturbed, lengths, options.steps)

    for scenario in (each for each in FIT if each.kill and each in known):
        lost = seen[scenario]["step"] - said_of(scenario)["step"]
        rates = replace(rates, start_s=max(0.0, lost * (options.steps - WARM_UP)))
    print(
        f"constants, seconds: {json.dumps({name: getattr(rates.engine, name) for name in EngineRates.__slots__})}"
    )
    print(json.dumps({name: getattr(rates.trainer, name) for name in TrainerRates.__slots__}))
    print(
        json.dumps(
            {
                name: getattr(rates, name)
                for name in ("turn_s", "report_s", "fetch_s", "start_s", "pack_token_s", "digest_s")
            }
        )
    )
    errors: dict[str, list[float]] = {}
    for scenario in known:
        values = []
        for name, value in said_of(scenario).items():
            real = seen[scenario][name]
            wrong = value / real - 1 if name == "step" else value - real
            values.append(f"{name} {value:.3f} / {real:.3f} ({wrong:+.0%})")
            if scenario not in FIT:
                errors.setdefault(name, []).append(abs(wrong))
        others = json.loads((known[scenario] / CPU_FILE).read_text())["others"]
        print(
            f"{scenario.name:20} {'fitted  ' if scenario in FIT else 'held out'}  predicted / measured: {', '.join(values)}; "
            f"other jobs took {others:.2f} cores"
        )
    for name, wrong in errors.items():
        print(
            f"median error over {len(wrong)} held-out runs: {name} {np.median(wrong):.1%}, largest {max(wrong):.1%}"
        )


if __name__ == "__main__":
    main()
