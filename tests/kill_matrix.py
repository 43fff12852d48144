"""Kills or stops processes of small runs at random moments, and checks that no run is lost.

    python tests/kill_matrix.py --kills 40 --seed 0 [--folder FOLDER]

Each kill has a run of its own: two generators, a rollout worker, a trainer. It must end in "the run went on", or in "resumed by
one command", with every rollout in one column of the ledger, every file well-formed, no process left, and a final reward within
noise of an undisturbed run. Prints a line for each kill and "N of N"; exits 1 if one is missing.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.integration.processes import process_stat  # noqa: E402

STEPS = 40
WORDS = f"""--config rl_grpo_qwen3_debug --rollouts-per-step 32 --validation.examples 32 --validation.every 10 --steps {STEPS}
    --generator.replicas 2 --rollout-workers 1 --supervision.stall-s 20 --checkpoint.interval 5""".split()
PARTS = ("generator-0", "generator-1", "rollout_worker-0", "trainer-0", "controller")
MOMENTS = ("build", "validation", "training", "weight update", "checkpoint", "shutdown")
REWARD_NOISE = 0.35
"""Half the width of what a validation on 32 examples after 40 steps shows from run to run, with room."""


@dataclass(frozen=True)
class Kill:
    part: str
    number: signal.Signals
    moment: str
    step: int
    """From which on the moment is looked for."""
    delay_s: float

    def __str__(self) -> str:
        return f"{self.number.name:<7} {self.part:<16} {self.moment:<13}"


def drawn(random_: random.Random) -> Kill:
    moment = random_.choice(MOMENTS)
    return Kill(
        part=random_.choice(PARTS),
        number=random_.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)),
        moment=moment,
        step=random_.randrange(1, STEPS - 5),
        delay_s=random_.uniform(0, 15.0 if moment == "build" else 0.5),
    )


class Command:
    """One start of the command, in a session of its own."""

    def __init__(self, folder: Path, words: list[str], output: Path):
        self.folder, self.output = folder, output
        with output.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan.experiments.rl.grpo", *words],
                cwd=ROOT,
                env=os.environ | {"WANDB_SILENT": "true"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> set[int]:
        stats = {int(entry): process_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
        return {pid for pid, stat in stats.items() if stat and stat[2] == self.process.pid and stat[0] != "Z"}

    def pid_of(self, part: str) -> int | None:
        if part == "controller":
            return self.process.pid
        log = str(self.folder / "logs" / f"{part}.jsonl")
        for pid in self.alive() - {self.process.pid}:
            if log in map(os.path.realpath, Path(f"/proc/{pid}/fd").glob("*")):
                return pid
        return None

    def end(self, limit_s: float) -> int | None:
        """The exit code; None if it did not end in time, and was killed."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def kill_all(self) -> int:
        """Kill what is left of the session. Returns how many processes."""
        left = self.alive()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


def wait_for(kill: Kill, command: Command, limit_s: float) -> bool:
    """Wait for the moment. Returns whether it came while the run lived."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and command.process.poll() is None:
        step = steps_of(command.folder)
        came = {
            "build": command.pid_of(kill.part) is not None,
            "validation": step >= kill.step // 10 * 10 >= 0,
            "training": step >= kill.step,
            "weight update": step >= kill.step,
            "checkpoint": step >= 0 and any(command.folder.glob("checkpoints/.step-*")),
            "shutdown": step >= STEPS,
        }[kill.moment]
        if came:
            time.sleep(0 if kill.moment == "weight update" else kill.delay_s)
            return command.process.poll() is None
        time.sleep(0.005)
    return False


def faults_of(folder: Path, left: int, rewards: list[float]) -> list[str]:
    """What is wrong with a run that has ended well."""
    faults = [f"{left} processes left"] if left else []
    try:
        for file in [*folder.glob("*.jsonl"), *folder.glob("logs/*.jsonl")]:
            json_lines(file)
    except ValueError as error:
        return [*faults, f"{file.name}: {error}"]
    steps = [record["step"] for record in json_lines(folder / "metrics.jsonl")]
    if steps != list(range(STEPS + 1)):
        faults.append(f"metrics have steps {steps}")
    ends = Counter(record["rollout_id"] for record in json_lines(folder / "ledger.jsonl"))
    twice = [rollout for rollout, count in ends.items() if count > 1]
    trained = sum(record["column"] == "trained" for record in json_lines(folder / "ledger.jsonl"))
    if twice or trained != 32 * STEPS:
        faults.append(f"ledger: {len(twice)} rollouts end twice, {trained} were trained, and not {32 * STEPS}")
    reward = final_reward(folder)
    if rewards and reward is not None and abs(reward - statistics.mean(rewards)) > REWARD_NOISE:
        faults.append(f"final reward {reward:.3f}, undisturbed {statistics.mean(rewards):.3f}")
    return faults


def final_reward(folder: Path) -> float | None:
    found = [record["validation/reward"] for record in json_lines(folder / "metrics.jsonl") if "validation/reward" in record]
    return found[-1] if found else None


def one(kill: Kill | None, folder: Path, limit_s: float, rewards: list[float]) -> tuple[bool, str]:
    """Run once, with a kill or without. Returns whether the run was kept, and how it ended."""
    folder.mkdir(parents=True)
    run, output = folder / "run", folder / "output"
    command = Command(run, [*WORDS, "--run-dir", str(run)], output)
    began, said = time.monotonic(), ""
    if kill is not None:
        if wait_for(kill, command, limit_s) and (pid := command.pid_of(kill.part)) is not None:
            os.kill(pid, kill.number)
            said = f"at step {steps_of(run)}, "
            if kill.part == "controller" and kill.number == signal.SIGSTOP:
                time.sleep(30)  # nobody is left to notice: as a suspended terminal does, it is continued
                os.kill(pid, signal.SIGCONT)
        else:
            said = "too late to kill, "
    code = command.end(limit_s)
    left = wait_until_gone(command)
    how = "the run went on"
    if code != 0:
        how = f"exit code {code}, "
        resumable = any(run.glob("checkpoints/step-*"))
        words = ["--resume", str(run)] if resumable else [*WORDS, "--run-dir", str(folder / "again")]
        run = run if resumable else folder / "again"
        command = Command(run, words, output)
        code = command.end(limit_s)
        left += wait_until_gone(command)
        how += ("resumed by one command" if resumable else "nothing to resume, begun again") if code == 0 else f"then {code}"
    faults = faults_of(run, left, rewards) if code == 0 else [output.read_text().splitlines()[-1] if output.exists() else ""]
    return not faults, f"{said}{how} in {time.monotonic() - began:.0f} s{''.join(f'; {fault}' for fault in faults)}"


def wait_until_gone(command: Command, limit_s: float = 30.0) -> int:
    deadline = time.monotonic() + limit_s
    while command.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return command.kill_all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each start of the command")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are kept; a temporary folder otherwise")
    arguments = parser.parse_args()
    random_ = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        fine, said = one(None, base / "undisturbed", arguments.limit_s, [])
        print(f"undisturbed: {said}", flush=True)
        reward = final_reward(base / "undisturbed" / "run")
        rewards, kept = [] if reward is None else [reward], 0
        for number in range(arguments.kills):
            kill = drawn(random_)
            fine, said = one(kill, base / str(number), arguments.limit_s, rewards)
            kept += fine
            print(f"{number:>3} {'ok  ' if fine else 'LOST'} {kill} {said}", flush=True)
    print(f"{kept} of {arguments.kills}")
    return 0 if kept == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
