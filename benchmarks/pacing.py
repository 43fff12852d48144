"""How fast pacing is, how stale its tokens get, and whether it trains what was dispatched. Simulated: no model, no actor.

1. Ours is the real thing but for engine and trainer: TrainingLoop, RolloutLoop, Pacer, Task, RendererEnv run on an event loop
   whose clock jumps from one timer to the next. The stub engine answers a rollout after a log-normal time, as long as its
   completion; any number run side by side. The stub trainer takes as long for a step as synchronous generation does on average.
2. Windowed first-in-first-out is the same with another pacer: as many groups open, a batch takes the oldest.
3. Discarding is an event simulation of its own: as many groups open, a batch takes the first to finish, and a group that is
   older than the bound, running or finished, is thrown away and replaced.
4. The ideal is one step per max(mean synchronous generation time, training time). Synchronous generation takes as long as the
   slowest rollout of a step. All sides draw the same durations for the same groups.

    python benchmarks/pacing.py
"""

import argparse
import asyncio
import heapq
import itertools
import logging
import math
import selectors
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.algorithms import GRPO  # noqa: E402
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import Batcher  # noqa: E402
from torchtitan.experiments.rl.configurable import BuildContext  # noqa: E402
from torchtitan.experiments.rl.data.task_mix import WeightedRoundRobin  # noqa: E402
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer  # noqa: E402
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import LocalRunner  # noqa: E402
from torchtitan.experiments.rl.loops.ledger import Ledger  # noqa: E402
from torchtitan.experiments.rl.loops.loop import build_loop  # noqa: E402
from torchtitan.experiments.rl.loops.pacing import Pacer  # noqa: E402
from torchtitan.experiments.rl.loops.parts import Parts, Schedule  # noqa: E402
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.rollouts.types import Completion  # noqa: E402
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric  # noqa: E402
from torchtitan.experiments.rl.tasks.examples.sum_digits import SumDigitsDataset, SumDigitsTask  # noqa: E402
from torchtitan.experiments.rl.weights.sync import CopiedOut, SyncReport  # noqa: E402

GROUPS_PER_STEP, GROUP_SIZE = 8, 4
UPDATE_S = 0.01
"""From a step's end until the generators hold its version; a rollout takes 1 on average."""
TOKENS_PER_S = 20


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: where it would sleep, its clock jumps."""

    def __init__(self):
        super().__init__(_Jump(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor, func, *args):
        """At once: while a thread works, the clock would jump."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualClockLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        events = super().select(0)
        if timeout is None and not events:
            raise RuntimeError("nothing will ever happen again: the loops wait for each other")
        if not events:
            self._loop.now += timeout
        return events


def alternating(rollout, env_input):
    return float(rollout.index_in_group % 2)


class Durations:
    """Log-normal times of mean 1, the same for a group's rollouts whoever asks."""

    def __init__(self, cv: float, seed: int, groups: int):
        sigma = math.sqrt(math.log(1 + cv**2))
        rng = np.random.default_rng(seed)
        self.rollouts = rng.lognormal(-(sigma**2) / 2, sigma, (groups, GROUP_SIZE))

    def group(self, number: int) -> float:
        return float(self.rollouts[number].max())

    def synchronous(self, steps: int) -> float:
        """Mean time of a step's slowest rollout."""
        return float(self.rollouts[: steps * GROUPS_PER_STEP].reshape(steps, -1).max(1).mean())


@dataclass(kw_only=True, slots=True)
class Outcome:
    steps_per_s: float
    ages: list[int] = field(default_factory=list)
    """Of each trained group."""
    trained: list[float] = field(default_factory=list)
    """Duration of each trained rollout."""
    dispatched: list[float] = field(default_factory=list)
    discarded: int = 0
    """Groups thrown away."""


class FirstInFirstOut(Pacer):
    """The same places; a batch takes the oldest groups, and waits for them."""

    def take_groups(self, base_version: int) -> list[str] | None:
        untaken = self._untaken_ids()
        waiting = [group for name, group in self._groups.items() if name in untaken]
        oldest = waiting[:GROUPS_PER_STEP]
        if len(oldest) < GROUPS_PER_STEP or not all(group.finished for group in oldest):
            return None
        return self._take(oldest, base_version)


