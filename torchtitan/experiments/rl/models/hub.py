"""A folder in hub format: the fields of its config.json, and the shapes of its weights.

Of the weights only the headers are read, no tensor.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from torchtitan.experiments.rl.errors import ConfigError, MissingError

_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that config.json may name."""

INDEX_FILE = "model.safetensors.index.json"
"""File that names the safetensors file of each tensor."""
ADAPTER_FOLDER = "adapter"
"""Folder with a run's adapters in PEFT's format, inside the folder of the run's policy.

The policy itself has the adapters merged."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file with rank, alpha and targets of an adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""PEFT's file with the tensors of an adapter."""

Shape = tuple[int, ...]

_TRAINABLE = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be trained, by safetensors' names. Quantized weights have others."""

_NOT_PARAMETERS = ("rotary_emb.inv_freq",)
"""Suffixes of the names of tensors that old checkpoints hold and no model loads."""


def has_config(path: str) -> bool:
    """Return whether ``path`` is a folder with a config.json, readable or not."""
    return os.path.isfile(os.path.join(path, "config.json"))


def is_adapter(path: str | Path) -> bool:
    """Return whether ``path`` is a PEFT folder: adapters without the model they belong to."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))


def copy_beside(folder: Path, target: Path) -> None:
    """Copy the files of a hub folder that hold no weights: config.json, tokenizer, template."""
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target)


class HubConfig:
    """The fields of a config.json.

    A missing or unsupported field raises a ConfigError that names the folder and the field.
    """

    def __init__(self, path: str, values: dict[str, Any], *, field: str = "model.hf_assets_path"):
        self.path = path
        """The hub folder."""
        self.field = field
        """Config field that holds ``path``; errors name it."""
        self._values = values

    @classmethod
    def read(cls, path: str, *, field: str = "model.hf_assets_path") -> "HubConfig":
        """Read the config.json of a hub folder.

        Args:
            path: the folder.
            field: config field that holds ``path``; errors name it.

        Raises:
            MissingError: there is no such folder, or no config.json in it.
            ConfigError: config.json can't be read or holds no JSON object, or the folder holds an
                adapter or a run instead of a model.
        """
        if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
            kind = ConfigError if os.path.exists(path) else MissingError
            raise kind(field, path, _cure_of_missing_folder(path, field))
        try:
            values = json.loads((Path(path) / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if is_adapter(path):
                cure = (
                    "a folder of PEFT, which has no whole model: merge it into its base by "
                    "rl-export, or name the base"
                )
                raise ConfigError(field, path, cure) from None
            kind = MissingError if isinstance(error, FileNotFoundError) else ConfigError
            cure = f"no readable config.json in it ({type(error).__name__})"
            raise kind(field, path, cure) from None
        if not isinstance(values, dict):
            cure = f"its config.json holds a {type(values).__name__}, not an object"
            raise ConfigError(field, path, cure)
        if {"tasks", "trainer", "model"} <= values.keys():
            cure = (
                "a run or a checkpoint of one: its policies are the folders in the run's policy/, "
                "and rl-export makes others"
            )
            raise ConfigError(field, path, cure)
        return cls(path, values, field=field)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Return a field's value, or raise a ConfigError if the field is missing."""
        if name not in self._values:
            raise self.error(f"its config.json has no {name!r}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """Return a field's value, or ``default`` if the field is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field that holds a whole number above 0.

        Raises:
            ConfigError: the field holds something else, or is missing and there is no default.
        """
        return self._number(name, default, int, "a whole number")

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a field that holds a finite number above 0. Raises as ``size`` does."""
        return self._number(name, default, (int, float), "a number")

    def _number(
        self, name: str, default: float | None, kind: type | tuple[type, ...], wanted: str
    ) -> Any:  # noqa: ANN401 - a ``kind``
        value: Any = self.get(name, default) if default is not None else self[name]
        is_of_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_of_kind or not 0 < value < float("inf"):
            raise self.error(f"its config.json has {name} = {value!r}, want {wanted} above 0")
        return value

    def require(self, name: str, supported: Any) -> None:  # noqa: ANN401 - JSON
        """Raise if a field has another value than the one that is supported.

        Raises:
            ConfigError: the field is there, and is not ``supported``.
        """
        value = self.get(name, supported)
        if value != supported:
            raise self.error(
                f"its config.json has {name} = {value!r}, and torchtitan's model {supported!r} "
                'only: set model.trained_by to "transformers"'
            )

    def error(self, cure: str) -> ConfigError:
        """Return an error that names the folder."""
        return ConfigError(self.field, self.path, cure)

    @property
    def architecture(self) -> str:
        """Name of the weights' model class in transformers; "" if the folder names none."""
        names = self.get("architectures", [])
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Dtype of the weights on disk."""
        value = self.get("dtype") or self.get("torch_dtype", "float32")
        if value not in _DTYPES:
            raise self.error(
                f"its config.json has dtype = {value!r}; want one of {', '.join(_DTYPES)}"
            )
        return value

    @property
    def rope(self) -> "HubConfig":
        """Fields of the rotary embedding.

        ``rope_type`` is always among them, and ``rope_theta`` if the folder gives it. transformers
        5 writes them to ``rope_parameters``, version 4 to ``rope_scaling`` with ``rope_theta``
        beside it.
        """
        parameters = self.get("rope_parameters") or self.get("rope_scaling", {})
        if not isinstance(parameters, dict):
            raise self.error(
                f"its config.json has rotary parameters {parameters!r}, want an object"
            )
        values = dict(parameters)
        values.setdefault("rope_type", values.get("type", "default"))
        if self.get("rope_theta"):
            values["rope_theta"] = self["rope_theta"]
        return HubConfig(self.path, values, field=self.field)


def _cure_of_missing_folder(path: str, field: str) -> str:
    """Return the advice on a hub folder that is not there."""
    if field != "model.hf_assets_path":
        return "no such folder; download the model there, or name the folder that has it"
    name = Path(path).name
    example = f"Qwen/{name}" if name.startswith("Qwen") else "Qwen/Qwen3-0.6B"
    return (
        f"no such folder: --model {example} downloads a model of the hub, and --model FOLDER takes "
        "one that is here"
    )


def check_weights(folder: str, expected: dict[str, Shape] | None, *, field: str) -> None:
    """Compare the tensors of the folder's safetensors files with those that the model needs.

    Args:
        folder: the hub folder.
        expected: shape by hub name, from ``hub_shapes``. None checks only that the headers can be
            read.
        field: config field that holds ``folder``; errors name it.

    Raises:
        MissingError: the folder has no safetensors files.
        ConfigError: a header can't be read, a file is cut off, or a tensor is missing, unknown or
            of another shape.
    """
    shapes = read_shapes(folder, field=field)
    if expected is None:
        return
    for name, shape in expected.items():
        if name not in shapes:
            cure = f"its weights have no {name!r}, which the model of its config.json needs"
            raise ConfigError(field, folder, cure)
        if shapes[name] != shape:
            cure = (
                f"{name!r} has shape {list(shapes[name])} in its weights, and config.json asks for "
                f"{list(shape)}: they are of different models"
            )
            raise ConfigError(field, folder, cure)
    # A folder may hold a tied head beside the embedding.
    for name in shapes.keys() - expected.keys() - {"lm_head.weight"}:
        if not name.endswith(_NOT_PARAMETERS):
            cure = (
                f"its weights have {name!r}, which the model of its config.json does not: they are "
                "of different models"
            )
            raise ConfigError(field, folder, cure)


def read_shapes(folder: str, *, field: str) -> dict[str, Shape]:
    """Return the shape of each tensor in the folder's safetensors files.

    Raises as ``check_weights`` does.
    """
    index = Path(folder) / INDEX_FILE
    if index.is_file():
        files = [Path(folder) / name for name in _files_of(index, folder, field=field)]
    else:
        files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        cure = "has no weights (*.safetensors); download the whole model"
        raise MissingError(field, folder, cure)
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes |= read_header(file, folder, field=field)
    return shapes


def read_header(file: Path, folder: str, *, field: str) -> dict[str, Shape]:
    """Return the shape of each tensor in one safetensors file of a folder.

    Raises as ``check_weights`` does.
    """
    shapes: dict[str, Shape] = {}
    try:
        # torch would map the file writable, which counts against the memory that is available.
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no dict
                header = weights.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _TRAINABLE:
                    cure = (
                        f"{file.name}: its tensor {name!r} has dtype {dtype}; want one of "
                        f"{', '.join(_TRAINABLE)}"
                    )
                    raise ConfigError(field, folder, cure)
                shapes[name] = tuple(header.get_shape())
    except FileNotFoundError:
        cure = f"has no {file.name}, which {INDEX_FILE} names; download it"
        raise MissingError(field, folder, cure) from None
    except (OSError, SafetensorError) as error:
        cure = f"{file.name} is no readable safetensors file ({error}); download it again"
        raise ConfigError(field, folder, cure) from None
    return shapes


def _files_of(index: Path, folder: str, *, field: str) -> list[str]:
    """Return the names of the safetensors files that an index names."""
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cure = f"{INDEX_FILE} can't be read ({type(error).__name__}: {error}); download it again"
        raise ConfigError(field, folder, cure) from None
