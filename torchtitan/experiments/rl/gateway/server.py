"""The HTTP server through which agents reach the policy: one in each process that runs rollouts.

A rollout has a key of its own. It is the API key that its agent's client sends, opens that rollout and no other, and is refused
when the rollout has ended. A call's answer counts as delivered when all of it was handed to a connection that was open.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import anthropic.types
import openai.types
from aiohttp import web

from torchtitan.experiments.rl.gateway.dialects import anthropic as messages
from torchtitan.experiments.rl.gateway.dialects import chat, responses
from torchtitan.experiments.rl.gateway.dialects.request import Refusal
from torchtitan.experiments.rl.gateway.session import AgentRollout, Call, Said

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 3.0
"""A stream says that often that it lives, until its turn is sampled. One that is sampled sooner begins with its answer."""
MAX_BODY = 64 << 20
"""Bytes of a request. A prompt that a model has room for has far less."""
LARGE_BODY = 1 << 18
"""Bytes above which JSON is parsed off the event loop."""
LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True, slots=True, frozen=True)
class Endpoint:
    """Where an agent reaches the model, for one rollout."""

    url: str
    """For OpenAI's clients: their base_url."""
    anthropic_url: str
    """For Anthropic's clients: their base_url."""
    key: str
    model: str = "policy"

    def variables(self) -> dict[str, str]:
        """The environment variables in which clients look for them."""
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
        }


