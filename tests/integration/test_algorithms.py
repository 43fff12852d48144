"""Every task its own algorithm, in real runs: a teacher behind a server and hosted, all components in a batch, a user's own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.learners import compute_in_float64, free_port, full, learner_of
from tests.integration.processes import process_stat
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config_registry import TINY_TEACHER
from torchtitan.experiments.rl.observability.metrics import read_metrics
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.types import LossDenominators, TrainingSample

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600
"""How long to wait for what must come; nothing is claimed about how long it takes."""
KEY = "sk-loopback-only"
KEY_VARIABLE = "TINY_TEACHER_KEY"

OUTSIDE = """
import json
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.experiments.rl.algorithms import OPD, SFT, Algorithm
from torchtitan.experiments.rl.algorithms.reference import connect
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
    config.rollouts_per_step, config.groups_per_step, config.steps = None, 3, 4
    config.validation.every = 0
    return config
"""


def command(folder: Path, *words: str, path: Path | None = None) -> None:
    """Run the command to its end; what it prints goes beside its folder, and no process is left."""
    run = [sys.executable, "-m", "torchtitan.experiments.rl.grpo", "--run-dir", str(folder), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path and str(path)])), KEY_VARIABLE: KEY}
    out = folder.with_name("printed")
    with out.open("w") as file:
        process = subprocess.Popen(run, cwd=path or ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        code = process.wait(PATIENCE_S)
    assert code == 0, out.read_text()
    deadline = time.monotonic() + 30
    while left := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if in_session(pid, process.pid)]:
        assert time.monotonic() < deadline, f"processes left alive: {left}"
        time.sleep(0.2)


def in_session(pid: int, session: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat[0] != "Z" and stat[2] == session


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The tiny teacher behind vLLM's own server, which wants a key. Yields its URL."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    words = f"--model {TINY_TEACHER} --served-model-name tiny --port {port} --host 127.0.0.1 --api-key {KEY}"
    words += " --enforce-eager --dtype float32 --max-model-len 512 --max-num-seqs 32 --disable-log-stats"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()],
            cwd=log.parent, env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        waited_from = time.monotonic()
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() - waited_from < PATIENCE_S, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # Its engine is a process of its own, which a server that is killed while it starts leaves behind.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def outside(server, tmp_path_factory) -> Path:
    """A run of a config, an algorithm and a loss that lie in a package outside the repository."""
    home = tmp_path_factory.mktemp("outside")
    (home / "my_package").mkdir()
    (home / "my_package" / "__init__.py").touch()
    text = OUTSIDE.replace("@URL@", server).replace("@NOTES@", str(home / "notes")).replace("@KEY_VARIABLE@", KEY_VARIABLE)
    (home / "my_package" / "configs.py").write_text(text)
    command(home / "run", "--module", "my_package.configs", "--config", "everything", path=home)
    return home


def test_a_teacher_hosted_and_the_same_behind_a_server_give_the_same_reference_logprobs(outside):
    pairs = [json.loads(line) for line in (outside / "notes").read_text().splitlines()]
    hosted, served = (np.concatenate(side) for side in zip(*pairs, strict=True))
    assert len(hosted) > 50 and np.ptp(hosted) > 1
    np.testing.assert_allclose(hosted, served, rtol=0, atol=1e-4)


def test_an_algorithm_and_a_loss_of_a_users_package_train_beside_the_librarys(outside):
    steps = read_metrics(outside / "run" / "metrics.jsonl")[1:]
    assert len(steps) == 4
    seen = {key for step in steps for key in step}
    # Reinforce masks nothing; it reports negative advantages as masked, so the number is a share of wrong answers.
    assert {"rl/masked_fraction", "rollout/own/reward_mean", "rollout/taught/reward_mean", "rollout/both/reward_mean"} <= seen
    for step in steps:
        if "rl/masked_fraction" in step:
            assert 0 <= step["rl/masked_fraction"] <= 1
    config = json.loads((outside / "run" / "config.json").read_text())
    assert config["tasks"]["own"]["algorithm"]["class"] == "my_package.configs.RewardItself"
    assert config["trainer"]["loss"]["rl"]["class"] == "my_package.configs.Reinforce"


def test_what_the_teacher_said_has_no_age_and_is_nearly_always_right(outside):
    steps = read_metrics(outside / "run" / "metrics.jsonl")[1:]
    taught = [step for step in steps if "ce/nll" in step]
    assert taught and np.mean([step["rollout/taught/reward_mean"] for step in taught]) > 0.9
    assert max(step["policy/age_max"] for step in steps) <= 1
    assert not any(key.startswith("mismatch_kl/task/taught") for step in steps for key in step)


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


# ---- what tasks do to each other in one batch: nothing

DENOMINATORS = LossDenominators(rl=200, ce=100, ref_kl=150)


def samples_of(task: str, seed: int, count: int = 6) -> list[TrainingSample]:
    """Samples that feed ``task``'s component: sampled in their second half."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(random.integers(8, 40))
        sampled = np.arange(length) >= length // 2
        weights = {name: np.zeros(length, np.float32) for name in ("rl_weights", "ce_weights", "ref_kl_weights")}
        weights[f"{task}_weights"] = sampled.astype(np.float32)
        samples.append(
            TrainingSample(
                token_ids=random.integers(0, 768, length).astype(np.int32),
                loss_mask=sampled,
                generator_logprobs=np.where(sampled, random.normal(-8, 1, length), 0).astype(np.float32),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, random.normal(), 0).astype(np.float32),
                ref_logprobs=np.where(sampled, random.normal(-7, 1, length), 0).astype(np.float32),
                task_name=task,
                rollout_id=f"{task}-{index}",
                **weights,
            )
        )
    return samples


