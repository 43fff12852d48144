"""scripts/gpu_smoke.py keeps what it has, whatever a step does. The steps themselves: tests/integration/test_gpu_smoke.py."""

import json
import time

import pytest

from scripts import gpu_smoke
from scripts.gpu_smoke import Failed, Setting, bounded, child, options_apart, run_steps


@pytest.fixture
def setting(tmp_path):
    return Setting(model="", device="cpu", folder=str(tmp_path), until=time.time() + 60)


def test_steps_after_one_that_fails_run_and_what_it_had_stays(setting, tmp_path, monkeypatch):
    def breaks(setting):
        raise ValueError("the kernel")

    def beyond(setting):
        return bounded({"half": 1}, 0.2, 0.1)

    monkeypatch.setattr(gpu_smoke, "STEPS", {"breaks": breaks, "beyond": beyond, "good": lambda setting: {"s": 2}})
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
        ("#!/bin/sh\necho half a step; kill -11 $$\n", 60, "the process ended with -11\nhalf a step\n"),
        ("#!/bin/sh\necho compiling; sleep 1000\n", 0.5, "no time was left\ncompiling\n"),
    ],
)
def test_a_process_that_dies_or_hangs_leaves_an_error_with_what_it_said(setting, tmp_path, monkeypatch, script, seconds, said):
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    object.__setattr__(setting, "until", time.time() + seconds)
    assert run_steps(["head"], setting) == {"head": {"error": said}}


def test_not_a_number_is_beyond_every_bound():
    with pytest.raises(Failed):
        bounded({}, float("nan"), 1)


def test_options_that_compute_another_gradient_are_told():
    def of(loss, norm):
        return {"figures": {"loss/total": loss, "train/grad_norm": norm}}

    steps = {"learner": of(0.2, 2.0), "learner-compiled": of(0.2, 2.1), "learner-offload": {"error": "x"}, "head": {}}
    assert options_apart(steps, 0.06)["figures"]["apart"] == pytest.approx(0.05)
    assert options_apart(steps, 0.04)["error"].startswith("apart by 0.05")
