"""Kills whole runs, resumes them, and compares them with runs that nothing disturbed.

    python tests/resume_matrix.py --kills 10 --seed 0 [--only sync async elastic init faults lora real]

sync     One synchronous run is killed so many times, every process at once, at random points: build, step, weight update,
         validation, checkpoint writing, shutdown. Each time it is resumed. At each kill its metrics so far, and at the end
         metrics, ledger, records and final policy, equal an undisturbed run's bit for bit, timing aside.
async    One asynchronous run over two epochs of its data is killed five times and resumed. Every example is served exactly
         twice, every rollout is in one column, and no token is older than the bound.
elastic  A run goes on with 2 trainer ranks and 2 generators, then with 1 of each. The step after each resume is that of a run
         that did not change, up to rounding.
init     A run with --init-from begins with the weights of another's checkpoint, bit for bit.
faults   No other user can enter a run by its sockets with a path; a part that is stopped is named; after a checkpoint for which there was
         no room the next is written; a run is resumed whose command a power cut has emptied, or whose newest checkpoint has
         lost its manifest; a forged checkpoint is refused by --resume, --init-from and rl-export, and runs nothing.
lora     As sync, with adapters and four kills.
real     As lora, with SmolLM2-135M-Instruct and all of its weights. Only where it is named: it needs scripts/get_model.py.

Prints a line for each case and "N of N"; exits 1 if one is missing. Some 10 minutes on two quiet cores.
"""

import argparse
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.integration.command_runs import private  # noqa: E402
from tests.integration.processes import listening_sockets  # noqa: E402
from tests.kills.command import ROOT, Command, has_checkpoint, steps_recorded, wait_for  # noqa: E402
from tests.kills.judge import (  # noqa: E402
    different_files,
    different_metrics,
    json_lines,
    not_served,
    rollout_records,
    torn_files,
    unbalanced,
)
from tests.kills.moments import Kill, Moment, draw, wait_for_moment  # noqa: E402
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter, step_of, verify  # noqa: E402

ROLLOUTS, GROUP = 32, 8
STEPS, INTERVAL, EVERY = 16, 3, 4
SMALL = [
    *f"--config rl_grpo_qwen3_debug --rollouts-per-step {ROLLOUTS} --validation.examples 16".split(),
    *f"--validation.every {EVERY} --post-batch-filters none".split(),
]
SYNC = [
    *SMALL,
    *f"--max-offpolicy-steps 0 --steps {STEPS} --checkpoint.interval {INTERVAL}".split(),
]
SYNC_MOMENTS: tuple[Moment, ...] = (
    "build",
    "training",
    "checkpoint",
    "validation",
    "weight update",
)
SHORT_STEPS, SHORT_INTERVAL, SHORT_KILLS = 8, 2, 4
SHORT = (
    f"--max-offpolicy-steps 0 --steps {SHORT_STEPS} --checkpoint.interval {SHORT_INTERVAL}".split()
)
LORA = [*SMALL, *SHORT, *"--trainer.lora.rank 8 --trainer.optimizer.lr 1e-3".split()]
REAL = [
    *f"--config rl_sums_smollm2 --rollouts-per-step {ROLLOUTS} --validation.examples 16 --validation.every {EVERY}".split(),
    *SHORT,
]

EXAMPLES, MAX_AGE, ASYNC_KILLS = 40, 2, 5
ASYNC_STEPS = 2 * EXAMPLES * GROUP // ROLLOUTS
ASYNC = [
    *SMALL,
    *f"--max-offpolicy-steps {MAX_AGE} --steps {ASYNC_STEPS} --checkpoint.interval 2".split(),
    *f"--tasks.sum-digits.dataset.count {EXAMPLES} --rollout-workers 1".split(),
]
WIDER_FROM, NARROWER_FROM = 2 * INTERVAL, 3 * INTERVAL
"""Steps after which a run goes on with more and with fewer processes."""
PARTS = ("sync", "async", "elastic", "init", "faults", "lora")
"""Those that run where none is named."""
ROOM_BYTES = 6 << 20
"""Largest file of a trainer whose disk is full: a snapshot of the weights has 4 MB, and a checkpoint of them 11."""
ROUNDING = 1e-3
"""Relative; float32 sums in another order, through one optimizer step."""


