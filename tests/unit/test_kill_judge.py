"""The judges of the kill, resume and soak scripts, on folders made by hand: a judge that finds nothing wrong proves nothing."""

import gzip
import json
import os
import random
import signal
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests import kill_matrix, soak
from tests.kills import after, judge
from tests.kills.moments import MOMENTS
from torchtitan.experiments.rl.process.temporary import shared_memory_of

STEPS, ROLLOUTS = 2, 2


def write(run: Path, *, metrics: list[dict], ledger: list[dict], records: list[dict]) -> Path:
    run.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("ledger.jsonl", ledger)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    members = [gzip.compress((json.dumps(line) + "\n").encode()) for line in records]
    (run / "rollouts.jsonl.gz").write_bytes(b"".join(members))
    return run


def metrics(**last) -> list[dict]:
    ends = {
        "ledger/t/dispatched": 5,
        "ledger/t/open": 1,
        "ledger/t/trained": 4,
        "validation/reward": 0.5,
    }
    return [
        {"step": 0, "validation/reward": 0.25},
        {"step": 1, "policy/age_max": 1, "time/step_s": 0.1},
        {"step": 2} | ends | last,
    ]


def ledger() -> list[dict]:
    columns = ["trained"] * 4 + ["untrained"]
    return [
        {"rollout_id": f"t-{i // 2}/{i % 2}", "task": "t", "column": column}
        for i, column in enumerate(columns)
    ]


def record(group: int, sample: str) -> dict:
    return {
        "data_sample": {"sample_id": sample},
        "rollout": {"group_id": f"t-{group}"},
        "generate_s": 0.25,
        "x": group,
    }


RECORDS = [record(0, "a"), record(0, "a"), record(1, "b"), record(2, "b"), record(3, "a")]


@pytest.fixture
def good(tmp_path) -> Path:
    return write(tmp_path / "good", metrics=metrics(), ledger=ledger(), records=RECORDS)


def unbalanced(run: Path, max_age: int = 1) -> list[str]:
    return judge.unbalanced(run, steps=STEPS, rollouts_per_step=ROLLOUTS, max_age=max_age)


def test_a_good_run_has_no_fault(good):
    assert judge.torn_files(good) == [] and unbalanced(good) == []
    assert judge.final_reward(good) == 0.5
    assert judge.not_served(RECORDS, examples=2, times=2) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (dict(metrics=metrics()[:2]), "metrics have steps [0, 1]"),
        (dict(metrics=[*metrics()[:2], *metrics()[1:]]), "metrics have steps [0, 1, 1, 2]"),
        (dict(ledger=[*ledger(), ledger()[0]]), "1 rollouts end twice, such as t-0/0"),
        (dict(ledger=ledger()[1:]), "3 rollouts were trained, and not 4"),
        (dict(ledger=ledger()[:4]), "5 dispatched, 4 in columns and 1 open, 4 in the file"),
        (
            dict(metrics=metrics(**{"ledger/t/dispatched": 6})),
            "6 dispatched, 4 in columns and 1 open",
        ),
        (dict(metrics=metrics(**{"policy/age_max": 2})), "older than 1 versions"),
    ],
)
def test_a_step_or_rollout_that_is_lost_or_counted_twice_is_a_fault(tmp_path, changed, fault):
    run = write(
        tmp_path / "run", **(dict(metrics=metrics(), ledger=ledger(), records=RECORDS) | changed)
    )
    assert any(fault in found for found in unbalanced(run))


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "rollouts.jsonl.gz"])
def test_a_torn_file_is_a_fault_of_a_run_that_ended_and_not_of_one_that_was_killed(
    good, tmp_path, name
):
    whole = write(tmp_path / "whole", metrics=metrics(), ledger=ledger(), records=RECORDS)
    (good / name).write_bytes((good / name).read_bytes()[:-3])
    (fault,) = judge.torn_files(good)
    assert fault.startswith(name)
    assert judge.different_metrics(good, whole, whole=False) == []


def test_an_unfinished_checkpoint_that_is_left_is_a_fault(good):
    (good / "checkpoints" / ".step-000002.partial").mkdir(parents=True)
    assert judge.torn_files(good) == [".step-000002.partial is left"]


def test_runs_are_compared_without_seconds_and_the_order_of_groups(good, tmp_path):
    other = [entry | {"generate_s": 9.5} for entry in reversed(RECORDS)]
    timed = metrics()
    timed[1]["time/step_s"] = 7.0
    run = write(tmp_path / "run", metrics=timed, ledger=ledger()[::-1], records=other)
    assert (
        judge.different_metrics(run, good, whole=True) == []
        and judge.different_files(run, good) == []
    )


