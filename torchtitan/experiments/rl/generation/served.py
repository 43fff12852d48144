"""Asks a server that a command's option names what it has, before anything depends on it."""

from typing import Any
from urllib.parse import urlsplit

import httpx
from transformers import AutoTokenizer

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel

ASK_TIMEOUT_S = 20.0
PROBE = "The sum of 4, 17 and 260 is 281.\n\t{'größer': [数, 🙂]} don't\n\nI'LL  see_what  x+=1"
"""Text that tokenizers divide differently."""


def served_model(url: str, *, field: str, name: str | None, key_env: str | None, tokenizer_path: str) -> FrozenModel:
    """The model behind a server.

    Args:
        field: the option that gives the URL.
        name: what the server calls the model. None: the only one that it has.
        key_env: environment variable with the server's key.
        tokenizer_path: folder of the tokenizer that prompts are made with.

    Raises:
        ConfigError: the server can't be asked, has no such model or several, or its tokenizer is another one.
    """
    model = FrozenModel(name=name or "?", base_url=url, api_key_env=key_env)
    try:
        model.validate(field=field)
        model.api_key()
    except ConfigError as error:
        raise ConfigError("--endpoint-key-env" if error.field.endswith("key_env") else field, error.value, error.cure) from None
    except LookupError:
        raise ConfigError("--endpoint-key-env", key_env, "is not set: export the server's key in this variable") from None
    names = _names(model, field)
    if name is None and len(names) != 1:
        has = f"the server has {len(names)} models ({_some(model, names)})"
        raise ConfigError(field, url, f"{has}: name one with --endpoint-model")
    if name is not None and names and name not in names:
        raise ConfigError("--endpoint-model", name, f"the server at {url} has no such model; it has {_some(model, names)}")
    model.name = name or names[0]
    check_served_tokenizer(model, field, tokenizer_path, cure="name a folder with that tokenizer by --model.hf-assets-path")
    return model


def _names(model: FrozenModel, field: str) -> list[str]:
    """Names of the server's models; empty where it tells none and the model has a name already."""
    url = model.base_url
    try:
        answer = _ask(model, "GET", f"{url.rstrip('/')}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cure = f"no server answers there ({type(error).__name__}): start it, wait until it is up, or correct host and port"
        raise ConfigError(field, url, cure) from None
    if answer.status_code in (401, 403):
        refused = f"it refuses the key in {model.api_key_env}" if model.api_key_env else "it wants a key"
        cure = f"{refused} (HTTP {answer.status_code}): name the environment variable that holds it with --endpoint-key-env"
        raise ConfigError(field, url, cure)
    try:
        names = [str(entry["id"]) for entry in answer.json()["data"]] if answer.status_code == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if not names and model.name == "?":
        seen = f"it lists no models (HTTP {answer.status_code} at {url.rstrip('/')}/models)"
        cure = 'want the address of the API with its version, such as "http://localhost:8000/v1", or a name by --endpoint-model'
        raise ConfigError(field, url, f"{seen}: {cure}")
    return names


def check_served_tokenizer(model: FrozenModel, field: str, tokenizer_path: str, *, cure: str) -> None:
    """Tokens go to the server and come back, so both sides must mean the same by them. Not every server can be asked: vLLM has
    ``/tokenize`` beside its API.

    Raises:
        ConfigError: the server divides a text into other tokens.
    """
    root = urlsplit(model.base_url)
    url = f"{root.scheme}://{root.netloc}/tokenize"
    try:
        answer = _ask(model, "POST", url, json={"model": model.name, "prompt": PROBE, "add_special_tokens": False})
        theirs = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return
    ours = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True).encode(PROBE, add_special_tokens=False)
    if theirs is not None and theirs != ours:
        seen = f"its model {model.name!r} has another tokenizer than {tokenizer_path}, and tokens go in and out"
        raise ConfigError(field, model.base_url, f"{seen}: {cure}")


def _ask(model: FrozenModel, method: str, url: str, **request: Any) -> httpx.Response:
    key = model.api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, url, headers=headers, timeout=ASK_TIMEOUT_S, **request)


def _some(model: FrozenModel, names: list[str]) -> str:
    return model.quoted(", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) if names else "none"
