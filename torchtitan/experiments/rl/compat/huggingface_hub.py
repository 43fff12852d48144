"""huggingface_hub 1.33 and datasets 4.7: tells whether there is a hub, and works without one.

Both retry for a minute if no hub answers. Both read HF_HUB_OFFLINE when they are imported, into a
constant that they look at from then on.
"""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
"""Time that the hub has to answer, in seconds."""


def hub_fault() -> str | None:
    """Return why the hub can't be asked, in one line, or None if it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=LIMIT_S).close()
    except urllib.error.HTTPError:  # an answer
        return None
    except (OSError, ValueError) as error:
        return f"no hub answers at {constants.ENDPOINT}: {getattr(error, 'reason', None) or error}"
    return None


@contextmanager
def without_hub() -> Iterator[None]:
    """Within the context, let both packages use their downloads alone and ask no hub."""
    from huggingface_hub import constants

    modules: list[Any] = [constants]
    if "datasets.config" in sys.modules:
        modules.append(sys.modules["datasets.config"])
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, offline in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = offline


def push_fault(name: str) -> str | None:
    """Return why a folder can't be pushed to the model ``name``, in one line.

    Returns None if the hub answers and knows the token.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return f"no name of a model, such as me/my-model: {' '.join(str(error).split())}"
    if get_token() is None:
        return "there is no token: run `hf auth login`, or set HF_TOKEN"
    fault = hub_fault()
    if fault is not None:
        return f"{fault}; leave it out, and push the saved policy later: `hf upload {name} FOLDER`"
    try:
        HfApi().whoami()
    except Exception as error:  # noqa: BLE001 - the hub's own types, and the network's
        return f"the hub refuses the token: {' '.join(str(error).split())[:200]}"
    return None


def push_folder(folder: Path, name: str) -> str:
    """Upload a hub folder to the model ``name``, and return the model's URL.

    The model is created if the hub does not have it.

    Raises:
        Exception: an error of the hub, the network or the disk.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    url = api.create_repo(name, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=folder)
    return str(url)
