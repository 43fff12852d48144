"""Checkpoints by the path that a GPU's take, with page-locking patched out.

Save, stall and resume; the order of copies, waits and writes; hosts whose memory ends.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
import torch.distributed as dist
from torch.distributed.checkpoint import _state_dict_stager, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager

from tests.integration.learners import (
    LAYOUTS,
    accumulate,
    assert_same,
    learner_of,
    parameters,
    samples_of,
)
from tests.integration.ranks import run_ranks
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training import learner as learning
from torchtitan.experiments.rl.training import staging
from torchtitan.experiments.rl.training.checkpoints import TrainerCheckpoints, TrainerStart
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.experiments.rl.training.staging import StagingError
from torchtitan.experiments.rl.training.trainer import init_process_group

PARAMETERS = 886_144
"""Number of parameters of the tiny model."""
STATE = 3 * 4 * PARAMETERS
"""Bytes of its checkpoint: float32 weights and two moments."""
QWEN3_0_6B = 3 * 4 * 596_049_920
"""The same of Qwen3-0.6B: 6.66 GiB."""
MIB, GIB = 2**20, 2**30


def step(learner: Learner, number: int) -> dict[str, float]:
    """Metrics of one step on samples of its own."""
    loss = accumulate(learner, LAYOUTS["long rows"], samples_of(seed=number))
    return {"loss": loss["loss/total"]} | learner.optim_step()


@dataclass
class Device:
    """Operations that torch was asked for on a GPU, in order."""

    locked: list[int] = field(default_factory=list)
    """Bytes of each buffer that was page-locked."""
    refuses: bool = False
    """True if the system page-locks nothing."""
    events: list[str] = field(default_factory=list)
    """Copies with the thread that asked for each, waits for the device, and writing."""

    def lock(self, pointer: int, size: int) -> None:
        if self.refuses:
            raise RuntimeError("Registering memory failed with cudaError: 801.")
        self.locked.append(size)


@pytest.fixture
def device(monkeypatch) -> Device:
    """Learners on CPU that save as on a GPU."""
    device = Device()
    own_init = _state_dict_stager.StateDictStager.__init__
    own_prepare = DefaultStager.__init__

    def init(stager, pin_memory=False, share_memory=False):
        own_init(stager, pin_memory=False, share_memory=share_memory)
        stager.pin_memory = pin_memory  # torch asks for CUDA here

    def prepare(stager, options):
        # Only here: an optimizer that saw a GPU would ask it for a stream.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            own_prepare(stager, options)

    def checkpoints(**options):
        return TrainerCheckpoints(**options | {"page_locked": True})

    monkeypatch.setattr(learning, "TrainerCheckpoints", checkpoints)
    monkeypatch.setattr(_state_dict_stager.StateDictStager, "__init__", init)
    monkeypatch.setattr(pin_memory_utils, "pin_memory", device.lock)
    monkeypatch.setattr(pin_memory_utils, "unpin_memory", lambda pointer: None)
    monkeypatch.setattr(DefaultStager, "__init__", prepare)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: device.events.append("wait"))
    return device


@pytest.fixture
def disk(monkeypatch) -> threading.Event:
    """A disk that writes nothing before the event is set."""
    ready, save = threading.Event(), state_dict_saver.save

    def stalled(*arguments, **options):
        assert ready.wait(300)
        return save(*arguments, **options)

    monkeypatch.setattr(state_dict_saver, "save", stalled)
    return ready


@pytest.mark.parametrize("path", ["page-locked", "plain"])
def test_a_checkpoint_whose_write_stalls_has_the_state_before_the_next_step_bit_for_bit(
    one_rank, tmp_path, disk, path, request
):
    """The next step has the reference take the policy's place, and then moves the policy."""
    device = request.getfixturevalue("device") if path == "page-locked" else None
    options = dict(reference=ReferenceConfig(kind="ema", decay=0.5, kl_coef=0.1))
    learner = learner_of(tmp_path, **options)
    step(learner, 1)
    before = parameters(learner)
    writing = learner.checkpoints.begin(tmp_path / "trainer", 1)
    second = step(learner, 2)
    assert not writing.done()
    disk.set()
    writing.result()
    after = parameters(learner)
    learner.close()
    again = learner_of(
        tmp_path / "again", start=TrainerStart(folder=tmp_path / "trainer", step=1), **options
    )
    assert_same(parameters(again), before, rtol=0, atol=0)
    assert step(again, 2) == second
    assert_same(parameters(again), after, rtol=0, atol=0)
    again.close()
    # A fourth value a parameter is the reference's; beside them are the moments' step counts.
    assert device is None or 4 * 4 * PARAMETERS <= sum(device.locked) < 4 * 4 * PARAMETERS + 1000


