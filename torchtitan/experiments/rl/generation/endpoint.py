"""Clients of frozen models: over HTTP to servers, or over a mesh of generators that this run hosts.

``EndpointClient`` generates and scores by token ids, and chats. ``HostedClient`` generates and
scores on the run's own generators. ``FrozenClients`` has one client for each distinct model,
however many tasks name it.

``served_model``, ``check_served_tokenizer`` and ``check_same_model`` ask servers before anything
depends on them.
"""

import asyncio
import dataclasses
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from torchtitan.experiments.rl.rollouts.costs import add_cost
from torchtitan.experiments.rl.rollouts.policy import ModelClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import FINISH_REASONS
from torchtitan.experiments.rl.rollouts.types import Completion

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0
"""Longest pause between two attempts, in seconds."""

ASK_TIMEOUT_S = 20.0
"""Time that a server has to answer a question before a run, in seconds."""

CONNECT_TIMEOUT_S = 10.0
"""Time limit of a connection, in seconds. A host that is gone does not answer at all."""

SET_ASIDE_S = 30.0
"""Time for which a server that failed is avoided unless no other answers, in seconds."""

DIRECT: dict[str, None] = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
"""Addresses of this host, which are reached without the proxy that the environment may name."""

PROBE = "The sum of 4, 17 and 260 is 281.\n\t{'größer': [数, 🙂]} don't\n\nI'LL  see_what  x+=1"
"""Text that tokenizers divide differently."""


@dataclass(slots=True)
class Server:
    """One of the servers of a frozen model, and whether it works."""

    url: str
    in_flight: int = 0
    last_request: int = 0
    """Number of the last request that it was chosen for."""
    fault: str = ""
    """Cause of the last failure of a server that is set aside; empty while the server works."""
    retry_from_s: float = 0.0
    """Time of the event loop from which a single request may try a server that is set aside."""


@dataclass(slots=True, frozen=True)
class ServerResponse:
    """A server's response to a request for one completion."""

    choice: dict[str, Any]
    """The only entry of its ``choices``."""
    usage: dict[str, Any]
    """Token counts as the server reports them; empty where it reports none."""
    url: str
    """URL of the server."""


class ServerFault(Exception):
    """A failure that another server, or the same one later, may not have."""


class ServerBusy(ServerFault):
    """A refusal by a server that works and is overloaded (HTTP 429). It is not set aside."""


