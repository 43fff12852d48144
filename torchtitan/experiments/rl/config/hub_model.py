"""``--model``: a folder in hub format, or the name of a model of the hub, which is downloaded."""

import os
import re
import sys

from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, without_hub
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import write_line

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
"""Of a model's repository. Others hold the same weights in formats that are not read here."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_folder(model: str) -> str:
    """The folder that holds ``model``. Downloads a model of the hub into the hub's own cache, with its progress on stderr.

    Raises:
        ConfigError: it is neither a folder nor a model of the hub that can be downloaded or was before.
    """
    if os.path.isdir(model):
        return os.path.abspath(model)
    if not _NAME.fullmatch(model):
        raise ConfigError("--model", model, "no such folder, and no name of the hub, such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download

    fault = hub_fault()
    if fault is not None:
        try:
            with without_hub():
                return snapshot_download(model, allow_patterns=FILES)
        except Exception:  # not in the cache, or not whole
            name = model.partition("/")[2]
            download = f"`hf download {model} --local-dir {name}`"
            cure = f"where there is a hub, run {download}, bring the folder {name} here, and name it"
            cure = f"no such folder, and never downloaded here ({fault}): {cure}"
            raise ConfigError("--model", model, cure) from None
    write_line(sys.stderr, f"model       {model}: looking it up in the hub, and downloading what is not here yet")
    try:
        return snapshot_download(model, allow_patterns=FILES)
    except Exception as error:  # the hub, the network and the disk raise types of their own
        cause = " ".join(str(error).split())[:300]
        raise ConfigError("--model", model, f"can't be downloaded: {type(error).__name__}: {cause}") from error
