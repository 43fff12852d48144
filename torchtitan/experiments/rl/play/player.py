"""Asks the person at the terminal for each completion of a rollout."""

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from torchtitan.experiments.rl.config.preflight import REPLY
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.printable import printable
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy

HELP = """\
  your answer in one line, or several lines between a line <<< and a line >>>
  /call NAME {"key": "value"}   a tool call, in the format of Qwen
  /scripted                     the reply that a config is checked with before a run
  /prompt                       the whole prompt again, as the model gets it
  /quit                         end without an answer"""


class Left(RunError):
    """The person has ended the session."""


class Player:
    """``reply`` is what a ScriptedPolicy calls for a completion. Nothing else goes on while it waits for the person."""

    def __init__(
        self, tokenizer_path: str, *, scripted: Sequence[str] = (), read: Callable[[], str] = input, out: TextIO | None = None
    ):
        """
        Args:
            scripted: answers that are given first, in order.
        """
        self.policy = ScriptedPolicy(tokenizer_path, self.reply)
        self.replies: dict[int, list[str]] = {}
        """What was answered, by the rollout's index."""
        self._scripted, self._read, self._out = list(scripted), read, out or sys.stdout
        self._shown: dict[int, str] = {}
        self._left = False

    def reply(self, rollout: int, turn: int) -> str:
        """The completion of a rollout's turn, after the part of its prompt that is new was shown.

        Raises:
            Left: the person has ended the session.
        """
        if self._left:
            raise Left("the session was ended")
        prompt = self.policy.prompts[-1]
        before = self._shown.get(rollout, "")
        new = prompt[len(before) :] if before and prompt.startswith(before) else prompt
        self._shown[rollout] = prompt
        self._say(f"── rollout {rollout}, turn {turn}: {'what is new in ' if new != prompt else ''}the prompt ──\n{new}")
        if not self.replies:
            self._say(HELP)
        text = self._answer(prompt)
        self.replies.setdefault(rollout, []).append(text)
        return text

    def _answer(self, prompt: str) -> str:
        if self._scripted:
            text = self._scripted.pop(0)
            self._say(f"you> {text}")
            return text
        while True:
            line = self._line("you> ")
            if line == "<<<":
                lines = []
                while (line := self._line("...> ")) != ">>>":
                    lines.append(line)
                return "\n".join(lines)
            if not line.startswith("/"):
                return line
            command, _, rest = line.partition(" ")
            if command == "/quit":
                raise self._end()
            if command == "/scripted":
                return REPLY
            if command == "/prompt":
                self._say(prompt)
            elif command == "/call":
                name, _, arguments = rest.partition(" ")
                return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments or "{}"}}}\n</tool_call>'
            else:
                self._say(HELP)

    def _line(self, before: str) -> str:
        self._out.write(before)
        self._out.flush()
        try:
            return self._read()
        except (EOFError, KeyboardInterrupt):
            raise self._end() from None

    def _end(self) -> Left:
        self._left = True
        return Left("the session was ended")

    def _say(self, text: str) -> None:
        self._out.write(printable(text) + "\n")
        self._out.flush()