class StubEngine:
    """Implements PolicyClient and the weights: a rollout's answer takes its time, an update a little."""

    def __init__(self, durations: Durations):
        self.version, self._durations = 0, durations

    def session(self, *, rollout_id, seed, sampling, stop_token_ids):
        group, index = rollout_id.rsplit("/", 1)
        duration = float(self._durations.rollouts[int(group.rsplit("-", 1)[1]), int(index)])

        async def generate(prompt_token_ids, *, max_tokens) -> Completion:
            version = self.version
            await asyncio.sleep(duration)
            tokens = max(1, round(duration * TOKENS_PER_S))
            # Alternating, so that rewards differ and every group teaches something.
            ids = np.full(tokens, 100 + int(index) % 2, np.int32)
            ids[-1] = stop_token_ids[0]
            return Completion(
                token_ids=ids,
                logprobs=np.full(tokens, -1, np.float32),
                policy_versions=np.full(tokens, version, np.int32),
                finish_reason="stop",
            )

        return SimpleNamespace(generate=generate, close=lambda: None)

    async def copy_out(self, version: int) -> CopiedOut:
        return CopiedOut(version=version, seconds=0.0)

    async def update(self, copied: CopiedOut) -> SyncReport:
        await asyncio.sleep(UPDATE_S)
        self.version = copied.version
        zeros = dict.fromkeys(
            ("canary_max_diff", "copy_out_s", "load_s", "verify_s", "reload_s"), 0.0
        )
        return SyncReport(version=copied.version, **zeros)


