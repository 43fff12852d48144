"""References by which a config names a model.

    LivePolicy     the policy itself
    FrozenModel    a server somewhere
    HostedModel    a checkpoint that the run serves itself

A config that needs a model has a field for a reference, such as an algorithm's teacher or a
rubric's judge. The object that the config builds asks for the model in its ``setup``, by
``policy.frozen(reference)``. The controller walks ``config.tasks`` and hosts every HostedModel that
it finds, so a model that is to be hosted must be a field of a config, not a value inside a
function.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import MinLen

from torchtitan.experiments.rl.bounds import (
    Changeable,
    Cure,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProcessCount,
    walk,
)
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.generation.engine import EngineConfig
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.rollouts.policy import ModelReference

SERVER_TEXT = "TORCHTITAN_RL_SERVER_TEXT"
"""Environment variable: "1" shows the text of every server's errors.

Otherwise the text of servers that were sent a key is left out."""
EXCERPT = 300
"""Maximum number of characters of a server's text that are shown."""


@dataclass(kw_only=True, slots=True)
class LivePolicy(ModelReference):
    """The policy itself, with the weights that the generators hold when it is asked."""


@dataclass(kw_only=True, slots=True)
class FrozenModel(ModelReference):
    """A model behind the OpenAI-compatible API of a vLLM server, or of several.

    Its tokenizer must be the policy's if requests and answers are tokens.
    """

    name: Annotated[
        str, MinLen(1), Cure("name the model as its server does (GET /v1/models lists them)")
    ]
    """Name of the model on the server."""
    base_url: str | tuple[str, ...]
    """URL up to and with the version, such as "http://10.0.0.7:8000/v1"; or one URL for each server
    of the model. Servers take requests in turn, and one that fails is set aside for a while."""
    api_key_env: str | None = None
    """Environment variable that holds the key, or None if the server wants none.

    The key is read at every request, and never logged or saved."""
    max_concurrency: PositiveInt = 64
    """Maximum number of requests in flight at once, at all servers together. More wait."""
    timeout_s: PositiveFloat = 120.0
    """Time that one server has for a request before it counts as failing, in seconds."""
    max_retries: NonNegativeInt = 5
    """Number of attempts after the first, if no server can be reached, or each is busy (429) or
    failing (5xx)."""
    backoff_s: NonNegativeFloat = 0.5
    """Pause before the first retry, in seconds. It doubles for each further retry, up to 30 s."""

    def validate(self, *, field: str) -> None:
        """Raise if a field has a value that can't work.

        A key that was pasted in place of its variable's name, or into the URL, is not shown.

        Args:
            field: path of this reference; errors name it.

        Raises:
            ConfigError: ``api_key_env`` names no variable, or ``base_url`` no server, something
                that is no URL of a server, or a server twice.
        """
        if self.api_key_env is not None and not re.fullmatch(
            r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env
        ):
            raise ConfigError(
                f"{field}.api_key_env",
                "(hidden)",
                "is no name of an environment variable: export the key, and name it here",
            )
        servers = self.servers(field=field)
        if not servers:
            raise ConfigError(f"{field}.base_url", (), "names no server: want at least one URL")
        for where, url in servers:
            _check_url(url, where)
        urls = [url for _, url in servers]
        for index, (where, url) in enumerate(servers):
            if url in urls[:index]:
                raise ConfigError(where, url, "is named twice: name each server once")

    def servers(self, *, field: str) -> list[tuple[str, str]]:
        """Return the path of the field that names it, and its URL, for each server.

        URLs have no slash at the end.

        Args:
            field: path of this reference.
        """
        if isinstance(self.base_url, str):
            return [(f"{field}.base_url", self.base_url.rstrip("/"))]
        return [
            (f"{field}.base_url[{index}]", url.rstrip("/"))
            for index, url in enumerate(self.base_url)
        ]

    @property
    def urls(self) -> list[str]:
        """URLs of the servers, without a slash at the end."""
        return [url for _, url in self.servers(field="")]

    def api_key(self) -> str | None:
        """Return the key from its environment variable, or None if the server wants none.

        Raises:
            LookupError: the variable is not set, or empty.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise LookupError(
                f"this environment variable is not set: export the key of {self.name} in it"
            )
        return key

    def quoted(self, text: str) -> str:
        """Return what to show of a text that the server sent.

        The text may hold the key in any form, in pieces or masked, so nothing is shown of a server
        that was sent a key.
        """
        if self.api_key_env is None or os.environ.get(SERVER_TEXT) == "1":
            return " ".join(text.split())[:EXCERPT]
        return f"(its words are left out, as it was sent a key; {SERVER_TEXT}=1 shows them)"

    def check_present(self, *, field: str) -> None:
        """Raise a MissingError if the key's environment variable is not set."""
        try:
            self.api_key()
        except LookupError as error:
            raise MissingError(f"{field}.api_key_env", self.api_key_env, str(error)) from None


