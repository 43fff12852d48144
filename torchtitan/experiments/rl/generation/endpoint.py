"""Clients of frozen models: of a vLLM server (token ids in, token ids and log-probabilities out, over /v1/completions), and of
a checkpoint that the run serves. ``FrozenClients`` has one for each distinct model, however many tasks name it.

``served_model`` asks a server what it has, before anything depends on it.
"""

import asyncio
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from renderers import Message
from transformers import AutoTokenizer

from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import FINISH_REASONS
from torchtitan.experiments.rl.rollouts.types import Completion

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0

ASK_TIMEOUT_S = 20.0

PROBE = "The sum of 4, 17 and 260 is 281.\n\t{'größer': [数, 🙂]} don't\n\nI'LL  see_what  x+=1"
"""Text that tokenizers divide differently."""


class EndpointClient:
    """Implements rollouts.policy.ModelClient over HTTP."""

    def __init__(self, model: FrozenModel):
        self.model = model
        self._url = model.base_url.rstrip("/")
        self._places = asyncio.Semaphore(model.max_concurrency)
        limits = httpx.Limits(max_connections=model.max_concurrency, max_keepalive_connections=model.max_concurrency)
        self._http = httpx.AsyncClient(timeout=model.timeout_s, limits=limits)

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> "EndpointSession":
        return EndpointSession(self, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids).tolist()
        choice = await self.complete({"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise self._error("answered without prompt_logprobs of the prompt's length: is it a vLLM server?")
        logprobs = np.zeros(len(ids), np.float32)
        try:
            # A position may hold the top token beside the prompt's own: read by token id.
            for position in range(1, len(ids)):
                logprobs[position] = positions[position][str(ids[position])]["logprob"]
        except (KeyError, TypeError):
            raise self._error(f"gave no log-probability of token {ids[position]} at position {position}") from None
        return logprobs

    async def chat(self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig) -> Reply:
        """See ChatClient.chat. The server renders the messages by its model's template; any OpenAI-compatible one will do."""
        request: dict[str, Any] = {"messages": list(messages), "max_tokens": sampling.max_tokens, "seed": seed}
        request |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        request |= {name: value for name in ("stop", "stop_token_ids") if (value := getattr(sampling, name))}
        choice = await self.complete(request, "/chat/completions")
        message, usage = choice.get("message"), choice["usage"]
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise self._error("answered without a message of text")
        return Reply(
            message={"role": "assistant", "content": message["content"]},
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            whole=choice.get("finish_reason") != "length",
        )

    async def complete(self, request: dict[str, Any], path: str = "/completions") -> dict[str, Any]:
        """POST one request; returns its only choice, with the ``usage`` of the answer. Waits for a place, and retries what may
        pass.

        Raises:
            RunError: the server refused, answered with rubbish, or failed at every attempt; names model and URL.
        """
        body = {"model": self.model.name, **request}
        async with self._places:
            for attempt in range(self.model.max_retries + 1):
                if attempt:
                    await asyncio.sleep(self._wait_s(attempt))
                answer, problem = await self._attempt(self._url + path, body)
                if answer is not None:
                    return answer
                logger.info("frozen model %s: %s", self.model.name, problem)
        raise self._error(f"failed {self.model.max_retries + 1} times, last with {problem}")

    async def close(self) -> None:
        await self._http.aclose()

    async def _attempt(self, url: str, body: dict[str, Any]) -> tuple[dict[str, Any], None] | tuple[None, str]:
        """The choice, or why another attempt may help."""
        try:
            response = await self._http.post(url, json=body, headers=_headers(self.model))
        except LookupError as error:
            raise self._error(f"has no key: {self.model.api_key_env}: {error}") from None
        except httpx.TransportError as error:
            return None, f"{type(error).__name__} {self.model.quoted(str(error))}".rstrip()  # it may quote a broken answer
        if response.status_code == 429 or response.status_code >= 500:
            return None, f"HTTP {response.status_code}"
        if response.status_code != 200:
            raise self._error(f"refused with HTTP {response.status_code}: {self.model.quoted(response.text)}")
        try:
            answer = response.json()
            (choice,) = answer["choices"]
            choice["usage"] = answer.get("usage") or {}
        except (ValueError, KeyError, TypeError):
            raise self._error(f"answered what is no completion: {self.model.quoted(response.text)}") from None
        return choice, None

    def _wait_s(self, attempt: int) -> float:
        # Drawn, so that requests that failed together don't come back together.
        return min(self.model.backoff_s * 2 ** (attempt - 1), LONGEST_WAIT_S) * random.uniform(0.5, 1.0)

    def _error(self, what: str) -> RunError:
        return RunError(f"frozen model {self.model.name!r} at {self.model.base_url} {what}")


class EndpointSession:
    """Implements rollouts.policy.PolicySession."""

    def __init__(self, client: EndpointClient, *, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]):
        self._client, self._seed = client, seed
        self._sampling, self._stop_token_ids = sampling, stop_token_ids + sampling.stop_token_ids
        self._turn = 0

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        """The log-probabilities are what the server reports: by vLLM's default at temperature 1, whatever was sampled at."""
        sampling = self._sampling
        self._turn += 1
        choice = await self._client.complete(
            {
                "prompt": np.asarray(prompt_token_ids).tolist(),
                "max_tokens": min(max_tokens, sampling.max_tokens),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": (self._seed + self._turn) % 2**63,
                "stop": sampling.stop,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "stop_token_ids": self._stop_token_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
            }
        )
        try:
            token_ids = np.asarray(choice["token_ids"], np.int32)
            logprobs = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
            if (finish_reason := choice["finish_reason"]) not in FINISH_REASONS:  # any text else, which is recorded
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise self._client._error("answered without token_ids, logprobs and finish_reason: is it a vLLM server?") from None
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=np.full(len(token_ids), -1, np.int32),
            finish_reason=finish_reason,
        )

    def close(self) -> None: ...