class Case:
    """A run in a folder of its own, its starts and its faults."""

    def __init__(self, folder: Path, limit_s: float):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.run, self.limit_s = folder, folder / "run", limit_s
        self.began = time.monotonic()
        self.faults: list[str] = []

    def start(self, words: list[str]) -> Command:
        return Command(
            self.run, words, output=self.folder / "output", temporary=self.folder / "tmp"
        )

    def go_on(self, words: list[str]) -> Command:
        """Resume, or begin again where nothing was saved."""
        if has_checkpoint(self.run):
            return self.start(["--resume", str(self.run)])
        shutil.rmtree(self.run, ignore_errors=True)
        return self.start([*words, "--run-dir", str(self.run)])

    def end(self, command: Command) -> None:
        code = command.wait(self.limit_s)
        if code != 0:
            lines = (self.folder / "output").read_text(errors="replace").splitlines()
            self.faults.append(f"exit code {code}: {lines[-1] if lines else ''}")
        command.kill_session()

    def to_the_end(self, words: list[str]) -> None:
        self.end(self.start(words))

    def __str__(self) -> str:
        return "; ".join(self.faults[:4]) or f"{time.monotonic() - self.began:.0f} s"


Result = tuple[str, bool, object]
"""Name of a case, whether it is right, what to say of it."""


def killed_and_resumed(
    case: Case, words: list[str], kills: list[Kill], check: Callable[[], list[str]]
) -> Iterator[tuple[Kill, str, list[str]]]:
    """Kill every process of the run at each moment, and go on. Yields what ``check`` finds after each kill."""
    for kill in kills:
        command = case.go_on(words)
        base = steps_recorded(case.run)
        came = wait_for_moment(kill, command, case.limit_s) is not None
        was, ended = steps_recorded(case.run), not command.lives
        command.kill_session()
        if not came and command.process.returncode not in (0, -signal.SIGKILL):
            case.faults.append(f"exit code {command.process.returncode} before the kill")
        missed = (
            "the run had ended before it could be killed"
            if ended
            else f"the moment did not come in {case.limit_s:g} s"
        )
        yield kill, f"from step {max(base, 0)}, at step {was}", ([] if came else [missed]) + check()
    case.end(case.go_on(words))


def planned(
    random_: random.Random, count: int, moments: tuple[Moment, ...], *, steps: int, interval: int
) -> list[Kill]:
    """So many kills in the order of their steps, the last at the shutdown: a run can't be killed earlier than it was before."""
    drawn = []
    for number in range(count - 1):
        moment = moments[number % len(moments)]
        drawn.append(
            draw(random_, "controller", moment, steps=steps, interval=interval, every=EVERY)
        )
    drawn.sort(key=lambda kill: kill.step)
    last = draw(random_, "controller", "shutdown", steps=steps, interval=interval, every=EVERY)
    return [replace(kill, number=signal.SIGKILL) for kill in [*drawn, last]]


def undisturbed(folder: Path, words: list[str], limit_s: float) -> Case | str:
    """The run that others are compared with; in a --folder, that of an earlier start where it is there."""
    if any((folder / "run").glob("policy/step-*/*.safetensors")):
        return "as it was"
    case = Case(folder, limit_s)
    case.to_the_end([*words, "--run-dir", str(case.run)])
    return case


