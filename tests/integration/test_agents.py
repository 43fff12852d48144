"""Agents in a real run: the clients that people have, against the real engine, and what they said is trained."""

import pytest

from tests.integration.command_runs import Run
from tests.unit.agents import assert_accounted
from torchtitan.experiments.rl.observability.rollouts import lines_of
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_client_is_trained_on_what_it_was_answered_in_a_worker_and_after_a_resume(
    tmp_path, resumes
):
    words = ["--module", "tests.integration.agents_config", "--validation.every", "0"]
    run = Run(tmp_path, *words, "--steps", "1", "--rollout-workers", "1", config="rl_clients")
    try:
        run.ended_well()
        if resumes:
            run = Run(tmp_path, "--steps", "2", "--rollout-workers", "0", resume=run.folder)
            run.ended_well()
        records = list(read_rollouts(run.folder / "rollouts.jsonl.gz"))
        trained = [record.rollout for record in records if record.outcome == "trained"]
        assert len(trained) == 32 * len(run.steps) == (64 if resumes else 32)
        ways = {rollout.answer["way"] for rollout in trained}
        assert ways == {
            f"{ask} {how}"
            for ask in ("chat", "responses", "messages", "openai_agents")
            for how in ("plain", "stream")
        }
        for rollout in trained:
            assert_accounted(rollout)
            expected = {"answered": len(rollout.turns)}
            if rollout.answer["way"].startswith("openai_agents"):
                # OpenAI's own runner asks for more in each answer, which nothing here gives.
                expected["ignored/include"] = len(rollout.turns)
            assert rollout.calls == expected and rollout.turns
            assert all(turn.untrained is None for turn in rollout.turns)
            # Append-only clients: one sample, unless a completion was cut off within its own markup.
            stopped = all(turn.completion.finish_reason == "stop" for turn in rollout.turns)
            assert len(rollout.samples) == 1 or not stopped
        assert all(abs(metrics["mismatch_kl/all"]) < 0.1 for metrics in run.steps)
        turns = sum(
            metrics["rollout/turns_mean"] * metrics["rollout/count"] for metrics in run.steps
        )
        assert sum(metrics["agent/clients/answered"] for metrics in run.steps) == pytest.approx(
            turns
        )
        shown = lines_of(records[0])
        assert "turn 1" in shown[1] and records[0].rollout.turns[0].call["dialect"] in shown[1]
        run.assert_nothing_left()
    finally:
        run.kill()
