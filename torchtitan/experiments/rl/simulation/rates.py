"""What things of a run cost, in seconds, by device or as measured: what config/costs.py has, and what a simulation adds."""

import math
from dataclasses import dataclass

from torchtitan.experiments.rl.config.costs import (
    GPUS_PER_HOST,
    EngineRates,
    Gpu,
    ModelSizes,
    TrainerRates,
    device_rates,
    version_bytes,
)
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.operations.supervision import READERS_AT_ONCE

READER_BYTES_S = 1.5e9
"""A weight reader's, measured over TCP between two hosts of one machine (benchmarks/host_weights.py).
No network of a device is slower."""
TURN_S = 0.77e-3
"""Renderer and all else of a turn, measured (docs/measured.md)."""
START_S, DEATH_SEEN_S = 180.0, 10.0
"""Until a process of a real model takes work, compiled; until Monarch reports the death of a process elsewhere."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    engine: EngineRates
    trainer: TrainerRates
    fetch_s: float = 0.0
    """Until every host of generators has a version."""
    start_s: float = START_S
    turn_s: float = 0.0
    """Of the process that runs the rollouts, for each turn: rendering, parsing, messages. One Python thread does that."""


def run_rates(config: RunConfig, sizes: ModelSizes, gpu: Gpu) -> Rates:
    """Of a config on GPUs of one kind."""
    engine, trainer = device_rates(config, sizes, gpu)
    # From the hosts of the trainer to all hosts of generators, each of which others read from next.
    generators = config.generator.replicas * config.generator.engine.tensor_parallel_degree
    readers = math.ceil(generators / GPUS_PER_HOST) / max(1, config.trainer.ranks // GPUS_PER_HOST)
    rounds = math.ceil(math.log(readers + 1, READERS_AT_ONCE + 1))
    fetch_s = rounds * version_bytes(config, sizes) / READER_BYTES_S
    return Rates(engine=engine, trainer=trainer, fetch_s=fetch_s, turn_s=TURN_S)
