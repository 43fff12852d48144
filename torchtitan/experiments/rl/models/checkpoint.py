"""The weights of a hub folder, as the headers of its safetensors files describe them. No tensor is read."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.protocols.model_spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"

Shape = tuple[int, ...]

_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header, little-endian."""
_MAX_HEADER_BYTES = 100 * 2**20
"""The safetensors library refuses longer headers."""
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element. Quantized weights have other types, and can't be trained."""
_NOT_PARAMETERS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that old checkpoints hold and that no model loads."""


def check_weights(folder: str, expected: dict[str, Shape] | None, *, field: str) -> None:
    """Compare the tensors of the folder's safetensors files with those that the model needs.

    Args:
        expected: shape by hub name, from ``hub_shapes``. None: check only that the headers can be read.

    Raises:
        MissingError: the folder has no safetensors files.
        ConfigError: a header can't be read, a file is cut off, a tensor is missing, unknown, or has another shape.
    """
    found = read_shapes(folder, field=field)
    if expected is None:
        return
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(field, folder, f"its weights have no {name!r}, which the model of its config.json needs")
        if found[name] != shape:
            cure = f"{name!r} has shape {list(found[name])} in its weights, and config.json asks for {list(shape)}"
            raise ConfigError(field, folder, f"{cure}: they are of different models")
    for name in found.keys() - expected.keys() - {"lm_head.weight"}:  # a tied head may be saved too
        if not name.endswith(_NOT_PARAMETERS):
            cure = f"its weights have {name!r}, which the model of its config.json does not: they are of different models"
            raise ConfigError(field, folder, cure)


def hub_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shape of each parameter by its hub name; a tied head is not named. Nothing is allocated."""
    with torch.device("meta"):
        state = spec.model.build().state_dict()
    assert spec.state_dict_adapter is not None, "every family has one"
    return {name: tuple(tensor.shape) for name, tensor in spec.state_dict_adapter(spec.model, None).to_hf(state).items()}


def read_shapes(folder: str, *, field: str) -> dict[str, Shape]:
    """Shape of each tensor in the folder's safetensors files. Raises as ``check_weights`` does."""
    index = Path(folder) / INDEX_FILE
    files = sorted(path for path in Path(folder).glob("*.safetensors"))
    if index.is_file():
        files = [Path(folder) / name for name in _files_of(index, folder, field=field)]
    if not files:
        raise MissingError(field, folder, "has no weights (*.safetensors); download the whole model")
    shapes: dict[str, Shape] = {}
    for file in files:
        try:
            shapes |= _shapes_in(file)
        except FileNotFoundError:
            raise MissingError(field, folder, f"has no {file.name}, which {INDEX_FILE} names; download it") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            cause = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ConfigError(
                field, folder, f"{file.name} is no readable safetensors file ({cause}); download it again"
            ) from None
    return shapes


def _files_of(index: Path, folder: str, *, field: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cure = f"{INDEX_FILE} can't be read ({type(error).__name__}: {error}); download it again"
        raise ConfigError(field, folder, cure) from None


def _shapes_in(file: Path) -> dict[str, Shape]:
    """
    Raises:
        OSError: the file can't be read.
        ValueError: its header is not one of safetensors, or describes more bytes than the file has.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"its header claims {length:,} bytes, the file has {size:,}")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {name: _shape_of(name, entry, size - _LENGTH_BYTES - length) for name, entry in header.items()}


def _shape_of(name: str, entry: dict[str, Any], data_bytes: int) -> Shape:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype}; want one of {', '.join(_DTYPES)}")
    if not 0 <= start <= end <= data_bytes:
        raise ValueError(f"tensor {name!r} ends at byte {end:,} of {data_bytes:,}: the file is cut off")
    if end - start != math.prod(shape) * _DTYPES[dtype]:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has {end - start:,} bytes")
    return shape
