"""What a scheduler starts on each host: Monarch's agent, which waits for the command.

python -m torchtitan.experiments.rl.hosts.agent --port 22222
"""

import argparse
import os
import signal
import socket

from torchtitan.experiments.rl.process.setup import set_up_process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    set_up_process()
    # A scheduler signals every process of a job. The command ends the others, with a checkpoint.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from monarch.actor import run_worker_loop_forever
    from monarch.job import ranked_service_proc_id_from_env, service_proc_addr

    # The name by which the command knows this host, and its place among the hosts, where a scheduler gives them.
    name = os.environ.get("SLURMD_NODENAME") or socket.getfqdn()
    identity = ranked_service_proc_id_from_env(rank_env="SLURM_NODEID")
    address = f"tcp://{name}:{port}@tcp://0.0.0.0:{port}"
    run_worker_loop_forever(address=service_proc_addr(address, identity), ca="trust_all_connections")


if __name__ == "__main__":
    main()