async def run_ours(
    pacer_class: type[Pacer],
    renderer,
    durations: Durations,
    *,
    bound: int,
    steps: int,
    train_s: float,
) -> Outcome:
    outcome = Outcome(steps_per_s=0.0)
    loop = asyncio.get_running_loop()
    engine = StubEngine(durations)

    class StubTrainer:
        data_parallel_size = 1

        async def forward_backward(self, packed, step):
            return step

        async def optim_step(self, gradient):
            await asyncio.sleep(train_s)
            return {}

    class Recorder:
        """Where the rollout loop says how each group left."""

        def record(self, group, outcomes):
            number = int(group.group_id.rsplit("-", 1)[1])
            outcome.trained += [
                durations.rollouts[number, int(name.rsplit("/", 1)[1])] for name in outcomes
            ]

    task = SumDigitsTask.Config(
        algorithm=GRPO.Config(),
        group_size=GROUP_SIZE,
        dataset=SumDigitsDataset.Config(count=1000),
        validation=None,
        rubric=Rubric.Config(reward_fns=[RewardFn(alternating, takes="rollout")]),
    )
    task.env.max_rollout_tokens = task.sampling.max_tokens = 4096
    task = task.build(name="sum", context=BuildContext(renderer=renderer, vocab_size=1 << 31))
    schedule = Schedule(
        steps=steps, rollouts_per_step=GROUPS_PER_STEP * GROUP_SIZE, max_offpolicy_steps=bound
    )
    parts = Parts(
        selection=Selection(
            OrderedCalls(),
            tasks={"sum": task},
            mix=WeightedRoundRobin.Config().build(weights={"sum": 1.0}),
        ),
        runner=LocalRunner(engine, seed=0),
        policy=engine,
        batcher=Batcher.Config(row_length=4096, rows_per_microbatch=64).build(),
        trainer=StubTrainer(),
        weights=engine,
        ordered=OrderedCalls(),
        ledger=Ledger(),
        recorder=Recorder(),
    )
    ends: list[float] = []

    class Steps(RunEvents):
        def step_recorded(self, record) -> None:
            ends.append(loop.time())
            outcome.ages.append(int(record.metrics["policy/age_max"]))

    pacer = pacer_class(rollouts_per_step=schedule.rollouts_per_step, max_offpolicy_steps=bound)
    loops = build_loop(schedule, parts, watchers=[Steps()], pacer=pacer)
    rollouts = loops.rollouts
    await loops.training.run()
    await loops.training.close()
    await rollouts.close()
    outcome.dispatched = (
        durations.rollouts[: rollouts.ledger.counts()["sum/dispatched"] // GROUP_SIZE]
        .flatten()
        .tolist()
    )
    outcome.steps_per_s = _rate(ends)
    return outcome


def run_discarding(durations: Durations, *, bound: int, steps: int, train_s: float) -> Outcome:
    """As many groups open as ours; a batch takes the first that finish; whatever is older than the bound is thrown away."""
    outcome = Outcome(steps_per_s=0.0)
    slots = (bound + 1) * GROUPS_PER_STEP
    running: list[tuple[float, int, int]] = []
    """Time it finishes, group, version it was admitted at."""
    finished: list[tuple[int, int]] = []
    started = version = 0
    now, ends = 0.0, []

    def fill() -> None:
        nonlocal started
        while len(running) + len(finished) < slots:
            heapq.heappush(running, (now + durations.group(started), started, version))
            outcome.dispatched.extend(durations.rollouts[started].tolist())
            started += 1

    def collect() -> None:
        while running and running[0][0] <= now:
            _, group, admitted = heapq.heappop(running)
            finished.append((group, admitted))

    fill()
    while len(ends) < steps:
        collect()
        while len(finished) < GROUPS_PER_STEP:
            now = running[0][0]
            collect()
        batch, finished = finished[:GROUPS_PER_STEP], finished[GROUPS_PER_STEP:]
        for group, admitted in batch:
            outcome.trained.extend(durations.rollouts[group].tolist())
            outcome.ages.append(version - admitted)
        fill()  # a slot is free as soon as its group is taken: kinder than ours, where the weights must be live first
        now += train_s
        version += 1
        collect()
        stale = [entry for entry in running if version - entry[2] > bound]
        running = [entry for entry in running if version - entry[2] <= bound]
        heapq.heapify(running)
        old = [entry for entry in finished if version - entry[1] > bound]
        finished = [entry for entry in finished if version - entry[1] <= bound]
        outcome.discarded += len(stale) + len(old)
        now += UPDATE_S
        fill()
        ends.append(now)
    outcome.steps_per_s = _rate(ends)
    return outcome


def _rate(ends: list[float]) -> float:
    """Steps per second between the first fifth, where the pipeline fills, and the last step."""
    skip = len(ends) // 5
    return (len(ends) - 1 - skip) / (ends[-1] - ends[skip])


def in_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--cv",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 2.0],
        help="coefficients of variation of durations",
    )
    parser.add_argument(
        "--train",
        type=float,
        nargs="+",
        default=[1.0, 0.3],
        help="training time / synchronous generation time",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    model = Path(__file__).resolve().parents[1] / "assets" / "tiny_qwen3"
    renderer = build_renderer(RendererConfig(), model)
    print(
        f"{GROUPS_PER_STEP} groups of {GROUP_SIZE} a step, {args.steps} steps. Durations: log-normal of mean 1, this cv;"
    )
    print(
        "train: a step's training time / synchronous generation time. Throughput is a share of the ideal.\n"
    )
    print(
        "train   cv bound |   ours   fifo  discard | age max |   mean length, trained / dispatched"
    )
    print("                 |                        |         |   ours  discard   thrown away")
    failures = []
    for train, cv, bound in itertools.product(args.train, args.cv, (1, 2, 4)):
        durations = Durations(cv, args.seed, groups=20 * args.steps * GROUPS_PER_STEP)
        sync_s = durations.synchronous(args.steps)
        settings = dict(bound=bound, steps=args.steps, train_s=train * sync_s)
        ours = in_virtual_time(run_ours(Pacer, renderer, durations, **settings))
        fifo = in_virtual_time(run_ours(FirstInFirstOut, renderer, durations, **settings))
        discard = run_discarding(durations, **settings)
        shares = [side.steps_per_s * sync_s * max(1, train) for side in (ours, fifo, discard)]
        bias = [np.mean(side.trained) / np.mean(side.dispatched) for side in (ours, discard)]
        thrown = discard.discarded / (len(discard.dispatched) / GROUP_SIZE)
        print(
            f"{train:5.1f} {cv:4.1f} {bound:5d} | {shares[0]:6.3f} {shares[1]:6.3f} {shares[2]:8.3f} | {max(ours.ages):7d} | "
            f"{bias[0]:6.3f} {bias[1]:8.3f}   {thrown:.0%} of groups",
            flush=True,
        )
        case = f"train {train}, cv {cv}, bound {bound}"
        if max(ours.ages) > bound:
            failures.append(f"{case}: a group of age {max(ours.ages)} was trained")
        if ours.steps_per_s < fifo.steps_per_s * (1 - 1e-9):
            failures.append(f"{case}: slower than first-in-first-out")
        if cv == 0.5 and shares[0] < 0.9:
            failures.append(f"{case}: {shares[0]:.3f} of the ideal, below 0.9")
        if sorted(ours.trained) != sorted(ours.dispatched):
            failures.append(f"{case}: what was trained is not what was dispatched")
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
