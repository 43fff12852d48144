"""Every task its own algorithm, in real runs: a teacher behind a server and hosted, all components in a batch, a user's own.

The same server is evaluated, and answers in a played game: it takes minutes to start."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import portpicker
import pytest

from tests.integration.processes import process_stat
from torchtitan.experiments.rl.config_registry import TINY_MODEL, TINY_TEACHER
from torchtitan.experiments.rl.observability.metrics import read_metrics
from torchtitan.experiments.rl.play import main as play
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600
"""How long to wait for what must come; nothing is claimed about how long it takes."""
KEY = "sk-loopback-only"
KEY_VARIABLE = "TINY_TEACHER_KEY"

OUTSIDE = """
import json
from dataclasses import dataclass, replace

import numpy as np
import portpicker

from torchtitan.experiments.rl.algorithms import OPD, SFT, Algorithm
from torchtitan.experiments.rl.algorithms.base import connect
from torchtitan.experiments.rl.config_registry import rl_opd_qwen3_debug
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.losses import RLLoss


class Both(OPD):
    '''OPD that also asks another model what it thinks of the same tokens, and writes down both.'''

    @dataclass(kw_only=True, slots=True)
    class Config(OPD.Config):
        other: FrozenModel
        notes: str

    async def setup(self, policy):
        await super().setup(policy)
        self.other = await connect(policy, self.config.other)

    async def score_rollout(self, rollout):
        await super().score_rollout(rollout)
        for sample in rollout.samples:
            hosted = sample.ref_logprobs[sample.loss_mask].tolist()
            server = (await self.other.score(sample.token_ids))[sample.loss_mask].tolist()
            with open(self.config.notes, "a") as notes:
                notes.write(json.dumps([hosted, server]) + "\\n")


class RewardItself(Algorithm):
    '''The toy algorithm: a rollout's advantage is its reward.'''

    def score_group(self, group):
        for rollout in group.scored:
            rollout.assign_advantages(2 * rollout.reward - 1)


class Reinforce(RLLoss):
    '''The toy loss: no ratio, no clip.'''

    def per_token(self, tokens):
        return -tokens.advantages * tokens.logprobs, tokens.advantages < 0


def everything():
    '''A user's own algorithm and loss, and a teacher that is reached in two ways.'''
    config = rl_opd_qwen3_debug()
    task = config.tasks["sum_digits"]
    server = FrozenModel(name="tiny", base_url="@URL@", api_key_env="@KEY_VARIABLE@")
    hosted = task.algorithm.teacher
    config.tasks = {
        "both": replace(task, algorithm=Both.Config(teacher=hosted, other=server, notes="@NOTES@")),
        "taught": replace(task, algorithm=SFT.Config(teacher=server)),
        "own": replace(task, algorithm=RewardItself.Config()),
    }
    config.trainer.loss.rl = Reinforce.Config()
    config.trainer.save_final_model = False
    config.rollouts_per_step, config.steps = 24, 4
    config.validation.every = 0
    return config
"""


def command(folder: Path, *words: str, path: Path | None = None, name: str = "train") -> None:
    """Run the command to its end; what it prints goes beside its folder, and no process is left."""
    run = [
        sys.executable,
        "-m",
        f"torchtitan.experiments.rl.{name}",
        "--run-dir",
        str(folder),
        *words,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path and str(path)])),
        KEY_VARIABLE: KEY,
    }
    out = folder.with_name("printed")
    with out.open("w") as file:
        process = subprocess.Popen(
            run, cwd=path or ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        code = process.wait(PATIENCE_S)
    assert code == 0, out.read_text()
    deadline = time.monotonic() + 30
    while left := [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if in_session(pid, process.pid)
    ]:
        assert time.monotonic() < deadline, f"processes left alive: {left}"
        time.sleep(0.2)


def in_session(pid: int, session: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat[0] != "Z" and stat[2] == session


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The tiny teacher behind vLLM's own server, which wants a key. Yields its URL."""
    port, log = portpicker.pick_unused_port(), tmp_path_factory.mktemp("server") / "log"
    words = f"--model {TINY_TEACHER} --served-model-name tiny --port {port} --host 127.0.0.1 --api-key {KEY}"
    words += (
        " --enforce-eager --dtype float32 --max-model-len 512 --max-num-seqs 32 --disable-log-stats"
    )
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()],
            cwd=log.parent, env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        waited_from = time.monotonic()
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() - waited_from < PATIENCE_S, (
                log.read_text()[-3000:]
            )
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # Its engine is a process of its own, which a server that is killed while it starts leaves behind.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            url, timeout=5
        ) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def outside(server, tmp_path_factory) -> Path:
    """A run of a config, an algorithm and a loss that lie in a package outside the repository."""
    home = tmp_path_factory.mktemp("outside")
    (home / "my_package").mkdir()
    (home / "my_package" / "__init__.py").touch()
    text = (
        OUTSIDE.replace("@URL@", server)
        .replace("@NOTES@", str(home / "notes"))
        .replace("@KEY_VARIABLE@", KEY_VARIABLE)
    )
    (home / "my_package" / "configs.py").write_text(text)
    command(home / "run", "--module", "my_package.configs", "--config", "everything", path=home)
    return home


