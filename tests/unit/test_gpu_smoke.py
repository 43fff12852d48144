"""scripts/gpu_smoke.py keeps what it has, whatever a step does. The steps themselves: tests/integration/test_gpu_smoke.py."""

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torchtitan.models.common.attention import FlexAttention

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
    main,
    parser,
    run_steps,
)
from torchtitan.experiments.rl.config_registry import TINY_MODEL

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setting(tmp_path):
    return Setting(model="", device="cpu", folder=str(tmp_path), until=time.time() + 60)


def test_steps_after_one_that_fails_run_and_what_it_had_stays(setting, tmp_path, monkeypatch):
    def breaks(setting, figures):
        figures["before"] = 1
        raise ValueError("the kernel")

    def beyond(setting, figures):
        figures["half"] = 1
        bounded(figures, 0.2, 0.1)

    def good(setting, figures):
        figures["s"] = 2

    monkeypatch.setattr(gpu_smoke, "STEPS", {"breaks": breaks, "beyond": beyond, "good": good})
    child(["breaks", "beyond", "good"], setting, tmp_path / "out")
    found = {}
    for line in (tmp_path / "out").read_text().splitlines():
        found |= json.loads(line)
    assert found["breaks"]["error"].splitlines()[-1] == "ValueError: the kernel"
    assert found["breaks"]["figures"] == {"before": 1}
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
    monkeypatch.setattr(gpu_smoke, "CHILD", [str(program)])
    setting = replace(setting, until=time.time() + seconds)
    logs = {"head.txt": said.splitlines()[1:]}
    assert run_steps(["head"], setting) == {"head": {"error": said, "logs": logs}}


DYING_ENGINE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from scripts import gpu_smoke

def log_of(setting):
    log = Path(setting.folder, "logs", "generator-0.txt")
    log.parent.mkdir()
    return log

def engine_dies(setting, figures):
    figures["updates"] = [{{"version": 1, "load_s": 0.2}}]
    lines = [f"engine: line {{number}}" for number in range(300)]
    log_of(setting).write_text("\\n".join([*lines, "CUDA error: misaligned address"]))
    Path(setting.folder, "weights.safetensors").write_bytes(b"small")
    Path(setting.folder, "core").write_bytes(bytes(2**17))
    raise RuntimeError("generator 0 died (exit code -6)")

def is_killed(setting, figures):
    figures["updates"] = [{{"version": 1, "load_s": 0.3}}]
    log_of(setting).write_text("engine: capturing CUDA graphs")
    while not Path(setting.folder, "figures.json").exists():
        time.sleep(0.1)
    os.kill(os.getpid(), 9)

def good(setting, figures):
    log_of(setting).write_text("well")
    figures["cores"] = 2

gpu_smoke.LARGEST_KEPT = 2**16
gpu_smoke.STEPS.update({{"machine": good, "updates": engine_dies, "updates-lora": is_killed}})
sys.exit(gpu_smoke.main())
"""


def test_an_engine_that_dies_and_a_step_that_is_killed_leave_their_last_words_their_logs_and_what_was_measured(
    tmp_path, monkeypatch, capsys
):
    """The steps are scripted. The processes, their limits and the files are real."""
    program = tmp_path / "smoke.py"
    program.write_text(DYING_ENGINE.format(root=str(ROOT)))
    monkeypatch.setattr(gpu_smoke, "CHILD", [sys.executable, str(program)])
    monkeypatch.setattr(gpu_smoke, "LARGEST_KEPT", 2**16)
    monkeypatch.setattr(gpu_smoke, "left_out", lambda *_, **__: None)
    out = tmp_path / "sent" / "a.json"
    words = "--device cuda --minutes 10 --only machine updates updates-lora --out".split()
    monkeypatch.setattr("sys.argv", ["gpu_smoke.py", TINY_MODEL, *words, str(out)])
    assert main() == 1
    printed = capsys.readouterr().out
    assert "1 of 3 steps went well" in printed
    assert f"the logs of what failed are in {tmp_path}/sent/a-steps" in printed
    steps = json.loads(out.read_text())["steps"]
    assert steps["machine"]["figures"] == {"cores": 2} and "logs" not in steps["machine"]

    died = steps["updates"]
    assert died["error"].endswith("RuntimeError: generator 0 died (exit code -6)\n")
    assert died["figures"] == {"updates": [{"version": 1, "load_s": 0.2}]}
    lines = died["logs"]["logs/generator-0.txt"]
    assert len(lines) == 200 and lines[-1] == "CUDA error: misaligned address"
    assert lines[0] == "engine: line 101"

    killed = steps["updates-lora"]
    assert killed["error"].startswith("the process ended with -9")
    assert killed["figures"] == {"updates": [{"version": 1, "load_s": 0.3}]}
    assert killed["logs"]["logs/generator-0.txt"] == ["engine: capturing CUDA graphs"]

    kept = {path.name for path in (tmp_path / "sent/a-steps").iterdir()}
    assert {"updates", "updates-lora"} <= kept and "machine" not in kept
    log = (tmp_path / "sent/a-steps/updates/logs/generator-0.txt").read_text()
    assert log.startswith("engine: line 0\n")
    files = {path.name for path in (tmp_path / "sent/a-steps/updates").iterdir()}
    assert not files & {"weights.safetensors", "core"}


def test_not_a_number_is_beyond_every_bound():
    with pytest.raises(Failed):
        bounded({}, float("nan"), 1)


H100_SECONDS = {"set-up": 64, "set-up from the cache": 10, "step": 1.78, "version": 0.08 + 0.3}
"""Seconds that an H100 took, as docs/gpu.md has them."""
ENGINE_START_S = 180
"""Seconds allowed for each start of an engine or of a run, which no GPU has shown."""
PROCESS_S = 15
"""Seconds allowed for imports, the model and its end."""
RUN_STEP_S = 22
"""Seconds of a step of 32 rollouts that are all as long as they may be: a quarter of the dry run's."""


