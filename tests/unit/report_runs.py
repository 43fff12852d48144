"""Run folders for the tests of the report, written by what writes those of runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.fakes.rollouts import group_of, rollout_of, turn_of
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.records import RecordKind
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutStatus,
)


def rollout(
    group: str, index: int, *, reward: float | None, reply: str = "7", task: str = "sums", **fields
) -> Rollout:
    """Return a rollout of one turn: the prompt's tokens are 1, 2, 3, the completion's 4 and 5."""
    turn = turn_of([1, 2, 3], [4, 5], logprobs=[-0.5, -0.25], versions=[2, 3])
    turn.prompt_messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "3 4"},
    ]
    turn.prompt_role_ids = np.array([0, 2, -1], np.int8)
    turn.prompt_is_content = np.array([True, True, False])
    turn.assistant_message = {"role": "assistant", "content": reply}
    return rollout_of(
        turn,
        group_id=group,
        index=index,
        task=task,
        data_sample=DataSample(sample_id="s", env_input=[3, 4]),
        status=RolloutStatus.COMPLETED if reward is not None else RolloutStatus.ERROR,
        reward=reward,
        reward_components={} if reward is None else {"right": reward},
        **fields,
    )


def record(
    folder: Path,
    groups: Sequence[Sequence[Rollout]],
    outcomes: Mapping[str, str],
    *,
    step: int = 0,
    kind: RecordKind = "training",
) -> None:
    """Append groups to the folder's records; ``outcomes`` by rollout id.

    They were started at version ``step``, and the step after the next one trained on them.
    """
    recorder = RolloutRecorder.Config().build(run_dir=folder)
    for rollouts in groups:
        group = group_of(*rollouts, version=step)
        recorder.record(group, outcomes, kind=kind, trained_step=step + 2)
    recorder.close()
    assert recorder.not_recorded == 0


def write_metrics(
    folder: Path, records: Mapping[int, Mapping[str, float]], *, resume_step: int | None = None
) -> None:
    logger = MetricsLogger.Config(tensorboard=False).build(run_dir=folder, resume_step=resume_step)
    for step, metrics in records.items():
        logger.log(step, metrics)
    logger.close()


def write_ledger(folder: Path, ends: Sequence[tuple[str, str, str]]) -> None:
    """``ends``: task, rollout id and column of each."""
    ledger = Ledger(folder / "ledger.jsonl")
    for task, rollout_id, column in ends:
        ledger.dispatch(task, [rollout_id], version=0)
        ledger.end(rollout_id, column, version=1)
    ledger.close()


def record_evaluation(
    folder: Path, label: str, rewards: Mapping[str, Sequence[float | None]], *, step: int
) -> None:
    """``rewards``: of each attempt, by the id of the example; the first is the validation set's first."""
    groups = [
        [
            rollout(f"validation-sums-{place}@{label}", index, reward=reward)
            for index, reward in enumerate(attempts)
        ]
        for place, attempts in enumerate(rewards.values())
    ]
    for example, own in zip(rewards, groups, strict=True):
        for one in own:
            one.data_sample = DataSample(sample_id=example, env_input=None)
    outcomes = {one.rollout_id: "validation" for own in groups for one in own}
    record(folder, groups, outcomes, step=step, kind="validation")


def small_run(folder: Path) -> Path:
    """Two groups of two tasks, one filtered and one with a failure; three steps; an evaluation of version 0."""
    folder.mkdir(parents=True, exist_ok=True)
    first = [rollout("sums-0", 0, reward=1.0), rollout("sums-0", 1, reward=0.0, reply="eight")]
    first[0].assign_advantages([0.5, 0.75])
    first[1].assign_advantages(-0.5)
    second = [
        rollout("words-0", 0, reward=1.0, task="words"),
        rollout("words-0", 1, reward=None, task="words", error="it broke"),
    ]
    outcomes = {
        "sums-0/0": "trained",
        "sums-0/1": "trained",
        "words-0/0": "filtered/pre/zero_advantage",
    }
    outcomes["words-0/1"] = "failed/error"
    record(folder, [first], outcomes, step=0)
    record(folder, [second], outcomes, step=1)
    write_ledger(folder, [(name.split("-")[0], name, column) for name, column in outcomes.items()])
    counts = {
        "ledger/sums/dispatched": 3,
        "ledger/sums/open": 1,
        "ledger/words/dispatched": 2,
        "ledger/words/open": 0,
    }
    steps = {0: {"validation/step": 0, "validation/reward": 0.25, "validation/sums/avg@1": 0.25}}
    steps |= {
        n: {"rollout/reward_mean": n / 4, "policy/entropy": 1 / n, "time/step_s": 2.0, **counts}
        for n in (1, 2, 3)
    }
    steps[2] |= {"policy/entropy": float("nan")}
    write_metrics(folder, steps)
    config = {
        "steps": 3,
        "seed": 7,
        "tasks": {"sums": {"group_size": 2}},
        "judge": {"api_key": "sk-1", "api_key_env": "JUDGE"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