def sync(
    folder: Path, words: list[str], plan: list[Kill], *, like: Path, limit_s: float
) -> Iterator[Result]:
    """A synchronous run that is killed, beside the undisturbed one in ``like``."""
    case, name, rows = Case(folder, limit_s), folder.name, []
    for number, (kill, said, faults) in enumerate(
        killed_and_resumed(
            case, words, plan, lambda: different_metrics(case.run, like, whole=False)
        )
    ):
        rows.append((f"{name} {number}, {kill.moment}", not faults, "; ".join([said, *faults])))
        print(f"     killed: {rows[-1][0]}, {rows[-1][2]}", flush=True)
    case.faults += [
        *torn_files(case.run),
        *different_metrics(case.run, like, whole=True),
        *different_files(case.run, like),
    ]
    for row, fine, said in rows:  # the last resume shows whether each was right
        yield row, fine and not case.faults, said
    yield f"{name}, the whole run", not case.faults, case


def short(
    base: Path, name: str, words: list[str], limit_s: float, random_: random.Random
) -> Iterator[Result]:
    """As ``sync``, with an undisturbed run of its own."""
    like = base / f"undisturbed-{name}"
    print(f"undisturbed, {name}: {undisturbed(like, words, limit_s)}", flush=True)
    moments: tuple[Moment, ...] = ("checkpoint", "training", "weight update")
    plan = planned(random_, SHORT_KILLS, moments, steps=SHORT_STEPS, interval=SHORT_INTERVAL)
    yield from sync(base / name, words, plan, like=like / "run", limit_s=limit_s)


def asynchronous(base: Path, limit_s: float, random_: random.Random) -> Iterator[Result]:
    case = Case(base / "async", limit_s)
    plan = planned(
        random_,
        ASYNC_KILLS,
        ("training", "weight update", "checkpoint", "training"),
        steps=ASYNC_STEPS,
        interval=2,
    )
    for number, (kill, said, faults) in enumerate(killed_and_resumed(case, ASYNC, plan, list)):
        print(
            f"     killed: async {number}, {kill.moment}, {'; '.join([said, *faults])}", flush=True
        )
        case.faults += faults
    case.faults += torn_files(case.run)
    case.faults += unbalanced(
        case.run, steps=ASYNC_STEPS, rollouts_per_step=ROLLOUTS, max_age=MAX_AGE
    )
    served = not_served(rollout_records(case.run), examples=EXAMPLES, times=2)
    recorded = len(rollout_records(case.run))
    if recorded != 2 * EXAMPLES * GROUP:
        served.append(f"{recorded} rollouts were recorded, and not {2 * EXAMPLES * GROUP}")
    yield (
        f"async, {ASYNC_KILLS} kills: each example served twice",
        not served,
        "; ".join(served) or case,
    )
    yield "async: ledger, files, ages", not case.faults, case


def elastic(base: Path, limit_s: float) -> Iterator[Result]:
    """1 rank and 1 generator, then 2 and 2, then 1 and 1, against runs that stay as they were."""
    one = base / "undisturbed" / "run"
    two, back = Case(base / "elastic", limit_s), Case(base / "elastic-back", limit_s)
    continued(two, one, WIDER_FROM, ["--trainer.ranks", "2", "--generator.replicas", "2"])
    yield "elastic, 1 to 2 ranks and generators", *compared(two, one, WIDER_FROM)
    continued(back, two.run, NARROWER_FROM, ["--trainer.ranks", "1", "--generator.replicas", "1"])
    yield "elastic, back to 1", *compared(back, two.run, NARROWER_FROM)


def continued(case: Case, run: Path, step: int, words: list[str]) -> None:
    """A copy of ``run`` goes on from the checkpoint of ``step``."""
    shutil.copytree(run, case.run)
    case.to_the_end(["--resume", str(case.run / "checkpoints" / f"step-{step:06d}"), *words])


def compared(case: Case, reference: Path, step: int) -> tuple[bool, object]:
    """Whether the step after ``step`` is the reference's up to rounding: same rollouts, same loss and gradient."""
    if not case.faults:
        ours, theirs = (
            {r["step"]: r for r in json_lines(run / "metrics.jsonl")}[step + 1]
            for run in (case.run, reference)
        )
        for key in (
            "rollout/reward_mean",
            "batch/tokens",
            "loss/total",
            "train/grad_norm",
            "policy/entropy",
            "train/lr",
        ):
            if not math.isclose(ours[key], theirs[key], rel_tol=ROUNDING, abs_tol=1e-6):
                case.faults.append(f"step {step + 1}: {key} = {ours[key]}, and not {theirs[key]}")
        case.faults += unbalanced(case.run, steps=STEPS, rollouts_per_step=ROLLOUTS, max_age=0)
    return not case.faults, case


