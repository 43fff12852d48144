"""Predicted against measured: the simulator's constants from some real runs on this machine, and its word on others.

    python benchmarks/calibrate.py --folder outputs/calibration [--steps 50] [--only NAME,...] [--no-runs]

1. Each scenario is the command itself with the 1M-parameter model: ``rl_grpo_qwen3_debug`` with another number of replicas,
   other prompts, group size and bound, or with a generator that is killed in its middle. A run takes 35 s on two quiet cores,
   the whole set ten minutes; one whose folder is there already is not run again. While it runs, the CPU time of each of its
   processes is read, and how much of the cores other jobs take (``cpu.json``).
2. Those marked FIT give the constants. The shape of an engine's and of a trainer's step comes by least squares from the steps'
   records, and its level from their processes' CPU time. A turn is the CPU time of the controller's event loop. Copying,
   loading and the way of a version are medians of synchronous runs. A restart is what a FIT run with a kill took longer.
3. The others are predicted: by their config, and the rollouts that a FIT run with the same prompts has recorded. All
   processes share the cores, less what other jobs took of them.
4. A step's time, and each side's idle share of the time, are of all steps but the first.

Printed: the constants, each scenario's predicted and measured values, and the median of the errors over those not fitted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import read_metrics  # noqa: E402
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts  # noqa: E402
from torchtitan.experiments.rl.simulation import run as simulated_run  # noqa: E402
from torchtitan.experiments.rl.simulation.clock import run_virtually  # noqa: E402
from torchtitan.experiments.rl.simulation.rates import EngineRates, Rates, TrainerRates  # noqa: E402
from torchtitan.experiments.rl.simulation.run import Failures, SimulatedRun, _Attempt  # noqa: E402
from torchtitan.experiments.rl.simulation.tasks import Recorded  # noqa: E402

WARM_UP = 5
CPU_FILE = "cpu.json"
simulated_run.DEATH_SEEN_S = 0.0  # a process of this host
CORES = 2
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
        return f"{self.replicas}-{prompts}-g{self.group_size}-b{self.bound}" + ("-kill" if self.kill else "")

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
            *("--validation.every", "0", "--trainer.no-save-final-model", "--checkpoint.interval", "0"),
        ]


FIT = (
    Scenario(bound=0),
    Scenario(digits=LONG, group_size=16, bound=0),
    Scenario(),
    Scenario(digits=LONG),
    Scenario(bound=2, kill=True),
)
HELD_OUT = (
    Scenario(digits=LONG, bound=0),
    Scenario(group_size=16),
    Scenario(digits=LONG, group_size=16),
    Scenario(bound=2),
    Scenario(replicas=2),
    Scenario(replicas=2, bound=0),
    Scenario(replicas=2, digits=LONG),
    Scenario(replicas=2, digits=LONG, group_size=16, bound=0),
    Scenario(replicas=4),
    Scenario(replicas=4, digits=LONG, bound=0),
    Scenario(replicas=4, kill=True),
)


def run(scenario: Scenario, folder: Path, steps: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torchtitan.experiments.rl.grpo", *scenario.words(steps, folder)]
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    killed, read = not scenario.kill, Counter[str]()
    first: tuple[int, float, Counter[str]] | None = None
    while process.poll() is None:
        time.sleep(0.05)
        file = folder / "metrics.jsonl"
        taken = len(read_metrics(file)) if file.exists() else 0
        if not killed and taken >= steps // 2:
            killed = kill_generator(process)
        # Not in the last steps: the processes end.
        if WARM_UP <= taken < steps - 1 and (first is None or taken > first[0]):
            read = cpu_seconds(process)
            if first is None:
                first = taken, time.monotonic(), read
            seconds, count = time.monotonic() - first[1], taken - first[0]
            used = {name: read[name] - first[2][name] for name in read}
            others = used.pop("machine") - sum(used.values())
            if count:
                each = {name: value / count for name, value in used.items()}
                (folder / CPU_FILE).write_text(json.dumps(each | {"others": max(0.0, others / seconds)}))
    if process.returncode or not killed:
        raise SystemExit(f"{scenario.name}: exit code {process.returncode}, generator killed: {killed}")


def role(process: psutil.Process) -> str:
    """As its log is called."""
    logs = [Path(file.path) for file in process.open_files() if file.path.endswith(".jsonl") and "/logs/" in file.path]
    return logs[0].stem if logs else ""


def cpu_seconds(command: psutil.Process) -> "Counter[str]":
    """Of each kind of process of the run so far, and of the whole machine."""
    machine, found = psutil.cpu_times(), Counter[str]()
    found["machine"] = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    for process in [command, *command.children(recursive=True)]:
        try:
            kind = "controller" if process == command else role(process).partition("-")[0]
            threads = sorted(thread.user_time + thread.system_time for thread in process.threads())
            found[kind] += threads.pop()  # its event loop's, its engine's or its computing thread's
            found["controller beside" if kind == "controller" else kind] += sum(threads)
        except psutil.NoSuchProcess:
            continue
    return found


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
    engines = [sum(record.get(f"perf/generator_{i}/busy", 0.0) for i in range(replicas)) / replicas for record in records]
    return shares(seconds, engines, [record.get("perf/trainer_rank_0/busy", 0.0) for record in records])


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
            return np.array([factors[used.index(column)] if column in used else 0.0 for column in range(rows.shape[1] - 1)])
        used.pop(int(factors.argmin()))


def fitted(folders: dict[Scenario, Path]) -> Rates:
    """Of runs with one replica."""
    engine, trainer, syncs, cpu, rollouts = [], [], [], Counter[str](), 0.0
    for scenario, folder in folders.items():
        prompt = np.mean([len(r.rollout.turns[0].prompt_token_ids) for r in read_rollouts(folder)])
        records = read_metrics(folder / "metrics.jsonl")[WARM_UP:]
        for record in records:
            seconds, steps = record["time/step_s"], record["perf/generator_0/steps"]
            # Of the requests that run after a step; those that it ended ran in it too.
            sampled = record["perf/generated_tokens_per_s"] * seconds
            prompts = record["rollout/count"] * prompt * (1 - record.get("perf/generator_0/prompts_cached", 0.0))
            engine.append((steps, sampled, prompts, record["perf/generator_0/busy"] * seconds))
            slots = record["batch/tokens"] * (1 - record["batch/shared_fraction"]) / record["batch/packing_efficiency"]
            trainer.append((1.0, slots, record["time/train_s"]))
            if scenario.bound == 0:
                copy, load, verify, reload = (
                    record[f"time/sync_{part}_s"] for part in ("copy_out", "load", "verify", "reload")
                )
                syncs.append((copy, verify + reload, load - verify - reload))
        cpu.update({name: value * len(records) for name, value in json.loads((folder / CPU_FILE).read_text()).items()})
        rollouts += sum(record["rollout/count"] for record in records)
    publish, load, way = np.median(np.array(syncs), axis=0)
    engine_fit, trainer_fit = nonnegative(np.array(engine)), nonnegative(np.array(trainer))
    # What the processes have computed, and not how long that took where they shared a core.
    steps = len(engine)
    engine_fit *= (cpu["generator"] - load * steps) / (np.array(engine)[:, :3] @ engine_fit).sum()
    trainer_fit *= (cpu["trainer"] - publish * steps) / (np.array(trainer)[:, :2] @ trainer_fit).sum()
    return Rates(
        engine=EngineRates(
            step_s=engine_fit[0],
            sequence_s=engine_fit[1],
            context_s=0.0,
            prompt_s=0.0,
            prefill_token_s=engine_fit[2],
            cache_tokens=131_072,
            load_s=load,
        ),
        trainer=TrainerRates(
            step_s=trainer_fit[0],
            microbatch_s=0.0,
            token_s=trainer_fit[1],
            pair_s=0.0,
            publish_s=publish,
            checkpoint_s=0.0,
        ),
        fetch_s=way,
        start_s=0.0,
        turn_s=cpu["controller"] / rollouts,
        report_s=cpu["controller beside"] / steps,
        cores=CORES,
    )


def predicted(scenario: Scenario, folder: Path, rates: Rates, lengths: Recorded, steps: int) -> dict[str, float]:
    config = rl_grpo_qwen3_debug()
    config.steps, config.max_offpolicy_steps = steps, scenario.bound
    config.generator.replicas, config.tasks["sum_digits"].group_size = scenario.replicas, scenario.group_size
    config.post_batch_filters = []
    config.checkpoint.interval, config.tasks["sum_digits"].validation = 0, None

    class Killed(_Attempt):
        def step_taken(self, record):
            super().step_taken(record)
            if record.step == steps // 2:
                self._beside_run(self._make_again(0, self._replicas.pop(0)))

    simulated_run._Attempt = Killed if scenario.kill else _Attempt
    others = json.loads((folder / CPU_FILE).read_text())["others"]
    rates = replace(rates, cores=max(0.5, CORES - others))
    run = SimulatedRun(config, rates, lengths, failures=Failures(repair_s=0.0))
    records = [metrics for step, metrics in sorted(run_virtually(run.run).steps.items()) if step > WARM_UP]
    names = ("time/step_s", "perf/generators/busy", "perf/trainer/busy")
    return shares(*([record[name] for record in records] for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", default="", help="scenarios to run beside those that are fitted, by name")
    parser.add_argument("--no-runs", action="store_true", help="use the folders that are there")
    options = parser.parse_args()
    chosen = [each for each in HELD_OUT if not options.only or each.name in options.only.split(",")]
    folders = {each: options.folder / each.name for each in (*FIT, *chosen)}
    for scenario, folder in folders.items():
        if not (folder / CPU_FILE).exists() and not options.no_runs:
            run(scenario, folder, options.steps)
    known = {scenario: folder for scenario, folder in folders.items() if (folder / CPU_FILE).exists()}
    undisturbed = {scenario: folder for scenario, folder in known.items() if scenario in FIT and not scenario.kill}
    rates = fitted(undisturbed)
    seen = {scenario: measured(folder, scenario.replicas) for scenario, folder in known.items()}
    lengths = {scenario.digits: Recorded(str(folder)) for scenario, folder in undisturbed.items()}

    def said_of(scenario: Scenario) -> dict[str, float]:
        steps = len(read_metrics(known[scenario] / "metrics.jsonl"))
        return predicted(scenario, known[scenario], rates, lengths[scenario.digits], steps)

    for scenario in (each for each in FIT if each.kill and each in known):
        lost = seen[scenario]["step"] - said_of(scenario)["step"]
        rates = replace(rates, start_s=max(0.0, lost * (options.steps - WARM_UP)))
    print(f"constants, seconds: {json.dumps({name: getattr(rates.engine, name) for name in EngineRates.__slots__})}")
    print(json.dumps({name: getattr(rates.trainer, name) for name in TrainerRates.__slots__}))
    print(json.dumps({name: getattr(rates, name) for name in ("turn_s", "report_s", "fetch_s", "start_s")}))
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
        print(f"median error over {len(wrong)} held-out runs: {name} {np.median(wrong):.1%}, largest {max(wrong):.1%}")


if __name__ == "__main__":
    main()
