"""A person as the policy: what is shown, what answers become, and that a play is a record."""

import asyncio
import json
import os
import re
import signal

import numpy as np
import pytest

from torchtitan.experiments.rl.config_registry import TINY_MODEL, rl_guess_number_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.play import main
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.tools.play import Left, Player, answering_model


def player_of(lines, **options):
    entered = iter(lines)

    def read():
        try:
            return next(entered)
        except StopIteration:
            raise EOFError from None

    return Player(TINY_MODEL, read=read, **{"model": no_model, **options})


def no_model():
    raise ConfigError("--model", "m", "is not here")


async def answered(player, *, stop: int, max_tokens: int = 9):
    """One turn of rollout 0, prompted with the text "Say it."."""
    prompt = np.array(player.tokenizer.encode("Say it."), np.int32)
    talk = player.session(
        rollout_id="g/0", seed=1, sampling=SamplingConfig(temperature=0.0), stop_token_ids=[stop]
    )
    try:
        return await talk.generate(prompt, max_tokens=max_tokens)
    finally:
        talk.close()


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        (["4 2"], "4 2"),
        (["<<<", "two", "/quit", ">>>"], "two\n/quit"),
        (
            ['/call add {"a": 1}'],
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        ),
        (["/call now"], '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        (["/prompt", "/what", "7"], "7"),
        (["", "  ", "7"], "7"),
        (["<<<", "", ">>>"], ""),
        (["/scripted"], "The answer is 42."),
    ],
)
def test_what_is_entered_becomes_the_answer(lines, answer):
    player = player_of(lines)
    player.prompts.append("Say it.")
    assert player.reply(0, 0) == answer and player.replies == {0: [answer]}


async def test_a_models_answer_keeps_the_tokens_it_sampled(capsys):
    class Model:
        """Samples "4\x1b2" in pieces that no tokenizer would make of it."""

        def session(self, **options):
            return self

        async def generate(self, prompt_token_ids, *, max_tokens):
            ids = [player.tokenizer.encode(text)[0] for text in ("4", "\x1b", "2")]
            zeros = np.zeros(4, np.float32)
            return Completion(
                token_ids=np.array([*ids, 761], np.int32),
                logprobs=zeros - 0.25,
                policy_versions=zeros.astype(np.int32) - 1,
                finish_reason="stop",
            )

        def close(self): ...

    player = player_of(["/model"], model=Model)
    completion = await answered(player, stop=761)
    assert (
        completion.logprobs.tolist() == [-0.25] * 4
        and completion.policy_versions.tolist() == [-1] * 4
    )
    assert player.replies == {0: ["4\x1b2"]}
    shown = capsys.readouterr().out
    assert "(the model answers)\nmodel> 4\\x1b2\n" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("folder", "version", "named"),
    [("run/policy/step-30", 30, "policy 30"), ("models/step-3", 0, "a model")],
)
def test_what_a_model_answered_is_named_by_the_step_of_its_policy(tmp_path, folder, version, named):
    path = tmp_path / folder
    path.parent.mkdir(parents=True)
    path.symlink_to(TINY_MODEL)
    player = Player(str(path), model=no_model)
    assert player.version == version and player.sampled_by(0) == "", "a person has no version"
    player.by_model.add((0, 1))
    assert (player.sampled_by(0), player.sampled_by(1)) == (named, "")


async def test_a_model_that_cannot_answer_leaves_the_turn_to_the_person(capsys):
    player = player_of(["/model", "/model", "7"])
    completion = await answered(player, stop=761)
    assert player.tokenizer.decode(completion.token_ids[:-1]) == "7" and player.replies == {
        0: ["7"]
    }
    shown = capsys.readouterr().out
    assert shown.count("error: --model = 'm': is not here\n") == 2 and shown.count("Say it.") == 1


async def test_the_person_is_the_judge_too_and_sees_the_question(capsys):
    player = player_of(["/model", "yes"])
    reply = await player.chat(
        [{"role": "user", "content": "Is\x1b it right?"}], seed=0, sampling=SamplingConfig()
    )
    assert reply.message["content"] == "yes"
    shown = capsys.readouterr().out
    assert (
        "a judge is asked, user ──\nIs\\x1b it right?" in shown
        and "Only a turn can be the model's" in shown
    )


@pytest.mark.parametrize("lines", [[], ["/quit"], ["<<<", "half"]])
def test_a_play_that_is_left_answers_nothing_more(lines):
    player = player_of(lines)
    player.prompts.append("Say it.")
    for rollout in (0, 1):
        with pytest.raises(Left):
            player.reply(rollout, 0)
    assert player.replies == {}


