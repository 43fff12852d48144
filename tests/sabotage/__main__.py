"""Deliveries of weights that go wrong, one at a time, against a real engine: each has to be caught at its version.

    python -m tests.sabotage [--dtypes float32 bfloat16] [--versions 200] [--seed 0] [--model FOLDER] [--adapters | --experts]

1. The model is tiny and random, with a tied head and biases; or that of a hub folder, which may have no biases and no case of
   them. A version moves each weight by up to the learning rate, as Adam does.
2. Two replicas are one engine that loads twice: the second replica wrongly, the first as it should.
3. A delivery is caught if the generator refuses it or the controller does, by an error that names the version.
4. The engine is given a version in both ways that ``compat/vllm.py`` has: by copying, and by vLLM's own reload. After each way
   it computes the same, to the last bit.
5. Every sabotage is followed by an honest version, which must pass; then ``--versions`` in a row, at learning rates of 1e-4 to
   1e-7. A version passes if digests and canary let it, and in the row the alarm on tokens that are sampled from it.
   transformers computes the trainer's side of both.

Prints a line for each miss, and "N of N". Exits with 1 below. Some 5 minutes on two quiet cores.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.sabotage.kinds import ADAPTER_SABOTAGES, BIAS, EXPERT_SABOTAGES, SABOTAGES  # noqa: E402
from tests.sabotage.world import World, make_mixture, make_model, read_model, reloaded_by_vllm  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402


def run_adapters(
    dtype: Literal["float32", "bfloat16"], versions: int, seed: int, model: str | None
) -> dict[str, str]:
    """As ``run``, where a version is an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            model or folder, dtype, seed, make=read_model if model else make_model, adapters=True
        )
        found = {}
        for name, (how, lr) in ADAPTER_SABOTAGES.items():
            error = world.deliver(how, lr)
            found[name] = "" if str(world.version) in error else f"not caught: {error!r}"
            if error := world.deliver(None, lr):
                found[name] += f" stopped an honest version after it: {error}"
        stops = [
            error
            for i in range(versions)
            if (error := world.deliver(None, 10.0 ** -(2 + i % 4), sampled=True))
        ]
        found[f"{versions} honest adapters"] = (
            f"{len(stops)} were stopped: {stops[0]}" if stops else ""
        )
        world.engine.close()
        return found


def run(
    dtype: Literal["float32", "bfloat16"],
    versions: int,
    seed: int,
    model: str | None,
    *,
    experts: bool = False,
) -> dict[str, str]:
    """Each sabotage and what went wrong with it: "" where it was caught.

    Args:
        experts: the model is a mixture, and the sabotages those of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            model or folder,
            dtype,
            seed,
            make=read_model if model else make_mixture if experts else make_model,
        )
        sabotages = {
            name: how
            for name, how in SABOTAGES.items()
            if BIAS in world.names or "bias" not in name
        }
        sabotages = EXPERT_SABOTAGES if experts else sabotages
        found = {}
        for way, context in (
            ("copied", contextlib.nullcontext),
            ("reloaded by vLLM", reloaded_by_vllm),
        ):
            with context():
                for name, (how, lr) in sabotages.items():
                    error, case = world.deliver(how, lr), f"{way}, {name}"
                    found[case] = "" if str(world.version) in error else f"not caught: {error!r}"
                    if error := world.deliver(None, lr):
                        found[case] += f" stopped an honest version after it: {error}"
        found["copied as vLLM reloads"] = world.both_ways_differ()
        stops = [
            error
            for i in range(versions)
            if (error := world.deliver(None, 10.0 ** -(4 + i % 4), sampled=True))
        ]
        found[f"{versions} honest versions"] = (
            f"{len(stops)} were stopped: {stops[0]}" if stops else ""
        )
        world.engine.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--versions", type=int, default=200, help="honest versions in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a hub folder; a tiny model is made without it")
    parser.add_argument(
        "--adapters", action="store_true", help="a version is an adapter, and not the whole model"
    )
    parser.add_argument("--experts", action="store_true", help="the model is a mixture of experts")
    parser.add_argument("--json", help="write the outcome of each case here")
    arguments = parser.parse_args()
    set_up_process()
    found = {
        f"{dtype}: {name}": fault
        for dtype in arguments.dtypes
        for name, fault in (
            run_adapters if arguments.adapters else partial(run, experts=arguments.experts)
        )(dtype, arguments.versions, arguments.seed, arguments.model).items()
    }
    missed = {name: fault for name, fault in found.items() if fault}
    for name, fault in missed.items():
        print(f"{name}: {fault}")
    print(f"{len(found) - len(missed)} of {len(found)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(1 if missed else 0)  # vLLM's exit handlers take seconds


if __name__ == "__main__":
    main()