def test_the_copy_takes_12_bytes_a_parameter_once_for_all_checkpoints(
    one_rank, tmp_path, device, monkeypatch
):
    copies, stage = [], DefaultStager.stage

    def recorded(stager, state):
        copies.append(stage(stager, state))
        return copies[-1]

    monkeypatch.setattr(DefaultStager, "stage", recorded)
    learner = learner_of(tmp_path)
    for number in (1, 2, 3):
        step(learner, number)
        learner.checkpoints.begin(tmp_path / "trainer", number).result()
        assert STATE <= sum(device.locked) < STATE + 1000, "the second and third copy take no more"
    pointers = [
        {
            name: value.data_ptr()
            for name, value in copy.items()
            if name in dict(learner.model.named_parameters())
        }
        for copy in copies
    ]
    assert len(pointers[0]) > 40 and pointers[0] == pointers[1] == pointers[2]
    learner.close()


def test_the_copy_is_queued_behind_the_threads_own_kernels_and_complete_before_it_is_written(
    one_rank, tmp_path, device, monkeypatch
):
    """Another thread or stream would have to wait for them by itself."""
    events, copy, save = device.events, torch.UntypedStorage.copy_, state_dict_saver.save

    def copied(target, source, non_blocking=None):
        events.append(
            f"copy by {threading.get_ident()}, {'queued' if non_blocking else 'blocking'}"
        )
        return copy(target, source, non_blocking)

    def written(*arguments, **options):
        events.append("write")
        return save(*arguments, **options)

    def no_stream(*arguments, **options):
        raise AssertionError("the copy is on a stream of its own")

    learner = learner_of(tmp_path)
    step(learner, 1)
    monkeypatch.setattr(torch.UntypedStorage, "copy_", copied)
    monkeypatch.setattr(state_dict_saver, "save", written)
    monkeypatch.setattr(torch, "Stream", no_stream)
    learner.checkpoints.begin(tmp_path / "trainer", 1).result()
    own = f"copy by {threading.get_ident()}, queued"
    copies = events.count(own)
    assert copies > 3 * 40 and events == [own] * copies + ["wait", "write"]
    monkeypatch.setattr(torch.UntypedStorage, "copy_", copy)
    learner.close()


# ---- memory that ends


class Ending:
    """Memory that ends after so many bytes: the tiny model's state takes as much of it as Qwen3-0.6B's would."""

    def __init__(self, limit: int):
        self.limit, self.taken = limit, 0

    def take(self, size: int, refusal: str) -> None:
        self.taken += size * QWEN3_0_6B // STATE
        if self.taken > self.limit:
            raise RuntimeError(refusal)


LIMITS = {"64 MB, as docker's": 64 * MIB, "6 GiB": 6 * GIB}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_checkpoint_takes_no_shared_memory_however_little_there_is(
    one_rank, tmp_path, device, monkeypatch, limit
):
    shared, new = Ending(limit), torch.UntypedStorage._new_shared

    def new_shared(size, **options):
        shared.take(
            size,
            "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
        )
        return new(size, **options)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", new_shared)
    learner = learner_of(tmp_path)
    step(learner, 1)
    learner.checkpoints.begin(tmp_path / "trainer", 1).result()
    second = step(learner, 2)
    learner.close()
    assert shared.taken == 0
    again = learner_of(tmp_path / "again", start=TrainerStart(folder=tmp_path / "trainer", step=1))
    assert step(again, 2) == second
    again.close()


def ends_after(monkeypatch, limit: int) -> Ending:
    """The memory that copies are made in."""
    memory, stage = Ending(limit), _state_dict_stager.StateDictStager._stage_untyped_storage

    def staged(stager, storage, non_blocking=False):
        if storage not in stager._cached_storage_mapping:
            memory.take(
                storage.nbytes(),
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
            )
        return stage(stager, storage, non_blocking)

    monkeypatch.setattr(_state_dict_stager.StateDictStager, "_stage_untyped_storage", staged)
    return memory


