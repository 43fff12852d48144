"""One session: a group of a task, whose completions a person gives; what comes of it; and the files that are left."""

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.experiments.rl.config import checks
from torchtitan.experiments.rl.config.resolved import resolved_config
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.saved_command import CONFIG_FILE
from torchtitan.experiments.rl.config.trial_build import checked_renderer
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.observability.rollouts import lines_of
from torchtitan.experiments.rl.play.model import LocalModel
from torchtitan.experiments.rl.play.player import Player
from torchtitan.experiments.rl.play.policy import Model
from torchtitan.experiments.rl.printable import printable
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup

NO_LIMIT_S = 1e6
"""A person takes longer than an env may."""
OUTCOME = "played"
"""Of the recorded rollouts."""


def play(config: RunConfig, name: str, player: Player, *, example: int, rollouts: int) -> RolloutGroup:
    """Run a group of task ``name`` to its end, and score it.

    Args:
        example: index in the task's dataset.
    """
    own = config.tasks[name]
    own = replace(own, max_retries=0, env=replace(own.env, rollout_timeout_s=NO_LIMIT_S))
    task = own.build(name=name, renderer=checked_renderer(config), seed=config.seed)

    async def run() -> RolloutGroup:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for the loop, which waits for the person
        await task.setup(player.policy)
        try:
            group = await task.run_group(
                task.dataset[example], player.policy, group_id="play", seed=config.seed, group_size=rollouts
            )
            group.failure = await task.score_group(group)
            return group
        finally:
            await task.close()
            await player.policy.close()

    return asyncio.run(run())


def answering_model(config: RunConfig, server: FrozenModel | None) -> Model:
    """What ``/model`` asks: a server's model, without further attempts, for the person sees what is wrong; or the config's own.

    Raises:
        ConfigError: the config's model or its engine is not on this machine.
    """
    if server is not None:
        return EndpointClient(replace(server, max_retries=0))
    checks.check_model_folder(config.model)
    for lacking in checks.missing_engine(config):
        raise lacking
    device, path = config.provision.resolve(), config.model.hf_assets_path
    return LocalModel(lambda: config.generator.engine.build(model_path=path, device=device))


def result_lines(group: RolloutGroup, player: Player) -> list[str]:
    """Rewards by component, and what would be trained."""
    lines = []
    for rollout in group.rollouts:
        line = encode_rollout(rollout, outcome=OUTCOME, admitted_version=0, max_bytes=sys.maxsize)
        lines += [printable(line) for line in lines_of(decode_rollout(line), tokens=True)]
        lines += [printable(line) for line in _trained(rollout, player.policy.tokenizer)]
    if group.failure:
        lines.append(f"The group would not be trained on: {group.failure}")
    elif len(group.rollouts) == 1:
        lines.append("A group of one has nothing to compare: --rollouts 2 shows advantages of algorithms that compare.")
    return lines


def save(group: RolloutGroup, config: RunConfig, folder: Path, test: str) -> None:
    """Write the record, the config and the test skeleton into an existing folder."""
    (folder / CONFIG_FILE).write_text(json.dumps(resolved_config(config), indent=2) + "\n", encoding="utf-8")
    (folder / f"test_{''.join(c if c.isalnum() else '_' for c in group.task_name)}.py").write_text(test, encoding="utf-8")
    recorder = replace(config.recorder, fraction=1.0).build(run_dir=folder)
    recorder.record(group, {rollout.rollout_id: OUTCOME for rollout in group.rollouts})
    recorder.close()


def _trained(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Each training sample as text, with what was sampled in brackets, and its advantages."""
    lines = []
    for number, sample in enumerate(rollout.samples):
        parts, mask = [], sample.loss_mask
        edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
        for part in np.split(np.arange(len(sample)), edges):
            text = tokenizer.decode(sample.token_ids[part])
            parts.append(f"[[{text}]]" if mask[part[0]] else text)
        advantages = sample.advantages[mask] if sample.advantages is not None else np.zeros(0)
        told = f", advantages {advantages.min():.3g} to {advantages.max():.3g}" if len(advantages) else ", no advantages"
        lines.append(f"── sample {number}: {len(sample)} tokens, the {int(mask.sum())} in [[ ]] would be trained{told} ──")
        lines += "".join(parts).splitlines()
    return lines
