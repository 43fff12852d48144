"""The play command at a pseudo-terminal, as a person has it."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.command_runs import PATIENCE_S, ROOT, environment
from torchtitan.experiments.rl.config_registry import rl_guess_number_qwen3_debug
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts


class Terminal:
    """The other end of the command's terminal."""

    def __init__(self, words: list[str], variables: dict[str, str]):
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "torchtitan.experiments.rl.play", *words]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | variables | {"TERM": "dumb"},  # readline adds no codes to the text
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def until(self, text: str) -> None:
        ends = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < ends, self.shown
            if select.select([self._ours], [], [], 1)[0]:
                try:
                    self.shown += os.read(self._ours, 2**16).decode(errors="replace")
                except OSError:  # the command has ended
                    assert text in self.shown, self.shown
                    return

    def enter(self, line: str) -> None:
        """Enter a line as a person does, who has seen the prompt: readline shows what came before a second time."""
        self.until_it_reads()
        self.shown = ""
        os.write(self._ours, line.encode() + b"\n")

    def until_it_reads(self) -> None:
        """Wait until the command is in the system call that waits for a line.

        It is ``read``, or select where readline is loaded, as Python 3.13's ``pdb`` does it.

        Python loses a signal that comes after it has looked for one and before that call, until the
        next key: a person is never so quick.
        """
        ends = time.monotonic() + PATIENCE_S
        # Numbers of x86-64 and of ARM; the file is 0, and a select looks at files below 1.
        calls = [f"{read} 0x0 " for read in (0, 63)]
        calls += [f"{select} 0x1 " for select in (23, 270, 72)]
        while not Path(f"/proc/{self.process.pid}/syscall").read_text().startswith(tuple(calls)):
            assert time.monotonic() < ends, self.shown
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.shown = ""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            os.close(self._ours)


HOSTILE = """
from dataclasses import dataclass, fields

from torchtitan.experiments.rl.config_registry import rl_guess_number_qwen3_debug
from torchtitan.experiments.rl.tasks.examples.guess_number import GuessNumberEnv
from torchtitan.experiments.rl.tasks.examples.guess_number import GuessNumberTask


class HostileEnv(GuessNumberEnv):
    async def reset(self):
        output = await super().reset()
        output.messages[0]["content"] += "\\x1b]0;owned\\x07\\x1b[2J\\u202e\\x9b31m"
        return output


class Hostile(GuessNumberTask):
    @dataclass(kw_only=True, slots=True)
    class Config(GuessNumberTask.Config): ...

    def make_env(self, sample):
        return HostileEnv(sample.env_input)


def played():
    config = rl_guess_number_qwen3_debug()
    task = config.tasks["guess_number"]
    config.tasks["guess_number"] = Hostile.Config(**{field.name: getattr(task, field.name) for field in fields(task)})
    return config
"""
"""Its text would name the terminal's window, clear the screen, turn the direction of writing and colour what follows."""


def test_a_game_is_played_with_the_model_and_left_at_a_terminal(tmp_path):
    """Two rollouts, in turn. Of the first a turn is the model's, on a generator that the command starts."""
    (tmp_path / "hostile_games.py").write_text(HOSTILE)
    game = rl_guess_number_qwen3_debug().tasks["guess_number"].dataset.build()[0].env_input
    words = [
        "--module",
        "hostile_games",
        "--config",
        "played",
        "--rollouts",
        "2",
        "--run-dir",
        str(tmp_path / "played"),
    ]
    terminal = Terminal(words, {"PYTHONPATH": str(tmp_path)})
    terminal.until("you> ")
    assert "I am thinking of a number" in terminal.shown
    assert "\\x1b]0;owned\\x07\\x1b[2J\\u202e\\x9b31m" in terminal.shown
    for harmful in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b"):
        assert harmful not in terminal.shown
    terminal.enter("/model")
    terminal.until("(the model answers)")
    terminal.interrupt()
    terminal.until("you> ")
    assert "error: it was interrupted" in terminal.shown
    terminal.enter("/model")
    terminal.until("model> ")
    assert (
        terminal.shown.splitlines()[1] == "(the model answers)" and "arning" not in terminal.shown
    ), terminal.shown
    terminal.until("rollout 1, turn 0")
    terminal.until("you> ")
    terminal.enter(str(game.secret))
    terminal.until("rollout 0, turn 1")
    terminal.until("you> ")
    assert f"You have {game.guesses - 1} guesses left" in terminal.shown
    terminal.until_it_reads()
    terminal.interrupt()
    terminal.until("saved ")
    assert (
        "Correct!" in terminal.shown
        and "reward 1" in terminal.shown
        and "You left" in terminal.shown
    )
    assert "error" not in terminal.shown
    assert terminal.close() == 0
    assert sorted(path.name for path in (tmp_path / "played").iterdir()) == [
        "config.json",
        "logs",
        "rollouts.jsonl.gz",
    ]
    first, second = read_rollouts(tmp_path / "played")
    (turn,) = first.rollout.turns
    assert (turn.completion.policy_versions == 0).all() and (turn.completion.logprobs <= 0).all()
    assert set(second.rollout.turns[0].completion.logprobs.tolist()) == {-1.0}  # a person's
    assert second.rollout.reward == 1.0 and first.rollout.reward is None
