"""The command that shows runs in a browser, ``rl-report``.

    python -m torchtitan.experiments.rl.report RUN... [--port N] [--host ADDRESS]
    python -m torchtitan.experiments.rl.report RUN... --export FILE.html

Exit codes: 0 ended by Ctrl-C, or exported; 2 a folder without a run, or no such address.
"""

import argparse
import errno
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.observability.console import typed_command
from torchtitan.experiments.rl.process.entry import of_command, run_command

if TYPE_CHECKING:  # imported once the options are read
    from torchtitan.experiments.rl.tools.report.run import ReportedRun

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this host reaches: the pages ask for no token there."""


@of_command(RunError, OSError)
def main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    from torchtitan.experiments.rl.tools.report.run import ReportedRun

    runs = [ReportedRun(folder) for folder in options.runs]
    if options.export is None:
        return _serve(runs, options.host, options.port)
    from torchtitan.experiments.rl.tools.report.app import exported

    for run in runs:
        while not run.refresh():
            pass
    options.export.write_text(exported(runs, sample=options.sample), encoding="utf-8")
    print(f"wrote       {options.export}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed_command("report"),
        description="Pages about runs, in the browser: rewards, where rollouts went, "
        "what the model said and why. Follows a run that goes on.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run folder; several are shown side by side",
    )
    parser.add_argument(
        "--port", type=int, default=8765, help="default %(default)s; 0: any that is free"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: this host alone; any other asks for a token)",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write one HTML file that needs no server, and end",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=40,
        help="rollouts of each run in the exported file (default %(default)s)",
    )
    return parser


def _serve(runs: "Sequence[ReportedRun]", host: str, port: int) -> int:
    """Serve the pages until Ctrl-C."""
    import uvicorn

    from torchtitan.experiments.rl.tools.report.app import report_app

    token = None if host in LOOPBACK else secrets.token_urlsafe(24)
    server = uvicorn.Server(
        uvicorn.Config(report_app(runs, token=token), log_level="warning", access_log=False)
    )
    bound = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{bound.getsockname()[1]}/"
    if token is not None:
        address += f"?token={token}"
    for run in runs:
        run.start()
    print(f"report      {address}\n            Ctrl-C ends it", flush=True)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        for run in runs:
            run.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise RunError(
            f"--port {port}: another program listens there; --port 0 takes one that is free"
        ) from error


if __name__ == "__main__":
    run_command(main)
