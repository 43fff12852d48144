"""Packing of one step's samples: rows against first-fit and the lower bound, time against a plain copy of the same arrays.

    python benchmarks/packing.py [--samples 4096] [--row-length 8192] [--ranks 8]

Lengths are log-normal, as completions are. The copy writes every stream of every sample once into a preallocated array of its
own, one after the other: what any batcher must at least do. Both are timed in turn and the fastest of each is kept.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.batching.batcher import Batcher  # noqa: E402
from torchtitan.experiments.rl.batching.packing import pack_rows  # noqa: E402
from torchtitan.experiments.rl.types import STREAMS, TrainingSample  # noqa: E402


def first_fit_rows(lengths: list[int], row_length: int) -> int:
    """Rows taken when each sample, in the order of arrival, goes to the first row with room."""
    space: list[int] = []
    for length in lengths:
        for row, left in enumerate(space):
            if length <= left:
                space[row] -= length
                break
        else:
            space.append(row_length - length)
    return len(space)


def make_samples(lengths: list[int], rng: np.random.Generator) -> list[TrainingSample]:
    """Samples as GRPO makes them: a prompt of an eighth, then sampled tokens; no weights but the default."""
    samples = []
    for index, length in enumerate(lengths):
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, 150_000, length, dtype=np.int32),
                loss_mask=np.arange(length) > length // 8,
                generator_logprobs=rng.random(length, np.float32),
                policy_versions=np.full(length, index % 3, np.int32),
                advantages=rng.random(length, np.float32),
                task_name=f"task{index % 3}",
                rollout_id=f"group{index // 8}/{index % 8}",
            )
        )
    return samples


def plain_copy(samples: list[TrainingSample]) -> list[np.ndarray]:
    """Every stream a batch of a model without experts carries (absent ones too, and the three it derives), with no packing."""
    total = sum(map(len, samples))
    copies = []
    for name, stream in STREAMS.items():
        if stream.dims:  # routes, which these samples do not have
            continue
        copy = np.empty(total, stream.dtype)
        at = 0
        for sample in samples:
            values = getattr(sample, name)
            copy[at : at + len(sample)] = stream.fill if values is None else values
            at += len(sample)
        copies.append(copy)
    for dtype in (np.int32, np.float32, np.int32):  # positions, temperatures, task_ids
        copy = np.empty(total, dtype)
        at = 0
        for sample in samples:
            copy[at : at + len(sample)] = 1
            at += len(sample)
        copies.append(copy)
    return copies


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--row-length", type=int, default=8192)
    parser.add_argument("--rows-per-microbatch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--median", type=float, default=600.0, help="of the lengths, in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)

    rng = np.random.default_rng(args.seed)
    drawn = rng.lognormal(math.log(args.median), args.sigma, args.samples)
    lengths = np.clip(drawn.astype(int), 2, args.row_length).tolist()
    bound = math.ceil(sum(lengths) / args.row_length)
    ours, arrival = (
        len(pack_rows(lengths, args.row_length)),
        first_fit_rows(lengths, args.row_length),
    )
    print(f"{args.samples} samples, {sum(lengths):,} tokens, rows of {args.row_length}")
    print(f"rows: {ours} ours, {arrival} first-fit in order of arrival, {bound} the lower bound")
    print(f"efficiency of packing: {sum(lengths) / (ours * args.row_length):.4f} ours", end=", ")
    print(f"{sum(lengths) / (arrival * args.row_length):.4f} first-fit")
    print(f"ours / first-fit in rows: {ours / arrival:.4f}; ours / lower bound: {ours / bound:.4f}")

    samples = make_samples(lengths, rng)
    batcher = Batcher.Config(
        row_length=args.row_length, rows_per_microbatch=args.rows_per_microbatch
    ).build()
    plan = batcher.plan(samples, args.ranks)
    print(
        f"plan for {args.ranks} ranks: {plan.rows} rows, {plan.efficiency:.4f} of the slots hold a token"
    )
    times = [
        (seconds(lambda: batcher.plan(samples, args.ranks)), seconds(lambda: plain_copy(samples)))
    ]
    for _ in range(args.repeats - 1):
        times.append(
            (
                seconds(lambda: batcher.plan(samples, args.ranks)),
                seconds(lambda: plain_copy(samples)),
            )
        )
    planned, copied = (min(column) for column in zip(*times, strict=True))
    print(
        f"time: {planned * 1e3:.1f} ms to plan and fill, {copied * 1e3:.1f} ms for the plain copy"
    )
    print(f"ratio plan / plain copy: {planned / copied:.2f}")


if __name__ == "__main__":
    main()
