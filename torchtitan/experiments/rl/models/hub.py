"""A hub folder: its config.json, and the shapes of its weights, of which no tensor is read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from torchtitan.experiments.rl.errors import ConfigError, MissingError

_DTYPES = ("float32", "bfloat16", "float16")

INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FOLDER = "adapter"
"""Folder in that of a run's policy with its adapters as PEFT keeps them. The policy itself has them merged."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

Shape = tuple[int, ...]

_TRAINABLE = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, in the words of safetensors. Quantized weights have others."""

_NOT_PARAMETERS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that old checkpoints hold and that no model loads."""


def has_config(path: str) -> bool:
    """Whether ``path`` is a folder with a config.json, readable or not."""
    return os.path.isfile(os.path.join(path, "config.json"))


def is_adapter(path: str | Path) -> bool:
    """Return whether ``path`` is a folder of PEFT: adapters, without the model that they belong to."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))


def copy_beside(folder: Path, target: Path) -> None:
    """Copy the files of a hub folder that hold no weights: config.json, the tokenizer, its template."""
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target)


class HubConfig:
    """The fields of config.json. A missing or unsupported field is a ConfigError that names the folder and the field."""

    def __init__(self, path: str, values: dict[str, Any], *, field: str = "model.hf_assets_path"):
        self.path, self.field, self._values = path, field, values

    @classmethod
    def read(cls, path: str, *, field: str = "model.hf_assets_path") -> "HubConfig":
        """
        Args:
            field: config field that holds ``path``; errors name it.

        Raises:
            MissingError: no such folder, or no config.json in it.
            ConfigError: config.json can't be read, or holds no JSON object.
        """
        if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
            cure = "no such folder; download the model there, or name the folder that has it"
            if field == "model.hf_assets_path":
                name = Path(path).name
                example = f"Qwen/{name}" if name.startswith("Qwen") else "Qwen/Qwen3-0.6B"
                cure = f"no such folder: --model {example} downloads a model of the hub, and --model FOLDER takes one that is here"
            raise (ConfigError if os.path.exists(path) else MissingError)(field, path, cure)
        try:
            values = json.loads((Path(path) / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if is_adapter(path):
                cure = "a folder of PEFT, which has no whole model: merge it into its base by rl-export, or name the base"
                raise ConfigError(field, path, cure) from None
            kind = MissingError if isinstance(error, FileNotFoundError) else ConfigError
            raise kind(
                field, path, f"no readable config.json in it ({type(error).__name__})"
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                field, path, f"its config.json holds a {type(values).__name__}, not an object"
            )
        if {"tasks", "trainer", "model"} <= values.keys():
            cure = "a run or a checkpoint of one: its policies are the folders in the run's policy/, and rl-export makes others"
            raise ConfigError(field, path, cure)
        return cls(path, values, field=field)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise self.error(f"its config.json has no {name!r}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """``default`` where the field is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            ConfigError: the field holds something else, or is missing and there is no default.
        """
        return self._number(name, default, int, "a whole number")

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Raises as ``size`` does."""
        return self._number(name, default, int | float, "a number")

    def _number(self, name: str, default: float | None, kind: Any, wanted: str) -> Any:
        value = self.get(name, default) if default is not None else self[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
            raise self.error(f"its config.json has {name} = {value!r}, want {wanted} above 0")
        return value

    def require(self, name: str, supported: Any) -> None:
        """
        Raises:
            ConfigError: the field is there, and has another value than ``supported``.
        """
        value = self.get(name, supported)
        if value != supported:
            raise self.error(
                f"its config.json has {name} = {value!r}; this library trains such models with {supported!r} only"
            )

    def error(self, cure: str) -> ConfigError:
        """An error that names the folder."""
        return ConfigError(self.field, self.path, cure)

    @property
    def architecture(self) -> str:
        """The class of transformers that the weights are of; "" where the folder names none."""
        names = self.get("architectures", [])
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Of the weights on disk."""
        value = self.get("dtype") or self.get("torch_dtype", "float32")
        if value not in _DTYPES:
            raise self.error(
                f"its config.json has dtype = {value!r}; want one of {', '.join(_DTYPES)}"
            )
        return value

    @property
    def rope(self) -> "HubConfig":
        """The rotary embedding's fields, ``rope_type`` and, unless the folder leaves it out, ``rope_theta`` among them.

        transformers 5 writes them to ``rope_parameters``, version 4 to ``rope_scaling`` with ``rope_theta`` beside it.
        """
        found = self.get("rope_parameters") or self.get("rope_scaling", {})
        if not isinstance(found, dict):
            raise self.error(f"its config.json has rotary parameters {found!r}, want an object")
        values = dict(found)
        values.setdefault("rope_type", values.get("type", "default"))
        if self.get("rope_theta"):
            values["rope_theta"] = self["rope_theta"]
        return HubConfig(self.path, values, field=self.field)


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
            raise ConfigError(
                field,
                folder,
                f"its weights have no {name!r}, which the model of its config.json needs",
            )
        if found[name] != shape:
            cure = f"{name!r} has shape {list(found[name])} in its weights, and config.json asks for {list(shape)}"
            raise ConfigError(field, folder, f"{cure}: they are of different models")
    for name in found.keys() - expected.keys() - {"lm_head.weight"}:  # a tied head may be saved too
        if not name.endswith(_NOT_PARAMETERS):
            cure = f"its weights have {name!r}, which the model of its config.json does not: they are of different models"
            raise ConfigError(field, folder, cure)


def read_shapes(folder: str, *, field: str) -> dict[str, Shape]:
    """Shape of each tensor in the folder's safetensors files. Raises as ``check_weights`` does."""
    index = Path(folder) / INDEX_FILE
    files = sorted(Path(folder).glob("*.safetensors"))
    if index.is_file():
        files = [Path(folder) / name for name in _files_of(index, folder, field=field)]
    if not files:
        raise MissingError(
            field, folder, "has no weights (*.safetensors); download the whole model"
        )
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes |= read_header(file, folder, field=field)
    return shapes


def read_header(file: Path, folder: str, *, field: str) -> dict[str, Shape]:
    """Return the shape of each tensor in a safetensors file of a folder. Raises as ``check_weights`` does."""
    shapes: dict[str, Shape] = {}
    try:
        with safe_open(
            file, framework="np"
        ) as weights:  # torch would map the file writable, against the memory there is
            for name in weights.keys():  # noqa: SIM118  # it is no dict
                part = weights.get_slice(name)
                if (dtype := part.get_dtype()) not in _TRAINABLE:
                    cure = f"its tensor {name!r} has dtype {dtype}; want one of {', '.join(_TRAINABLE)}"
                    raise ConfigError(field, folder, f"{file.name}: {cure}")
                shapes[name] = tuple(part.get_shape())
    except FileNotFoundError:
        raise MissingError(
            field, folder, f"has no {file.name}, which {INDEX_FILE} names; download it"
        ) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            field,
            folder,
            f"{file.name} is no readable safetensors file ({error}); download it again",
        ) from None
    return shapes


def _files_of(index: Path, folder: str, *, field: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cure = f"{INDEX_FILE} can't be read ({type(error).__name__}: {error}); download it again"
        raise ConfigError(field, folder, cure) from None
