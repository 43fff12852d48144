"""scripts/gpu_smoke.sh: every step of it that needs no GPU, on CPU with the tiny model."""

import json
import subprocess

import pytest

from scripts.gpu_smoke import COMPARISONS, ONLY_ON_GPUS, SIZES, STEPS, TWO_RANKS
from tests.integration.command_runs import ROOT

pytestmark = pytest.mark.slow


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
    wanted = {name for name in STEPS if name not in ONLY_ON_GPUS} | COMPARISONS.keys()
    assert figures.keys() == wanted
    assert not any("error" in step for step in figures.values())
    assert figures["machine"]["figures"]["packages"]["torch"].startswith("2.")
    assert all(
        figures[name]["figures"]["s"] > 0
        for name in wanted
        if name.startswith("learner") and "apart" not in name
    )


def test_the_trainers_state_is_saved_and_resumed_and_its_digests_are_those_of_the_host(figures):
    assert figures["resume"]["figures"]["the step's metrics are equal"]
    assert figures["publish"]["figures"]["apart"] == 0


def test_each_version_reaches_the_engine_and_what_is_sampled_agrees_with_the_trainer(figures):
    for name in ("updates-tiny", "updates", "updates-lora"):
        assert_engine_follows(figures[name]["figures"])


def test_a_family_of_transformers_is_trained_served_and_compared(figures):
    assert figures["family-attention"]["figures"]["apart"] < 1e-3
    assert figures["family"]["figures"]["graphs compiled by steps"] == 0
    found = figures["family-updates"]["figures"]
    assert all(report["canary_max_diff"] < 1e-3 for report in found["updates"])
    assert found["logprobs"]["most_apart"] < 1e-3


def assert_engine_follows(found):
    assert [report["version"] for report in found["updates"]] == [1, 2, 3]
    assert all(report["canary_max_diff"] < 1e-3 for report in found["updates"])
    assert len({report["loss"] for report in found["updates"]}) == 3  # the weights change
    assert found["sampling"]["versions"] == [3] and found["sampling"]["repeated"] == 1
    assert found["logprobs"]["most_apart"] < 1e-3 < found["moved"]
    assert found["logprobs"]["tokens"] == SIZES["cpu"].completions * SIZES["cpu"].sampled


def test_two_ranks_take_the_step_of_one(figures):
    coordinates = [figures[name]["figures"]["data_parallel"] for name in TWO_RANKS]
    assert coordinates == [2, 1, 2]  # FSDP, tensor parallelism, expert parallelism
    assert figures["learner-ranks-apart"]["figures"]["steps"] == 3
    assert figures["experts-ranks-apart"]["figures"]["steps"] == 2
    assert all(figures[name]["figures"]["apart"] < 1e-4 for name in COMPARISONS)


def test_experts_are_replayed_in_rows_of_two_shapes(figures):
    found = figures["experts-replay"]["figures"]
    assert found["rows of 256"]["compiled"] == [[1, 256]]
    assert found["rows of 128"]["compiled"] == [[1, 128]]
    # 2 of 8 experts by chance: a quarter of them are the router's own.
    assert 0.1 < found["rows of 256"]["experts/agreement"] < 0.4


def test_the_run_takes_its_steps_and_takes_the_last_again_from_its_checkpoint(figures):
    for name in ("run", "checkpoint"):
        assert [record["step"] for record in figures[name]["figures"]["metrics"]] == [0, 1, 2]
    assert figures["checkpoint"]["figures"]["resumed"] == 1
