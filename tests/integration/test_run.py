"""A run of the command, installed from a wheel: what it records, and that it leaves nothing behind."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.command_runs import ROOT, Run, assert_ledger_balances
from tests.integration.installs import FreshEnvironment, no_isolation


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> FreshEnvironment:
    fresh = FreshEnvironment(tmp_path_factory.mktemp("installed"))
    fresh.pip("install", "--no-deps", *no_isolation(), str(ROOT))
    return fresh


@pytest.fixture(scope="module")
def async_run(start, installed, tmp_path_factory) -> Run:
    """From an empty folder. Where it ends well, all its processes had the installed library: nothing else has these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        options = dict(
            program=(str(installed.bin / "rl-train"),), cwd=tmp_path_factory.mktemp("empty")
        )
        return start(
            "--steps", "5", "--validation.every", "2", "--metrics.wandb", **options
        ).ended_well()


def test_the_installed_command_runs_from_an_empty_folder_with_the_model_that_is_installed(
    async_run, installed
):
    assert (
        f"model       {installed.packages / 'torchtitan_rl/library/assets/tiny_qwen3'} (0.9M parameters)"
        in async_run.out
    )


def test_run_records_every_step_and_each_record_is_whole(async_run):
    assert [record["step"] for record in async_run.metrics] == [0, 1, 2, 3, 4, 5]
    wanted = """loss/total loss/rl train/grad_norm train/lr policy/entropy policy/version policy/age_max policy/age_mean
        rollout/reward_mean rollout/count rollout/status/completed batch/packing_efficiency batch/tokens mismatch_kl/all
        mismatch_kl/task/sum_digits rl/logprob_diff_max rl/ratio_mean time/step_s time/wait_s time/train_s
        perf/trained_tokens_per_s""".split()
    for record in async_run.steps:
        assert [key for key in wanted if record.get(key) is None] == []
        assert record["policy/version"] == record["step"] and record["rollout/count"] == 32
    # Evaluations end when they end; the first and the last are waited for.
    evaluated = [
        record["validation/step"] for record in async_run.metrics if "validation/reward" in record
    ]
    assert evaluated[0] == 0 and evaluated[-1] == 5 and set(evaluated) <= {0, 2, 4, 5}
    for record in async_run.metrics:
        if "validation/reward" in record:
            assert (
                record["validation/step"]
                <= record["validation/sum_digits/version_min"]
                <= record["step"]
            )


def test_every_metric_is_explained_and_says_how_busy_each_process_was(async_run):
    """docs/running.md lists each, with <> where a name stands."""
    text = (ROOT / "docs/running.md").read_text()
    patterns = [
        re.sub("<[^>]*>", ".+", re.escape(name)) for name in re.findall(r"`([^ `]+/[^ `]+)`", text)
    ]
    explained = re.compile("|".join(patterns))
    names = {name for record in async_run.metrics for name in record} - {"step"}
    assert [name for name in sorted(names) if not explained.fullmatch(name)] == []
    for record in async_run.steps:
        assert (
            0 < record["perf/trainer_rank_0/busy"] <= 1
            and 0 <= record["perf/generator_0/busy"] <= 1
        )
    assert sum(record["perf/generator_0/steps"] for record in async_run.steps) > 0
    assert max(record["perf/generator_0/running"] for record in async_run.steps) > 0


def test_ledger_balances_at_every_step(async_run):
    for record in async_run.steps:
        assert_ledger_balances(record)
    assert async_run.steps[-1]["ledger/sum_digits/open"] == 0
    assert "160 sum_digits trained on" in async_run.out


def test_no_token_is_older_than_the_bound_and_on_policy_tokens_agree_with_the_trainer(async_run):
    ages = [record["policy/age_max"] for record in async_run.steps]
    assert ages[0] == 0 and max(ages) <= 1
    for record in async_run.steps:
        if record["policy/age_max"] == 0:
            assert record["rl/logprob_diff_max"] <= 1e-4
    # Of the newest version that every generator had answered for by then.
    canaries = [
        record["perf/sync_canary_max_diff"]
        for record in async_run.steps
        if "perf/sync_canary_max_diff" in record
    ]
    assert canaries and max(canaries) <= 1e-4


def test_console_has_a_line_for_each_step_and_nothing_else_is_printed_by_libraries(async_run):
    lines = async_run.out.splitlines()
    assert [line.split()[0] for line in lines if re.match(r"\s+\d/5 ", line)] == [
        f"{step}/5" for step in range(1, 6)
    ]
    assert any(line.startswith("steps") and "5 of 5" in line and "done" in line for line in lines)
    assert "\r" not in async_run.out and "\033" not in async_run.out
    (warning,) = async_run.err.splitlines()
    assert warning.startswith("warning: tasks.sum_digits.validation: the reward of 8 examples says")
    whole = ("model ", "sizes ", "rollouts ")  # lines that only a terminal breaks
    folder = str(async_run.folder)
    others = [line for line in lines if not line.startswith(whole) and folder not in line]
    assert max(map(len, others)) <= 80


def test_run_folder_has_config_logs_of_every_process_and_tensorboard(async_run):
    config = json.loads((async_run.folder / "config.json").read_text())
    assert (
        config["steps"] == 5
        and config["rollouts_per_step"] == 32
        and config["tasks"]["sum_digits"]["group_size"] == 8
    )
    assert sorted(path.name for path in (async_run.folder / "logs").iterdir()) == [
        "controller.jsonl",
        "generator-0.jsonl",
        "monarch.txt",
        "trainer-0.jsonl",
    ]
    for path in (async_run.folder / "logs").glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert records and {"time", "level", "logger", "process", "message"} <= records[0].keys()
        assert not [record for record in records if record["level"] in ("ERROR", "CRITICAL")]
        assert not [record for record in records if "[actor=" in record["message"]], (
            "the file says which process it is"
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(async_run.folder / "tensorboard"))
    events.Reload()
    rewards = {scalar.step: scalar.value for scalar in events.Scalars("rollout/reward_mean")}
    assert rewards == {
        record["step"]: pytest.approx(record["rollout/reward_mean"]) for record in async_run.steps
    }


def test_wandb_works_without_a_network(async_run):
    (folder,) = (async_run.folder / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_final_policy_is_a_hub_folder_that_transformers_loads(async_run):
    (folder,) = (async_run.folder / "policy").iterdir()
    assert folder.name == "step-5"
    model, before = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (folder, ROOT / "assets" / "tiny_qwen3")
    )
    changed = [
        name
        for name, tensor in model.state_dict().items()
        if not tensor.equal(before.state_dict()[name])
    ]
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert AutoTokenizer.from_pretrained(folder).encode("<|im_end|>")


def test_finished_run_leaves_no_process_and_no_shared_memory(async_run):
    async_run.assert_nothing_left()