class EndpointClient:
    """Client of one frozen model over HTTP, with failover among its servers.

    It implements rollouts.policy.ModelClient. Each request goes to the server with the fewest
    requests in flight; ties go to the one that was asked longest ago. If a server fails, the next
    is asked at once. A server that failed is set aside: it is avoided for SET_ASIDE_S seconds,
    unless no other answers. Then one request tries it, and an answer brings it back.
    """

    def __init__(self, model: FrozenModel):
        self.model = model
        self._servers = [Server(url) for url in model.urls]
        self._request_numbers = itertools.count(1)
        self._slots = asyncio.Semaphore(model.max_concurrency)
        limits = httpx.Limits(
            max_connections=model.max_concurrency, max_keepalive_connections=model.max_concurrency
        )
        timeout = httpx.Timeout(model.timeout_s, connect=min(model.timeout_s, CONNECT_TIMEOUT_S))
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, mounts=DIRECT)

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> "EndpointSession":
        return EndpointSession(self, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids).tolist()
        answer = await self.complete(
            {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        )
        positions = answer.choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise self.error(
                "answered without prompt_logprobs of the prompt's length: is it a vLLM server?",
                answer.url,
            )
        logprobs = np.zeros(len(ids), np.float32)
        try:
            # A position may hold the top token beside the prompt's own: read by token id.
            for position in range(1, len(ids)):
                logprobs[position] = positions[position][str(ids[position])]["logprob"]
        except (KeyError, TypeError):
            fault = f"gave no log-probability of token {ids[position]} at position {position}"
            raise self.error(fault, answer.url) from None
        return logprobs

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        """Return the server's reply to messages, which it renders by its model's template.

        This is ChatClient.chat. Any OpenAI-compatible server will do.
        """
        request: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.top_k > 0:  # OpenAI's own servers refuse the field
            request["top_k"] = sampling.top_k
        if sampling.stop:
            request["stop"] = sampling.stop
        if sampling.stop_token_ids:
            request["stop_token_ids"] = sampling.stop_token_ids
        answer = await self.complete(request, "/chat/completions")
        message = answer.choice.get("message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise self.error("answered without a message of text", answer.url)
        return Reply(
            message={"role": "assistant", "content": message["content"]},
            prompt_tokens=_count(answer.usage.get("prompt_tokens")),
            completion_tokens=_count(answer.usage.get("completion_tokens")),
            whole=answer.choice.get("finish_reason") != "length",
        )

    async def complete(self, request: dict[str, Any], path: str = "/completions") -> ServerResponse:
        """Send one request to the servers in turn until one answers, and return the answer.

        At most ``max_concurrency`` requests are in flight; others wait. If every server fails, all
        are tried again after a pause, up to ``max_retries`` times.

        Raises:
            RunError: a server refused or answered with rubbish, or every server failed at every
                attempt. The error names the model, and each such server with its cause.
        """
        body = {"model": self.model.name, **request}
        attempts = self.model.max_retries + 1
        async with self._slots:
            for attempt in range(attempts):
                if attempt:
                    await asyncio.sleep(self._wait_s(attempt))
                faults: dict[str, str] = {}
                for _ in self._servers:
                    server = self._choose(
                        [server for server in self._servers if server.url not in faults]
                    )
                    try:
                        return await self._ask_server(server, path, body)
                    except ServerFault as fault:
                        faults[server.url] = str(fault)
                        logger.info("frozen model %s at %s: %s", self.model.name, server.url, fault)
        if len(faults) == 1:
            ((url, cause),) = faults.items()
            raise self.error(f"failed {attempts} times, last with {cause}", url)
        causes = "; ".join(f"{url} with {cause}" for url, cause in faults.items())
        raise RunError(
            f"frozen model {self.model.name!r}: each of its {len(faults)} servers failed "
            f"{attempts} times, last {causes}"
        )

    async def close(self) -> None:
        await self._http.aclose()

    def error(self, fault: str, url: str) -> RunError:
        """Return an error that names the model, its server at ``url``, and what that did."""
        return RunError(f"frozen model {self.model.name!r} at {url} {fault}")

    def _choose(self, servers: Sequence[Server]) -> Server:
        """Return the server to ask next.

        A server that is due to be tried again goes first, then working ones, then any: an answer to
        the trial is what brings it back.
        """
        now = asyncio.get_running_loop().time()
        due = [server for server in servers if server.fault and server.retry_from_s <= now]
        working = [server for server in servers if not server.fault]
        chosen = min(
            due or working or servers, key=lambda server: (server.in_flight, server.last_request)
        )
        chosen.last_request = next(self._request_numbers)
        return chosen

    async def _ask_server(self, server: Server, path: str, body: dict[str, Any]) -> ServerResponse:
        """Send a request to one server, and note whether the server works.

        Raises:
            ServerFault: another server, or this one later, may succeed.
        """
        server.in_flight += 1
        server.retry_from_s = math.inf  # if it is set aside, no other request tries it meanwhile
        try:
            answer = await self._attempt(server.url, path, body)
        except ServerBusy:
            raise
        except ServerFault as fault:
            self._set_aside(server, str(fault))
            raise
        finally:
            server.in_flight -= 1
            server.retry_from_s = asyncio.get_running_loop().time() + SET_ASIDE_S
        self._bring_back(server)
        return answer

    def _set_aside(self, server: Server, fault: str) -> None:
        if not server.fault and len(self._servers) > 1:
            name, url = self.model.name, server.url
            logger.warning(
                "frozen model %s: its server %s is set aside, it failed with %s", name, url, fault
            )
            add_cost("frozen/servers_set_aside", 1)
        server.fault = fault

    def _bring_back(self, server: Server) -> None:
        if server.fault and len(self._servers) > 1:
            logger.warning("frozen model %s: its server %s is back", self.model.name, server.url)
            add_cost("frozen/servers_back", 1)
        server.fault = ""

    async def _attempt(self, url: str, path: str, body: dict[str, Any]) -> ServerResponse:
        """Send a request to the server at ``url``.

        Raises:
            ServerFault: the server can't be reached, is busy or failing.
            RunError: the server refused the request, or its answer is no completion.
        """
        try:
            response = await self._http.post(url + path, json=body, headers=_headers(self.model))
        except LookupError as error:  # of the model's api_key
            raise self.error(f"has no key: {self.model.api_key_env}: {error}", url) from None
        except httpx.TransportError as error:
            cause = self.model.quoted(str(error))  # it may quote a broken answer
            raise ServerFault(f"{type(error).__name__} {cause}".rstrip()) from None
        if response.status_code == 429:
            raise ServerBusy("HTTP 429")
        if response.status_code >= 500:
            raise ServerFault(f"HTTP {response.status_code}")
        if response.status_code != 200:
            raise self.error(
                f"refused with HTTP {response.status_code}: {self.model.quoted(response.text)}", url
            )
        try:
            answer = response.json()
            (choice,) = answer["choices"]
            usage = answer.get("usage")
            return ServerResponse(
                choice=dict(choice), usage=usage if isinstance(usage, dict) else {}, url=url
            )
        except (ValueError, KeyError, TypeError):
            raise self.error(
                f"answered what is no completion: {self.model.quoted(response.text)}", url
            ) from None

    def _wait_s(self, attempt: int) -> float:
        """Return the pause before an attempt, in seconds.

        It is random, so that requests that failed together don't come back together.
        """
        longest_s = min(self.model.backoff_s * 2 ** (attempt - 1), LONGEST_WAIT_S)
        return longest_s * random.uniform(0.5, 1.0)


class EndpointSession:
    """Session of one rollout with an EndpointClient. Its turns have consecutive seeds.

    It implements rollouts.policy.PolicySession.
    """

    stops_at_texts = True

    def __init__(
        self,
        client: EndpointClient,
        *,
        seed: int,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
    ):
        self._client = client
        self._seed = seed
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids + sampling.stop_token_ids
        self._turn = 0

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """Generate one turn's tokens, with the log-probabilities that the server reports.

        vLLM's are at temperature 1 by default, whatever the sampling temperature.

        Args:
            prompt_token_ids: int32 [P].
            max_tokens: maximum number of tokens; the sampling's own maximum holds too.
            stop: texts that end the completion, beside those of the sampling.
            seed: seed of this turn, or None for the session's own.
        """
        sampling = self._sampling
        self._turn += 1
        answer = await self._client.complete(
            {
                "prompt": np.asarray(prompt_token_ids).tolist(),
                "max_tokens": min(max_tokens, sampling.max_tokens),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": (self._seed + self._turn if seed is None else seed) % 2**63,
                "stop": [*sampling.stop, *stop],
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "stop_token_ids": self._stop_token_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
            }
        )
        choice = answer.choice
        try:
            token_ids = np.asarray(choice["token_ids"], np.int32)
            logprobs = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
            finish_reason = choice["finish_reason"]
            if finish_reason not in FINISH_REASONS:  # it is recorded, so it is no arbitrary text
                raise ValueError
        except (KeyError, TypeError, ValueError):
            fault = "answered without token_ids, logprobs and finish_reason: is it a vLLM server?"
            raise self._client.error(fault, answer.url) from None
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=np.full(len(token_ids), -1, np.int32),
            finish_reason=finish_reason,
        )

    def close(self) -> None: ...


def _count(reported: object) -> int:
    """Return a reported count of tokens, or 0 if none is reported."""
    return reported if isinstance(reported, int) else 0


def served_model(
    url: str, *, field: str, name: str | None, key_env: str | None, tokenizer_path: str
) -> FrozenModel:
    """Return a reference to the model of a server, or of several servers, after asking them.

    Args:
        url: URL of the server; several URLs are separated by commas.
        field: option that gives the URL; errors name it.
        name: name of the model on the server. None takes the only model that it has.
        key_env: environment variable with the server's key.
        tokenizer_path: folder of the tokenizer that prompts are made with.

    Raises:
        ConfigError: a server can't be asked, has no such model or several, or has another
            tokenizer.
    """
    urls = tuple(part.strip() for part in url.split(","))
    model = FrozenModel(
        name=name or "?", base_url=urls if len(urls) > 1 else urls[0], api_key_env=key_env
    )
    try:
        model.validate(field=field)
        model.api_key()
    except ConfigError as error:
        option = "--endpoint-key-env" if error.field.endswith("key_env") else field
        raise ConfigError(option, error.value, error.cure) from None
    except LookupError:
        cure = "is not set: export the server's key in this variable"
        raise ConfigError("--endpoint-key-env", key_env, cure) from None
    for server in model.urls:
        names = _names(model, server, field)
        if model.name == "?" and len(names) != 1:
            fault = f"the server has {len(names)} models ({_some(model, names)})"
            raise ConfigError(field, server, f"{fault}: name one with --endpoint-model")
        if model.name == "?":
            model.name = names[0]
        if names and model.name not in names:
            fault = f"the server at {server} has no such model; it has {_some(model, names)}"
            raise ConfigError("--endpoint-model", model.name, fault)
    cure = "name a folder with that tokenizer by --model.hf-assets-path"
    check_served_tokenizer(model, field, tokenizer_path, cure=cure)
    return model


def _names(model: FrozenModel, url: str, field: str) -> list[str]:
    """Return the names of a server's models.

    The list may be empty if the model has a name already.

    Raises:
        ConfigError: the server does not answer or refuses the key, or it lists no models and the
            model has no name yet.
    """
    try:
        answer = _ask(model, "GET", f"{url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cure = (
            f"no server answers there ({type(error).__name__}): start it, wait until it is up, or "
            "correct host and port"
        )
        raise ConfigError(field, url, cure) from None
    if answer.status_code in (401, 403):
        fault = "it wants a key"
        if model.api_key_env:
            fault = f"it refuses the key in {model.api_key_env}"
        cure = (
            f"{fault} (HTTP {answer.status_code}): name the environment variable that holds it "
            "with --endpoint-key-env"
        )
        raise ConfigError(field, url, cure)
    names = _listed(answer)
    if not names and model.name == "?":
        cure = (
            f"it lists no models (HTTP {answer.status_code} at {url}/models): want the address of "
            'the API with its version, such as "http://localhost:8000/v1", or a name by '
            "--endpoint-model"
        )
        raise ConfigError(field, url, cure)
    return names


def _listed(answer: httpx.Response) -> list[str]:
    """Return the names in a server's list of models; none if the answer is no such list."""
    if answer.status_code != 200:
        return []
    try:
        return [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def check_served_tokenizer(
    model: FrozenModel, field: str, tokenizer_path: str, *, cure: str
) -> None:
    """Raise if a server of a model has another tokenizer than the one on disk.

    Tokens go to the server and come back, so both sides must mean the same by them. Not every
    server can be asked: vLLM has ``/tokenize`` beside its API.

    Args:
        model: the servers' model.
        field: config field or option that names the servers; errors name it.
        tokenizer_path: folder of the tokenizer.
        cure: advice that the error gives.

    Raises:
        ConfigError: a server divides a text into other tokens.
    """
    for url in model.urls:
        served_ids = _tokens(model, url)
        if served_ids is None:
            continue
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        if served_ids != tokenizer.encode(PROBE, add_special_tokens=False):
            fault = (
                f"its model {model.name!r} has another tokenizer than {tokenizer_path}, and tokens "
                "go in and out"
            )
            raise ConfigError(field, url, f"{fault}: {cure}")


def check_same_model(model: FrozenModel, field: str) -> None:
    """Raise if the servers of one reference have different models.

    A server that can't be asked is passed over.

    Args:
        model: the reference.
        field: path of the reference.

    Raises:
        ConfigError: a server lists models, and none of this name; or two servers divide a text into
            different tokens. The error names the server.
    """
    cure = "every server of base_url must serve the same model"
    first: tuple[str, Any] | None = None
    """URL and tokens of the first server that tells its tokens."""
    for url_field, url in model.servers(field=field):
        try:
            names = _listed(_ask(model, "GET", f"{url}/models"))
        except httpx.HTTPError:
            continue
        if names and model.name not in names:
            fault = f"this server has no model {model.name!r}; it has {_some(model, names)}"
            raise ConfigError(url_field, url, f"{fault}: {cure}")
        tokens = _tokens(model, url)
        if tokens is None:
            continue
        if first is None:
            first = (url, tokens)
        elif tokens != first[1]:
            fault = f"its model {model.name!r} has another tokenizer than that of {first[0]}"
            raise ConfigError(url_field, url, f"{fault}: {cure}")


def _tokens(model: FrozenModel, url: str) -> Any:  # noqa: ANN401 - JSON
    """Return the tokens into which a server divides PROBE, or None if it does not tell."""
    root = urlsplit(url)
    body = {"model": model.name, "prompt": PROBE, "add_special_tokens": False}
    try:
        answer = _ask(model, "POST", f"{root.scheme}://{root.netloc}/tokenize", json=body)
        return answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def _ask(
    model: FrozenModel,
    method: str,
    url: str,
    **request: Any,  # noqa: ANN401 - httpx's
) -> httpx.Response:
    with httpx.Client(timeout=ASK_TIMEOUT_S, mounts=DIRECT) as client:
        return client.request(method, url, headers=_headers(model), **request)


def _headers(model: FrozenModel) -> dict[str, str]:
    key = model.api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _some(model: FrozenModel, names: list[str]) -> str:
    """Return the first few of a server's names, as an error shows them."""
    if not names:
        return "none"
    text = ", ".join(names[:5])
    return model.quoted(text + ", ..." if len(names) > 5 else text)


class FrozenClients:
    """Registry of the clients of frozen models, one for each distinct reference.

    ``policy.frozen`` looks a reference up here. The owner of the registry admits the replicas of
    each hosted model to that model's client in ``generators``.
    """

    def __init__(
        self,
        hosted: Mapping[str, HostedModel],
        *,
        on_stopped: Callable[[str, int, str], None] = lambda path, replica, cause: None,
        **options: Any,  # noqa: ANN401 - GeneratorClient's
    ):
        """Make a client for each hosted model.

        The client of a server is made when it is first looked up.

        Args:
            hosted: models that the run hosts, by path.
            on_stopped: called as GeneratorClient's, with the model's path first.
            options: other options of GeneratorClient.
        """
        self.generators: dict[str, GeneratorClient] = {
            path: HostedClient(model, on_stopped=functools.partial(on_stopped, path), **options)
            for path, model in hosted.items()
        }
        """Clients of the models that the run hosts, by path."""
        self._endpoints: dict[tuple, EndpointClient] = {}

    def find(self, model: ModelReference) -> ModelClient:
        """Return the client of a frozen model.

        Raises:
            RunError: the run does not host the model, or it is no frozen model.
        """
        if isinstance(model, FrozenModel):
            key = dataclasses.astuple(model)
            if key not in self._endpoints:
                self._endpoints[key] = EndpointClient(model)
            return self._endpoints[key]
        if isinstance(model, HostedModel) and model.path in self.generators:
            return self.generators[model.path]
        if isinstance(model, HostedModel):
            raise RunError(
                f"the run does not host {model.path!r}: it hosts what fields of a task's config "
                "name"
            )
        raise RunError(
            f"{type(model).__name__} is no frozen model: name a FrozenModel or a HostedModel"
        )

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request to hosted models with ``failure``.

        Requests to servers go on.
        """
        for client in self.generators.values():
            client.fail(failure)

    async def close(self) -> None:
        for client in self.generators.values():
            client.close()
        await asyncio.gather(*(client.close() for client in self._endpoints.values()))


class HostedClient(GeneratorClient):
    """Client of a frozen checkpoint that this run hosts, whose weights never change.

    It implements rollouts.policy.ModelClient.
    """

    is_frozen = True

    def __init__(self, model: HostedModel, **options: Any):  # noqa: ANN401 - GeneratorClient's
        super().__init__(stops_at_texts=model.engine.stops_at_texts, **options)
        self.model = model
        self._slots = asyncio.Semaphore(model.max_concurrency)

    async def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        async with self._slots:
            try:
                return await super().score(np.asarray(token_ids, np.int32))
            except RunError as error:
                raise RunError(f"hosted model {self.model.path!r}: {error}") from error
