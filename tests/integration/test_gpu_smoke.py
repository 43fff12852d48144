"""scripts/gpu_smoke.sh: every step of it that needs no GPU, on CPU with the tiny model."""

import json
import subprocess

import pytest

from scripts.gpu_smoke import ONLY_ON_GPUS, SIZES, STEPS
from tests.integration.command_runs import ROOT


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    out = tmp_path_factory.mktemp("smoke") / "figures.json"
    done = subprocess.run(
        [ROOT / "scripts/gpu_smoke.sh", "assets/tiny_qwen3", "--device", "cpu", "--out", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()
    return json.loads(out.read_text())["steps"]


def test_every_step_gives_its_figures(figures):
    wanted = {name for name in STEPS if name not in ONLY_ON_GPUS} | {"learner-options-apart"}
    assert figures.keys() == wanted
    assert not any("error" in step for step in figures.values())
    assert figures["machine"]["figures"]["packages"]["torch"].startswith("2.")
    assert all(figures[name]["figures"]["s"] > 0 for name in wanted if name.startswith("learner") and "apart" not in name)


def test_each_version_reaches_the_engine_and_what_is_sampled_agrees_with_the_trainer(figures):
    found = figures["updates"]["figures"]
    assert [report["version"] for report in found["updates"]] == [1, 2, 3]
    assert all(report["canary_max_diff"] < 1e-3 for report in found["updates"])
    assert len({report["loss"] for report in found["updates"]}) == 3  # the weights change
    assert found["sampling"]["versions"] == [3] and found["sampling"]["repeated"] == 1
    assert found["logprobs"]["most_apart"] < 1e-3
    assert found["logprobs"]["tokens"] == SIZES["cpu"].completions * SIZES["cpu"].sampled


def test_the_run_takes_its_steps(figures):
    assert [record["step"] for record in figures["run"]["figures"]["metrics"]] == [0, 1, 2]