class Gateway:
    """``acquire`` and ``release`` it; it listens while somebody has it."""

    def __init__(self, host: str):
        self.host = host
        self._port = 0
        self._users = 0
        self._runner: web.AppRunner | None = None
        self._rollouts: dict[str, AgentRollout] = {}
        self._lock = asyncio.Lock()

    async def acquire(self) -> None:
        """
        Raises:
            OSError: nothing can listen at this address.
        """
        async with self._lock:
            if self._runner is None:
                runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=1)
                await runner.setup()
                await web.TCPSite(runner, self.host, 0).start()
                self._runner, self._port = runner, runner.addresses[0][1]
            self._users += 1

    async def release(self) -> None:
        async with self._lock:
            self._users -= 1
            if not self._users and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    def admit(self, rollout: AgentRollout, *, name: str | None = None) -> Endpoint:
        """Give a rollout a key; ``forget`` takes it back.

        Args:
            name: of this host, for agents; None: the address that the server listens at.
        """
        key = f"rl-{secrets.token_urlsafe(24)}"
        self._rollouts[key] = rollout
        root = f"http://{name or self.host}:{self._port}"
        return Endpoint(url=f"{root}/v1", anthropic_url=root, key=key)

    def forget(self, key: str) -> None:
        self._rollouts.pop(key, None)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        for path, dialect in (("chat/completions", chat), ("responses", responses), ("messages", messages)):
            app.router.add_post(f"/v1/{path}", partial(self._handle, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        return app

    def _rollout(self, request: web.Request) -> AgentRollout:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        rollout = self._rollouts.get(key)
        if rollout is None:
            raise Refusal("this key opens no rollout, or its rollout has ended", status=401, code="invalid_api_key")
        return rollout

    async def _body(self, request: web.Request) -> tuple[bytes, dict[str, Any]]:
        try:
            raw = await request.read()
            body = json.loads(raw) if len(raw) < LARGE_BODY else await asyncio.to_thread(json.loads, raw)
        except web.HTTPRequestEntityTooLarge:
            raise Refusal(f"the request has more than {MAX_BODY:,} bytes", status=413, code="too_large") from None
        except (ValueError, RecursionError) as error:
            raise Refusal(f"the request is not JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Refusal("the request is no JSON object", code="invalid_json")
        return raw, body

    async def _handle(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        """One call, from its request to the last byte of its answer."""
        try:
            rollout = self._rollout(request)
            raw, body = await self._body(request)
            try:
                asked = dialect.parse(body)
            except Refusal:
                rollout.counts["refused"] += 1
                raise
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            digest = hashlib.blake2b(request.path.encode() + raw, digest_size=16).digest()
            call = rollout.begin(asked, digest=digest, retry=retry, dialect=dialect.NAME)
        except Refusal as refusal:
            return web.json_response(dialect.error(refusal), status=refusal.status)
        delivered = False
        try:
            if asked.stream:
                response, delivered = await _streamed(dialect, request, asked, call)
            else:
                said = await _answer(call)
                response = web.Response(
                    body=dialect.reply(said.reply).model_dump_json(exclude_unset=True), content_type="application/json"
                )
                await response.prepare(request)
                await response.write_eof()
                delivered = _is_open(request)
            return response
        except Refusal as refusal:
            return web.json_response(dialect.error(refusal), status=refusal.status)
        except ConnectionError:  # while it was written: the client has gone
            return web.Response()
        finally:
            rollout.leave(call, delivered=delivered)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        try:
            rollout = self._rollout(request)
            _, body = await self._body(request)
            count = await rollout.count_tokens(messages.parse(body))
        except Refusal as refusal:
            return web.json_response(messages.error(refusal), status=refusal.status)
        return _json(anthropic.types.MessageTokensCount(input_tokens=count))

    async def _models(self, request: web.Request) -> web.Response:
        """In the form of the client's own dialect: Anthropic's clients name their version of it."""
        of_anthropic = "anthropic-version" in request.headers
        try:
            rollout = self._rollout(request)
        except Refusal as refusal:
            return web.json_response((messages if of_anthropic else chat).error(refusal), status=refusal.status)
        name = request.match_info.get("name", "policy")
        limit = rollout.max_prompt_tokens + 1
        made = datetime.fromtimestamp(0, UTC)
        if of_anthropic:
            known: dict[str, Any] = {
                "id": name,
                "type": "model",
                "display_name": name,
                "created_at": made,
                "lifecycle": "active",
            }
            model: Any = anthropic.types.ModelInfo.model_validate(known | {"max_input_tokens": limit}).model_dump(
                mode="json", exclude_unset=True
            )
            listed: dict[str, Any] = {"data": [model], "has_more": False, "first_id": name, "last_id": name}
        else:
            fields = {"id": name, "object": "model", "created": 0, "owned_by": "run", "max_model_len": limit}
            model = openai.types.Model.model_validate(fields).model_dump(exclude_unset=True)
            listed = {"object": "list", "data": [model]}
        return web.json_response(model if "name" in request.match_info else listed)


async def _answer(call: Call) -> Said:
    """The call's own end is not its readers': one may go while another still waits.

    Raises:
        Refusal: it was refused, or lost.
    """
    try:
        return await asyncio.shield(call.answer)
    except asyncio.CancelledError:
        if call.answer.cancelled():  # and not this reader
            raise Refusal("the rollout of this key has ended", status=401, code="rollout_ended") from None
        raise


async def _streamed(dialect: ModuleType, request: web.Request, asked: Any, call: Call) -> tuple[web.StreamResponse, bool]:
    """The answer as a stream, and whether all of it was delivered. It begins when the turn is sampled, or with a sign of life.

    Raises:
        Refusal: it was refused, or lost, before the stream began.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    while not (await asyncio.wait([call.answer], timeout=KEEP_ALIVE_S))[0]:
        if not response.prepared:
            await response.prepare(request)
        await response.write(dialect.KEEP_ALIVE)
    try:
        said = await _answer(call)
    except Refusal as refusal:
        if not response.prepared:
            raise
        await response.write(f"event: error\ndata: {json.dumps(dialect.error_event(refusal))}\n\n".encode())
        await response.write_eof()
        return response, False
    if not response.prepared:
        await response.prepare(request)
    for part in dialect.stream(said.reply, asked):
        await response.write(part)
    await response.write_eof()
    return response, _is_open(request)


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _json(record: Any) -> web.Response:
    return web.Response(body=record.model_dump_json(exclude_unset=True), content_type="application/json")


_GATEWAYS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gateway]] = WeakKeyDictionary()


def gateway_at(host: str) -> Gateway:
    """The running event loop's server at this address."""
    servers = _GATEWAYS.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault(host, Gateway(host))
