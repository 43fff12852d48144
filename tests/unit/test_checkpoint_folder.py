"""A checkpoint's folder is complete or absent, whenever the process or the machine stops, and damage is found by file."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.checkpointing import folder as module
from torchtitan.experiments.rl.checkpointing.folder import (
    CheckpointError,
    CheckpointWriter,
    checkpoints,
    newest_valid,
    step_of,
    verify,
    write_durably,
)

MEMORY = "/dev/shm"
"""An fsync there takes no time."""
OPERATIONS = ("mkdir", "rename", "rmdir", "unlink", "fsync")


def contents(step: int) -> dict[str, bytes]:
    return {
        "controller.json": b'{"step": %d}' % step,
        "trainer/shard-0": bytes([step % 256]) * 300,
        "trainer/empty": b"",
    }


def write(checkpoints_of: CheckpointWriter, step: int) -> Path:
    partial = checkpoints_of.begin(step)
    (partial / "trainer").mkdir()
    for name, data in contents(step).items():
        (partial / name).write_bytes(data)
    return checkpoints_of.commit(step)


def steps_in(run_dir: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(run_dir)]


def assert_whole(path: Path) -> None:
    """Compared with what was written, not with the manifest."""
    verify(path)
    for name, data in contents(step_of(path)).items():
        assert (path / name).read_bytes() == data


class PowerFailure(BaseException):
    """Nothing after it runs: no except clause of the library may catch it."""


class Disk:
    """Counts the operations that change a disk, and stops at one of them: by a power failure, or by an error of the disk.

    After a power failure, a file that was not fsynced since it was made has lost its second half.
    """

    def __init__(self, stop_at: int, error: OSError | None = None):
        self.done, self._stop_at, self._error, self._synced = 0, stop_at, error, set[int]()

    @property
    def stopped(self) -> bool:
        return self.done >= self._stop_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in OPERATIONS}

        def operation(name):
            def call(*args, **options):
                if self.stopped:
                    raise self._error or PowerFailure
                self.done += 1
                if name == "fsync":
                    self._synced.add(os.fstat(args[0]).st_ino)
                return real[name](*args, **options)

            return call

        for name in OPERATIONS:
            setattr(os, name, operation(name))
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def lose_unsynced(self, run_dir: Path) -> None:
        for path in run_dir.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synced:
                os.truncate(path, path.stat().st_size // 2)


def test_committed_checkpoint_has_its_files_and_their_size_and_sha256(tmp_path):
    path = write(CheckpointWriter(tmp_path, keep=2), 20)
    assert path == tmp_path / "checkpoints/step-000020"
    assert_whole(path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert manifest["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents(20).items()
    }
    assert newest_valid(tmp_path) == (path, [])


def test_the_last_k_stay_in_the_order_of_their_steps(tmp_path):
    folder = CheckpointWriter(tmp_path, keep=2)
    for step in (20, 999_980, 1_000_000):
        write(folder, step)
    assert steps_in(tmp_path) == [999_980, 1_000_000]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-1000000", "step-999980"]


def test_a_discarded_checkpoint_leaves_nothing(tmp_path):
    folder = CheckpointWriter(tmp_path, keep=2)
    (folder.begin(20) / "half").write_bytes(b"1")
    folder.discard(20)
    folder.discard(20)
    assert os.listdir(tmp_path / "checkpoints") == [] and steps_in(tmp_path) == []


def test_a_run_that_goes_on_from_an_older_step_drops_later_checkpoints_and_writes_them_again(
    tmp_path,
):
    folder = CheckpointWriter(tmp_path, keep=3)
    for step in (20, 40, 60):
        write(folder, step)
    assert [step_of(path) for path in folder.drop_after(20)] == [40, 60]
    assert steps_in(tmp_path) == [20]
    write(folder, 40)
    assert steps_in(tmp_path) == [20, 40]


def test_a_checkpoint_of_the_same_step_is_replaced_if_it_is_damaged_and_stays_if_not(tmp_path):
    folder = CheckpointWriter(tmp_path, keep=3)
    path = write(folder, 20)
    before = path.stat().st_ino
    assert write(folder, 20).stat().st_ino == before
    (path / "controller.json").write_bytes(b"damaged")
    assert_whole(write(folder, 20))
    assert steps_in(tmp_path) == [20]


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.integers(0, 7), min_size=1, max_size=4).map(
        lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
    ),
    keep=st.integers(1, 2),
    stop_at=st.integers(0, 60),
)
def test_a_power_failure_at_any_operation_leaves_whole_checkpoints_and_at_most_the_last_one_missing(
    steps, keep, stop_at
):
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        run_dir, committed, attempted = Path(name), [], None
        disk = Disk(stop_at)
        try:
            with disk.watched():
                for attempted in steps:
                    write(CheckpointWriter(run_dir, keep), attempted)
                    committed.append(attempted)
        except PowerFailure:
            disk.lose_unsynced(run_dir)
        found = checkpoints(run_dir)
        for path in found:
            assert_whole(path)
        if committed:  # the one being written may be complete already
            assert step_of(newest_valid(run_dir)[0]) in (committed[-1], attempted)
        write(CheckpointWriter(run_dir, keep), 100)  # the next process goes on
        assert steps_in(run_dir)[-1] == 100 and len(steps_in(run_dir)) <= keep
        assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize("stop_at", range(8))
def test_a_power_failure_leaves_a_file_that_was_written_durably_as_it_was_or_as_it_is_to_be(
    stop_at, tmp_path
):
    run_dir, disk = tmp_path / "outputs" / "run", Disk(stop_at)
    run_dir.mkdir(parents=True)
    (run_dir / "command.json").write_text("old")
    disk._synced.add((run_dir / "command.json").stat().st_ino)
    ended = False
    try:
        with disk.watched():
            write_durably(run_dir / "command.json", "new and longer")
            ended = True
    except PowerFailure:
        pass
    disk.lose_unsynced(run_dir)
    assert (run_dir / "command.json").read_text() in (
        ["new and longer"] if ended else ["old", "new and longer"]
    )
    assert ended == (stop_at >= 4), "the file, its name, and the folders above: all on the disk"
    assert not ended or {path.stat().st_ino for path in (run_dir, run_dir.parent)} <= disk._synced


@settings(max_examples=60, deadline=None)
@given(stop_at=st.integers(0, 25), number=st.sampled_from([errno.ENOSPC, errno.EROFS, errno.EIO]))
def test_a_disk_that_fails_at_any_operation_leaves_the_checkpoint_before_and_one_line(
    stop_at, number
):
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        run_dir = Path(name)
        folder = CheckpointWriter(run_dir, keep=1)
        write(folder, 20)
        disk = Disk(stop_at, OSError(number, os.strerror(number)))
        with disk.watched():
            try:
                partial = folder.begin(40)
                (partial / "trainer").mkdir()
                for file, data in contents(40).items():
                    (partial / file).write_bytes(data)
                folder.commit(40)
            except CheckpointError as error:
                assert str(error).startswith(
                    "the checkpoint of step 40 can't be written ("
                ) and "\n" not in str(error)
                assert os.strerror(number) in str(error) and str(error).endswith(
                    "make the folder writable"
                )
            except OSError:
                pass  # of the test's own mkdir
            folder.discard(40)
        found = [step_of(path) for path in checkpoints(run_dir)]
        assert found in ([20], [40], [20, 40])
        assert_whole(newest_valid(run_dir)[0])
        write(folder, 60)  # space was freed
        assert steps_in(run_dir) == [60]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "trainer/shard-0").unlink(), "trainer/shard-0 is missing"),
        (
            lambda path: os.truncate(path / "trainer/shard-0", 200),
            "trainer/shard-0 has 200 bytes and had 300",
        ),
        (
            lambda path: (path / "trainer/shard-0").write_bytes(bytes([40]) * 299 + b"!"),
            "trainer/shard-0 has other bytes than were written",
        ),
        (
            lambda path: os.truncate(path / "manifest.json", 100),
            "manifest.json is not what was written",
        ),
        (
            lambda path: (path / "manifest.json").write_text("[1]"),
            "manifest.json is not what was written",
        ),
        (
            lambda path: (path / "manifest.json").write_text(
                '{"format": 2, "step": 20, "files": {}}'
            ),
            "manifest.json is not what was written",
        ),
    ],
)
def test_a_damaged_newest_checkpoint_is_refused_by_file_and_the_one_before_is_used(
    damage, said, tmp_path
):
    folder = CheckpointWriter(tmp_path, keep=2)
    older, newer = write(folder, 20), write(folder, 40)
    damage(newer)
    path, (reason,) = newest_valid(tmp_path)
    assert path == older
    assert (
        reason
        == f"checkpoint {newer} is damaged: {newer}/{said}; use the one before, or copy this one again"
    )


def test_a_run_without_a_valid_checkpoint_says_why(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"can't be resumed: it has no complete checkpoint \(there is nothing\); start",
    ):
        newest_valid(tmp_path)
    for name in (".lock", "logs", "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(
        CheckpointError, match=r"it has no complete checkpoint \(there is config.json, logs\)"
    ):
        newest_valid(tmp_path)
    os.truncate(write(CheckpointWriter(tmp_path, keep=1), 20) / "controller.json", 1)
    with pytest.raises(
        CheckpointError,
        match=r"can't be resumed: checkpoint .*step-000020 is damaged: .*has 1 bytes and had 12",
    ):
        newest_valid(tmp_path)


def test_a_manifest_of_another_format_is_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 1)
    path = write(CheckpointWriter(tmp_path, keep=1), 20)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 1, and this version reads 2"):
        verify(path)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_found(position, bit):
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        path = write(CheckpointWriter(Path(name), keep=1), 20)
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
        data = {file: bytearray(file.read_bytes()) for file in files}
        position %= sum(map(len, data.values()))
        for file, content in data.items():
            if position < len(content):
                if (
                    not chr(content[position]).isspace() or file.name != "manifest.json"
                ):  # white space says nothing in JSON
                    content[position] ^= 1 << bit
                    file.write_bytes(content)
                    with pytest.raises(CheckpointError):
                        verify(path)
                return
            position -= len(content)
