"""torch 2.13.0: shards, shared GPU memory, saved buffers, unsafe pickles, compiler limits."""

import ctypes
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    StorageMeta,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.experiments.rl.errors import PeerGone


def local_shard(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset of this rank's shard in the whole tensor, and the shard's shape.

    ``torch.distributed.tensor._utils`` is private. DTensor has no public way to the offset; torch's
    own checkpoints use this function.
    """
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(shape)


@contextmanager
def _cuda_ipc() -> Iterator[None]:
    """Turn CUDA's error into a PeerGone that names both of its possible causes.

    CUDA raises the same error for memory that it refuses to share and for memory whose process has
    ended.
    """
    try:
        yield
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]  # the other lines are the same for every error
        raise PeerGone(
            f"the weights on a trainer's GPU can't be shared ({cause}); if no trainer process has "
            'ended, CUDA IPC is refused here: set generator.weights to "host"'
        ) from error


@_cuda_ipc()
def offered_memory(memory: torch.Tensor) -> tuple[Any, ...]:
    """Return the handle by which other processes of this host open the memory of a CUDA tensor.

    The tensor is all of its storage, and lives as long as this process. Call the function once for
    it: torch counts one reader, and would free the memory when the first of several closes it.

    Raises:
        PeerGone: CUDA refuses to share the memory.
    """
    return memory.untyped_storage()._share_cuda_()[1:]


@_cuda_ipc()
def opened_memory(offered: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """Return the memory that another process offers, as uint8 [N].

    The memory is closed with the last tensor that uses it: wait for the device before. A reader
    sees what was written before it opened the memory; for later writes the writer has to tell when
    they are done.

    ``torch.multiprocessing`` would take the device's number from the other process. Here it is this
    process's own, from which the memory is reached wherever it lies: CUDA opens memory of GPUs that
    this process does not see.

    Args:
        offered: handle from ``offered_memory``.
        device: device of this process that reads the memory.

    Raises:
        PeerGone: CUDA refuses to open the memory, or the other process has ended.
    """
    # The last argument leaves out torch's event of the offer, which each call would open and none
    # would close.
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *offered[:-1], False)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint of ``model`` has, by name.

    torch tells them from other buffers by a private set, or by a state dict, whose hooks gather
    what is fused.
    """
    not_persistent: set[str] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        not_persistent |= {f"{prefix}{name}" for name in module._non_persistent_buffers_set}
    return {name: buffer for name, buffer in model.named_buffers() if name not in not_persistent}


class PortableWriter(FileSystemWriter):
    """Writer of a distributed checkpoint that every Python reads.

    torch's own pickles the folder's ``Path``, which has another module in Python 3.13
    (``pathlib._local``). This one pickles its text.
    """

    def storage_meta(self) -> StorageMeta | None:
        meta = super().storage_meta()
        if meta is None or meta.checkpoint_id is None:
            return meta
        return replace(meta, checkpoint_id=os.fspath(meta.checkpoint_id))


_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    # Of checkpoints that torch's own writer wrote; Python 3.13 has the second module.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""Names in the ``.metadata`` of a distributed checkpoint that may be unpickled, by module."""


def check_pickles(folder: Path) -> None:
    """Read the pickles of a distributed checkpoint without running code that they may hold.

    torch unpickles ``.metadata`` and each saved object that is no tensor
    (`FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`), and offers no way to
    restrict that: a pickle may name any function and call it. Call this function before torch reads
    a checkpoint that may have been forged.

    Args:
        folder: the checkpoint.

    Raises:
        ValueError: a file holds something that no checkpoint of a run does. The error names the
            file.
    """
    # torch reads the other metadata files if the first is no good.
    for file in [folder / ".metadata", *folder.glob("__*.metadata")]:
        metadata = _unpickled(file)
        objects = {
            name
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        }
        for index, place in metadata.storage_data.items():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"{file} names a file elsewhere: {place.relative_path}")
            if index.fqn in objects:
                _check_object(folder / place.relative_path, place.offset, place.length, index.fqn)


def _unpickled(file: Path) -> Any:  # noqa: ANN401 - torch's Metadata, or what it was forged from
    """Return the unpickled metadata of a checkpoint, made of the known names alone.

    Raises:
        ValueError: the file names something else, or is no metadata.
    """

    def _memory_format(enum: object, member: str) -> Any:  # noqa: ANN401 - torch's private enum
        """Stand in for getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
        if enum is not _MEM_FORMAT_ENCODING or member not in _MEM_FORMAT_ENCODING.__members__:
            raise ValueError(f"{file} reads {enum!r}.{member}, which no checkpoint needs")
        return _MEM_FORMAT_ENCODING[member]

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's
            if (module, name) == ("builtins", "getattr"):
                return _memory_format
            if name not in _METADATA_NAMES.get(module, ()):
                raise ValueError(f"{file} names {module}.{name}, which no checkpoint needs")
            return super().find_class(module, name)

    try:
        with file.open("rb") as pickled:
            metadata = Restricted(pickled).load()
        metadata.state_dict_metadata.items()
        metadata.storage_data.items()
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ImportError,
        AttributeError,
        TypeError,
        IndexError,
        KeyError,
    ) as error:
        raise ValueError(f"{file} is no checkpoint's: {error}") from None
    return metadata


def _check_object(file: Path, offset: int, length: int, name: str) -> None:
    """Raise a ValueError if a saved object is no plain value."""
    with file.open("rb") as data:
        data.seek(offset)
        saved = io.BytesIO(data.read(length))
    try:
        torch.load(saved, weights_only=True)
    except Exception as error:  # noqa: BLE001 - the file may be forged, and raise anything
        raise ValueError(
            f"{file} holds no plain value as {name}: {' '.join(str(error).split())[:200]}"
        ) from None


def take_cuda_error() -> int:
    """Return the CUDA runtime's last error and clear it; 0 if there is none.

    torch has no call for it. The runtime is the library that this process has loaded: another copy
    of it has other errors. Where there is no driver, the runtime answers each call with 35.
    """
    libraries = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libcudart" in line
    }
    return max((ctypes.CDLL(path).cudaGetLastError() for path in libraries), default=0)


MAX_ENTRIES = 64
"""Maximum number of graphs that dynamo keeps for one code object.

All transformer blocks share one code object. Each row shape takes a graph for training and one for
scoring, twice that where the first block's input differs in kind from the others' (adapters, tensor
parallelism), and once more for a reference and for router replay: up to 18. At torch's own limit
of 8 a block that is compiled whole fails.
"""


def compile_each_shape() -> None:
    """Have torch.compile make a graph for each shape, in this process.

    By default the second shape's graph serves all lengths, and then compiled flex attention checks
    the bounds of each of its blocks.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = MAX_ENTRIES