def _count(said: Any) -> int:
    """0 where the server does not say it."""
    return said if isinstance(said, int) else 0


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
    return httpx.request(method, url, headers=_headers(model), timeout=ASK_TIMEOUT_S, **request)


def _headers(model: FrozenModel) -> dict[str, str]:
    key = model.api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _some(model: FrozenModel, names: list[str]) -> str:
    return model.quoted(", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) if names else "none"


class FrozenClients:
    """Reached through ``policy.frozen``. Whoever makes it admits the replicas of the hosted models to ``generators``."""

    def __init__(
        self,
        hosted: Mapping[str, HostedModel],
        *,
        on_stopped: Callable[[str, int, str], None] = lambda path, replica, cause: None,
        **options: Any,
    ):
        """
        Args:
            hosted: by path, what the run hosts.
            on_stopped: as GeneratorClient's; called with the path first.
            options: others of GeneratorClient's.
        """
        self.generators: dict[str, GeneratorClient] = {
            path: HostedClient(model, on_stopped=functools.partial(on_stopped, path), **options)
            for path, model in hosted.items()
        }
        """Clients of what the run hosts, by path."""
        self._endpoints: dict[tuple, EndpointClient] = {}

    def find(self, model: ModelReference) -> ModelClient:
        if isinstance(model, FrozenModel):
            key = dataclasses.astuple(model)
            if key not in self._endpoints:
                self._endpoints[key] = EndpointClient(model)
            return self._endpoints[key]
        if isinstance(model, HostedModel) and model.path in self.generators:
            return self.generators[model.path]
        if isinstance(model, HostedModel):
            raise RunError(f"the run does not host {model.path!r}: it hosts what fields of a task's config name")
        raise RunError(f"{type(model).__name__} is no frozen model: name a FrozenModel or a HostedModel")

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request to a hosted model with ``failure``."""
        for client in self.generators.values():
            client.fail(failure)

    async def close(self) -> None:
        for client in self.generators.values():
            client.close()
        await asyncio.gather(*(client.close() for client in self._endpoints.values()))


class HostedClient(GeneratorClient):
    """Implements rollouts.policy.ModelClient over a Generator mesh that stays at its checkpoint, which is no version of the
    policy."""

    is_frozen = True

    def __init__(self, model: HostedModel, **options: Any):
        super().__init__(**options)
        self.model = model
        self._places = asyncio.Semaphore(model.max_concurrency)

    async def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        async with self._places:
            try:
                return await super().score(np.asarray(token_ids, np.int32))
            except RunError as error:
                raise RunError(f"hosted model {self.model.path!r}: {error}") from error
