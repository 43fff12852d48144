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
listening = set()
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            listening.add(fields[1].split(":")[0])
with open(f"{sys.argv[2]}/rank-{rank}", "w") as file:  # gloo prints to stdout, in pieces
    print(total.item(), *listening, file=file)
dist.barrier()
dist.destroy_process_group()
if second:
    assert os.waitpid(second, 0)[1] == 0
"""
LOOPBACK = "0100007F"
"""127.0.0.1 as /proc writes it."""


def test_ranks_that_meet_in_a_file_listen_on_the_loopback_interface_alone(tmp_path):
    ranks = subprocess.Popen(
        [sys.executable, "-c", RANKS, f"file://{tmp_path}/store", str(tmp_path)],
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert ranks.wait(timeout=240) == 0
        for rank in range(2):
            assert (tmp_path / f"rank-{rank}").read_text() == f"2.0 {LOOPBACK}\n"
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
