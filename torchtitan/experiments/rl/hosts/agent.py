"""The command that runs on each host of a run: Monarch's agent, which waits for the run's command.

python -m torchtitan.experiments.rl.hosts.agent --port 22222
"""

import argparse
import os
import socket
import sys

from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.host import other_users_line, raise_descriptor_limit
from torchtitan.experiments.rl.process.setup import ignore_signals_of_the_command, set_up_process
from torchtitan.experiments.rl.process.temporary import TemporaryFolder


def main() -> None:
    parser = argparse.ArgumentParser()
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="port to listen on, for a command on another host")
    where.add_argument("--socket", help="socket to listen on, for a command on this host")
    options = parser.parse_args()
    raise_descriptor_limit()  # the processes that Monarch starts here inherit the agent's limit
    set_up_process()
    if options.socket is None:  # an agent on the command's host inherits the command's folder
        TemporaryFolder()
        if line := other_users_line():
            print(printable_line(line), file=sys.stderr, flush=True)
    ignore_signals_of_the_command()
    from monarch.actor import run_worker_loop_forever
    from monarch.job import ranked_service_proc_id_from_env, service_proc_addr

    if options.socket is not None:
        run_worker_loop_forever(address=f"ipc://{options.socket}", ca="trust_all_connections")
        return
    # Slurm says by which name the command knows this host, and its place among the hosts.
    name = os.environ.get("SLURMD_NODENAME") or socket.getfqdn()
    identity = ranked_service_proc_id_from_env(rank_env="SLURM_NODEID")
    address = f"tcp://{name}:{options.port}@tcp://0.0.0.0:{options.port}"
    run_worker_loop_forever(
        address=service_proc_addr(address, identity), ca="trust_all_connections"
    )


if __name__ == "__main__":
    main()
