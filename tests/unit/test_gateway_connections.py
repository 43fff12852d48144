"""Connections of agents' clients: half of an answer, half of a connection, and the server's end."""

import asyncio
import json
import socket
import struct

import pytest

from tests.fakes.policy import HeldPolicy, ScriptedPolicy
from tests.fakes.waiting import until
from tests.unit.agents import client_of, run_agent
from torchtitan.experiments.rl.gateway import connection as connections
from torchtitan.experiments.rl.gateway import server
from torchtitan.experiments.rl.gateway.rollout import EVENTS_OF_A_RESET
from torchtitan.experiments.rl.gateway.server import Gateway

HELLO = {"role": "user", "content": "hello"}


def connect(endpoint):
    host, _, port = endpoint.anthropic_url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)))


def request_of(endpoint, *, version="1.1", messages=(HELLO,), **fields):
    body = json.dumps({"model": "policy", "messages": list(messages), **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: run\r\n"
        f"Authorization: Bearer {endpoint.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def whole_answer(own_socket):
    """Return what the server sends until it closes the connection."""
    received = b""
    while some := own_socket.recv(1 << 16):
        received += some
    return received


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_which_a_client_read_a_part_is_undelivered(stream, renderer, tokenizer):
    """The sockets' buffers take all of it, so that the server has sent it when the client resets."""

    def read_a_part(endpoint):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint, stream=stream))
            assert len(own_socket.recv(100)) == 100

    async def agent(sample, endpoint):
        await asyncio.to_thread(read_a_part, endpoint)

    policy = ScriptedPolicy(tokenizer, "word " * 200)
    rollout = await run_agent(agent, policy, renderer)
    (turn,) = rollout.turns
    assert turn.untrained == "undelivered" and not rollout.samples
    assert rollout.calls == {"undelivered": 1}


async def test_an_answer_that_the_next_call_goes_on_from_was_read_whatever_ends_its_connection(
    renderer, tokenizer
):
    def ask_and_read_a_part(endpoint):
        own_socket = connect(endpoint)
        own_socket.sendall(request_of(endpoint))
        assert len(own_socket.recv(100)) == 100
        return own_socket

    async def agent(sample, endpoint):
        own_socket = await asyncio.to_thread(ask_and_read_a_part, endpoint)
        async with client_of(endpoint) as ask:
            assert (await ask([HELLO, {"role": "assistant", "content": "ok"}, HELLO]))[0] == 200
        own_socket.close()

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 2} and len(rollout.samples) == 1


async def test_an_answer_is_delivered_once_the_client_asks_again_on_its_connection(
    renderer, tokenizer
):
    def ask_twice(endpoint):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint))
            head, _, body = own_socket.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and json.loads(body)
            own_socket.sendall(request_of(endpoint, user="again"))
            assert len(own_socket.recv(100)) == 100

    async def agent(sample, endpoint):
        await asyncio.to_thread(ask_twice, endpoint)

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 1, "undelivered": 1} and len(rollout.samples) == 1


async def test_an_answer_that_was_read_in_part_is_there_for_a_repeat(renderer, tokenizer):
    def read_a_part(endpoint):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint))
            own_socket.recv(100)

    def read_all(endpoint):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint))
            own_socket.shutdown(socket.SHUT_WR)
            return whole_answer(own_socket)

    async def agent(sample, endpoint):
        await asyncio.to_thread(read_a_part, endpoint)
        for _ in range(EVENTS_OF_A_RESET):
            await asyncio.sleep(0)
        assert b'"content": "ok"' in await asyncio.to_thread(read_all, endpoint)

    policy = ScriptedPolicy(tokenizer, "ok")
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.calls == {"answered": 1, "retried": 1} and len(rollout.turns) == 1


async def test_a_client_that_has_ended_what_it_sends_gets_its_answer(
    renderer, tokenizer, monkeypatch
):
    monkeypatch.setattr(connections, "PROBE_S", 0.01)
    policy = HeldPolicy(tokenizer)

    def ask(endpoint, **fields):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint, **fields))
            own_socket.shutdown(socket.SHUT_WR)
            return whole_answer(own_socket)

    async def agent(sample, endpoint):
        for number, fields in enumerate(({}, {"stream": True}, {"n": 2})):
            asked = asyncio.create_task(asyncio.to_thread(ask, endpoint, **fields))
            if number < 2:
                await until(lambda number=number: policy.begun == number + 1)
                await asyncio.sleep(0.1)  # some interim responses
                policy.released.set()
            received = await asked
            interim, final = (
                received.count(connections.INTERIM),
                received.rpartition(b"HTTP/1.1 ")[2],
            )
            assert final.startswith(b"400" if "n" in fields else b"200"), received
            assert interim > 1 or number
            policy.released.clear()

    rollout = await run_agent(agent, policy, renderer)
    assert rollout.error is None and rollout.calls == {"answered": 2, "refused": 1}


