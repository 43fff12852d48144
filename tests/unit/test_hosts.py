"""Hosts of a run: how their ends are noticed, and what they must share before anything is spawned."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.waiting import wait_until
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.hosts import MARK_FILE, check_shared_files
from torchtitan.experiments.rl.hosts import pool
from torchtitan.experiments.rl.hosts.pool import TOKEN_BYTES, text_of
from torchtitan.experiments.rl.process.host import (
    LOOPBACK,
    interface_towards,
    network_address,
    source_address,
)
from torchtitan.experiments.rl.process.lifetime import descendants

ROOT = Path(__file__).resolve().parents[2]

AGENT = """
import os, socket, subprocess, sys, threading
from torchtitan.experiments.rl.hosts.pool import _end_with_command
child = subprocess.Popen(["bash", "-c", "sleep 600 & wait"])
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    _end_with_command(listener, bytes.fromhex(sys.argv[1]), os.getppid())
print(listener.getsockname()[1], flush=True)
child.wait()
"""


@pytest.fixture
def host():
    """A host's agent with two processes and its keeper; its port, its token, and the processes of it that live."""
    token = secrets.token_bytes(TOKEN_BYTES)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, token.hex()], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    port = int(agent.stdout.readline())
    wait_until(lambda: len(descendants(agent.pid)) == 3)
    yield SimpleNamespace(port=port, token=token, agent=agent, alive=lambda: descendants(agent.pid))
    for pid in [*descendants(agent.pid), agent.pid]:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            pass
    agent.wait()


def test_the_end_of_the_commands_connection_ends_every_process_of_the_host(host):
    children = host.alive()
    with socket.create_connection(("127.0.0.1", host.port)) as command:
        command.sendall(host.token)
        assert host.agent.poll() is None
    assert host.agent.wait(timeout=60) == -9
    wait_until(lambda: not any(_lives(pid) for pid in children))


def test_a_stranger_can_not_end_a_host_nor_keep_the_command_from_it(host):
    for said in (b"", b"x" * TOKEN_BYTES, host.token[:-1]):
        with socket.create_connection(("127.0.0.1", host.port)) as stranger:
            stranger.sendall(said)
    with socket.create_connection(("127.0.0.1", host.port)) as command:
        command.sendall(host.token)
        assert host.agent.poll() is None and len(host.alive()) == 3
    assert host.agent.wait(timeout=60) == -9


def test_strangers_that_say_nothing_do_not_hold_the_command_up(host):
    with contextlib.ExitStack() as strangers:
        silent = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", host.port)))
            for _ in range(20)
        ]
        with socket.create_connection(("127.0.0.1", host.port)) as command:
            command.sendall(host.token)
        assert host.agent.wait(timeout=60) == -9
        for stranger in silent:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_the_hosts_death_ends_the_commands_connection(host):
    with socket.create_connection(("127.0.0.1", host.port), timeout=60) as command:
        command.sendall(host.token)
        for pid in [*host.alive(), host.agent.pid]:
            os.kill(pid, 9)
        with contextlib.suppress(ConnectionResetError):  # where what was sent had not been read
            assert command.recv(1) == b""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Pool:
    """Hosts of which each reads its own files: by name, what it reads."""

    def __init__(self, **reads):
        self.reads, self.asked = reads, []

    def read(self, file):
        self.asked.append(file.name)
        return {host: does(file) for host, does in self.reads.items()}


def test_hosts_that_see_the_same_files_pass_and_the_mark_goes(tmp_path):
    pool = Pool(one=text_of, two=text_of)
    check_shared_files(pool, config_registry.rl_grpo_qwen3_debug(), tmp_path)
    assert pool.asked == [MARK_FILE, "config.json"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [None, "of another disk"])
@pytest.mark.parametrize(
    ("name", "field"), [(MARK_FILE, "--run-dir"), ("config.json", "model.hf_assets_path")]
)
def test_a_host_that_does_not_see_a_folder_is_named_with_the_folder(tmp_path, name, field, there):
    pool = Pool(one=text_of, two=lambda file: there if file.name == name else text_of(file))
    config = config_registry.rl_grpo_qwen3_debug()
    folder = tmp_path if name == MARK_FILE else Path(config.model.hf_assets_path).resolve()
    with pytest.raises(
        RunError, match=f"^two does not see the folder {folder} as this host does: .*{field}"
    ):
        check_shared_files(pool, config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_has_no_text_and_an_empty_one_has(tmp_path):
    file = tmp_path / "config.json"
    assert text_of(file) is None and text_of(tmp_path) is None
    file.write_bytes(b"")
    assert text_of(file) == ""
    file.write_bytes(b'{"a": "\xff"}')
    assert text_of(file) == '{"a": "\ufffd"}'


def test_the_network_address_is_one_that_leads_out_and_a_host_name_does_not_change_it(monkeypatch):
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *name: [(0, 0, 0, "", ("127.0.1.1", 0)), (0, 0, 0, "", ("10.0.0.7", 0))],
    )
    assert network_address() == "10.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert network_address() == source_address("192.0.2.1")


def test_the_interface_that_leads_to_this_host_itself_is_the_loopback_one():
    assert source_address("127.0.0.1") == "127.0.0.1" and interface_towards("127.0.0.1") == LOOPBACK


# ---- agents that are not there yet


@pytest.fixture
def attached(monkeypatch):
    """What Monarch is told to attach to."""
    calls = []
    monkeypatch.setattr(pool, "attach_to_workers", lambda ca, workers, name: calls.append(workers))
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    return calls


def test_agents_that_begin_to_listen_late_are_waited_for_before_monarch_attaches(
    attached, tmp_path
):
    """Monarch loses its first message to an agent that listens more than half a minute later."""
    early = socket.create_server(("127.0.0.1", 0))
    late, path = socket.socket(), tmp_path / "socket"
    late.bind(("127.0.0.1", 0))
    (_, port), (_, late_port) = early.getsockname(), late.getsockname()
    endpoints = [("127.0.0.1", port), ("127.0.0.1", late_port), str(path)]
    attaching = threading.Thread(
        target=lambda: pool.attach(["a", "b", "c"], endpoints, timeout_s=60)
    )
    attaching.start()
    assert attached == []
    late.listen()
    with socket.socket(socket.AF_UNIX) as last:
        last.bind(str(path))
        assert attached == [], "a socket that exists, and at which nobody listens, is not enough"
        last.listen()
        attaching.join(timeout=60)
    assert attached == [["a", "b", "c"]]


def test_an_agent_that_does_not_come_is_one_line_with_its_host_and_the_field(
    attached, monkeypatch, capsys
):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        place = bound.getsockname()
        with pytest.raises(RunError) as error:
            pool.attach(["a"], [place], timeout_s=0.05)
        said = f"host 0 of 1: no agent at 127.0.0.1:{place[1]} after 0.05 s (Connection refused): "
        assert str(error.value).startswith(said) and "provision.job.start_timeout_s" in str(
            error.value
        )
        assert (
            f"warning: whoever reaches port {place[1]} of these hosts can run code as you"
            in capsys.readouterr().err
        )
        with pytest.raises(RunError, match="stopped while its hosts were taken"):
            pool.attach(["a"], [place], timeout_s=60, stopped=lambda: True)

    def refuse(**arguments):
        raise RuntimeError("attach failed: config push failed\nsomething long")

    monkeypatch.setattr(pool, "attach_to_workers", refuse)
    with pytest.raises(
        RunError,
        match="^the hosts' agents can't be attached to: attach failed: config push failed$",
    ):
        pool.attach(["a"], [], timeout_s=1)
