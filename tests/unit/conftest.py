"""Fixtures of the unit tests: the tiny checkpoint's tokenizer and renderer, the command, and builders of fakes."""

import functools
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.fakes.replicas import FakeChannel, Replica
from tests.fakes.tasks import list_task
from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.ask.child import IsolatedCalls
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.generation import client as generator_client
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.train import main

MODULE_NUMBERS = itertools.count()

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forget_own_modules(request):
    """Forgets what a test has imported from its tmp_path: the next test may have a file of the same name there."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder = str(request.getfixturevalue("tmp_path"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(folder)]
    if (
        "PYTHONPATH" in os.environ
    ):  # the command adds folders of modules, for the processes of a run
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            entry for entry in entries if not entry.startswith(folder)
        )


@pytest.fixture(scope="session")
def tokenizer_path():
    return Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(str(tokenizer_path))


@pytest.fixture(scope="session")
def renderer(tokenizer_path):
    return build_renderer(RendererConfig(), tokenizer_path)


@pytest.fixture(scope="session")
def scoring_server():
    return IsolatedCalls(1)


@pytest.fixture
def one_scoring_server(scoring_server, monkeypatch):
    """Has all rubrics of these tests score in forks of one process: to start one takes seconds."""

    def shared(max_workers: int, *, memory_gib: float) -> IsolatedCalls:
        return scoring_server

    monkeypatch.setattr("torchtitan.experiments.rl.rubrics.rubric.IsolatedCalls", shared)


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command in this process; gives its exit code, its output, and its error line."""

    def refuse(*args, **kwargs):
        raise AssertionError("a process was about to be spawned")

    monkeypatch.setattr("torchtitan.experiments.rl.train._run", refuse)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(command, tmp_path, monkeypatch):
    """Runs the command where it must refuse: gives the error line. It may leave nothing in its folder."""
    folder = tmp_path / "started_here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> str:
        code, out, err = command(*arguments)
        assert code == 2 and out == "", err
        assert_one_line(err)
        assert list(folder.iterdir()) == []
        return err

    return run


@pytest.fixture
def config_module(tmp_path, monkeypatch):
    """Writes a module of configs; gives its name and its file."""
    names = []

    def write(text: str) -> tuple[str, Path]:
        name = f"configs_{next(MODULE_NUMBERS)}"  # never the same: Python remembers a folder's files for a while
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name, tmp_path / f"{name}.py"

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def build(renderer):
    """Build a ListTask with these envs; its config has the fields that are given."""
    return functools.partial(list_task, renderer)


@pytest.fixture
def connect(monkeypatch):
    """Connect a client of the generators with replicas that the test plays; gives both."""
    monkeypatch.setattr(generator_client, "Channel", FakeChannel)

    async def connect(replicas: int = 1, **options) -> tuple[GeneratorClient, list[Replica]]:
        client = GeneratorClient(**options)
        mesh = [Replica() for _ in range(replicas)]
        for index, replica in enumerate(mesh):
            await client.admit(index, replica)
        return client, mesh

    return connect
