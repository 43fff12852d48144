"""The HTTP server through which agents reach the policy: one in each process that runs rollouts.

    agent's client ─▶ Gateway ─▶ dialect.parse ─▶ AgentRollout.begin
                   ◀─ dialect.reply, or dialect.stream ◀─ answer

Each rollout has a key. It is the API key that the agent's client sends, opens that rollout and no
other, and is refused when the rollout has ended. An answer counts as delivered when all of it was
handed to a connection that was open, unless the client resets the connection before it asks again.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from torchtitan.experiments.rl.gateway import anthropic, chat, responses
from torchtitan.experiments.rl.gateway.connection import Connection, connection_of
from torchtitan.experiments.rl.gateway.request import (
    MODEL_FAILED,
    ModelReply,
    ModelRequest,
    Refusal,
    event,
)
from torchtitan.experiments.rl.gateway.rollout import AgentCall, AgentRollout
from torchtitan.experiments.rl.printable import shown

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 0.5
"""Seconds between a stream's signs of life, from the moment the model is asked until its turn is
sampled. Hardly any client times out sooner."""
MAX_BODY = 64 << 20
"""Maximum number of bytes of a request, far above those of a prompt that a model has room for."""
LARGE_BODY = 1 << 18
"""Number of bytes from which on a request is parsed off the event loop."""
MAX_DEPTH = 100
"""Maximum number of objects and lists of a request inside each other. Schemas of tools have some
ten; Python's own limit ends whatever reads a value that is nested much deeper."""
SHUTDOWN_S = 1.0
"""Maximum seconds that handlers of lost connections have to end when the server closes."""
ROUTES = {"chat/completions": chat, "responses": responses, "messages": anthropic}
"""Dialects by their path under /v1."""
ANTHROPIC_HEADER = "anthropic-version"
"""Header that Anthropic's clients send."""


class SharedConnections(DefaultAsyncHttpxClient):
    """Connections that all clients of an event loop share. They outlive each of the clients."""

    async def aclose(self) -> None:
        """Do nothing: a client that is closed leaves the connections open."""

    async def close_all(self) -> None:
        """Close the connections."""
        await super().aclose()