async def test_a_client_that_closes_its_connection_is_seen_to_have_gone_at_once(
    renderer, tokenizer
):
    """So that its repeat joins the call, although it may have ended no more than what it sends."""
    policy = HeldPolicy(tokenizer)

    async def agent(sample, endpoint):
        own_socket = connect(endpoint)
        own_socket.sendall(request_of(endpoint))
        await until(lambda: policy.begun == 1)
        own_socket.close()
        async with client_of(endpoint) as ask:
            await asyncio.sleep(0.1)
            raw = request_of(endpoint).partition(b"\r\n\r\n")[2]
            again = asyncio.create_task(ask.raw("chat/completions", raw))
            await asyncio.sleep(0.1)
            policy.released.set()
            assert (await again)[0] == 200

    rollout = await run_agent(agent, policy, renderer)
    assert rollout.calls == {"answered": 1, "retried": 1} and policy.begun == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_were_sent_one_behind_the_other_are_all_answered(
    stream, renderer, tokenizer
):
    """The client ends what it sends before the first answer."""

    def ask_three_times(endpoint):
        with connect(endpoint) as own_socket:
            users = [{"user": str(number)} for number in range(3)]
            asked = [request_of(endpoint, stream=stream, **user) for user in users]
            own_socket.sendall(b"".join(asked))
            own_socket.shutdown(socket.SHUT_WR)
            return whole_answer(own_socket)

    async def agent(sample, endpoint):
        received = await asyncio.to_thread(ask_three_times, endpoint)
        assert received.count(b"HTTP/1.1 200") == 3

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 3}


async def test_a_client_that_has_reset_the_connection_stays_gone(renderer, tokenizer):
    """The kernel tells an error once."""
    policy = HeldPolicy(tokenizer)
    seen = []

    async def agent(sample, endpoint):
        own_socket = connect(endpoint)
        own_socket.sendall(request_of(endpoint))
        own_socket.shutdown(socket.SHUT_WR)
        await until(lambda: policy.begun == 1)
        (gateway,) = server._GATEWAYS[asyncio.get_running_loop()].values()
        (connection,) = gateway._connections
        connection._stop_looking()
        assert connection.is_open
        own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        own_socket.close()
        await until(lambda: not connection.is_open)
        seen.append([connection.is_open for _ in range(3)])
        policy.released.set()

    await run_agent(agent, policy, renderer)
    assert seen == [[False] * 3]


@pytest.mark.parametrize("read_s, calls", [(0.0, {"answered": 1}), (60.0, {"undelivered": 1})])
async def test_a_reset_takes_an_answer_back_unless_the_client_has_left_it_idle_since(
    read_s, calls, renderer, tokenizer, monkeypatch
):
    monkeypatch.setattr(connections, "READ_S", read_s)

    def read_all_and_reset(endpoint):
        with connect(endpoint) as own_socket:
            own_socket.sendall(request_of(endpoint))
            head, _, body = own_socket.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and json.loads(body)
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def agent(sample, endpoint):
        await asyncio.to_thread(read_all_and_reset, endpoint)

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == calls


UNFINISHED = {
    "nothing": b"",
    "half of a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: run\r\nContent-Le",
    "half of a body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: run\r\n"
    b"Authorization: Bearer %s\r\nContent-Length: 100\r\n\r\n{",
    "half of a body with another key": b"POST /v1/chat/completions HTTP/1.1\r\nHost: run\r\n"
    b"Content-Length: 100\r\n\r\n{",
}


@pytest.mark.parametrize("sent", UNFINISHED)
async def test_a_server_that_closes_waits_for_no_request_that_was_never_finished(sent, monkeypatch):
    monkeypatch.setattr(server, "SHUTDOWN_S", 3600)
    gateway = Gateway("127.0.0.1")
    await gateway.acquire()
    endpoint = gateway.admit(object())
    text = UNFINISHED[sent]

    def open_all():
        sockets = [connect(endpoint) for _ in range(300)]
        for own_socket in sockets:
            own_socket.sendall(text % endpoint.key.encode() if b"%s" in text else text)
        return sockets

    sockets = await asyncio.to_thread(open_all)
    await until(lambda: len(gateway._connections) == len(sockets))
    async with asyncio.timeout(60):
        await gateway.release()
    assert not gateway._connections
    for own_socket in sockets:
        own_socket.close()


async def test_the_server_has_no_connection_left_after_its_clients_have_gone(renderer, tokenizer):
    seen = []

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])
        (gateway,) = server._GATEWAYS[asyncio.get_running_loop()].values()
        await until(lambda: not gateway._connections)
        seen.append(gateway)

    await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert seen
