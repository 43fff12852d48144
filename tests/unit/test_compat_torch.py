"""The private API of torch that the library uses is there and does what the library needs. An upgrade that breaks it
fails here, by its name."""

import ctypes
import enum
import inspect
import os
import pickle
import pickletools
import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing import reductions
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.experiments.rl.compat.torch import (
    PortableWriter,
    check_pickles,
    compile_each_shape,
    local_shard,
    offered_memory,
    opened_memory,
    persistent_buffers,
    take_cuda_error,
)
from torchtitan.experiments.rl.errors import PeerGone


def test_memory_of_a_gpu_is_shared_as_torchs_own_multiprocessing_shares_it():
    """No GPU runs here. What ``_share_cuda_`` gives behind the device is what ``_new_shared_cuda`` takes there, and the last is
    whether to wait for an event."""
    offers, opens = (
        inspect.getsource(of) for of in (reductions.reduce_tensor, reductions.rebuild_cuda_tensor)
    )
    given = re.search(r"\(\s*device,([^()]*)\) = storage._share_cuda_\(\)", offers)[1]
    taken = re.search(r"_new_shared_cuda\(\s*storage_device,([^()]*)\)", opens)[1]
    assert given.split() == [word.replace("storage_handle", "handle") for word in taken.split()]
    assert taken.split()[-1] == "event_sync_required,"
    memory, gpu = torch.zeros(8, dtype=torch.uint8), torch.device("cuda", 0)
    for share in (
        lambda: offered_memory(memory),
        lambda: opened_memory((b"", 8, 0, b"", 0, b"", True), gpu),
    ):
        with pytest.raises(PeerGone) as caught:
            share()
        said, _, cure = str(caught.value).partition("); ")
        assert re.fullmatch(r"the weights on a trainer's GPU can't be shared \(.*CUDA.*", said)
        assert (
            cure
            == 'if no trainer process has ended, CUDA IPC is refused here: set generator.weights to "host"'
        )


@pytest.fixture
def third_of_four():
    """This process is rank 2 of 4; the others are not there, and nothing is sent."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(local: torch.Tensor, mesh, *placements, shape: tuple[int, int]) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def test_compute_local_shape_and_global_offset_gives_the_shard_of_this_rank(third_of_four):
    line = init_device_mesh("cpu", (4,))
    # 10 rows over 4 ranks: 3, 3, 3, 1.
    assert local_shard(sharded(torch.zeros(3, 5), line, Shard(0), shape=(10, 5))) == (
        (6, 0),
        (3, 5),
    )
    # 2 rows over 4 ranks: nothing for this one.
    assert local_shard(sharded(torch.zeros(0, 5), line, Shard(0), shape=(2, 5)))[1] == (0, 5)
    assert local_shard(sharded(torch.zeros(10, 5), line, Replicate(), shape=(10, 5))) == (
        (0, 0),
        (10, 5),
    )
    # Ranks 0, 1 above 2, 3: this is the second row's first.
    square = init_device_mesh("cpu", (2, 2))
    assert local_shard(sharded(torch.zeros(5, 2), square, Shard(0), Shard(1), shape=(10, 4))) == (
        (5, 0),
        (5, 2),
    )
    assert local_shard(
        sharded(torch.zeros(10, 2), square, Replicate(), Shard(1), shape=(10, 4))
    ) == ((0, 0), (10, 2))


# ---- checkpoints that may be forged


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, made: Path):
        self._made = made

    def __reduce__(self):
        return os.mkdir, (str(self._made),)


def save(folder: Path, *, writer=dcp.FileSystemWriter, **values) -> Path:
    state = {
        "weight": torch.arange(6.0).view(2, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "step": 3,
        "betas": (0.9, None),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state | values, storage_writer=writer(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, PortableWriter])
def test_an_honest_checkpoint_names_nothing_but_what_is_allowed(tmp_path, writer):
    """torch's own writer names the path of the folder, as checkpoints of earlier versions do."""
    check_pickles(save(tmp_path / "step-1", writer=writer))


