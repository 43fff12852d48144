"""Runs one case: a real Controller on a config with the case's culprit in it, and what can be seen of the run afterwards."""

import asyncio
import contextlib
import copy
import inspect
import io
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoTokenizer

from tests.fakes.contexts import context_of
from tests.zoo import world
from tests.zoo.misbehaviour import Kind, meddled
from tests.zoo.stand_ins import StandInFleet
from torchtitan.experiments.rl.ask import ordered, scopes
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.controller import actor
from torchtitan.experiments.rl.controller import run as run_module
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.types import STREAMS, TrainingSample

MODEL = str(Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3")
STEPS, ROLLOUTS_PER_STEP = 2, 2 * world.GROUP_SIZE
RENDERER = build_renderer(RendererConfig(), MODEL)  # before the fork: it takes a second
TOKENIZER: Any = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)

RUN: Any = inspect.unwrap(vars(actor.Controller)["run"]._method)
"""The endpoint's own function: there is no actor here."""

Key = tuple[str, str, int]
"""Task, example and index in the group: the same rollout in any run."""


class Stage:
    """An honest run's config, and what a place may replace in it."""

    def __init__(self) -> None:
        # The "good" task is named first: it gives every other group.
        self.config = RunConfig(
            tasks={name: _task(world.HonestTask, name) for name in ("good", "bad")},
            model=ModelConfig(hf_assets_path=MODEL),
            generator=GeneratorConfig(engine=VLLMEngineConfig(max_model_len=512)),
            batcher=Batcher.Config(row_length=256, rows_per_microbatch=4),
            steps=STEPS,
            rollouts_per_step=ROLLOUTS_PER_STEP,
            max_offpolicy_steps=1,
            max_drops_in_a_row=6,
            task_mix=world.HonestMix.Config(),
            metrics=MetricsLogger.Config(jsonl=True, tensorboard=False, wandb=False),
            provision=ProvisionConfig(device="cpu"),
            pre_batch_filters=[],
            post_batch_filters=[],
        )
        self.tokenizer = TOKENIZER
        self.renderer: Any = RENDERER
        self.bad_rollout_limit_s = world.ROLLOUT_LIMIT_S
        self.policy_class = world.HonestPolicy
        self.session_class = world.HonestSession

    @property
    def bad(self) -> Any:
        """The config of the task with the culprit."""
        return self.config.tasks["bad"]

    def bad_task(self, task_class: type) -> None:
        self.config.tasks["bad"] = _task(task_class, "bad")

    def limit_bad(self) -> None:
        """Short limits for the culprit's task and for ordered calls: the case is late. A case that blocks is not run again."""
        env, rubric = self.bad.env, self.bad.rubric
        env.step_timeout_s, env.rollout_timeout_s = world.STEP_LIMIT_S, self.bad_rollout_limit_s
        rubric.timeout_s = world.STEP_LIMIT_S
        if hasattr(self.config, "user_code"):
            limits = self.config.user_code
            limits.call_timeout_s = limits.setup_timeout_s = limits.close_timeout_s = (
                world.ROLLOUT_LIMIT_S
            )
        _shorten_limits()

    def replace_renderer(self, method: str, kind: Kind, when: Callable[..., bool]) -> None:
        culprit = copy.copy(RENDERER)
        culprit.__class__ = type("CulpritRenderer", (type(RENDERER),), {})
        bound = getattr(culprit, method)
        setattr(
            culprit,
            method,
            meddled(
                lambda *args, **kw: bound(*args, **kw),
                kind,
                when=lambda *args, **kw: when(culprit, *args, **kw),
            ),
        )
        self.renderer = culprit


@dataclass
class Sight:
    """What can be seen of a run."""

    error: BaseException | None = None
    loop_stopped: BaseException | None = None
    """What user code stopped the event loop with."""
    loop_alive: bool = False
    """The event loop still ran after the run."""
    trained: dict[Key, list[TrainingSample]] = field(default_factory=dict)
    """By rollout, the samples of the optimizer steps that were taken."""
    planned: dict[Key, list[TrainingSample]] = field(default_factory=dict)
    """By rollout, the samples that reached Batcher.plan."""
    records: dict[Key, tuple[str, float | None, str | None, str | None]] = field(
        default_factory=dict
    )
    """By rollout, as recorded: status, reward, error, ledger column."""
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    ledger: dict[str, int] | None = None
    ledger_lines: int = 0
    stdout: str = ""
    log: list[str] = field(default_factory=list)
    actors_closed: int = 0
    refused_before_start: bool = False
    """The config check refused it: there was no run."""
    left_open: list[str] = field(default_factory=list)
    """Parts of the controller that its close left open."""


def _shorten_limits() -> None:
    """Limits that no config sets, made short: a case that meets them should not take a minute."""
    cast(Any, scopes).CANCEL_GRACE_S = 0.1
    cast(Any, ordered).OrderedCalls.__init__.__kwdefaults__["timeout_s"] = world.ROLLOUT_LIMIT_S


def warm_up() -> None:
    """Have done what every case does first and which needs no thread: children inherit it."""
    checked_plan(Stage().config)
    np.unique(np.zeros(2))