@dataclass(kw_only=True, slots=True, frozen=True)
class Endpoint:
    """Address at which an agent reaches the model, for one rollout."""

    url: str
    """Base URL for OpenAI's clients."""
    anthropic_url: str
    """Base URL for Anthropic's clients."""
    key: str
    """API key, which opens the rollout."""
    model: str = "policy"

    def client(self) -> AsyncOpenAI:
        """Return an OpenAI client of this rollout.

        Clients made on the event loop that serves the rollouts share at most 1,000 connections,
        because setting up a client with connections of its own holds up the loop for 0.1 s. A
        client made on another loop has connections of its own, which end with that loop. No client
        asks the proxies that the environment names.

        Raises:
            RuntimeError: no event loop runs in this thread: the agent is a plain function.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "endpoint.client() is for agents that are async: in a plain function make one "
                "openai.OpenAI, and share it by with_options(base_url=..., api_key=...)"
            ) from None
        if loop not in _GATEWAYS:  # nothing would close shared connections at the end of the loop
            return AsyncOpenAI(
                base_url=self.url,
                api_key=self.key,
                http_client=DefaultAsyncHttpxClient(trust_env=False),
            )
        if loop not in _CONNECTIONS:
            _CONNECTIONS[loop] = SharedConnections(trust_env=False)
        return AsyncOpenAI(base_url=self.url, api_key=self.key, http_client=_CONNECTIONS[loop])

    def variables(self) -> dict[str, str]:
        """Return the environment variables in which clients look for URL, key and model."""
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
        }


class Gateway:
    """Server of one event loop at one address. It listens while a task has acquired it."""

    def __init__(self, host: str):
        self.host = host
        self._port = 0
        self._users = 0
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._rollouts: dict[str, AgentRollout] = {}
        self._lock = asyncio.Lock()

    @property
    def is_in_use(self) -> bool:
        """True while a task has acquired the server."""
        return self._users > 0

    async def acquire(self) -> None:
        """Listen, if nobody else has begun to.

        Raises:
            OSError: nothing can listen at this address.
        """
        async with self._lock:
            if self._runner is None:
                runner = web.AppRunner(
                    self._app(),
                    handler_cancellation=True,
                    auto_decompress=False,
                    access_log=None,
                    shutdown_timeout=SHUTDOWN_S,
                )
                await runner.setup()
                http = runner.server
                assert http is not None, "the runner is set up"
                self._listener = await asyncio.get_running_loop().create_server(
                    lambda: Connection(http(), self._connections), self.host, 0, backlog=128
                )
                self._runner = runner
                self._port = self._listener.sockets[0].getsockname()[1]
            self._users += 1

    async def release(self) -> None:
        """Undo one `acquire`. After the last, the server and its clients' connections close.

        No rollout is open then, so no connection is waited for: some may never finish a request.
        """
        async with self._lock:
            self._users -= 1
            if not self._users and self._runner is not None:
                runner = self._runner
                self._runner = None
                assert self._listener is not None, "the server listens"
                self._listener.close()
                for connection in list(self._connections):
                    connection.abort()
                await runner.cleanup()
        await _close_connections()

    def admit(self, rollout: AgentRollout, *, name: str | None = None) -> Endpoint:
        """Give a rollout a key.

        Args:
            name: name of this host, for agents elsewhere; None for the address of the server.
        """
        key = f"rl-{secrets.token_urlsafe(24)}"
        self._rollouts[key] = rollout
        root = f"http://{name or self.host}:{self._port}"
        return Endpoint(url=f"{root}/v1", anthropic_url=root, key=key)

    def forget(self, key: str) -> None:
        """Refuse a key from now on."""
        self._rollouts.pop(key, None)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_refused_in_words])
        for path, dialect in ROUTES.items():
            app.router.add_post(f"/v1/{path}", partial(self._handle, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        return app

    def _rollout(self, request: web.Request) -> AgentRollout:
        """Return the rollout that a request's key opens.

        Raises:
            Refusal: it opens none.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        keys = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            keys.append(bearer.strip())
        for key in keys:
            if key in self._rollouts:
                return self._rollouts[key]
        raise Refusal(
            "this key opens no rollout, or its rollout has ended",
            status=401,
            code="invalid_api_key",
        )

    async def _body(self, request: web.Request) -> tuple[bytes, dict[str, Any]]:
        """Return a request's body, as bytes and as an object.

        Raises:
            Refusal: the body is no JSON object, is compressed, or is nested too deep.
        """
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise Refusal(
                f"Content-Encoding is {shown(encoding)}: send the request as it is",
                code="invalid_encoding",
            )
        raw = await request.read()
        if len(raw) < LARGE_BODY:
            return raw, _json_of(raw)
        return raw, await asyncio.to_thread(_json_of, raw)

    async def _handle(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        """Answer a call, from its request to the last byte of the answer."""
        rollout = self._rollout(request)
        try:
            raw, body = await self._body(request)
            if len(raw) < LARGE_BODY:
                model_request = dialect.parse(body)
            else:
                model_request = await asyncio.to_thread(dialect.parse, body)
        except Refusal as refusal:
            rollout.count_refusal(refusal)
            raise
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        digest = hashlib.blake2b(request.path.encode() + raw, digest_size=16).digest()
        connection = connection_of(request.transport)
        call = rollout.begin(model_request, digest=digest, retry=retry, dialect=dialect.NAME)
        delivered = False
        try:
            if model_request.stream:
                response = await _stream(dialect, request, model_request, call)
            else:
                response = web.json_response(dialect.reply(await _reply_to(call)))
                connection.begin_response()
                await response.prepare(request)
                await response.write_eof()
            delivered = _is_open(connection)
            return response
        finally:
            rollout.leave(call, delivered=delivered)
            if delivered:
                connection.delivered(partial(rollout.take_back, call))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        rollout = self._rollout(request)
        _, body = await self._body(request)
        tokens = await rollout.count_tokens(anthropic.parse(body))
        return web.json_response({"input_tokens": tokens})

    async def _models(self, request: web.Request) -> web.Response:
        """Answer a question for the models: there is one, by whatever name it is asked for."""
        limit = self._rollout(request).max_prompt_tokens + 1
        name = request.match_info.get("name", "policy")
        if ANTHROPIC_HEADER in request.headers:
            model = {
                "id": name,
                "type": "model",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
                "lifecycle": "active",
                "max_input_tokens": limit,
            }
            listed: dict[str, Any] = {"has_more": False, "first_id": name, "last_id": name}
        else:
            model = {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "run",
                "max_model_len": limit,
            }
            listed = {"object": "list"}
        if "name" in request.match_info:
            return web.json_response(model)
        return web.json_response({"data": [model]} | listed)


def _json_of(raw: bytes) -> dict[str, Any]:
    """Return the object of a request's body.

    Raises:
        Refusal: the body is no JSON object, or is nested too deep.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the request is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal("the request is no JSON object", code="invalid_json")
    for name, value in body.items():
        if _is_deeper(value, MAX_DEPTH):
            raise Refusal(f"{name} is nested too deep, want at most {MAX_DEPTH} levels", field=name)
    return body


def _is_deeper(value: object, depth: int) -> bool:
    """Return True if a JSON value has more than ``depth`` objects and lists inside each other."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            entry
            for outer in level
            if isinstance(outer, dict | list)
            for entry in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True


@web.middleware
async def _refused_in_words(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer whatever goes wrong with a request in the form that its client knows."""
    try:
        connection = connection_of(request.transport)
        with connection.answering(knows_interim=request.version >= HttpVersion11):
            return await handler(request)
    except Refusal as error:
        refusal = error
    except ConnectionError:  # while it was written: the client has gone
        return web.Response()
    except web.HTTPException as error:
        refusal = _refusal_of(error, request)
    except Exception as error:  # noqa: BLE001 - a fault of the library's ends one call alone
        logger.exception("%s %s", request.method, request.path)
        refusal = Refusal(f"the run's server failed: {error!r}", status=500, code="server_error")
    is_of_anthropic = request.path.startswith("/v1/messages") or ANTHROPIC_HEADER in request.headers
    dialect = anthropic if is_of_anthropic else chat
    headers = None
    if refusal.status == MODEL_FAILED:
        # The run has asked the failing model's servers again, as often as the config says.
        headers = {"x-should-retry": "false"}
    return web.json_response(dialect.error(refusal), status=refusal.status, headers=headers)


def _refusal_of(error: web.HTTPException, request: web.Request) -> Refusal:
    """Return the refusal of a request that has no route, or a body above MAX_BODY."""
    text = f"{request.method} {request.path}: {error.text}"
    if error.status != 413:
        text += f"; the routes are {', '.join(f'/v1/{path}' for path in ROUTES)}"
    return Refusal(text, status=error.status, code=error.reason.lower().replace(" ", "_"))


async def _reply_to(call: AgentCall) -> ModelReply:
    """Return the reply of a call.

    If this reader is cancelled the call goes on, because another reader may wait for it.

    Raises:
        Refusal: the call was refused, or lost.
    """
    try:
        return (await asyncio.shield(call.task)).reply
    except asyncio.CancelledError:
        if call.task.cancelled():  # the call, and not this reader
            raise Refusal(
                "the rollout of this key has ended", status=401, code="rollout_ended"
            ) from None
        raise


async def _stream(
    dialect: ModuleType, request: web.Request, model_request: ModelRequest, call: AgentCall
) -> web.StreamResponse:
    """Send the answer of a call as a stream, which begins with a sign of life.

    Raises:
        Refusal: the call was refused, or lost, before the model was asked.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    connection = connection_of(request.transport)
    await call.prompted.wait()
    if not call.task.done():
        connection.begin_response()
        await response.prepare(request)
        await response.write(dialect.KEEP_ALIVE)
    while not (await asyncio.wait([call.task], timeout=KEEP_ALIVE_S))[0]:
        await response.write(dialect.KEEP_ALIVE)
    try:
        parts = list(dialect.stream(await _reply_to(call), model_request))
    except Refusal as refusal:
        if not response.prepared:
            raise
        parts = [event(dialect.error_event(refusal), "error")]
    if not response.prepared:
        connection.begin_response()
        await response.prepare(request)
    for part in parts[:-1]:
        await response.write(part)
    # With the last part, so that a client that has read it has read the end of the response too: a
    # connection that is closed before its end was read looks like an answer that was not read.
    await response.write_eof(parts[-1])
    return response


def _is_open(connection: Connection) -> bool:
    return connection.is_open


_CONNECTIONS: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedConnections] = WeakKeyDictionary()
"""Connections of the clients of each event loop."""
_GATEWAYS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gateway]] = WeakKeyDictionary()
"""Servers of each event loop, by address."""


def gateway_at(host: str) -> Gateway:
    """Return the running event loop's server at this address."""
    servers = _GATEWAYS.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault(host, Gateway(host))


async def _close_connections() -> None:
    """Close the connections of the running event loop's clients once no server is in use."""
    loop = asyncio.get_running_loop()
    in_use = any(gateway.is_in_use for gateway in _GATEWAYS.get(loop, {}).values())
    if not in_use and loop in _CONNECTIONS:
        await _CONNECTIONS.pop(loop).close_all()
