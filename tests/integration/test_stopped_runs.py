"""Runs of the command that a signal or the death of a process meets: how they end, or go on."""

import json
import os
import re
import signal
from collections import Counter

import pytest

from tests.integration.command_runs import (
    ENDLESS,
    PATIENCE_S,
    assert_ledger_balances,
    private,
    wait_for,
)
from tests.integration.processes import listening_sockets
from torchtitan.experiments.rl.checkpointing.folder import step_of, verify
from torchtitan.experiments.rl.command.history import read_history
from torchtitan.experiments.rl.observability.console import typed_command
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts

ENDED = "(?:killed by SIGKILL|its process ended)"
"""Monarch waits for its children too, and who is second learns no signal."""


@pytest.mark.slow
def test_run_whose_trainer_may_not_be_made_again_ends_with_one_error_line_that_names_it(start):
    run = start(*ENDLESS, "--supervision.max-restarts", "0")
    wait_for(lambda: run.has("trainer"), "the trainer was not spawned")
    os.kill(run.worker("trainer"), signal.SIGKILL)  # while the run is being built
    assert run.wait() == 1, run.err
    (error,) = [line for line in run.err.splitlines() if line.startswith("error:")]
    assert re.match(
        r"error: trainer rank 0 died: .+ \(supervision.max_restarts = 0\) \(logs in ", error
    )
    assert "Traceback" not in run.err
    assert "stopped by an error" in run.out
    run.assert_nothing_left()


def test_run_that_is_killed_before_its_first_checkpoint_begins_again_in_its_folder(start):
    killed = start(*ENDLESS)
    killed.until_step(2)
    killed.kill()
    taken = killed.metrics[-1]["step"]
    run = start("--steps", "1", resume=killed.folder).ended_well()
    assert (
        f"resumed     step 0: the run has no checkpoint, and begins again; its {taken} steps are "
        "taken anew\nchanged     steps = 1 (was 100000)\n"
    ) in run.out
    assert [record["step"] for record in run.metrics] == [0, 1]
    assert_ledger_balances(run.steps[-1])
    trained = [record for record in read_rollouts(run.folder) if record.outcome == "trained"]
    assert len(trained) == 32, "the rollouts of the killed start are gone"
    history = read_history(run.folder)
    assert [begun.step for begun in history.starts] == [0, 0] and history.end.how == "done"
    assert len(list((run.folder / "tensorboard").glob("*tfevents*"))) == 1


def test_run_goes_on_when_any_of_its_parts_is_killed_and_ends_with_a_checkpoint_when_all_are_told_to(
    start,
):
    """The only generator is killed, so that requests have to wait, and the worker while they do. Then
    the trainer. At the end every process of the job gets a signal, as a scheduler sends it."""
    run = start(
        *ENDLESS,
        "--rollout-workers",
        "1",
        "--checkpoint.interval",
        "2",
        "--checkpoint.grace-s",
        str(PATIENCE_S),
    )
    run.until_step(2)
    assert [path.name[:14] for path in run.temporary.iterdir()] == ["torchtitan-rl-"]
    sockets = {path for path in listening_sockets(run.alive()) if not path.startswith("@")}
    assert len(sockets) >= 2 and all(map(private, sockets)), (
        f"another user could enter the run by {sockets}"
    )
    killed = {
        ("generator", 0): "generator 0",
        ("rollout_worker", 0): "rollout worker 0",
    }
    for name, index in killed:
        os.kill(run.worker(name, index), signal.SIGKILL)
    wait_for(
        lambda: all(f"{part} is back" in run.out for part in killed.values()),
        "a part did not come back",
    )
    run.until_step(len(run.steps) + 3)
    os.kill(run.worker("trainer"), signal.SIGKILL)
    went_on = re.compile(
        rf"^trainer rank 0 died: {ENDED}; the run goes on from step (\d+); (\d+) steps? lost .1 of 3.$",
        re.M,
    )
    wait_for(lambda: went_on.search(run.out), "the run did not go on")
    step, lost = map(int, went_on.search(run.out).groups())
    printed = [int(line.split("/")[0]) for line in run.out.splitlines() if "/100000 " in line]
    assert step % 2 == 0 and step + lost == max(printed), (
        "steps lost are those after the checkpoint"
    )
    run.until_step(step + lost + 2)
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.out + run.err
    newest = max((run.folder / "checkpoints").iterdir())
    verify(newest)
    assert step_of(newest) == run.steps[-1]["step"]
    assert run.out.endswith(f"go on with  {typed_command('train')} --resume {run.folder}\n")
    assert run.out.count("config      rl_grpo") == 1
    for part in killed.values():
        assert re.search(f"^{part} died: {ENDED}; made again .1 of 3.$", run.out, re.MULTILINE)
        assert run.steps[-1][f"restarts/{part.replace(' ', '_')}"] == 1
    assert run.steps[-1]["restarts/trainer"] == 1
    assert [record["step"] for record in run.metrics] == list(range(len(run.metrics)))
    for record in run.steps:
        assert_ledger_balances(record)
        assert record["policy/age_max"] <= 1
    ends = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert len({end["rollout_id"] for end in ends}) == len(ends)
    columns = Counter(end["column"] for end in ends)
    assert columns["lost"] == 0 and columns["trained"] == 32 * run.steps[-1]["step"]
    assert (
        sum(record.outcome == "trained" for record in read_rollouts(run.folder))
        == columns["trained"]
    )
    assert "Traceback" not in run.err
    run.assert_nothing_left()
