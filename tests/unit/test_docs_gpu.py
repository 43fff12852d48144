"""The hour with a GPU of docs/gpu.md: every command in it exists, and what a CPU can try of it is tried."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from scripts import gpu_smoke
from tests.fakes.gpus import fake_gpus
from tests.fakes.models import stub_model
from torchtitan.experiments.rl.command import machine
from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_0_6b_1gpu
from torchtitan.experiments.rl.train import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()
HOUR = PAGE.partition("## 4. One hour")[2].partition("### All steps")[0]
MODEL = "assets/hf/Qwen3-0.6B"
OF_THE_MACHINE = {"nvidia-smi", "df -h /dev/shm", "ulimit -l", "free -g", "nproc"}


def rows(first: str) -> list[list[str]]:
    """Return the columns of the table of the hour whose second column is called ``first``."""
    (table,) = re.findall(
        rf"^\| minute \| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", HOUR, re.MULTILINE
    )
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


COMMANDS = [code for row in rows("command") for code in re.findall(r"`([^`]+)`", row[1])]


def test_the_hour_has_its_minutes_in_order_and_each_step_shows_something():
    minutes = [int(minute) for minute, _, _ in rows("command")]
    assert minutes == sorted(minutes) and minutes[0] == 0 and minutes[-1] < 60
    assert all(shown for _, _, shown in rows("command"))
    troubled = {int(minute) for row in rows("look") for minute in row[0].split(",")}
    assert troubled <= {*minutes}


def test_every_command_of_the_hour_is_one_that_its_parser_takes():
    for command in COMMANDS:
        program, *words = shlex.split(command)
        match program:
            case "rl-train":
                parsed = parse_command(words)
                if parsed.config_name is not None:
                    load_config(parsed)
            case "scripts/gpu_smoke.sh":
                assert (ROOT / program).exists()
                assert gpu_smoke.parser().parse_args(words).model == MODEL
            case "tar":
                assert words[:2] == ["czf", "report.tar.gz"]
            case _:
                assert command in OF_THE_MACHINE


def test_each_smoke_of_the_hour_writes_a_file_of_its_own_and_all_steps_with_an_engine_are_there():
    options = [
        gpu_smoke.parser().parse_args(shlex.split(command)[1:])
        for command in COMMANDS
        if command.startswith("scripts/gpu_smoke.sh")
    ]
    files = [str(one.out) for one in options]
    assert len({*files}) == len(files) and all(file.startswith("outputs/") for file in files)
    taken = [name for one in options for name in one.only]
    # The hour has a run and its resumption by themselves.
    assert {*gpu_smoke.WITH_ENGINE} - {"run", "checkpoint"} <= {*taken}


@pytest.fixture
def beside_a_gpu(tmp_path, monkeypatch):
    """A folder with a stand-in for the model, on a host with as many stand-ins for L4s as wanted."""
    stub_model(tmp_path / MODEL, "qwen3/0.6B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "PROBE_BYTES", 2**10)
    monkeypatch.setattr(machine, "gpu_host_lacks", lambda several_hosts: [])

    def host(gpus: int) -> None:
        fake_gpus(monkeypatch, gpus, memory_gib=22)

    return host


RUNS = [command for command in COMMANDS if command.startswith("rl-train --config")]


@pytest.mark.parametrize("command", RUNS)
def test_the_runs_of_the_hour_pass_their_dry_run_on_gpus_of_22_gib(command, beside_a_gpu, capsys):
    beside_a_gpu(2 if "--gpus 2" in command else 1)
    words = [word for word in shlex.split(command)[1:] if word != "--dry-run"]
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    lacks = [line for line in printed.splitlines() if line.startswith("before a run")]
    assert not any("provision.device" in line for line in lacks), lacks


TRIED = [code for row in rows("look") for code in re.findall(r"`(--[^`]+)`", row[2])]


@pytest.mark.parametrize("options", TRIED)
def test_what_is_to_be_tried_are_options_of_the_run_that_fit_it(options):
    if options.startswith("--run-dir"):
        options = "--run-dir outputs/again"
    words = ["--config", "rl_grpo_qwen3_0_6b_1gpu", *shlex.split(options)]
    config = load_config(parse_command(words))
    check(config)
    gib = plan_run(config, device="cuda", available=[0]).gpu_gib
    before = plan_run(rl_grpo_qwen3_0_6b_1gpu(), device="cuda", available=[0]).gpu_gib
    assert f"{before:.1f}" == "21.4"
    if "kv-cache-gib" in options:
        assert f"{gib:.1f}" == "20.0"
        said = f"21.4, and 20.0 with\n`{options}`"
        assert said in PAGE


def test_an_engine_without_asynchronous_scheduling_is_configured_as_shown(tmp_path, monkeypatch):
    (text,) = re.findall(r"```python\n(# synchronous\.py\n.*?)```", HOUR, re.DOTALL)
    (tmp_path / "synchronous.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = re.findall(r"^\.venv/bin/rl-train (--module synchronous .*)$", HOUR, re.MULTILINE)
    config = load_config(parse_command(shlex.split(command)))
    sys.modules.pop("synchronous", None)
    check(config)
    assert config.generator.engine.args == {"async_scheduling": False}
    config.generator.engine.args = {}
    shipped = rl_grpo_qwen3_0_6b_1gpu()
    assert config.generator.engine == shipped.generator.engine
