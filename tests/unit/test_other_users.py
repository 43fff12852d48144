"""The warning that other people of a host can enter a run."""

import os
import pwd
import subprocess
import sys

import pytest

from torchtitan.experiments.rl.process import host


def test_people_are_named_and_services_root_and_oneself_are_not(monkeypatch):
    owners = {0, 101, 999, os.getuid(), 70001, 70005, 70009, host.NOBODY}
    names = {70001: "ann", 70005: "ben"}

    def named(user: int) -> pwd.struct_passwd:
        return pwd.struct_passwd([names[user], *[""] * 6])  # 70009 has no name: KeyError

    monkeypatch.setattr(host, "process_owners", lambda: owners)
    monkeypatch.setattr(host.pwd, "getpwuid", named)
    assert host.other_users() == ["70009", "ann", "ben"]


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ([], ""),
        (["ann"], "warning: other users of this host can control this run: ann (docs/security.md)"),
        (
            list("abcde"),
            "warning: other users of this host can control this run: a, b, c and 2 more",
        ),
    ],
)
def test_the_line_names_at_most_three(monkeypatch, others, line):
    monkeypatch.setattr(host, "other_users", lambda: others)
    assert host.other_users_line().startswith(line) and bool(others) == bool(
        host.other_users_line()
    )


def test_the_owner_of_each_process_is_read():
    assert os.getuid() in host.process_owners()
    if os.getuid() == 0:  # nobody else can be another user for a while
        code = "import os, sys; os.setuid(54321); print(flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            other.stdout.readline()
            assert 54321 in host.process_owners()
            other.stdin.close()