def init(base: Path, limit_s: float) -> Iterator[Result]:
    """With steps too small to change a float32 weight, the final policy is that of the checkpoint."""
    reference = base / "undisturbed" / "run"
    case = Case(base / "init", limit_s)
    words = [
        *SMALL,
        *"--max-offpolicy-steps 0 --seed 5 --steps 1 --trainer.optimizer.lr 1e-30".split(),
    ]
    case.to_the_end([*words, "--init-from", str(reference), "--run-dir", str(case.run)])
    if not case.faults:
        ours, theirs = (
            {path.name: path.read_bytes() for path in run.glob("policy/step-*/*.safetensors")}
            for run in (case.run, reference)
        )
        if not theirs or ours != theirs:
            case.faults.append("the weights are not those of the run it began from")
        first = json_lines(case.run / "metrics.jsonl")[0]["validation/reward"]
        last = json_lines(reference / "metrics.jsonl")[-1]["validation/reward"]
        if first != last:
            case.faults.append(
                f"the first evaluation gives {first}, the other run's last gave {last}"
            )
    yield "--init-from", not case.faults, case


def faults(base: Path, limit_s: float) -> Iterator[Result]:
    """What full disks, power cuts, stopped processes and other people do to a run, one after another."""
    case = Case(base / "faults", limit_s)
    words = [
        *SMALL,
        *f"--steps {STEPS} --checkpoint.interval 1 --checkpoint.keep 3 --max-offpolicy-steps 0".split(),
    ]
    command = case.start([*words, "--run-dir", str(case.run)])
    came = wait_for(lambda: steps_recorded(case.run) >= 1 or not command.lives, limit_s)
    parts = command.parts() if came and command.lives else {}
    if not {"trainer-0", "generator-0"} <= set(parts):
        command.kill_session()
        yield "faults", False, "the run ended before it had a step"
        return
    sockets = {path for path in listening_sockets(command.alive()) if not path.startswith("@")}
    open_ = [path for path in sockets if not private(path)]
    yield (
        "faults, sockets with a path that no other user can enter",
        len(sockets) >= 2 and not open_,
        open_ or f"{len(sockets)} sockets",
    )

    said = Said(case.folder / "output")
    _, most = resource.prlimit(parts["trainer-0"], resource.RLIMIT_FSIZE)
    resource.prlimit(parts["trainer-0"], resource.RLIMIT_FSIZE, (ROOM_BYTES, most))
    failed = wait_for(lambda: "is not saved" in said.new, limit_s)
    step = steps_recorded(case.run)
    resource.prlimit(parts["trainer-0"], resource.RLIMIT_FSIZE, (most, most))
    lines = [line for line in said.new.splitlines() if "WARNING" in line or "ERROR" in line]
    yield (
        "faults, one line for a checkpoint without room",
        failed and all("is not saved" in line for line in lines),
        "; ".join(lines[:3]),
    )

    os.kill(parts["generator-0"], signal.SIGSTOP)
    named = wait_for(lambda: "generator 0 has not answered for" in said.new, 60)
    os.kill(parts["generator-0"], signal.SIGCONT)
    case.end(command)
    yield (
        "faults, a stopped generator is named and the run goes on",
        named and not case.faults,
        case,
    )
    newest = max((case.run / "checkpoints").glob("step-*"), key=step_of, default=None)
    later = newest is not None and step_of(newest) == STEPS > step
    yield "faults, checkpoints after the one without room", later, newest
    if not later or case.faults:
        return
    verify(newest)

    for name in ("command.json", "config.json"):
        (case.run / name).write_bytes(b"")
    case.to_the_end(["--resume", str(case.run), "--steps", str(STEPS + 2)])
    steps = steps_recorded(case.run)
    yield (
        "faults, resumed after a power cut emptied its command",
        steps == STEPS + 2 and not case.faults,
        case,
    )

    (case.run / "checkpoints" / f"step-{STEPS + 2:06d}" / "manifest.json").unlink()
    case.to_the_end(["--resume", str(case.run)])
    named = (
        f"step-{STEPS + 2:06d} is damaged: " in said.all and "manifest.json is missing" in said.all
    )
    yield (
        "faults, a newest checkpoint without its manifest is named",
        named and not case.faults,
        case,
    )

    forged, made = base / "forged" / "run", base / "forged" / "made"
    shutil.rmtree(forged.parent, ignore_errors=True)
    shutil.copytree(case.run, forged)
    shutil.rmtree(forged / "checkpoints")
    folder = CheckpointWriter(forged, keep=9)
    source = next((case.run / "checkpoints").glob("step-*"))
    shutil.copytree(
        source,
        folder.begin(STEPS),
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("manifest.json"),
    )
    for metadata in (forged / "checkpoints").rglob(".metadata"):
        metadata.write_bytes(pickle.dumps(Mkdir(made)))
    folder.commit(STEPS)
    rl = "torchtitan.experiments.rl"
    for name, command_words in {
        "--resume": [f"{rl}.train", "--resume", str(forged), "--steps", "99"],
        "--init-from": [f"{rl}.train", *SMALL, "--init-from", str(forged)],
        "rl-export": [f"{rl}.export", str(forged), "--to", str(forged.parent / "policy")],
    }.items():
        ended = subprocess.run(
            [sys.executable, "-m", *command_words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        line = ended.stderr.strip().splitlines()[-1:]
        refused = (
            ended.returncode == 2
            and "names posix.mkdir, which no checkpoint needs" in "".join(line)
            and not made.exists()
        )
        yield f"faults, a forged checkpoint is refused by {name}", refused, "".join(line)


class Mkdir:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


class Said:
    """What commands have written to a file since it was made."""

    def __init__(self, path: Path):
        self._path, self._begin = path, path.stat().st_size

    @property
    def new(self) -> str:
        return self.all[self._begin :]

    @property
    def all(self) -> str:
        return self._path.read_bytes().decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of the synchronous run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "real"), help="these parts alone")
    parser.add_argument(
        "--limit-s", type=float, default=400.0, help="for each start of the command"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where the runs are kept; a temporary folder otherwise",
    )
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    right = total = 0
    with tempfile.TemporaryDirectory() as temporary:
        base, limit_s = arguments.folder or Path(temporary), arguments.limit_s
        words, like = [*SYNC, "--checkpoint.keep", "99"], base / "undisturbed"
        if {"sync", "elastic", "init"} & set(parts):
            print(f"undisturbed: {undisturbed(like, words, limit_s)}", flush=True)
        drawn = random.Random(f"sync {arguments.seed}")
        plan = planned(drawn, arguments.kills, SYNC_MOMENTS, steps=STEPS, interval=INTERVAL)
        runs: dict[str, Callable[[], Iterator[Result]]] = {
            "sync": lambda: sync(base / "sync", words, plan, like=like / "run", limit_s=limit_s),
            "async": lambda: asynchronous(base, limit_s, random.Random(f"async {arguments.seed}")),
            "elastic": lambda: elastic(base, limit_s),
            "init": lambda: init(base, limit_s),
            "faults": lambda: faults(base, limit_s),
            "lora": lambda: short(
                base, "lora", LORA, limit_s, random.Random(f"lora {arguments.seed}")
            ),
            "real": lambda: short(
                base, "real", REAL, limit_s, random.Random(f"real {arguments.seed}")
            ),
        }
        for part in parts:
            for name, fine, said in runs[part]():
                total, right = total + 1, right + fine
                print(f"{'ok   ' if fine else 'WRONG'} {name}: {said}", flush=True)
    print(f"{right} of {total}")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())
