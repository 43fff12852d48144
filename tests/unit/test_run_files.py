"""A resumed run keeps its files: everything up to the checkpoint, nothing after it, and no torn record."""

import errno
import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.fakes.disk import FullDisk
from tests.fakes.rollouts import completed_rollout, group_of
from torchtitan.experiments.rl.checkpointing.folder import CheckpointError
from torchtitan.experiments.rl.checkpointing.run_files import cut_back, sizes
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.observability.metrics import MetricsLogger, read_metrics
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts


class Writers:
    """The three writers of a run, and a step that gives each something to write."""

    def __init__(self, run_dir: Path, resume_step: int | None = None, tensorboard: bool = True):
        config = MetricsLogger.Config(tensorboard=tensorboard)
        self.metrics = config.build(run_dir=run_dir, resume_step=resume_step)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.recorder = RolloutRecorder.Config().build(run_dir=run_dir)

    def step(self, step: int) -> None:
        self.metrics.log(step, {"loss": step / 10})
        self.ledger.dispatch("t", [f"t-{step}/0"], version=step)
        self.ledger.end(f"t-{step}/0", "trained", version=step)
        self.recorder.record(
            group_of(completed_rollout(group_id=f"t-{step}")), {f"t-{step}/0": "trained"}
        )

    def flush(self) -> None:
        self.metrics.flush()
        self.ledger.flush()
        self.recorder.size_by_now().result(30)

    def close(self) -> None:
        self.metrics.close()
        self.ledger.close()
        self.recorder.close()


def recorded_steps(run_dir: Path) -> dict[str, list[int]]:
    """Steps by file, read by a reader of each format's own."""
    events = [
        event.step
        for path in sorted((run_dir / "tensorboard").glob("*tfevents*"))
        for event in EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    return {
        "metrics": [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")],
        "ledger": [record["ended_version"] for record in ledger],
        "rollouts": [
            int(record.rollout.group_id.removeprefix("t-")) for record in read_rollouts(run_dir)
        ],
        "tensorboard": events,
    }


def test_a_resumed_run_has_each_step_once_in_every_file(tmp_path):
    writers = Writers(tmp_path)
    for step in (1, 2):
        writers.step(step)
    writers.flush()
    at_checkpoint = sizes(tmp_path)
    for step in (3, 4, 5):
        writers.step(step)
    writers.close()
    assert set(map(tuple, recorded_steps(tmp_path).values())) == {(1, 2, 3, 4, 5)}
    with (
        (tmp_path / "metrics.jsonl").open("a") as metrics,
        (tmp_path / "ledger.jsonl").open("a") as ledger,
    ):
        metrics.write('{"step": 6, "lo')  # killed in mid-write
        ledger.write('{"rollout_id')

    for _ in range(2):  # a resume that is killed and repeated
        assert cut_back(tmp_path, at_checkpoint) == []
        assert set(map(tuple, recorded_steps(tmp_path).values())) == {(1, 2)}
    writers = Writers(tmp_path, resume_step=2)
    for step in (3, 4):
        writers.step(step)
    writers.close()
    assert set(map(tuple, recorded_steps(tmp_path).values())) == {(1, 2, 3, 4)}
    assert (
        len(list((tmp_path / "tensorboard").iterdir())) == 2
    )  # a file for each process, none of the steps cut away
    assert len(gzip.decompress((tmp_path / "rollouts.jsonl.gz").read_bytes()).splitlines()) == 4


def test_files_made_after_the_checkpoint_are_removed(tmp_path):
    first = Writers(tmp_path, tensorboard=False)
    first.step(1)
    first.close()
    at_checkpoint = sizes(tmp_path)
    MetricsLogger.Config(jsonl=False).build(run_dir=tmp_path).close()
    cut_back(tmp_path, at_checkpoint)
    assert sorted(os.listdir(tmp_path)) == [
        "ledger.jsonl",
        "metrics.jsonl",
        "rollouts.jsonl.gz",
        "tensorboard",
    ]
    assert os.listdir(tmp_path / "tensorboard") == []


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\n", b"")), max_size=8),
    torn=st.binary(max_size=9),
)
@settings(deadline=None)
def test_the_offset_of_a_file_is_where_its_last_whole_line_ends(lines, torn):
    with tempfile.TemporaryDirectory() as name:
        whole = b"".join(line + b"\n" for line in lines)
        (Path(name) / "ledger.jsonl").write_bytes(whole + torn.replace(b"\n", b""))
        assert sizes(Path(name)) == {"ledger.jsonl": len(whole)}


def test_a_line_longer_than_what_is_read_at_once_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"a\n" + b"b" * 200_000)
    assert sizes(tmp_path) == {"metrics.jsonl": 2}


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_metrics_or_ledger_shorter_than_at_the_checkpoint_are_refused_before_anything_is_cut(
    name, tmp_path
):
    writers = Writers(tmp_path, tensorboard=False)
    writers.step(1)
    writers.close()
    at_checkpoint = {file: max(0, size - 1) for file, size in sizes(tmp_path).items()} | {
        name: 10_000
    }
    before = {path: path.stat().st_size for path in tmp_path.glob("*.*")}
    with pytest.raises(
        CheckpointError,
        match=rf"{name} has [0-9]+ bytes, and had 10,000 at the checkpoint: put the file back",
    ):
        cut_back(tmp_path, at_checkpoint)
    assert {path: path.stat().st_size for path in tmp_path.glob("*.*")} == before
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing, and had 10,000"):
        cut_back(tmp_path, at_checkpoint)


