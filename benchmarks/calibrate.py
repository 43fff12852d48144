"""Predicted against measured: the simulator's constants from some real runs on this machine, and its word on others.

    python benchmarks/calibrate.py --folder outputs/calibration [--steps 30] [--only NAME,...] [--no-runs]

1. Each scenario is the command itself with the 1M-parameter model: ``rl_grpo_qwen3_debug`` with another number of replicas,
   other prompts, group size and bound, or with a generator that is killed in its middle. A run takes half a minute on two
   quiet cores, all of them ten minutes; one whose folder is there already is not run again.
2. Those marked FIT give the constants, by least squares without negative ones: seconds of an engine's step, of a sequence in
   it and of a prompt's token that is not cached, from each step's ``perf/generator_0/...``; of a trainer's step and token from
   ``time/train_s``; publishing and loading from ``time/sync_...``; what a turn takes of the controller's thread is the value
   with which their simulated steps take what the real ones took.
3. The others are predicted: by their config, and the lengths that a FIT run with the same prompts has recorded. Engines that
   share a core take turns on it: each is as many times slower.
4. A step's time, and each side's idle share, are means without the first steps (warm-up) and without those that evaluate.

Printed: the constants, each scenario's predicted and measured values, and the median of the errors over those not fitted.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

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
simulated_run.DEATH_SEEN_S = 0.0  # a process of this host
CORES = 2
SHORT, LONG = (2, 5), (20, 24)
"""Digits of a prompt."""
RESTART_S = 6.0
"""Until a generator of this model that was killed takes requests again."""


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


FIT = (Scenario(), Scenario(digits=LONG), Scenario(bound=0), Scenario(digits=LONG, group_size=16, bound=0))
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
    Scenario(replicas=2, kill=True),
)


def run(scenario: Scenario, folder: Path, steps: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torchtitan.experiments.rl.grpo", *scenario.words(steps, folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    killed = not scenario.kill
    while process.poll() is None:
        time.sleep(0.05)
        file = folder / "metrics.jsonl"
        if not killed and file.exists() and len(read_metrics(file)) >= steps // 2:
            killed = kill_generator(process.pid)
    if process.returncode or not killed:
        raise SystemExit(f"{scenario.name}: exit code {process.returncode}, generator killed: {killed}")


def kill_generator(command: int) -> bool:
    for child in psutil.Process(command).children(recursive=True):
        if any(file.path.endswith("generator-0.log") for file in child.open_files()):
            child.kill()
            return True
    return False


def measured(folder: Path, replicas: int) -> dict[str, float]:
    records = read_metrics(folder / "metrics.jsonl")[WARM_UP:]
    sides = [
        np.mean([r[f"perf/generator_{i}/busy"] for r in records if f"perf/generator_{i}/busy" in r]) for i in range(replicas)
    ]
    return {
        "step": float(np.mean([record["time/step_s"] for record in records])),
        "generators idle": 1 - float(np.mean(sides)),
        "trainer idle": 1 - float(np.mean([record["perf/trainer_rank_0/busy"] for record in records])),
        "generate_s": float(np.mean(sides)) * float(np.mean([record["time/step_s"] for record in records])),
        "train_s": float(np.mean([record["time/train_s"] for record in records])),
    }


def nonnegative(rows: np.ndarray) -> np.ndarray:
    """Factors of all columns but the last, none below 0, whose sum is nearest to the last; by leaving out what falls below."""
    used = list(range(rows.shape[1] - 1))
    while True:
        factors = np.linalg.lstsq(rows[:, used], rows[:, -1], rcond=None)[0]
        if (factors >= 0).all():
            return np.array([factors[used.index(column)] if column in used else 0.0 for column in range(rows.shape[1] - 1)])
        used.pop(int(factors.argmin()))


def fitted(folders: list[Path]) -> Rates:
    """Of one engine, and of a trainer, each with a core of its own. ``turn_s`` is not fitted here."""
    engine, trainer, syncs = [], [], []
    for folder in folders:
        prompt = np.mean([len(r.rollout.turns[0].prompt_token_ids) for r in read_rollouts(folder)])
        for record in read_metrics(folder / "metrics.jsonl")[WARM_UP:]:
            seconds, steps = record["time/step_s"], record["perf/generator_0/steps"]
            # Of the requests that run after a step; those that it ended ran in it too.
            sampled = record["perf/generated_tokens_per_s"] * seconds
            prompts = record["rollout/count"] * prompt * (1 - record.get("perf/generator_0/prompts_cached", 0.0))
            engine.append((steps, sampled, prompts, record["perf/generator_0/busy"] * seconds))
            slots = record["batch/tokens"] * (1 - record["batch/shared_fraction"]) / record["batch/packing_efficiency"]
            trainer.append((1.0, slots, record["time/train_s"]))
            syncs.append([record[f"time/sync_{part}_s"] for part in ("copy_out", "verify", "reload")])
    engine_fit, trainer_fit = nonnegative(np.array(engine)), nonnegative(np.array(trainer))
    publish, *load = np.median(np.array(syncs), axis=0)
    return Rates(
        engine=EngineRates(
            step_s=engine_fit[0],
            sequence_s=engine_fit[1],
            context_s=0.0,
            prompt_s=0.0,
            prefill_token_s=engine_fit[2],
            cache_tokens=131_072,
            load_s=sum(load),
        ),
        trainer=TrainerRates(
            step_s=trainer_fit[0],
            microbatch_s=0.0,
            token_s=trainer_fit[1],
            pair_s=0.0,
            publish_s=publish,
            checkpoint_s=0.0,
        ),
        start_s=RESTART_S,
    )


def predicted(scenario: Scenario, rates: Rates, lengths: Recorded, steps: int) -> dict[str, float]:
    config = rl_grpo_qwen3_debug()
    config.steps, config.max_offpolicy_steps = steps, scenario.bound
    config.generator.replicas, config.tasks["sum_digits"].group_size = scenario.replicas, scenario.group_size
    config.post_batch_filters = []
    config.checkpoint.interval, config.tasks["sum_digits"].validation = 0, None
    slower = max(1.0, scenario.replicas / (CORES - 1))
    own = {name: getattr(rates.engine, name) * slower for name in ("step_s", "sequence_s", "prefill_token_s", "load_s")}

    class Killed(_Attempt):
        def step_taken(self, record):
            super().step_taken(record)
            if record.step == steps // 2:
                self._beside_run(self._make_again(0, self._replicas.pop(0)))

    simulated_run._Attempt = Killed if scenario.kill else _Attempt
    engine = replace(rates.engine, **own)
    run = SimulatedRun(config, replace(rates, engine=engine), lengths, failures=Failures(repair_s=0.0))
    outcome = run_virtually(run.run)
    return {
        "step": outcome.step_s,
        "generators idle": outcome.generators_idle,
        "trainer idle": outcome.trainer_idle,
        "generate_s": outcome.engines["busy_s"] / scenario.replicas / steps,
        "train_s": outcome.trainer_busy_s / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="scenarios to run beside those that are fitted, by name")
    parser.add_argument("--no-runs", action="store_true", help="use the folders that are there")
    options = parser.parse_args()
    chosen = [each for each in HELD_OUT if not options.only or each.name in options.only.split(",")]
    folders = {each: options.folder / each.name for each in (*FIT, *chosen)}
    for scenario, folder in folders.items():
        if not (folder / "metrics.jsonl").exists() and not options.no_runs:
            run(scenario, folder, options.steps)
    known = {scenario: folder for scenario, folder in folders.items() if (folder / "metrics.jsonl").exists()}
    fits = [scenario for scenario in FIT if scenario in known]
    rates = fitted([known[scenario] for scenario in fits])
    seen = {scenario: measured(folder, scenario.replicas) for scenario, folder in known.items()}
    lengths = {scenario.digits: Recorded(str(known[scenario])) for scenario in fits}

    # What prompts of different examples have in common is not simulated, so as much is computed as no real side computes.
    def ratio(side: str) -> float:
        return float(np.mean([seen[e][side] / predicted(e, rates, lengths[e.digits], options.steps)[side] for e in fits]))

    engine, trainer, generate, train = rates.engine, rates.trainer, ratio("generate_s"), ratio("train_s")
    engine = replace(engine, **{name: getattr(engine, name) * generate for name in ("step_s", "sequence_s", "prefill_token_s")})
    trainer = replace(trainer, step_s=trainer.step_s * train, token_s=trainer.token_s * train)
    rates = replace(rates, engine=engine, trainer=trainer)

    def error(turn_s: float) -> float:
        tried = replace(rates, turn_s=turn_s)
        ratios = [predicted(each, tried, lengths[each.digits], options.steps)["step"] / seen[each]["step"] for each in fits]
        return float(np.mean([abs(math.log(ratio)) for ratio in ratios]))

    rates = replace(rates, turn_s=min((0.1e-3 * 2**power for power in range(5)), key=error))
    print(f"constants, seconds: {json.dumps({name: getattr(rates.engine, name) for name in EngineRates.__slots__})}")
    print(f"{json.dumps({name: getattr(rates.trainer, name) for name in TrainerRates.__slots__})}, a turn {rates.turn_s:.2g}")
    errors: dict[str, list[float]] = {}
    for scenario in known:
        said = predicted(scenario, rates, lengths[scenario.digits], options.steps)
        values = []
        for name, value in list(said.items())[:3]:
            real = seen[scenario][name]
            wrong = said[name] / real - 1 if name == "step" else value - real
            values.append(f"{name} {value:.3f} / {real:.3f} ({wrong:+.0%})")
            if scenario not in fits:
                errors.setdefault(name, []).append(abs(wrong))
        print(f"{scenario.name:20} {'fitted  ' if scenario in fits else 'held out'}  predicted / measured: {', '.join(values)}")
    for name, wrong in errors.items():
        print(f"median error over {len(wrong)} held-out runs: {name} {np.median(wrong):.1%}, largest {max(wrong):.1%}")


if __name__ == "__main__":
    main()
