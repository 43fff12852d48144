"""Processes are told apart by their hosts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.experiments.rl.process import host as module
from torchtitan.experiments.rl.process.host import HOST_VARIABLE, host_identity

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def not_injected(monkeypatch):
    monkeypatch.delenv(HOST_VARIABLE, raising=False)


def test_two_processes_of_one_host_have_one_identity():
    code = (
        "from torchtitan.experiments.rl.process.host import host_identity; print(host_identity())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == host_identity()


def test_a_new_host_name_changes_nothing(monkeypatch):
    before = host_identity()
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2")
    assert host_identity() == before


@pytest.mark.parametrize("part", ["_kernel", "_namespace", "_shared_memory"])
def test_hosts_of_one_name_differ_by_kernel_namespaces_and_shared_memory(monkeypatch, part):
    before = host_identity()
    monkeypatch.setattr(module, part, lambda *kind: "another")
    assert host_identity() != before


def test_a_container_without_the_files_of_linux_has_an_identity(monkeypatch):
    def absent(*path):
        raise FileNotFoundError(*path)

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr("os.readlink", absent)
    monkeypatch.setattr("os.stat", absent)
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-7")
    assert host_identity() == "pod-7:pid:net:shm"


def test_the_environment_may_say_which_host_a_process_counts_for(monkeypatch):
    monkeypatch.setenv(HOST_VARIABLE, "process host 1")
    assert host_identity() == "process host 1"