def test_a_checkpoint_names_no_class_of_a_module_that_another_python_calls_otherwise(tmp_path):
    """A Path is of ``pathlib`` in Python 3.11, 3.12 and 3.14, and of ``pathlib._local`` in 3.13."""
    folder = save(tmp_path / "step-1", writer=PortableWriter)
    written = (folder / ".metadata").read_bytes()
    words = {word for _, word, _ in pickletools.genops(written) if isinstance(word, str)}
    assert str(folder) in words and not [word for word in words if word.startswith("pathlib")]
    loaded = {"weight": torch.zeros(2, 3)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded["weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


class OlderPickler(pickle.Pickler):
    """Pickles an enum's member as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    def reducer_override(self, value: object):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_a_checkpoint_of_the_python_of_debian_12_is_read_by_every_python(tmp_path):
    folder = save(tmp_path / "step-1", writer=PortableWriter)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        OlderPickler(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    check_pickles(folder)
    loaded = {"weight": torch.zeros(2, 3)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded["weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("holder", "attribute"),
    [
        (Metadata, "__init__"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, "value"),
    ],
)
def test_an_attribute_that_is_no_memory_format_is_refused(tmp_path, holder, attribute):
    class Attribute:
        def __reduce__(self):
            return getattr, (holder, attribute)

    folder = save(tmp_path / "step-1", writer=PortableWriter)
    (folder / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(ValueError, match=rf"\.metadata reads .*\.{attribute}, which no checkpoint"):
        check_pickles(folder)


def test_a_forged_checkpoint_is_refused_before_what_it_names_is_called(tmp_path):
    made = tmp_path / "made"
    in_metadata = save(tmp_path / "step-1")
    (in_metadata / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    in_data = save(tmp_path / "step-2", noise=Evil(made))
    beside = save(tmp_path / "step-3")
    (beside / "__0.metadata").write_bytes(pickle.dumps(Evil(made)))
    elsewhere = save(tmp_path / "step-4")
    metadata = pickle.loads((elsewhere / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../step-2/__0_0.distcp"
    (elsewhere / ".metadata").write_bytes(pickle.dumps(metadata))
    for folder, said in {
        in_metadata: r"\.metadata names posix\.mkdir, which no checkpoint needs",
        in_data: r"__0_0\.distcp holds no plain value as noise",
        beside: r"__0\.metadata names posix\.mkdir",
        elsewhere: r"names a file elsewhere: \.\./step-2",
    }.items():
        with pytest.raises(ValueError, match=said):
            check_pickles(folder)
    assert not made.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"noise": None}, checkpoint_id=in_data, no_dist=True)
    assert made.exists(), (
        "torch unpickles objects without restriction no more: check_pickles need not read them"
    )


def test_a_file_that_is_no_pickle_is_refused_as_such(tmp_path):
    folder = save(tmp_path / "step-1")
    of_3_13 = b"cpathlib._local\nPosixPath\n."  # other Pythons have no such module
    for data in (b"", b"hello", pickle.dumps({}), pickle.dumps(3), of_3_13):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(ValueError, match="is no checkpoint's"):
            check_pickles(folder)


def test_the_last_error_of_the_loaded_cuda_runtime_is_taken_once(tmp_path):
    """A stand-in for libcudart, with an error that a call has left."""
    source, library = tmp_path / "cudart.c", tmp_path / "libcudart.so.13"
    source.write_text(
        "static int last = 801; int cudaGetLastError(void) { int code = last; last = 0; return code; }"
    )
    # torch's CUDA build has loaded a runtime. Where there is no driver, it answers each call with that error.
    without_driver = 35
    before = take_cuda_error()
    assert before in (0, without_driver) and take_cuda_error() == before
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    ctypes.CDLL(str(library))
    assert (take_cuda_error(), take_cuda_error()) == (801, before)


def test_buffers_that_are_not_persistent_are_left_out_of_what_is_saved():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    model[0].register_buffer("also_passing", torch.zeros(1), persistent=False)
    parameters = {name for name, _ in model.named_parameters()}
    assert set(persistent_buffers(model)) == set(model.state_dict()) - parameters != set()


@torch._dynamo.config.patch(automatic_dynamic_shapes=True, recompile_limit=8)  # and puts them back
def test_each_shape_is_compiled_for_itself_however_many_there_are():
    compile_each_shape()
    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(value.shape) for value in inputs])
        return graph.forward

    doubled = torch.compile(lambda values: values * 2, backend=backend, fullgraph=True)
    lengths = range(3, 15)  # more than the 8 graphs at which torch gives up by default
    for length in (*lengths, 4):
        assert len(doubled(torch.ones(length))) == length
    assert graphs == [[(length,)] for length in lengths]
