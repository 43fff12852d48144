"""For all tests."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from torchtitan.experiments.rl.compat.monarch import keep_messages_as_written
from torchtitan.experiments.rl.process.setup import set_up_process

set_up_process()

# A shell without job control has its background jobs ignore SIGINT, and nohup SIGHUP. Tests send both to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example's time limit of its own would make a test depend on what else the machine does.
settings.register_profile("here", deadline=None)
settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    """Have coverage measure the processes that tests start, where it measures the tests (`make coverage`)."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and config.pluginmanager.hasplugin("_cov"):
        os.environ["CHECKOUT"] = str(Path(__file__).resolve().parents[1])
        os.environ["COVERAGE_PROCESS_START"] = f"{os.environ['CHECKOUT']}/pyproject.toml"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Have ``caplog`` show each message as it was logged, whichever tests ran before in this process.

    Once a test has used an actor of its own process, Monarch writes ``[actor=<root>]`` before every later message.
    """
    for handler in logging.getLogger().handlers:
        keep_messages_as_written(handler)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """Half a character, which tests of what is printed log, can't be sent from a test worker: it would end the whole run."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value
