"""scripts/gpu_smoke.py keeps what it has, whatever a step does. The steps themselves: tests/integration/test_gpu_smoke.py."""

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts import gpu_smoke
from scripts.gpu_smoke import (
    STEPS,
    TWO_RANKS,
    Failed,
    Setting,
    bounded,
    check_resumed,
    child,
    compared_steps,
    left_out,
    made_model,
    run_steps,
    time_limit,
)


@pytest.fixture
def setting(tmp_path):
    return Setting(model="", device="cpu", folder=str(tmp_path), until=time.time() + 60)


def test_steps_after_one_that_fails_run_and_what_it_had_stays(setting, tmp_path, monkeypatch):
    def breaks(setting):
        raise ValueError("the kernel")

    def beyond(setting):
        return bounded({"half": 1}, 0.2, 0.1)

    monkeypatch.setattr(
        gpu_smoke, "STEPS", {"breaks": breaks, "beyond": beyond, "good": lambda setting: {"s": 2}}
    )
    child(["breaks", "beyond", "good"], setting, tmp_path / "out")
    found = {}
    for line in (tmp_path / "out").read_text().splitlines():
        found |= json.loads(line)
    assert found["breaks"]["error"].splitlines()[-1] == "ValueError: the kernel"
    assert found["beyond"]["error"] == "apart by 0.2, more than 0.1"
    assert found["beyond"]["figures"] == {"half": 1, "apart": 0.2, "bound": 0.1}
    assert found["good"]["figures"] == {"s": 2} and "error" not in found["good"]


@pytest.mark.parametrize(
    "script, seconds, said",
    [
        ("#!/bin/sh\necho no driver; exit 7\n", 60, "the process ended with 7\nno driver\n"),
        (
            "#!/bin/sh\necho half a step; kill -11 $$\n",
            60,
            "the process ended with -11\nhalf a step\n",
        ),
        ("#!/bin/sh\necho compiling; sleep 1000\n", 0.5, "no time was left\ncompiling\n"),
    ],
)
def test_a_process_that_dies_or_hangs_leaves_an_error_with_what_it_said(
    setting, tmp_path, monkeypatch, script, seconds, said
):
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    object.__setattr__(setting, "until", time.time() + seconds)
    assert run_steps(["head"], setting) == {"head": {"error": said}}


def test_not_a_number_is_beyond_every_bound():
    with pytest.raises(Failed):
        bounded({}, float("nan"), 1)


def first_step(loss: float, norm: float, entropy: float = 1.0) -> dict:
    metrics = {"loss/total": loss, "train/grad_norm": norm, "policy/entropy": entropy}
    return {"figures": metrics}


def test_steps_that_compute_another_gradient_are_told():
    steps = {"learner": first_step(0.2, 2.0), "b": first_step(0.2, 2.1), "c": {"error": "x"}}
    assert compared_steps(steps, 0.06)["figures"]["apart"] == pytest.approx(0.05)
    assert compared_steps(steps, 0.06)["figures"]["steps"] == 2
    assert compared_steps(steps, 0.04)["error"].startswith("apart by 0.05")


@pytest.mark.parametrize("where", [0, 1])
def test_a_metric_that_is_not_a_number_is_told_wherever_it_is(where):
    steps = [first_step(0.2, 2.0), first_step(0.2, 2.0)]
    steps[where]["figures"]["loss/total"] = float("nan")
    assert "error" in compared_steps({"a": steps[0], "b": steps[1]}, 1.0)


def lacking(device: str, gpus: int, *, engine: bool = True) -> dict[str, str]:
    """Return what a machine lacks, by the step that it can't take."""
    lacks = {name: left_out(name, device, gpus, engine=engine) for name in STEPS}
    return {name: lack for name, lack in lacks.items() if lack is not None}


def test_steps_of_two_ranks_are_left_out_where_there_is_one_gpu():
    assert len(TWO_RANKS) == 3
    assert lacking("cuda", 2) == {}
    assert lacking("cuda", 1) == dict.fromkeys(TWO_RANKS, "two GPUs")
    assert lacking("cpu", 0) == dict.fromkeys(["learner-offload", "updates-device"], "a GPU")


def test_steps_with_an_engine_are_left_out_where_vllm_is_not_installed():
    with_engine = ["updates", "updates-device", "updates-lora", "run", "checkpoint"]
    assert lacking("cuda", 2, engine=False) == dict.fromkeys(with_engine, "vLLM")


def test_a_made_model_has_random_matrices_and_norms_of_one(tmp_path):
    folder = Path(made_model(tmp_path / "model", "debugmodel"))
    weights = load_file(folder / "model.safetensors")
    hub = json.loads((folder / "config.json").read_text())
    assert weights["model.norm.weight"].eq(1).all()
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.shape == (hub["vocab_size"], hub["hidden_size"])
    assert 0.015 < embedding.float().std() < 0.025


def test_the_run_and_its_resumption_have_time_left_for_them():
    times = dict(now=100.0, end=1000.0, total=1000.0)
    # A quarter of all; what is left before the 300 of the run and the 200 of the checkpoint.
    assert time_limit("head", ["copies", "run", "checkpoint"], **times) == 350
    assert time_limit("head", ["run", "checkpoint"], **times | {"now": 400.0}) == 500
    assert time_limit("run", ["checkpoint"], **times) == 800
    assert time_limit("run", [], **times) == 1000
    assert time_limit("checkpoint", [], **times) == 1000


RATES = {1: 0.1, 2: 0.2, 3: 0.3}
PRINTED = "resumed     step 2, from run/checkpoints/step-000002\n"


def records(*steps: int, loss: float = 1.0) -> list[dict]:
    return [{"step": step, "train/lr": RATES[step], "loss/total": loss} for step in steps]


@pytest.mark.parametrize(
    "after, printed, cause",
    [
        (records(1, 2, 3), "", "does not say: resumed from step 2"),
        (records(1, 2), PRINTED, r"steps \[1, 2\]"),
        (records(1, 2, loss=2.0) + records(3), PRINTED, "metrics of step 1, before the checkpoint"),
        (records(1, 2) + [{"step": 3, "train/lr": 0.1}], PRINTED, "step 3 was 0.3, and is 0.1"),
    ],
)
def test_a_resumed_run_that_is_not_the_one_before_is_told(after, printed, cause):
    with pytest.raises(Failed, match=cause):
        check_resumed(records(1, 2, 3), {"resumed": 2, "metrics": after}, printed)


def test_a_resumed_run_takes_the_steps_after_its_checkpoint_anew_and_may_go_further():
    after = records(1, 2) + records(3, loss=2.0)
    check_resumed(records(1, 2, 3), {"resumed": 2, "metrics": after}, PRINTED)
    check_resumed(records(1, 2), {"resumed": 2, "metrics": after}, PRINTED)
