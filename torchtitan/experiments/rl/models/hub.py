"""config.json of a hub folder."""

import json
from pathlib import Path
from typing import Any, Literal

from torchtitan.experiments.rl.errors import ConfigError


class HubConfig:
    """The fields of config.json. What is missing or not supported is a ConfigError that names the folder and the field."""

    def __init__(self, path: str, values: dict[str, Any]):
        self.path, self._values = path, values

    @classmethod
    def read(cls, path: str) -> "HubConfig":
        """
        Raises:
            ConfigError: no such folder, or no readable config.json in it.
        """
        if not Path(path).is_dir():
            cure = "no such folder; download the model there, or name the folder that has it"
            raise ConfigError("model.hf_assets_path", path, cure)
        try:
            return cls(path, json.loads((Path(path) / "config.json").read_text()))
        except (OSError, json.JSONDecodeError) as error:
            cure = f"no readable config.json in it ({type(error).__name__})"
            raise ConfigError("model.hf_assets_path", path, cure) from None

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise ConfigError("model.hf_assets_path", self.path, f"its config.json has no {name!r}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """``default`` where the field is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def require(self, name: str, supported: Any) -> None:
        """
        Raises:
            ConfigError: the field is there, and has another value than ``supported``.
        """
        value = self.get(name, supported)
        if value != supported:
            cure = f"its config.json has {name} = {value!r}; this library trains such models with {supported!r} only"
            raise ConfigError("model.hf_assets_path", self.path, cure)

    @property
    def architecture(self) -> str:
        """The class of transformers that the weights are of; "" where the folder names none."""
        return next(iter(self.get("architectures", [])), "")

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Of the weights on disk."""
        return self.get("dtype") or self.get("torch_dtype", "float32")

    @property
    def rope(self) -> "HubConfig":
        """The rotary embedding's fields, ``rope_type`` and, unless the folder leaves it out, ``rope_theta`` among them.

        transformers 5 writes them to ``rope_parameters``, version 4 to ``rope_scaling`` with ``rope_theta`` beside it.
        """
        values = dict(self.get("rope_parameters") or self.get("rope_scaling", {}))
        values.setdefault("rope_type", values.get("type", "default"))
        if self.get("rope_theta"):
            values["rope_theta"] = self["rope_theta"]
        return HubConfig(self.path, values)
