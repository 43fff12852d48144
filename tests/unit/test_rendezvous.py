"""Trainer ranks of one host meet where no other host can reach them."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torchtitan.experiments.rl.training.trainer import init_process_group
second = os.fork()  # both have imported torch at once, and nothing is started yet
rank = 0 if second else 1
init_process_group(device="cpu", rank=rank, world_size=2, url=sys.argv[1])
total = torch.ones(1)
dist.all_reduce(total)
sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            print(rank, "listens on", fields[1].split(":")[0], flush=True)
print(rank, "sum", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
if second:
    assert os.waitpid(second, 0)[1] == 0
"""
LOOPBACK = "0100007F"
"""127.0.0.1 as /proc writes it."""


def test_ranks_that_meet_in_a_file_listen_on_the_loopback_interface_alone(tmp_path):
    ranks = subprocess.Popen(
        [sys.executable, "-c", RANKS, f"file://{tmp_path}/store"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lines = ranks.communicate(timeout=240)[0].splitlines()
        for rank in ("0", "1"):
            *listening, total = [line for line in lines if line.startswith(f"{rank} ")]
            assert total == f"{rank} sum 2.0"
            assert listening and set(listening) == {f"{rank} listens on {LOOPBACK}"}
        assert ranks.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