def seconds_of_engine_steps() -> dict[str, float]:
    """Return the seconds of the steps up to the last one with an engine of the smoke's own model."""
    later = PROCESS_S + H100_SECONDS["set-up from the cache"] + ENGINE_START_S
    updates = later + 20 * (H100_SECONDS["step"] + H100_SECONDS["version"]) + 20
    return {
        "machine": PROCESS_S,
        "learner-compiled-checkpointing": PROCESS_S + H100_SECONDS["set-up"] + 6 * 1.78,
        "updates-tiny": later + 20 * 0.6 + 20,
        "updates": updates,
        "run": later + 6 * RUN_STEP_S,
        "checkpoint": later + 4 * RUN_STEP_S,
        "updates-lora": updates,
        "updates-device": updates,
    }


def test_half_an_hour_takes_every_step_with_an_engine_at_the_speed_of_an_h100(
    monkeypatch, tmp_path, capsys
):
    """By the time table of the machine that was seen, on a clock that each step moves on."""
    table, now, begun = seconds_of_engine_steps(), [0.0], []

    def run_by_the_table(names, setting):
        (name,) = names
        begun.append(name)
        taken = table.get(name, 60.0)
        assert taken <= setting.until - now[0], f"{name} would be killed"
        now[0] += taken
        return {name: {"figures": {}, "seconds": taken}}

    monkeypatch.setattr(gpu_smoke, "run_steps", run_by_the_table)
    monkeypatch.setattr(gpu_smoke, "clock", lambda: now[0])
    monkeypatch.setattr(gpu_smoke, "compared_steps", lambda *_: {"figures": {}})
    monkeypatch.setattr(
        gpu_smoke, "left_out", lambda name, *_, **__: "two GPUs" if name in TWO_RANKS else None
    )
    out = tmp_path / "figures.json"
    monkeypatch.setattr(
        "sys.argv", ["gpu_smoke.py", TINY_MODEL, "--device", "cuda", "--out", str(out)]
    )
    assert parser().get_default("minutes") == 30
    assert main() == 0
    assert begun[: len(table)] == list(table), "and in this order"
    assert now[0] <= 1800
    steps = json.loads(out.read_text())["steps"]
    left = [name for name, step in steps.items() if "not begun" in step]
    assert left and not {*left} & {*table}
    printed = capsys.readouterr().out
    assert f"--only {' '.join(left)}" in printed.splitlines()[-1]
    words = shlex.split(printed.splitlines()[-1])[1:]
    assert parser().parse_args(words).only == left


def test_no_step_spends_its_time_on_every_configuration_of_attention(monkeypatch):
    """Outside of compiled blocks torchtitan's flex attention tries all, for minutes."""
    options = {name: getattr(step, "keywords", {}) for name, step in STEPS.items()}
    uncompiled = [
        name
        for name, step in STEPS.items()
        if getattr(step, "func", step) is gpu_smoke.learner and not options[name].get("compile")
    ]
    assert uncompiled == ["learner"], "which is the last, and has one configuration"
    assert list(STEPS)[-1] == "learner"
    compiled = []
    monkeypatch.setattr("torch.compile", lambda *_, options: compiled.append(options) or "one")
    with gpu_smoke.one_configuration_of_attention():
        assert FlexAttention._compiled_flex_attn == "one"
    assert compiled == [
        FlexAttention.inductor_configs | {"max_autotune": False, "coordinate_descent_tuning": False}
    ]


def test_the_commit_is_known_where_there_is_no_git(monkeypatch, setting):
    monkeypatch.setattr(gpu_smoke, "ROOT", Path("/"))
    monkeypatch.setenv("TORCHTITAN_RL_COMMIT", "abc123")
    figures = {}
    gpu_smoke.machine(replace(setting, model=str(ROOT / TINY_MODEL)), figures)
    assert figures["commit"] == "abc123"


def first_step(loss: float, norm: float, entropy: float = 1.0) -> dict:
    metrics = {"loss/total": loss, "train/grad_norm": norm, "policy/entropy": entropy}
    return {"figures": metrics}


def test_steps_that_compute_another_gradient_are_told():
    steps = {"learner": first_step(0.2, 2.0), "b": first_step(0.2, 2.1)}
    steps |= {"c": {"error": "x", "figures": {}}, "d": {"not begun": "no time"}}
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
    with_engine = ["updates-tiny", "updates", "run", "checkpoint", "updates-lora", "updates-device"]
    lacks = lacking("cuda", 2, engine=False)
    assert lacks == dict.fromkeys([*with_engine, "family-updates"], "vLLM")


def test_a_made_model_has_random_matrices_and_norms_of_one(tmp_path):
    folder = Path(made_model(tmp_path / "model", "debugmodel"))
    weights = load_file(folder / "model.safetensors")
    hub = json.loads((folder / "config.json").read_text())
    assert weights["model.norm.weight"].eq(1).all()
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.shape == (hub["vocab_size"], hub["hidden_size"])
    assert 0.015 < embedding.float().std() < 0.025


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
