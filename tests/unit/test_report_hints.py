"""Hints of the report: each is given where its figure says so, with the figure, and not where all is well."""

import json
from pathlib import Path

import pytest

from torchtitan.experiments.rl.tools.report.hints import hints

DONE = {"state": "done", "step": 100, "steps": 100, "silent_s": 1.0}


def steps(value, count=40):
    """``value``: of every step, or a function of the step."""
    return [
        (step, float(value(step) if callable(value) else value)) for step in range(1, count + 1)
    ]


GOOD = {
    "rollout/reward_mean": steps(lambda s: s / 50),
    "rollout/groups_all_equal": steps(0.3),
    "policy/entropy": steps(lambda s: 1 / s),
    "mismatch_kl/all": steps(1e-4),
    "mismatch/share_of_bound_max": steps(0.1),
    "rl/ratio_capped_fraction": steps(0.0),
    "rollout/status/truncated_length": steps(0.01),
    "perf/generator_0/busy": steps(0.9),
    "time/wait_s": steps(0.3),
    "time/step_s": steps(1.0),
    "perf/event_loop_lag_max_s": steps(0.05),
    "restarts/generator_0": steps(0),
}


def texts(series=None, state=None, ledger=None):
    return [
        f"{h.severity}: {h.text} -> {h.field}"
        for h in hints(GOOD | (series or {}), DONE | (state or {}), ledger or {})
    ]


def test_a_run_without_faults_has_no_hints():
    assert texts(ledger={"sums": {"trained": 960, "failed/error": 40}}) == []
    assert hints({}, {"state": "starting", "step": None, "steps": 5, "silent_s": None}, {}) == []


@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        (
            {"rollout/reward_mean": steps(0.3)},
            ["warning: The reward is flat: 0.3 at first, 0.3 now"],
        ),
        (
            {"rollout/reward_mean": steps(lambda s: 0.5 - s / 100)},
            ["warning: The reward falls: 0.47 at its best, 0.12 now"],
        ),
        ({"rollout/reward_mean": steps(0.99)}, []),
        ({"rollout/reward_mean": steps(0.3, 15)}, []),
        (
            {"rollout/groups_all_equal": steps(0.9)},
            ["warning: 90% of the groups have equal rewards"],
        ),
        (
            {"mismatch/share_of_bound_max": steps(0.7)},
            ["warning: Trainer and generators disagree: 70% of the bound"],
        ),
        ({"rl/ratio_capped_fraction": steps(0.0005)}, []),
        (
            {"ref_kl/ratio_capped_fraction": steps(0.015)},
            [
                "warning: 1.5% of the tokens have an importance ratio above ratio_max, and teach nothing -> trainer.opt"
            ],
        ),
        (
            {"mismatch_kl/all": steps(lambda s: 0.01 * s)},
            ["warning: The mismatch rises: 0.055 nats a token at first, 0.36 now"],
        ),
        (
            {"policy/entropy": steps(lambda s: 1.0 if s < 11 else 0.01)},
            ["warning: The entropy has collapsed: 1 nats at first, 0.01"],
        ),
        (
            {"rollout/status/truncated_length": steps(0.4)},
            ["warning: 40% of the rollouts were cut off"],
        ),
        (
            {"perf/generator_0/busy": steps(0.4)},
            ["note: Generators idle 60% of the time: the trainer is the slower side"],
        ),
        (
            {"perf/generator_0/busy": steps(0.4), "time/wait_s": steps(0.6)},
            [
                "warning: Generators idle 60% of the time, and the trainer waits 60% of a step: slow envs -> rollout_workers"
            ],
        ),
        (
            {
                "validation/sums/failed": [(0, 12.0), (10, 1.0), (20, 0.0)],
                "validation/sums/attempts": [(0, 32.0), (10, 32.0), (20, 32.0)],
            },
            [
                "warning: 12 of 32 attempts at sums failed in the evaluation of version 0: its figure is a mean that leaves them out -> the page Evaluations"
            ],
        ),
        (
            {
                "validation/sums/failed": [(0, 0.0), (10, 32.0)],
                "validation/sums/attempts": [(0, 32.0), (10, 32.0)],
            },
            [
                "error: 32 of 32 attempts at sums failed in the evaluation of version 10: its figure is no reward"
            ],
        ),
        (
            {
                "validation/sums/failed": [(0, 0.0), (10, 0.0)],
                "validation/sums/attempts": [(0, 32.0), (10, 32.0)],
            },
            [],
        ),
        ({"time/wait_s": steps(0.8)}, ["note: The trainer waits 80% of a step for rollouts"]),
        (
            {"perf/event_loop_lag_max_s": steps(2.5)},
            ["warning: Something blocks the event loop for 2.5 s a step"],
        ),
        (
            {"restarts/generator_0": steps(lambda s: s // 20)},
            ["warning: generator_0 died and was restarted 2 times"],
        ),
    ],
)
def test_each_fault_gives_its_hint(series, wanted):
    found = texts(series)
    assert len(found) == len(wanted) and all(
        text.startswith(start) for text, start in zip(found, wanted, strict=True)
    ), found


def test_what_stops_a_run_is_said_first():
    ledger = {"sums": {"trained": 40, "failed/error": 60, "oversized": 10}}
    stalled = {"state": "stalled", "silent_s": 900.0, "step": 7}
    found = texts({"perf/generator_0/busy": steps(0.4)}, stalled, ledger)
    assert found[0].startswith("error: Stalled: nothing was written for 900 s, after step 7")
    assert found[1].startswith("error: 55% of the rollouts of sums failed (60 of 110)")
    assert "batcher.row_length" in found[2] and found[-1].startswith("note")
    (stopped,) = texts(state={"state": "stopped", "step": 4})
    assert stopped.startswith("warning: Stopped after step 4 of 100")


# ---- a corpus of curves: of runs, and drawn by formula

CORPUS = json.loads((Path(__file__).parent / "reward_curves.json").read_text())
"""Each with the ``steps`` its run was to take, what its hints ``say`` at its end (the beginning of each) and what they may say
``meanwhile``: a reward that is not zero for the first time at step 80 is flat before."""


def said_of(case, until):
    """What the hints say after step ``until``."""
    series = {
        name: [
            (step, value)
            for step, value in zip(curve["steps"], curve["values"], strict=True)
            if step <= until
        ]
        for name, curve in case["series"].items()
    }
    state = "done" if until >= case["steps"] else "running"
    return [
        hint.text
        for hint in hints(series, {"state": state, "step": until, "steps": case["steps"]}, {})
    ]


def begin_with(texts, wanted):
    return all(any(text.startswith(start) for start in wanted) for text in texts)


@pytest.mark.parametrize("case", CORPUS, ids=[case["name"] for case in CORPUS])
def test_each_curve_of_the_corpus_is_called_what_it_is_and_a_healthy_run_nothing_at_any_step(case):
    last = max(curve["steps"][-1] for curve in case["series"].values())
    final = said_of(case, last)
    assert len(final) == len(case["says"]) and begin_with(final, case["says"]), final
    for until in range(1, last):
        texts = said_of(case, until)
        assert begin_with(texts, case["meanwhile"]), f"after step {until}: {texts}"


def test_the_corpus_has_what_runs_do():
    assert len(CORPUS) >= 24 and sum(case["from"] != "synthetic" for case in CORPUS) >= 6
    assert sum(not case["says"] for case in CORPUS) >= 12
