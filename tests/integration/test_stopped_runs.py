"""Runs of the command that a signal or the death of a process meets: how they end, or go on."""

import os
import re
import signal

from tests.integration.command_runs import ENDLESS, MODULE, PATIENCE_S, assert_ledger_balances, wait_for
from torchtitan.experiments.rl.checkpointing.folder import step_of, verify


def test_ctrl_c_ends_the_run_after_its_step_with_a_summary_and_leaves_nothing(start):
    run = start(*ENDLESS)
    run.until_step(2)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    assert "stopped by SIGINT" in run.out and "stopping after this step" in run.err and "Traceback" not in run.err
    for record in run.steps:
        assert_ledger_balances(record)
    run.assert_nothing_left()


def test_a_signal_to_every_process_of_the_job_ends_the_run_with_a_checkpoint_and_leaves_nothing(start):
    run = start(*ENDLESS, "--checkpoint.interval", "0", "--checkpoint.grace-s", str(PATIENCE_S))
    run.until_step(2)
    assert [path.name[:14] for path in run.temporary.iterdir()] == ["torchtitan-rl-"]
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.err
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    verify(checkpoint)
    assert step_of(checkpoint) == run.steps[-1]["step"]
    assert run.out.endswith(f"go on with  python -m {MODULE} --resume {run.folder}\n")
    run.assert_nothing_left()


def test_killed_trainer_ends_the_run_with_one_error_line_that_names_it(start):
    run = start(*ENDLESS)
    run.until_step(2)
    for record in run.steps:
        assert_ledger_balances(record)
    os.kill(run.worker("trainer"), signal.SIGKILL)
    assert run.wait() == 1, run.err
    (error,) = [line for line in run.err.splitlines() if line.startswith("error:")]
    assert "trainer rank 0 died: " in error and str(run.folder / "logs") in error
    assert "Traceback" not in run.err
    assert "stopped by an error" in run.out
    run.assert_nothing_left()


def test_run_goes_on_when_generators_and_a_rollout_worker_are_killed(start):
    """Both generators at once, so that requests have to wait, and the worker while they do."""
    run = start(*ENDLESS, "--rollout-workers", "1", "--generator.replicas", "2")
    run.until_step(2)
    killed = {("generator", 0): "generator 0", ("generator", 1): "generator 1", ("rollout_worker", 0): "rollout worker 0"}
    for name, index in killed:
        os.kill(run.worker(name, index), signal.SIGKILL)
    wait_for(lambda: all(f"{part} is back" in run.out for part in killed.values()), "a part did not come back")
    run.until_step(len(run.steps) + 3)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    for part in killed.values():
        # Monarch waits for its children too, and who is second learns no signal.
        assert re.search(f"^{part} died: (killed by SIGKILL|its process ended); made again .1 of 3.$", run.out, re.MULTILINE)
        assert run.steps[-1][f"restarts/{part.replace(' ', '_')}"] == 1
    for record in run.steps:
        assert_ledger_balances(record)
        assert record["policy/age_max"] <= 1
    assert "Traceback" not in run.err
    run.assert_nothing_left()