def test_recorded_rollouts_that_are_missing_cost_a_line_and_leave_whole_groups(tmp_path):
    writers = Writers(tmp_path, tensorboard=False)
    for step in (1, 2):
        writers.step(step)
    writers.close()
    at_checkpoint = sizes(tmp_path)
    path = tmp_path / "rollouts.jsonl.gz"
    os.truncate(path, path.stat().st_size - 5)
    (line,) = cut_back(tmp_path, at_checkpoint)
    assert line == f"{path} lacks records from before the checkpoint; the run goes on without them"
    assert [record.rollout.group_id for record in read_rollouts(tmp_path)] == ["t-1"]
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 1  # gzip refuses a torn member


@pytest.mark.parametrize("room", [0, 1, 20, 130])
def test_a_full_disk_leaves_whole_lines_and_an_error_that_names_the_file(room, tmp_path):
    writers = Writers(tmp_path, tensorboard=False)
    writers.step(1)
    writers.flush()
    before = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")}
    for writer in (writers.metrics, writers.ledger):
        real = writer._file._file
        writer._file._file = FullDisk(real, room if writer is writers.ledger else min(room, 20))
    with pytest.raises(OSError, match="No space left on device: '.*metrics.jsonl'"):
        writers.metrics.log(2, {"loss": 0.5})
    for index in (1, 2):
        writers.ledger.dispatch("t", [f"t-2/{index}"], version=1)
        writers.ledger.end(f"t-2/{index}", "trained", version=2)
    with pytest.raises(OSError, match="No space left on device: '.*ledger.jsonl'"):
        writers.ledger.flush()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    writers.ledger._file._file = real  # space was freed
    writers.ledger.flush()
    assert recorded_steps(tmp_path)["ledger"] == [1, 2, 2]


def test_tensorboard_whose_disk_is_full_is_given_up_and_the_metrics_file_goes_on(tmp_path, caplog):
    metrics = MetricsLogger.Config().build(run_dir=tmp_path)

    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics._tensorboard.file_writer.add_summary = fail
    for step in (1, 2):
        metrics.log(step, {"loss": 0.5})
    metrics.flush()
    metrics.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert (
        caplog.text.count(
            "no further metrics are sent to SummaryWriter: [Errno 28] No space left on device"
        )
        == 1
    )
