"""Seconds that the simulated actors take, derived from a config and a kind of GPU."""

import math
from dataclasses import dataclass

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.fleet.weight_readers import READERS_AT_ONCE
from torchtitan.experiments.rl.plan.costs import (
    GPUS_PER_HOST,
    EngineRates,
    Gpu,
    ModelSizes,
    TrainerRates,
    device_rates,
    version_bytes,
)

READER_BYTES_S = 1.5e9
"""Bytes a second that a weight reader fetches. Measured over TCP between two hosts of one machine
(benchmarks/host_weights.py); no network between GPU hosts is slower."""
TURN_S = 0.77e-3
"""Seconds of Python a turn: rendering, parsing and messages. Measured (docs/scale.md)."""
START_S = 180.0
"""Seconds until a new process of a real model takes requests, compiled."""
DEATH_SEEN_S = 10.0
"""Seconds until Monarch reports the death of a process on another host."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    """Seconds that every simulated actor takes for its work."""

    engine: EngineRates
    trainer: TrainerRates
    fetch_s: float = 0.0
    """Seconds until every host of generators has a version in its memory."""
    start_s: float = START_S
    """Seconds until a new replica, or a new run, takes requests."""
    turn_s: float = 0.0
    """Seconds that the process which runs a rollout computes for each turn, in one Python
    thread."""


def run_rates(config: RunConfig, sizes: ModelSizes, gpu: Gpu) -> Rates:
    """Return the rates of a config on GPUs of one kind."""
    engine, trainer = device_rates(config, sizes, gpu)
    return Rates(
        engine=engine,
        trainer=trainer,
        fetch_s=_fetch_rounds(config) * version_bytes(config, sizes) / READER_BYTES_S,
        turn_s=TURN_S,
    )


def _fetch_rounds(config: RunConfig) -> int:
    """Return how many times in a row hosts copy a version from hosts that have it.

    At first only the trainer's hosts have it. Each host that has it serves `READERS_AT_ONCE`
    others, and from then on each of these does too.
    """
    generators = config.generator.replicas * config.generator.engine.tensor_parallel_degree
    reading_hosts = math.ceil(generators / GPUS_PER_HOST)
    serving_hosts = max(1, config.trainer.ranks // GPUS_PER_HOST)
    return math.ceil(math.log(reading_hosts / serving_hosts + 1, READERS_AT_ONCE + 1))
