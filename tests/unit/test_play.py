"""A person as the policy: what is shown, what answers become, and that a session is a record and a test that holds."""

import json

import numpy as np
import pytest

from torchtitan.experiments.rl.config_registry import TINY_MODEL, rl_guess_number_qwen3_debug
from torchtitan.experiments.rl.play.command import main
from torchtitan.experiments.rl.play.player import Left, Player
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts


def player_of(lines, **options):
    entered = iter(lines)

    def read():
        try:
            return next(entered)
        except StopIteration:
            raise EOFError from None

    return Player(TINY_MODEL, read=read, **options)


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        (["4 2"], "4 2"),
        (["<<<", "two", "/quit", ">>>"], "two\n/quit"),
        (['/call add {"a": 1}'], '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (["/call now"], '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        (["/prompt", "/what", "7"], "7"),
        (["/scripted"], "The answer is 42."),
    ],
)
def test_what_is_entered_becomes_the_answer(lines, answer):
    player = player_of(lines)
    player.policy.prompts.append("Say it.")
    assert player.reply(0, 0) == answer and player.replies == {0: [answer]}


@pytest.mark.parametrize("lines", [[], ["/quit"], ["<<<", "half"]])
def test_a_session_that_is_left_answers_nothing_more(lines):
    player = player_of(lines)
    player.policy.prompts.append("Say it.")
    for rollout in (0, 1):
        with pytest.raises(Left):
            player.reply(rollout, 0)
    assert player.replies == {}


def test_only_what_is_new_of_a_prompt_is_shown_and_nothing_acts_on_the_terminal(capsys):
    player = player_of([], scripted=["a", "b", "c"])
    for rollout, turn, prompt in ((0, 0, "one\x1b[31m"), (1, 0, "one"), (0, 1, "one\x1b[31m two")):
        player.policy.prompts.append(prompt)
        player.reply(rollout, turn)
    shown = capsys.readouterr().out
    assert (
        "\x1b" not in shown and "one\\x1b[31m\n" in shown and "rollout 0, turn 1: what is new in the prompt ──\n two\n" in shown
    )


def test_a_session_ends_with_rewards_a_record_and_a_test_that_holds(tmp_path, capsys):
    game = rl_guess_number_qwen3_debug().tasks["guess_number"].dataset.build()[0].env_input
    folder = tmp_path / "played"
    words = ["--config", "rl_guess_number_qwen3_debug", "--run-dir", str(folder), "--rollouts", "2"]
    for text in ("no number", str(game.secret), str(game.secret)):  # first answers of both, then the second of rollout 0
        words += ["--scripted", text]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "[[" in shown and "advantages" in shown and f"Correct! The number was {game.secret}" in shown
    records = list(read_rollouts(folder))
    assert [(r.outcome, r.rollout.status.value, len(r.rollout.turns)) for r in records] == [
        ("played", "completed", 2),
        ("played", "completed", 1),
    ]
    assert all(np.isin(r.rollout.samples[0].policy_versions, (-1, 0)).all() for r in records)
    assert json.loads((folder / "config.json").read_text())["seed"] == 0
    (file,) = folder.glob("test_*.py")
    namespace: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    import asyncio

    asyncio.run(namespace["test_guess_number_rewards_this_session"]())
    assert str([r.rollout.reward for r in records]) in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task x", "--config"),
        ("--config rl_guess_number_qwen3_debug --task sums", "--task = 'sums': name one of guess_number"),
        ("--config rl_guess_number_qwen3_debug --rollouts 0", "--rollouts = 0: must be at least 1"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(words, message, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
