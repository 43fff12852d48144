"""The report of a large run: makes one, and prints index time, memory of the server, and time per page.

    python benchmarks/report_size.py                               # 200 steps x 512 rollouts of 3,000 tokens: some 5 GB of disk
    python benchmarks/report_size.py --steps 5 --rollouts 64 --tokens 300

The server runs in a process of its own. "first look" is the Overview while the index is being made; the pages after it are with
the whole index.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan.experiments.rl.rollouts.record_file import (  # noqa: E402
    LEDGER_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RecordFile,
    compress,
)
from torchtitan.experiments.rl.rollouts.records import encode_rollout  # noqa: E402
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import (  # noqa: E402
    Completion,
    DataSample,
    Rollout,
    RolloutStatus,
    RolloutTurn,
)

GROUP = 8
TASK = "words"
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=512, help="of a step")
    parser.add_argument("--tokens", type=int, default=3000, help="of a rollout")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="report-size-"))
    try:
        began = time.perf_counter()
        make_run(folder, options.steps, options.rollouts, options.tokens)
        sizes = {
            name: (folder / name).stat().st_size / 2**20
            for name in (ROLLOUTS_FILE, LEDGER_FILE, METRICS_FILE)
        }
        print(
            f"made in       {time.perf_counter() - began:.1f} s: "
            + ", ".join(f"{n} {s:.1f} MiB" for n, s in sizes.items())
        )
        measure(folder)
    finally:
        shutil.rmtree(folder)


def make_run(folder: Path, steps: int, rollouts: int, tokens: int) -> None:
    random = np.random.default_rng(0)
    words = [f"word{i}" for i in range(5000)]
    records, ledger, metrics = (
        RecordFile(folder / name) for name in (ROLLOUTS_FILE, LEDGER_FILE, METRICS_FILE)
    )
    for step in range(steps):
        for number in range(rollouts // GROUP):
            group_id, lines, ends = f"{TASK}-{step * rollouts // GROUP + number}", [], []
            for index in range(GROUP):
                rollout = made(group_id, index, tokens, step, random, words)
                lines.append(
                    encode_rollout(
                        rollout, outcome="trained", admitted_version=step, max_bytes=2**30
                    )
                )
                end = {"rollout_id": rollout.rollout_id, "task": TASK, "dispatched_version": step}
                ends.append(
                    json.dumps(end | {"column": "trained", "ended_version": step + 1}) + "\n"
                )
            records.append(compress(b"".join(lines)))
            ledger.append("".join(ends).encode())
        values = {f"perf/metric_{i}": float(random.random()) for i in range(100)}
        values |= {
            "rollout/reward_mean": step / steps,
            "time/step_s": 60.0,
            f"ledger/{TASK}/dispatched": (step + 1) * rollouts,
        }
        metrics.append((json.dumps({"step": step + 1, **values}) + "\n").encode())
    (folder / "config.json").write_text(
        json.dumps({"steps": steps, "tasks": {TASK: {"group_size": GROUP}}})
    )


def made(
    group_id: str, index: int, tokens: int, step: int, random: np.random.Generator, words: list[str]
) -> Rollout:
    prompt, sampled = tokens // 10, tokens - tokens // 10
    turn = RolloutTurn(
        prompt_messages=[
            {
                "role": "user",
                "content": " ".join(words[i] for i in random.integers(0, 5000, prompt)),
            }
        ],
        prompt_token_ids=np.arange(prompt, dtype=np.int32),
        prompt_role_ids=np.full(prompt, 2, np.int8),
        prompt_is_content=np.ones(prompt, bool),
        completion=Completion(
            token_ids=random.integers(0, 150_000, sampled).astype(np.int32),
            logprobs=-random.random(sampled).astype(np.float32),
            policy_versions=np.full(sampled, step, np.int32),
            finish_reason="stop",
        ),
        assistant_message={
            "role": "assistant",
            "content": " ".join(words[i] for i in random.integers(0, 5000, sampled)),
        },
    )
    rollout = Rollout(
        group_id=group_id,
        index_in_group=index,
        task_name=TASK,
        data_sample=DataSample(sample_id=group_id, env_input=None),
        turns=[turn],
        status=RolloutStatus.COMPLETED,
        reward=float(random.random()),
    )
    rollout.samples = samples_from_turns(
        [turn], task_name=TASK, rollout_id=rollout.rollout_id, temperature=1.0
    )
    rollout.assign_advantages(float(random.normal()))
    return rollout


def measure(folder: Path) -> None:
    command = [sys.executable, "-m", "torchtitan.experiments.rl.report", str(folder), "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        with httpx.Client(base_url=address, timeout=600) as client:
            began = time.perf_counter()
            client.get("api/runs/0/page/overview").raise_for_status()
            print(f"first look    {time.perf_counter() - began:.3f} s")
            while client.get("api/runs").json()["runs"][0]["state"]["unread_bytes"]:
                time.sleep(0.2)
            print(f"indexed in    {time.perf_counter() - began:.1f} s")
            key = client.get("api/runs/0/rollouts?sort=highest").json()["rows"][0]["key"]
            pages = {
                "overview": "page/overview",
                "ledger": "page/ledger",
                "rollouts": "rollouts",
                "by reward": "rollouts?sort=lowest&min_reward=0.5",
                "by text": "rollouts?text=word77",
                "group": f"groups/{key.partition('-')[0]}",
                "rollout": f"rollouts/{key}",
                "tokens": f"rollouts/{key}/tokens",
            }
            for name, page in pages.items():
                seconds = []
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    client.get(f"api/runs/0/{page}").raise_for_status()
                    seconds.append(time.perf_counter() - began)
                print(f"{name:<14}{statistics.median(seconds):.3f} s (longest {max(seconds):.3f})")
        print(f"memory        {resident_mib(server.pid):.0f} MiB")
    finally:
        server.terminate()
        server.wait()


def resident_mib(pid: int) -> float:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
