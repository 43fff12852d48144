"""Trainer ranks of one host meet where no other host can reach them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torchtitan.experiments.rl.training.trainer import init_process_group
init_process_group(device="cpu", rank=int(sys.argv[1]), world_size=2, url=sys.argv[2])
total = torch.ones(1)
dist.all_reduce(total)
sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            print("listens on", fields[1].split(":")[0])
print("sum", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LOOPBACK = "0100007F"
"""127.0.0.1 as /proc writes it."""


def test_ranks_that_meet_in_a_file_listen_on_the_loopback_interface_alone(tmp_path):
    words = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), f"file://{tmp_path}/store"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            *listening, total = rank.communicate(timeout=240)[0].splitlines()
            assert total == "sum 2.0"
            assert listening and set(listening) == {f"listens on {LOOPBACK}"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