def run(install: Callable[[Stage], None]) -> Sight:
    """Run the case in this process, which is of no use afterwards: user code may have left anything behind."""
    torch.set_num_threads(1)
    stage, sight = Stage(), Sight()
    install(stage)
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    loop = asyncio.new_event_loop()
    controller: list[actor.Controller] = []
    output = io.StringIO()
    with _in_this_process(stage), _samples_seen(sight), contextlib.redirect_stdout(output):
        main = _main(stage, sight, folder, controller)
        try:
            loop.run_until_complete(main)
        except BaseException as error:  # SystemExit and the like leave the loop itself
            sight.loop_stopped = error
    sight.stdout = output.getvalue()
    _look(sight, folder, controller[0] if controller else None)
    shutil.rmtree(folder, ignore_errors=True)
    return sight


async def _main(stage: Stage, sight: Sight, folder: Path, made: list[actor.Controller]) -> None:
    try:
        controller = actor.Controller(
            checked_plan(stage.config), run_dir=str(folder), config_name="zoo"
        )
        made.append(controller)
        await RUN(controller)
    except Exception as error:
        sight.error = error
    beats = 0
    for _ in range(3):
        await asyncio.sleep(0.001)
        beats += 1
    sight.loop_alive = beats == 3


def _look(sight: Sight, folder: Path, controller: actor.Controller | None) -> None:
    actors = getattr(StandInFleet, "made", None)
    sight.refused_before_start = actors is None
    if actors is not None:
        trainer: Any = actors.trainer
        for sample in trainer.stepped:
            sight.trained.setdefault(_key_of(sample), []).append(sample)
        sight.losses, sight.steps, sight.actors_closed = (
            trainer.losses,
            len(trainer.losses),
            actors.closed,
        )
    if controller is not None and (built := controller._run._loops) is not None:
        sight.ledger = built.rollouts.ledger.counts()
        if any(thread.name == "rollout-recorder" for thread in threading.enumerate()):
            sight.left_open.append("the recorder")
        if str(folder / "metrics.jsonl") in map(os.path.realpath, Path("/proc/self/fd").iterdir()):
            sight.left_open.append("the metrics")
    if (ledger := folder / "ledger.jsonl").exists():
        sight.ledger_lines = len(ledger.read_text().splitlines())
    with contextlib.suppress(FileNotFoundError):
        for record in read_rollouts(folder):
            rollout = record.rollout
            sample_id = rollout.data_sample.sample_id if rollout.data_sample is not None else ""
            key = (rollout.task_name, sample_id, rollout.index_in_group)
            sight.records[key] = (
                RolloutStatus(rollout.status).value,
                rollout.reward,
                rollout.error,
                record.outcome,
            )
    if (log := folder / "logs" / "controller.jsonl").exists():
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            sight.log.append(str(entry.get("message", entry)))


@contextlib.contextmanager
def _in_this_process(stage: Stage) -> Iterator[None]:
    """Give the Controller stand-ins for what it spawns, and the renderer that was built before the fork."""
    StandInFleet.policy_of = staticmethod(lambda: stage.policy_class(TOKENIZER))
    stage.policy_class.session_class = stage.session_class
    run_module.Fleet = StandInFleet
    # No process sends notes, and a forked child has no Monarch to open a port with.
    actor.print_notes = lambda console: asyncio.create_task(asyncio.sleep(0))
    run_module.build_context = lambda config, path, seed: context_of(
        stage.renderer, vocab_size=HubConfig.read(path).size("vocab_size"), seed=seed
    )
    yield


@contextlib.contextmanager
def _samples_seen(sight: Sight) -> Iterator[None]:
    """Note what reaches the batcher, as it is then: the process is a fork, so nothing is put back."""
    plan = Batcher.plan

    def noting(self: Batcher, samples: Any, ranks: int) -> Any:
        seen = copy.deepcopy(list(samples))
        for sample in seen:
            sight.planned.setdefault(_key_of(sample), []).append(sample)
        packed = plan(self, samples, ranks)
        cast(Any, StandInFleet.made.trainer).planned.extend(seen)
        return packed

    Batcher.plan = noting
    yield


def _key_of(sample: TrainingSample) -> Key:
    # The question names its example; samplers may hand examples out in any order.
    asked = re.search(
        r"question (\d+)", TOKENIZER.decode(np.asarray(sample.token_ids).ravel().tolist())
    )
    return sample.task_name, asked[1] if asked else "?", int(sample.rollout_id.rpartition("/")[2])


def _task(task_class: Any, name: str) -> Any:
    return task_class.Config(dataset=world.HonestDataset.Config(task_name=name))


def streams_of(samples: list[TrainingSample]) -> list[dict[str, Any]]:
    """What the trainer reads of them, as plain values; but for the versions, which depend on who was slow."""
    return [
        {name: _plain(getattr(sample, name)) for name in STREAMS if name != "policy_versions"}
        | {"temperature": sample.temperature}
        for sample in samples
    ]


def _plain(stream: Any) -> Any:
    return None if stream is None else np.asarray(stream).tolist()
