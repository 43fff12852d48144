"""Adapters beside full training: what is learned, seconds and bytes; and that peft computes what the trainer does.

    .venv/bin/pip install --no-deps --target .benchmarks -r requirements/benchmarks.txt
    python benchmarks/lora.py [--config rl_grpo_qwen3_debug] [--steps 40] [--seeds 3] [--ranks 1 8 64] [--lr 1.5e-3]

1. Runs of the config, in turns: full training, then adapters of each rank, each with each seed. Held-out reward by version,
   seconds of a step and of a published version, tokens a second of the engine while it generates, bytes of a version.
2. The final policy's PEFT folder of one run: peft loads it on the base, and scores 20 texts beside the merged folder.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / ".benchmarks"

SCORE = """
import sys, torch
from pathlib import Path
from peft import PeftModel
from transformers import AutoModelForCausalLM
policy, base = Path(sys.argv[1]), sys.argv[2]
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), policy / "adapter")
merged = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
worst = 0.0
with torch.no_grad():
    for seed in range(20):
        torch.manual_seed(seed)
        tokens = merged.generate(torch.tensor([[seed + 3]]), do_sample=True, max_new_tokens=40, pad_token_id=0)
        left, right = (model(tokens).logits.log_softmax(-1) for model in (adapted, merged))
        worst = max(worst, float((left - right).gather(2, tokens[:, :, None]).abs().max()))
print(f"peft on the base, and the merged folder in transformers: log-probabilities differ by {worst:.1e} at most")
"""


def run(words: list[str], folder: Path) -> list[dict]:
    command = [
        sys.executable,
        "-m",
        "torchtitan.experiments.rl.train",
        *words,
        "--run-dir",
        str(folder),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stdout[-2000:] + ended.stderr[-2000:])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median(records: list[dict], key: str) -> float:
    return statistics.median(
        [record[key] for record in records if record["step"] and key in record][3:]
        or [float("nan")]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="rl_grpo_qwen3_debug")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--lr", default="1.5e-3", help="of the adapters")
    args = parser.parse_args()
    kinds: dict[str, list[str]] = {"full": []}
    kinds |= {
        f"rank {rank}": f"--trainer.lora.rank {rank} --trainer.optimizer.lr {args.lr}".split()
        for rank in args.ranks
    }
    print(f"{args.config}, {args.steps} steps; load {os.getloadavg()[0]:.1f}")
    columns = f"{'seed':>4} {'step s':>7} {'train s':>8} {'sync s':>7} {'tokens/s':>9} {'MiB out':>8} {'canary':>8}"
    print(f"{'':<10} {columns}  held out by version")
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.seeds):
            for kind, words in kinds.items():
                folder = Path(temporary) / f"{kind} {seed}".replace(" ", "-")
                records = run(
                    [
                        "--config",
                        args.config,
                        "--steps",
                        str(args.steps),
                        "--seed",
                        str(seed),
                        *words,
                    ],
                    folder,
                )
                curve = " ".join(
                    f"{record['step']}: {record['validation/reward']:.2f}"
                    for record in records
                    if "validation/reward" in record
                )
                policy = next((folder / "policy").iterdir())
                published = policy if kind == "full" else policy / "adapter"
                nbytes = sum(file.stat().st_size for file in published.glob("*.safetensors"))
                canary = max(record.get("perf/sync_canary_max_diff", 0) for record in records)
                figures = [
                    median(records, f"time/{key}") for key in ("step_s", "train_s", "sync_s")
                ]
                speed = median(records, "perf/generated_tokens_per_s")
                print(
                    f"{kind:<10} {seed:>4} {figures[0]:>7.2f} {figures[1]:>8.2f} {figures[2]:>7.3f} {speed:>9.0f} "
                    f"{nbytes / 2**20:>8.2f} {canary:>8.1e}  {curve}",
                    flush=True,
                )
        if args.ranks:
            values = json.loads((folder / "config.json").read_text())
            base = values.get("config", values)["model"]["hf_assets_path"]
            environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
            command = [sys.executable, "-c", SCORE, str(policy), str(ROOT / base)]
            scored = subprocess.run(command, capture_output=True, text=True, env=environment)
            print(scored.stdout.strip() or scored.stderr[-1500:])
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
