"""Generated puzzles in a real run: asked of the real engine, scored in child processes of a real controller, trained on."""

import json

import pytest
import reasoning_gym

from tests.integration.command_runs import ROOT, Run
from torchtitan.experiments.rl.command.reply_checks import REPLY

MODULE = '''
import json
import os

from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rubrics.rubric import last_assistant_text
from torchtitan.experiments.rl.tasks.examples.reasoning_gym import (
    PuzzleGenerator,
    PuzzleRubric,
    ReasoningGymDataset,
    ReasoningGymTask,
)


class NotedGRPO(GRPO):
    def score_group(self, group):
        super().score_group(group)
        with open(os.environ["NOTES"], "a") as notes:
            for rollout in group.rollouts:
                puzzle = rollout.data_sample.env_input
                note = {"entry": puzzle.entry, "said": last_assistant_text(rollout), "reward": rollout.reward}
                notes.write(json.dumps(note) + "\\n")


def rl_sums():
    """Sums of two digits."""
    config = rl_grpo_qwen3_debug()
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    sums = {"chain_sum": PuzzleGenerator(config=one_digit)}
    config.tasks = {
        "sums": ReasoningGymTask.Config(
            algorithm=NotedGRPO.Config(),
            template="Sum of the digits: {question}",
            dataset=ReasoningGymDataset.Config(generators=sums, count=1000),
            validation=ReasoningGymDataset.Config(generators=sums, count=8, seed=1000),
            rubric=PuzzleRubric.Config(exact=True),
            env=RendererEnvConfig(max_turns=1, max_rollout_tokens=160),
            sampling=SamplingConfig(max_tokens=8),
        )
    }
    return config
'''


@pytest.mark.slow
def test_puzzles_are_answered_scored_and_trained_on_by_real_actors(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(MODULE)
    notes = tmp_path / "notes.jsonl"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("NOTES", str(notes))
    run = Run(
        tmp_path, "--module", "sums", "--steps", "2", "--max-offpolicy-steps", "0", config="rl_sums"
    )
    try:
        run.ended_well()
        run.assert_nothing_left()
    finally:
        run.kill()
    assert run.steps[-1]["ledger/sums/trained"] == run.steps[-1]["ledger/sums/dispatched"] == 64
    scorer = reasoning_gym.create_dataset("chain_sum", seed=0)
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    noted = [note for note in noted if note["said"] != REPLY]
    assert len(noted) == 64
    for note in noted:
        answer = note["said"].strip()
        assert note["reward"] == (scorer.score_answer(answer, note["entry"]) if answer else 0.0)
