"""Every per-token stream is declared once, in types.py: samples, batches and records follow, and losses read what it says."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.unit.loss_batches import ONE, random_batch
from torchtitan.experiments.rl.losses import (
    CISPO,
    DPPO,
    GSPO,
    LossConfig,
    PPOClip,
    compute_loss,
    count_denominators,
)
from torchtitan.experiments.rl.types import STREAMS, TrainingBatch, TrainingSample

ROOT = Path(__file__).resolve().parents[2]

NEW_LINE = "    surprises: Annotated[OptionalArray, Stream(dtype=np.float32, fill=-7, in_loss=False)] = UNSET\n"
NEW_CREDIT = """    entropy_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = UNSET
"""

USE_OF_THE_NEW_CREDIT = """
import numpy as np
from torchtitan.experiments.rl.tasks.scoring import Drafts, check_streams
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.types import TrainingSample

sample = TrainingSample(
    token_ids=np.array([5, 6], np.int32), loss_mask=np.array([False, True]),
    generator_logprobs=np.zeros(2, np.float32), policy_versions=np.zeros(2, np.int32),
    advantages=np.ones(2, np.float32), task_name="t", rollout_id="t-0/0")
rollout = Rollout(group_id="t-0", index_in_group=0, task_name="t", samples=[sample]).freeze()
for weights in ([0.0, np.nan], [0.0, 0.5]):
    try:
        with Drafts([rollout]) as drafts:
            rollout.samples[0].entropy_weights = np.array(weights)
            drafts.check(rollout)
            check_streams(rollout.samples[0])
            drafts.take(rollout)
    except ValueError as error:
        print(error)
print(rollout.samples[0].entropy_weights.dtype, rollout.samples[0].entropy_weights.tolist())
"""

USE_OF_THE_NEW_STREAM = """
import sys
from pathlib import Path
import numpy as np
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.types import TrainingSample

def sample(index, **streams):
    return TrainingSample(
        token_ids=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True, True]),
        generator_logprobs=np.zeros(3, np.float32), policy_versions=np.zeros(3, np.int32), advantages=np.ones(3, np.float32),
        task_name="t", rollout_id=f"t-0/{index}", **streams)

given, absent = sample(0, surprises=np.array([0.5, np.nan, -1], np.float32)), sample(1)
batch = Batcher.Config(row_length=8).build().plan([given, absent], ranks=1).microbatches[0][0]
print(batch.surprises.dtype, batch.to("cpu").surprises.tolist())

rollouts = [Rollout(group_id="t-0", index_in_group=i, task_name="t", samples=[s]) for i, s in enumerate([given, absent])]
recorder = RolloutRecorder.Config().build(run_dir=Path(sys.argv[1]))
data = DataSample(sample_id="s", env_input=None)
recorder.record(RolloutGroup(group_id="t-0", task_name="t", data_sample=data, rollouts=rollouts), {})
recorder.close()
first, second = (record.rollout.samples[0].surprises for record in read_rollouts(sys.argv[1]))
print(first.dtype, first.tolist(), second)
"""


def printed_with(declaration: str, program: str, folder: Path) -> list[str]:
    """Return what a program prints with one more stream declared, in a copy of the library."""
    shutil.copytree(
        ROOT / "torchtitan", folder / "torchtitan", ignore=shutil.ignore_patterns("__pycache__")
    )
    types = folder / "torchtitan" / "experiments" / "rl" / "types.py"
    before, found, after = types.read_text().partition("    ref_logprobs: Annotated")
    assert found
    types.write_text(before + declaration + found + after)

    (folder / "run").mkdir()
    command = [sys.executable, "-c", program, str(folder / "run")]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    result = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_one_line_in_types_adds_a_stream_from_sample_to_batch_to_record(tmp_path):
    # Two samples of 3 tokens and 2 tokens of padding in one row.
    assert printed_with(NEW_LINE, USE_OF_THE_NEW_STREAM, tmp_path)[-2:] == [
        "torch.float32 [[0.5, nan, -1.0, -7.0, -7.0, -7.0, -7.0, -7.0]]",
        "float32 [0.5, nan, -1.0] None",
    ]


def test_a_new_stream_that_algorithms_write_is_checked_and_taken_over_like_the_others(tmp_path):
    assert printed_with(NEW_CREDIT, USE_OF_THE_NEW_CREDIT, tmp_path)[-2:] == [
        "entropy_weights is nan at token 1, want a finite number that float32 holds",
        "float32 [0.0, 0.5]",
    ]


def test_a_batch_and_a_sample_have_every_stream():
    for record in (TrainingSample, TrainingBatch):
        assert set(STREAMS) < {field.name for field in fields(record)} == set(record.__slots__)
    batch = random_batch(0)[1]
    with pytest.raises(TypeError, match="needs every stream: advantages missing"):
        replace(batch, advantages=None)
    assert not hasattr(batch, "__dict__")


# ---- what the losses read

VARIANTS = [DPPO.Config(), PPOClip.Config(), CISPO.Config(), GSPO.Config()]


def perturbed(batch: TrainingBatch, name: str) -> TrainingBatch:
    """Other values of one stream, on every token."""
    values = getattr(batch, name)
    other = ~values if values.dtype == torch.bool else values + torch.ones_like(values)
    return replace(batch, **{name: other})


def loss_of(logprobs: torch.Tensor, batch: TrainingBatch, rl) -> tuple[list[int], float, list]:
    """Members of each component, the loss, and its gradient."""
    logprobs = logprobs.clone().requires_grad_()
    loss, _ = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))
    loss.backward()
    return count_denominators(batch, ["members"] * 3).tolist(), loss.item(), logprobs.grad.tolist()


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
@pytest.mark.parametrize("name", STREAMS)
def test_a_loss_reads_a_stream_exactly_where_its_declaration_says_so(name, rl):
    logprobs, batch = random_batch(3)
    same = loss_of(logprobs, perturbed(batch, name), rl) == loss_of(logprobs, batch, rl)
    assert same == (not STREAMS[name].in_loss)


def test_declared_fills_make_padding_a_member_of_nothing():
    empty = {
        name: torch.from_numpy(stream.padding(4, None)[None]) for name, stream in STREAMS.items()
    }
    zeros = torch.zeros(1, 4, dtype=torch.int32)
    batch = TrainingBatch(
        **empty, positions=zeros, temperatures=torch.ones(1, 4), task_ids=zeros - 1, task_names=()
    )
    assert count_denominators(batch, ["members"] * 3).tolist() == [0, 0, 0]