@pytest.fixture
def learner(one_rank, tmp_path, monkeypatch) -> Learner:
    compute_in_float64(monkeypatch.setattr)
    learner = learner_of(tmp_path, dtype=torch.float64)
    monkeypatch.setattr(learner, "_denominators", lambda microbatches: DENOMINATORS)
    return learner


def gradient(learner: Learner, samples: list[TrainingSample]) -> tuple[torch.Tensor, dict[str, float]]:
    """Of all parameters, in a row, and the metrics; the learner's own gradient is cleared."""
    plan = Batcher.Config(row_length=256, rows_per_microbatch=4).build().plan(samples, 1)
    metrics = learner.forward_backward(plan.microbatches[0], 0).compute()
    flat = torch.cat([full(parameter.grad).flatten() for parameter in learner.model.parameters()])
    learner.optimizers.zero_grad()
    return flat, metrics


def test_a_tasks_gradient_does_not_depend_on_what_it_is_packed_with(learner):
    groups = {task: samples_of(task, seed) for seed, task in enumerate(("rl", "ce", "ref_kl"))}
    alone = {task: gradient(learner, samples)[0] for task, samples in groups.items()}
    for task, samples in groups.items():
        others = [sample for other in groups if other != task for sample in groups[other]]
        silent = [
            replace(sample, **{f"{name}_weights": np.zeros(len(sample), np.float32) for name in groups}) for sample in others
        ]
        mixed = [sample for pair in zip(samples, silent, strict=False) for sample in pair] + silent[len(samples) :]
        packed, _ = gradient(learner, mixed)
        scale = alone[task].abs().max()
        assert scale > 1e-4
        torch.testing.assert_close(packed, alone[task], rtol=0, atol=1e-6 * float(scale))
    together, _ = gradient(learner, [sample for samples in groups.values() for sample in samples])
    torch.testing.assert_close(together, sum(alone.values()), rtol=0, atol=1e-6 * float(together.abs().max()))


def test_echos_observation_tokens_leave_the_rl_term_as_it_is(learner):
    plain = samples_of("rl", 3)
    echoing = []
    for sample in plain:
        answered = ~sample.loss_mask & (np.arange(len(sample)) > 2)
        echoing.append(replace(sample, ce_weights=np.where(answered, 0.1, 0).astype(np.float32)))
    before, after = (gradient(learner, samples)[1] for samples in (plain, echoing))
    assert after["loss/rl"] == pytest.approx(before["loss/rl"], rel=1e-12) and before["loss/ce"] == 0 < after["loss/ce"]