def test_runs_that_differ_in_a_number_a_line_or_a_weight_are_told_apart(good, tmp_path):
    run = write(
        tmp_path / "run",
        metrics=metrics(**{"validation/reward": 0.75}),
        ledger=ledger(),
        records=RECORDS[1:],
    )
    for folder, weights in ((good, b"1"), (run, b"2")):
        (folder / "policy" / "step-2").mkdir(parents=True)
        (folder / "policy" / "step-2" / "model.safetensors").write_bytes(weights)
    (fault,) = judge.different_metrics(run, good, whole=True)
    assert fault == "metrics of step 2: validation/reward = 0.75, and not 0.5 (1 keys differ)"
    assert judge.different_files(run, good) == [
        "rollouts.jsonl.gz: 0 lines that the undisturbed run has not, 1 missing",
        "final policy: policy/step-2/model.safetensors differs",
    ]


def test_an_example_that_is_served_once_more_or_less_is_a_fault():
    assert judge.not_served([*RECORDS, record(4, "a")], examples=2, times=2) == [
        "1 examples were not served 2 times: {'a': 3}"
    ]
    assert judge.not_served(RECORDS, examples=3, times=2) == ["2 examples were served, and not 3"]


def test_a_seed_draws_the_same_kills_and_every_part_at_every_moment():
    drawn = [kill for kill, _ in zip(kill_matrix.kills(3), range(80), strict=False)]
    assert drawn == [kill for kill, _ in zip(kill_matrix.kills(3), range(80), strict=False)]
    cases = {(kind.name, kill.part, kill.moment) for kind, kill in drawn[:70]}
    assert cases == {
        (kind.name, part, moment)
        for kind in kill_matrix.RUNS
        for part in kind.parts
        for moment in MOMENTS
    }
    assert {kill.number for _, kill in drawn} == {signal.SIGKILL, signal.SIGSTOP}
    assert all(0 <= kill.step <= kill_matrix.STEPS for _, kill in drawn)


def test_slope_of_a_line_is_found_and_noise_is_its_error():
    steps = list(range(0, 600, 5))
    rising = soak.fitted(steps, [30 + 0.02 * step for step in steps])
    assert rising.slope == pytest.approx(2.0) and rising.error == pytest.approx(0.0, abs=1e-9)
    noise = random.Random(0)
    flat = soak.fitted(steps, [30 + noise.gauss(0, 1) for _ in steps])
    assert abs(flat.slope) < 3 * flat.error < 0.5


def test_descriptors_that_come_and_go_do_not_grow_and_those_that_stay_do():
    assert not soak.grows([50, 52, 50, 53, 52, 50, 52, 51])
    assert soak.grows([50, 51, 51, 52, 52, 53, 53, 54])


def test_memory_is_that_of_small_mappings():
    smaps = "00-10 rw-p\nSize:  400 kB\nRss:  300 kB\nAnonymous:  200 kB\nAnonHugePages:  0 kB\n"
    smaps += "20-30 rw-p\nSize:  262144 kB\nAnonymous:  131072 kB\n40-50 rw-p\nSize:  8 kB\nAnonymous:  4 kB\n"
    assert soak.anonymous_kb(smaps) == 204


@pytest.mark.parametrize(
    "answers_a_step, faults", [(10, []), (0, ["worker: memory grows by +0.488"])]
)
def test_what_monarch_keeps_of_answers_is_taken_off_the_growth(answers_a_step, faults, capsys):
    """5 kB a step are 0.488 MB in 100 steps, and those are what it keeps of 10 answers a step."""
    constant = dict(descriptors=50, threads=9, live_mb=20.0, free_mb=3.0, python_blocks=1000)
    of = [
        soak.Sample(
            step=step,
            memory_mb=30 + step * 5 / 1024,
            answers=step * answers_a_step,
            seconds=500.0,
            **constant,
        )
        for step in range(400, 1000, 5)
    ]
    found = soak.divided({"worker": of}, warm_up=400, bound=0.3)
    assert [fault.partition(" ±")[0] for fault in found] == faults
    assert "+0.488" in capsys.readouterr().out


def test_what_monarch_keeps_of_its_polls_grows_with_the_time_and_in_the_controller_with_the_processes():
    """100 answers of 0.5 kB; 600 s of 0.7 kB in a polled process, and of 3 times 1 kB in one that polls three."""
    constant = dict(
        step=1,
        memory_mb=30.0,
        descriptors=50,
        threads=9,
        live_mb=20.0,
        free_mb=3.0,
        python_blocks=1000,
    )
    polled = soak.Sample(answers=100, seconds=600.0, **constant)
    assert polled.explained_mb * 1024 == pytest.approx(50 + 420)
    assert replace(polled, polls=3).explained_mb * 1024 == pytest.approx(50 + 1800)


def test_only_shared_memory_of_the_run_counts_as_left(tmp_path):
    memory = SharedMemory(create=True, size=1)
    try:
        assert memory.name in shared_memory_of([os.getpid()])
        (tmp_path / "torchtitan-rl-x").mkdir()
        left = after.left_behind(tmp_path, {memory.name, "gone"})
        assert left == [
            f"shared memory left: {memory.name}",
            "temporary file left: torchtitan-rl-x",
        ]
    finally:
        memory.close()
        memory.unlink()
