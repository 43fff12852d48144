"""How a config names a model: the policy, a server somewhere, or a checkpoint that the run hosts itself.

A config that needs a model has a field for one (an algorithm's teacher, a rubric's judge). What the config builds asks for it
in ``setup``: ``policy.frozen(reference)``. The controller walks ``config.tasks`` and hosts the HostedModels it finds, so one
that is to be hosted must be a field of a config, not a value inside a function.
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
"""Environment variable: "1" shows what servers say in errors, also those that were sent a key."""
EXCERPT = 300
"""Characters of it that are shown."""


@dataclass(kw_only=True, slots=True)
class LivePolicy(ModelReference):
    """The policy itself, as the generators hold it at that moment."""


@dataclass(kw_only=True, slots=True)
class FrozenModel(ModelReference):
    """A model behind the OpenAI-compatible API of a vLLM server, or of several.

    Its tokenizer must be the policy's where tokens go in and out.
    """

    name: Annotated[
        str, MinLen(1), Cure("name the model as its server does (GET /v1/models lists them)")
    ]
    """What the server calls the model."""
    base_url: str | tuple[str, ...]
    """URL up to and with the version, such as "http://10.0.0.7:8000/v1"; or one URL for each server of
    the model. Servers take requests in turn, and one that fails is set aside for a while."""
    api_key_env: str | None = None
    """Environment variable that holds the key; read at every request, never logged or saved. None: the server wants none."""
    max_concurrency: PositiveInt = 64
    """Requests in flight at once, at all servers together; more wait."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that one server has for a request before it counts as failing."""
    max_retries: NonNegativeInt = 5
    """Attempts after the first, where no server can be reached, or each is busy (429) or failing (5xx)."""
    backoff_s: NonNegativeFloat = 0.5
    """Wait before the first retry; doubled for each further one, up to 30 s."""

    def validate(self, *, field: str) -> None:
        # A key pasted where its variable's name belongs, or into the URL, must not be shown either.
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
        """Return for each server the path of the field that names it, and its URL without a slash at the end.

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
        """The key, from its environment variable; None where the server wants none.

        Raises:
            LookupError: the variable is not set or empty.
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
        """What to show of ``text``, which the server sent. It may hold the key in any form, in pieces or masked: where a key
        is sent nothing of it is shown."""
        if self.api_key_env is None or os.environ.get(SERVER_TEXT) == "1":
            return " ".join(text.split())[:EXCERPT]
        return f"(its words are left out, as it was sent a key; {SERVER_TEXT}=1 shows them)"

    def check_present(self, *, field: str) -> None:
        try:
            self.api_key()
        except LookupError as error:
            raise MissingError(f"{field}.api_key_env", self.api_key_env, str(error)) from None


def _check_url(text: str, field: str) -> None:
    """Refuse what is no URL of a server, or may hold a secret."""
    url = urlsplit(text)
    if url.username or url.password or url.query:
        raise ConfigError(
            field, "(hidden)", "may hold a secret: leave user, password and query out of it"
        )
    try:
        _ = url.port
        fits = url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:  # a port that is none
        fits = False
    if not fits:
        raise ConfigError(
            field, text, 'want the server\'s root, such as "http://localhost:8000/v1"'
        )


@dataclass(kw_only=True, slots=True)
class HostedModel(ModelReference):
    """A checkpoint that the run serves itself: generators that never synchronise, shared by all that name its path."""

    path: Annotated[str, MinLen(1), Cure("name the checkpoint's folder")]
    """Hub-format folder. Its tokenizer must be the policy's."""
    replicas: Changeable[ProcessCount] = 1
    """Independent engines."""
    engine: EngineConfig = field(default_factory=VLLMEngineConfig)
    max_concurrency: Changeable[PositiveInt] = 256
    """Scores in flight at once; more wait. How much is sampled at once is the engine's to say."""

    def validate(self, *, field: str) -> None:
        self.engine.validate(field=f"{field}.engine")

    def check_present(self, *, field: str) -> None:
        if not (Path(self.path) / "config.json").is_file():
            raise MissingError(
                f"{field}.path",
                self.path,
                "has no config.json; download the model, or name its folder",
            )
        self.engine.check_present(field=f"{field}.engine")


def find_references(
    config: Any, *, field: str, beside: tuple[type, ...] = ()
) -> Iterator[tuple[str, ModelReference]]:
    """Every reference in a tree of dataclasses, dicts and lists, with the path of the field it is in.

    Args:
        beside: types of configs that are not looked into.
    """
    return (
        (path, found)
        for path, found, _ in walk(config, field, beside=beside)
        if isinstance(found, ModelReference)
    )


def hosted_models(tasks: Any) -> dict[str, HostedModel]:
    """The models a run has to host, by path, in the order they are named.

    Raises:
        ConfigError: two fields name one path with different settings.
    """
    found: dict[str, tuple[str, HostedModel]] = {}
    for where, reference in find_references(tasks, field="tasks"):
        if isinstance(reference, HostedModel):
            first, known = found.setdefault(reference.path, (where, reference))
            if known != reference:
                cure = f"{first} names the same path with other settings, and one path is one mesh: make them equal"
                raise ConfigError(where, reference, cure)
    return {path: model for path, (_, model) in found.items()}