def _check_url(text: str, field: str) -> None:
    """Raise if a text is no URL of a server, or may hold a secret."""
    url = urlsplit(text)
    if url.username or url.password or url.query:
        cure = "may hold a secret: leave user, password and query out of it"
        raise ConfigError(field, "(hidden)", cure)
    try:
        _ = url.port  # reading it raises if it is no port
        is_server = url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:
        is_server = False
    if not is_server:
        cure = 'want the server\'s root, such as "http://localhost:8000/v1"'
        raise ConfigError(field, text, cure)


@dataclass(kw_only=True, slots=True)
class HostedModel(ModelReference):
    """A checkpoint that the run serves itself, by generators whose weights never change.

    All references with the same path share them.
    """

    path: Annotated[str, MinLen(1), Cure("name the checkpoint's folder")]
    """Folder in hub format. Its tokenizer must be the policy's, unless the model is a judge."""
    replicas: Changeable[ProcessCount] = 1
    """Number of independent engines."""
    engine: EngineConfig = field(default_factory=VLLMEngineConfig)
    max_concurrency: Changeable[PositiveInt] = 256
    """Maximum number of scores in flight at once; more wait. The engine limits what is sampled at
    once."""

    def validate(self, *, field: str) -> None:
        """Raise a ConfigError if fields of the engine can't work together."""
        self.engine.validate(field=f"{field}.engine")

    def check_present(self, *, field: str) -> None:
        """Raise a MissingError if the checkpoint, or the engine's package, is not there."""
        if not (Path(self.path) / "config.json").is_file():
            cure = "has no config.json; download the model, or name its folder"
            raise MissingError(f"{field}.path", self.path, cure)
        self.engine.check_present(field=f"{field}.engine")


def find_references(
    config: Any,  # noqa: ANN401 - any tree of configs
    *,
    field: str,
    beside: tuple[type, ...] = (),
) -> Iterator[tuple[str, ModelReference]]:
    """Yield every reference in a tree, with the path of the field that holds it.

    Args:
        config: tree of dataclasses, dicts and lists.
        field: path of the tree.
        beside: types of configs that are not looked into.
    """
    for path, value, _ in walk(config, field, beside=beside):
        if isinstance(value, ModelReference):
            yield path, value


def hosted_models(
    tasks: Any,  # noqa: ANN401 - any tree of configs
) -> dict[str, HostedModel]:
    """Return the models that a run has to host, by path, in the order they are named.

    Raises:
        ConfigError: two fields name one path with different settings.
    """
    models: dict[str, tuple[str, HostedModel]] = {}
    for field_path, reference in find_references(tasks, field="tasks"):
        if not isinstance(reference, HostedModel):
            continue
        first_field, first = models.setdefault(reference.path, (field_path, reference))
        if first != reference:
            cure = (
                f"{first_field} names the same path with other settings, and one path is one mesh: "
                "make them equal"
            )
            raise ConfigError(field_path, reference, cure)
    return {path: model for path, (_, model) in models.items()}