@pytest.mark.parametrize("path", ["page-locked", "plain"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_training_goes_on_where_a_hosts_memory_ends_and_saves_when_there_is_some_again(
    one_rank, tmp_path, monkeypatch, limit, path, request
):
    device = request.getfixturevalue("device") if path == "page-locked" else None
    memory = ends_after(monkeypatch, limit)
    learner = learner_of(tmp_path)
    for number in (1, 2):
        step(learner, number)
        error = learner.checkpoints.begin(tmp_path / "trainer", number).exception()
        assert isinstance(error, StagingError)
        wanted = "rank 0 can't copy its state into its host's memory: raise the limit of the host or container to"
        assert str(error).startswith(
            wanted
        ) and "(RuntimeError: DefaultCPUAllocator: can't allocate memory" in str(error)
        assert not (tmp_path / "trainer").exists()
        memory.taken = 0  # what was copied is freed
    memory.limit = QWEN3_0_6B + MIB
    third = step(learner, 3)
    learner.checkpoints.begin(tmp_path / "trainer", 3).result()
    assert third["loss"] and memory.taken >= QWEN3_0_6B
    fourth = step(learner, 4)
    learner.close()
    again = learner_of(tmp_path / "again", start=TrainerStart(folder=tmp_path / "trainer", step=3))
    assert step(again, 4) == fourth
    again.close()
    assert device is None or len(device.events) >= 1


def test_what_was_copied_before_memory_ended_is_freed(one_rank, tmp_path, monkeypatch):
    memory, made = ends_after(monkeypatch, 6 * GIB), []
    stage = _state_dict_stager.StateDictStager._stage_untyped_storage

    def recorded(stager, storage, non_blocking=False):
        copy = stage(stager, storage, non_blocking)
        made.append(torch.multiprocessing.reductions.StorageWeakRef(copy))
        return copy

    monkeypatch.setattr(_state_dict_stager.StateDictStager, "_stage_untyped_storage", recorded)
    learner = learner_of(tmp_path)
    step(learner, 1)
    failed = learner.checkpoints.begin(tmp_path / "trainer", 1)
    assert isinstance(failed.exception(), StagingError) and memory.taken > 6 * GIB
    assert len(made) > 40 and all(copy.expired() for copy in made)
    learner.close()


def test_where_page_locking_is_refused_the_copy_is_made_without_it(
    one_rank, tmp_path, device, monkeypatch, caplog
):
    taken = []
    monkeypatch.setattr(staging, "take_cuda_error", lambda: taken.append("error"))
    device.refuses = True
    learner = learner_of(tmp_path)
    step(learner, 1)
    learner.checkpoints.begin(tmp_path / "trainer", 1).result()
    device.refuses = False
    learner.checkpoints.begin(tmp_path / "trainer", 2).result()
    assert device.locked == [] and taken == ["error"], (
        "it is asked for once, and CUDA has forgotten the refusal"
    )
    (line,) = [
        record.getMessage() for record in caplog.records if "page-locked" in record.getMessage()
    ]
    assert line.startswith(
        "a checkpoint's copy can't be page-locked, so it takes longer: Registering memory failed"
    )
    again = learner_of(tmp_path / "again", start=TrainerStart(folder=tmp_path / "trainer", step=2))
    assert_same(parameters(again), parameters(learner), rtol=0, atol=0)
    again.close()
    learner.close()


def work_of_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    init_process_group(device="cpu", rank=rank, world_size=2, url=f"file://{folder}/store")
    learner = learner_of(folder)
    step(learner, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            ends_after(patch, 64 * MIB)
        error = learner.checkpoints.begin(Path(folder, "trainer"), 1).exception()
    assert isinstance(error, StagingError) and str(error).startswith(
        "rank 1 can't copy its state"
    ), error
    assert not Path(folder, "trainer").exists()
    learner.checkpoints.begin(Path(folder, "trainer"), 1).result()
    learner.close()
    dist.destroy_process_group()


def test_no_rank_waits_for_one_whose_hosts_memory_ended(tmp_path):
    run_ranks(work_of_a_rank, str(tmp_path), count=2)
    assert (tmp_path / "trainer/step-1/.metadata").is_file()
