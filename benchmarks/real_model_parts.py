"""Where a step of `make real` goes, beside what this machine's cores can do.

    python scripts/get_model.py smollm2
    python benchmarks/real_model_parts.py [--steps 10]

1. What the machine can do: multiplications of the model's own shapes, in float32, with nothing else running.
2. `rl_sums_smollm2`, synchronous and without evaluations, so that no part waits for another's cores. A profile of its second
   half gives the seconds of each part.
3. Floating-point operations, by arithmetic: 2 for each weight and token of a forward pass, 4 in the backward pass. The trainer
   computes a prefix that samples share once. Of the engine only sampled tokens are counted, not prompts that its cache lacks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchtitan.experiments.rl.config_registry.smollm2 import SMOLLM2  # noqa: E402

TRAINER, GENERATOR = "trainer", "generator"
PARTS = {
    "step": GENERATOR,
    "forward": TRAINER,
    "backward": TRAINER,
    "optimizer": TRAINER,
    "copy weights out": TRAINER,
    "load weights": GENERATOR,
}
"""Spans of a profile, by the beginning of the name of the process that they are of."""


def multiplications(hidden: int, inner: int, layers: int, vocabulary: int, tokens: int) -> float:
    """GFLOP/s of the products of a forward pass over ``tokens``: the best of five."""
    x, up, down = (
        torch.randn(tokens, hidden),
        torch.randn(inner, hidden),
        torch.randn(hidden, inner),
    )
    square, head = torch.randn(hidden, hidden), torch.randn(vocabulary, hidden)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(layers):
            wide = x @ up.T
            _ = (x @ up.T, wide @ down.T, x @ square.T, x @ square.T)
        _ = x @ head.T
        operations = (
            2 * tokens * (layers * (3 * hidden * inner + 2 * hidden * hidden) + vocabulary * hidden)
        )
        best = max(best, operations / (time.perf_counter() - began) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    hub = json.loads((ROOT / SMOLLM2 / "config.json").read_text())
    hidden, inner, layers, vocabulary = (
        hub[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    kv = hidden * hub["num_key_value_heads"] // hub["num_attention_heads"]
    weights = (
        layers * (3 * hidden * inner + 2 * hidden * hidden + 2 * hidden * kv) + vocabulary * hidden
    )
    print(f"{weights / 1e6:.0f}M weights, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for tokens in (64, 512):
        print(
            f"the machine alone, {tokens} tokens: {multiplications(hidden, inner, layers, vocabulary, tokens):.0f} GFLOP/s"
        )

    profiled = args.steps // 2
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        words = [
            "--config",
            "rl_sums_smollm2",
            "--steps",
            str(args.steps),
            "--max-offpolicy-steps",
            "0",
            "--run-dir",
            str(run),
        ]
        words += [
            "--validation.every",
            str(args.steps + 1),
            "--profile-steps",
            f"{args.steps - profiled + 1}:{args.steps}",
        ]
        words += ["--trainer.no-save-final-model"]
        output = subprocess.run(
            [sys.executable, "-m", "torchtitan.experiments.rl.train", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if output.returncode:
            sys.exit(output.stdout[-2000:] + output.stderr[-2000:])
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][
            -profiled:
        ]
        (file,) = run.glob("trace-steps-*.json")
        traced = json.loads(file.read_text())["traceEvents"]

    step = statistics.mean(record["time/step_s"] for record in records)
    computed = statistics.mean(
        record["batch/tokens"] * (1 - record["batch/shared_fraction"]) for record in records
    )
    sampled = statistics.mean(record["batch/sampled_tokens"] for record in records)
    seconds = {name: total(traced, process, name) / profiled for name, process in PARTS.items()}
    trained = computed * weights
    print(
        f"a synchronous step: {step:.2f} s; {computed:.0f} tokens computed by the trainer, {sampled:.0f} sampled"
    )
    rows = {
        "engine: prompts and replies": (seconds["step"], 2 * sampled * weights),
        "trainer: forward": (seconds["forward"], 2 * trained),
        "trainer: backward": (seconds["backward"], 4 * trained),
        "trainer: optimizer": (seconds["optimizer"], 0.0),
        "weights: out of the trainer": (seconds["copy weights out"], 0.0),
        "weights: into the engine, and the proof": (seconds["load weights"], 0.0),
    }
    rows["everything else, waiting included"] = (
        step - sum(spent for spent, _ in rows.values()),
        0.0,
    )
    for name, (spent, operations) in rows.items():
        rate = f", {operations / spent / 1e9:4.0f} GFLOP/s" if operations else ""
        print(f"{name:<40} {spent:6.2f} s {spent / step:4.0%}{rate}")
    print(f"load {os.getloadavg()[0]:.1f}")


def total(traced: list[dict], process: str, name: str) -> float:
    """Seconds of all spans of a name in a process; each is of one thread."""
    (pid,) = {
        event["pid"]
        for event in traced
        if event["name"] == "process_name" and event["args"]["name"].startswith(process)
    }
    seconds, began = 0.0, dict[int, float]()
    for event in traced:
        if event["pid"] == pid and event["name"] == name:
            if event["ph"] == "B":
                began[event["tid"]] = event["ts"]
            elif event["ph"] == "E":
                seconds += (event["ts"] - began[event["tid"]]) / 1e6
    return seconds


if __name__ == "__main__":
    main()