def test_an_empty_line_and_an_unknown_command_are_asked_again(capsys):
    player = player_of(["", "/what now", "7"])
    player.prompts.append("Say it.")
    assert player.reply(0, 0) == "7"
    shown = capsys.readouterr().out
    assert "Nothing was entered. An empty answer is an empty line between <<< and >>>." in shown
    assert "There is no /what. An answer that begins with / goes between <<< and >>>." in shown


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [("Say it.", False), ("Call tools within <tool_call></tool_call>.", True)],
)
def test_a_tool_call_is_offered_where_the_prompt_has_tools(capsys, prompt, calls):
    player = player_of(["7"])
    player.prompts.append(prompt)
    player.reply(0, 0)
    assert ("/call NAME" in capsys.readouterr().out) == calls


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "/quit"])
@pytest.mark.parametrize("answers", [0, 1])
def test_a_play_that_is_left_ends_well_and_says_so(tmp_path, capsys, monkeypatch, end, answers):
    def read() -> str:
        if not isinstance(end, str):
            raise end
        return end

    monkeypatch.setattr("builtins.input", read)
    words = ["--config", "rl_guess_number_qwen3_debug", "--run-dir", str(tmp_path / "played")]
    assert main([*words, *["--scripted", "no number"] * answers]) == 0
    out, err = capsys.readouterr()
    assert (
        err == ""
        and "Left" not in out
        and "error" not in out
        and "would not be trained on" not in out
    )
    assert ("You left: a rollout that had not ended has no reward." in out) == (answers == 1)
    assert ("left: nothing was answered, and nothing is saved" in out) == (answers == 0)
    assert (tmp_path / "played").exists() == (answers == 1)


def test_only_what_is_new_of_a_prompt_is_shown_and_nothing_acts_on_the_terminal(capsys):
    player = player_of([], scripted=["a", "b", "c"])
    for rollout, turn, prompt in ((0, 0, "one\x1b[31m"), (1, 0, "one"), (0, 1, "one\x1b[31m two")):
        player.prompts.append(prompt)
        player.reply(rollout, turn)
    shown = capsys.readouterr().out
    assert (
        "\x1b" not in shown
        and "one\\x1b[31m\n" in shown
        and "rollout 0, turn 1: what is new in the prompt ──\n two\n" in shown
    )


def test_a_play_ends_with_rewards_and_a_record(tmp_path, capsys):
    game = rl_guess_number_qwen3_debug().tasks["guess_number"].dataset.build()[0].env_input
    folder = tmp_path / "played"
    words = ["--config", "rl_guess_number_qwen3_debug", "--run-dir", str(folder), "--rollouts", "2"]
    for text in (
        "no number",
        str(game.secret),
        str(game.secret),
    ):  # first answers of both, then the second of rollout 0
        words += ["--scripted", text]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"tokens \d+:", shown), "what was typed has no log-probability"
    assert (
        "[[" in shown
        and "advantages" in shown
        and f"Correct! The number was {game.secret}" in shown
    )
    records = list(read_rollouts(folder))
    assert [(r.outcome, r.rollout.status.value, len(r.rollout.turns)) for r in records] == [
        ("played", "completed", 2),
        ("played", "completed", 1),
    ]
    assert all(np.isin(r.rollout.samples[0].policy_versions, (-1, 0)).all() for r in records)
    assert json.loads((folder / "config.json").read_text())["seed"] == 0
    assert [record.rollout.reward for record in records] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task x", "--config"),
        (
            "--config rl_guess_number_qwen3_debug --task sums",
            "--task = 'sums': name one of guess_number",
        ),
        (
            "--config rl_guess_number_qwen3_debug --endpoint http://127.0.0.1:9/v1",
            "--endpoint = 'http://127.0.0.1:9/v1': no server",
        ),
        ("--config rl_guess_number_qwen3_debug --rollouts 0", "--rollouts = 0: must be at least 1"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(words, message, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# ---- Ctrl-C


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def test_a_ctrl_c_while_the_model_answers_ends_its_answer_and_nothing_else(capsys):
    ended = []

    class Slow:
        def session(self, **options):
            return self

        async def generate(self, prompt_token_ids, *, max_tokens):
            asyncio.get_running_loop().call_later(0.1, press)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        def close(self): ...

    player = player_of(["/model", "/model", "7"], model=Slow)
    completion = await answered(player, stop=761)
    assert ended == [True, True] and player.tokenizer.decode(completion.token_ids[:-1]) == "7"
    assert capsys.readouterr().out.count("error: it was interrupted") == 2
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_servers_model_is_asked_once():
    server = FrozenModel(name="m", base_url="http://127.0.0.1:9/v1", max_retries=5)
    model = answering_model(rl_guess_number_qwen3_debug(), server, lambda: None)
    assert isinstance(model, EndpointClient) and model.model.max_retries == 0