@pytest.mark.slow
def test_a_teacher_hosted_and_the_same_behind_a_server_give_the_same_reference_logprobs(outside):
    pairs = [json.loads(line) for line in (outside / "notes").read_text().splitlines()]
    hosted, served = (np.concatenate(side) for side in zip(*pairs, strict=True))
    assert len(hosted) > 50 and np.ptp(hosted) > 1
    np.testing.assert_allclose(hosted, served, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_algorithm_and_a_loss_of_a_users_package_train_beside_the_librarys(outside):
    steps = read_metrics(outside / "run" / "metrics.jsonl")[1:]
    assert len(steps) == 4
    seen = {key for step in steps for key in step}
    # Reinforce masks nothing; it reports negative advantages as masked, so the number is a share of wrong answers.
    assert {
        "rl/masked_fraction",
        "rollout/own/reward_mean",
        "rollout/taught/reward_mean",
        "rollout/both/reward_mean",
    } <= seen
    for step in steps:
        if "rl/masked_fraction" in step:
            assert 0 <= step["rl/masked_fraction"] <= 1
    config = json.loads((outside / "run" / "config.json").read_text())
    assert config["tasks"]["own"]["algorithm"]["class"] == "my_package.configs.RewardItself"
    assert config["trainer"]["loss"]["rl"]["class"] == "my_package.configs.Reinforce"


@pytest.mark.slow
def test_what_the_teacher_said_has_no_age_and_is_nearly_always_right(outside):
    steps = read_metrics(outside / "run" / "metrics.jsonl")[1:]
    taught = [step for step in steps if "ce/nll" in step]
    assert taught and np.mean([step["rollout/taught/reward_mean"] for step in taught]) > 0.9
    assert max(step["policy/age_max"] for step in steps) <= 1
    assert not any(key.startswith("mismatch_kl/task/taught") for step in steps for key in step)


@pytest.mark.slow
def test_the_servers_key_is_in_no_file_of_the_run_and_in_nothing_it_printed(outside):
    files = [file for file in (outside / "run").rglob("*") if file.is_file()]
    assert len(files) > 4
    for file in [*files, outside / "printed"]:
        assert KEY.encode() not in file.read_bytes(), file


def test_in_the_mixed_run_a_batch_holds_members_of_all_components(tmp_path):
    words = "--rollouts-per-step 48 --steps 4 --validation.examples 4 --trainer.no-save-final-model"
    command(tmp_path / "run", "--config", "rl_mixed_qwen3_debug", *words.split())
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert len(steps) == 4
    whole = [step for step in steps if {"rl/loss", "ce/nll", "ref_kl/kl"} <= step.keys()]
    assert whole and all(step["loss/ref_kl"] and step["loss/ce"] > 0 for step in whole)
    for step in steps:
        total = step["loss/rl"] + step["loss/ce"] + step["loss/ref_kl"]
        assert step["loss/total"] == pytest.approx(total, rel=1e-5, abs=1e-6)


# ---- the server's model, evaluated and played with

ATTEMPTS = 4


@pytest.fixture(scope="module")
def evaluated(server, tmp_path_factory) -> Path:
    """The teacher behind the server against the tiny model in generators, on 12 examples."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    words = f"--config rl_grpo_qwen3_debug --endpoint {server} --endpoint-key-env {KEY_VARIABLE} --against {TINY_MODEL}"
    words += f" --attempts {ATTEMPTS} --validation.examples 12"
    command(folder, *words.split(), name="evaluate")
    return folder


def rewards_by_example(folder: Path) -> dict[str, list[float]]:
    """Worked out from the recorded conversations: 1 for the sum of the prompt's digits, else 0."""
    rewards: dict[str, list[float]] = {}
    for record in read_rollouts(folder, kind="validation"):
        (turn,) = record.rollout.turns
        digits = turn.prompt_messages[-1]["content"].partition(": ")[2].split()
        right = turn.assistant_message["content"].strip() == str(sum(map(int, digits)))
        assert record.rollout.reward == right
        rewards.setdefault(record.rollout.group_id.partition("@")[0], []).append(float(right))
    return rewards


@pytest.mark.slow
def test_a_server_and_a_folder_are_measured_on_the_same_examples(evaluated):
    found = [rewards_by_example(folder) for folder in (evaluated, evaluated / "against")]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 12
    result = json.loads((evaluated / "evaluation.json").read_text())
    for model, rewards in zip(result["models"], found, strict=True):
        figures = model["tasks"]["sum_digits"]
        assert all(len(own) == ATTEMPTS for own in rewards.values()) and figures["failed"] == 0
        assert figures[f"avg@{ATTEMPTS}"]["value"] == pytest.approx(
            np.mean([np.mean(own) for own in rewards.values()])
        )
        assert figures[f"pass@{ATTEMPTS}"]["value"] == pytest.approx(
            np.mean([max(own) for own in rewards.values()])
        )
        assert model["metrics"]["validation/reward"] == pytest.approx(
            figures[f"avg@{ATTEMPTS}"]["value"]
        )
    served, local = result["models"]
    assert served["model"].startswith("tiny at http") and local["model"] == TINY_MODEL
    assert (
        served["tasks"]["sum_digits"]["avg@4"]["value"]
        > 0.9
        > local["tasks"]["sum_digits"]["avg@4"]["value"]
    )


@pytest.mark.slow
def test_the_comparison_is_of_the_recorded_rewards_of_each_example(evaluated):
    served, local = (rewards_by_example(folder) for folder in (evaluated, evaluated / "against"))
    steps = {
        example: round(sum(local[example]) - sum(served[example])) for example in served
    }  # of 1 / ATTEMPTS
    compared = json.loads((evaluated / "evaluation.json").read_text())["comparison"]["sum_digits"]
    assert compared["examples"] == 12 and compared.keys() >= {"low", "high"}
    assert compared["difference"] == pytest.approx(sum(steps.values()) / (12 * ATTEMPTS))
    assert compared["low"] < compared["difference"] < compared["high"]
    assert set(compared["lost"]) == {example for example, step in steps.items() if step < 0}
    assert set(compared["won"]) == {example for example, step in steps.items() if step > 0}
    printed = (evaluated.with_name("printed")).read_text()
    told = f"{compared['difference']:+.3f} ({compared['low']:+.3f} to {compared['high']:+.3f})"
    assert f"second less first {told};" in printed


@pytest.mark.slow
def test_the_key_is_in_no_file_of_the_evaluation_and_in_nothing_it_printed(evaluated):
    files = [file for file in evaluated.rglob("*") if file.is_file()]
    assert len(files) > 4 and not any(
        KEY.encode() in file.read_bytes() for file in [*files, evaluated.with_name("printed")]
    )


@pytest.mark.slow
def test_the_servers_model_answers_in_a_played_game(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    words = f"--config rl_grpo_qwen3_debug --endpoint {server} --endpoint-key-env {KEY_VARIABLE} --scripted /model"
    assert play([*words.split(), "--run-dir", str(tmp_path / "played")]) == 0
    (record,) = read_rollouts(tmp_path / "played")
    (turn,) = record.rollout.turns
    assert (turn.completion.policy_versions == -1).all() and (turn.completion.logprobs < 0).any()
    assert f"model> {turn.assistant_message['content']}" in capsys.readouterr().out
    digits = turn.prompt_messages[-1]["content"].partition(": ")[2].split()
    assert record.rollout.reward == (
        turn.assistant_message["content"].strip() == str(sum(map(int, digits)))
    )
