"""A run over three hosts, which are processes of this machine."""

import json
import os
import re
import signal
import socket
from collections import Counter
from pathlib import Path

from tests.integration.command_runs import ENDLESS, private, wait_for
from tests.integration.processes import listening_sockets, open_files
from torchtitan.experiments.rl.process.host import HOST_VARIABLE


def environment_of(pid: int) -> dict[str, str]:
    """What a process was launched with; empty where it is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)


def processes_of(temporary: Path) -> dict[int, dict[str, str]]:
    """Environments of the processes of a run, on all its hosts, by their temporary folder."""
    found = {
        int(entry): environment_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()
    }
    return {
        pid: own for pid, own in found.items() if own.get("TMPDIR", "").startswith(str(temporary))
    }


def test_three_hosts_have_the_roles_of_the_config_and_a_killed_one_ends_the_run_by_its_name(start):
    run = start(*ENDLESS, config="rl_grpo_qwen3_debug_hosts")
    run.until_step(2)
    listening = listening_sockets(processes_of(run.temporary))
    sockets = {path for path in listening if not path.startswith("@")}
    assert len(sockets) >= 3 and all(map(private, sockets)), (
        f"another user could enter the run by {sockets}"
    )
    host_of = {}
    for pid, launched in processes_of(run.temporary).items():
        logs = [path.stem for path in map(Path, open_files(pid)) if "logs" in path.parts]
        host_of |= dict.fromkeys(logs, launched.get(HOST_VARIABLE, "").rpartition("/")[2])
    roles = {
        name: host
        for name, host in host_of.items()
        if name.startswith(("trainer", "generator", "rollout"))
    }
    assert roles == {
        "trainer-0": "process host 0",
        "trainer-1": "process host 1",
        "generator-0": "process host 1",
        "generator-1": "process host 2",
        "rollout_worker-0": "process host 2",
    }
    agents = [
        pid
        for pid, own in processes_of(run.temporary).items()
        if own.get("HYPERACTOR_PROCESS_NAME") == "hosts_2"
    ]
    os.kill(min(agents), signal.SIGKILL)
    assert run.wait() == 1
    name = re.escape(socket.gethostname())
    assert re.search(
        rf"^error: host 2 \({name}\) died: [\w ]+ \(logs in ", run.err, re.MULTILINE
    ), run.err
    assert "Traceback" not in run.err and "Monarch" not in run.err
    assert "Monarch internal logs" in (run.folder / "logs/monarch.txt").read_text()
    wait_for(lambda: not processes_of(run.temporary), "processes left alive")
    run.assert_nothing_left()
    columns = Counter(
        json.loads(line)["column"]
        for line in (run.folder / "ledger.jsonl").read_text().splitlines()
    )
    assert columns["trained"] >= 2 * 32
    fetched = re.findall(
        r"(host_\d) fetched version (\d+): ", (run.folder / "logs" / "controller.jsonl").read_text()
    )
    assert {host for host, _ in fetched} == {"host_1", "host_2"}, "those of the generators"
    assert max(Counter(fetched).values()) == 1, "a host fetches a version once"
