"""The play command at a pseudo-terminal, as a person has it."""

import os
import pty
import select
import subprocess
import sys
import time

from tests.integration.command_runs import PATIENCE_S, ROOT, environment
from torchtitan.experiments.rl.config_registry import rl_guess_number_qwen3_debug


class Terminal:
    """The other end of the command's terminal."""

    def __init__(self, words: list[str]):
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "torchtitan.experiments.rl.play", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
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
        self.shown = ""
        os.write(self._ours, line.encode() + b"\n")

    def close(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            os.close(self._ours)


def test_a_game_is_played_and_left_at_a_terminal(tmp_path):
    game = rl_guess_number_qwen3_debug().tasks["guess_number"].dataset.build()[0].env_input
    terminal = Terminal(["--config", "rl_guess_number_qwen3_debug", "--run-dir", str(tmp_path / "played")])
    terminal.until("you> ")
    assert "I am thinking of a number" in terminal.shown
    terminal.enter("-1")
    terminal.until("you> ")
    assert f"higher than -1. You have {game.guesses - 1} guesses left" in terminal.shown
    terminal.enter(str(game.secret))
    terminal.until("saved ")
    assert "Correct!" in terminal.shown and "reward 1" in terminal.shown
    assert terminal.close() == 0
    assert sorted(path.name for path in (tmp_path / "played").iterdir()) == [
        "config.json",
        "rollouts.jsonl.gz",
        "test_guess_number.py",
    ]
