"""Asks the person at the terminal for each completion of a rollout."""

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from renderers import Message

from torchtitan.experiments.rl.config.preflight import REPLY
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.play.policy import Model, ModelAsked, PlayedPolicy
from torchtitan.experiments.rl.printable import printable, printable_line

HELP = """\
  your answer in one line, or several lines between a line <<< and a line >>>
  /call NAME {"key": "value"}   a tool call, in the format of Qwen
  /model                        the model answers this turn; Ctrl-C stops it
  /scripted                     the reply that a config is checked with before a run
  /prompt                       the whole prompt again, as the model gets it
  /quit                         end without an answer"""


class Left(RunError):
    """The person has ended the session."""


class Player:
    """``policy`` asks it for completions. Nothing else goes on while it waits for the person."""

    def __init__(
        self,
        tokenizer_path: str,
        *,
        model: Callable[[], Model],
        scripted: Sequence[str] = (),
        read: Callable[[], str] | None = None,
        out: TextIO | None = None,
    ):
        """
        Args:
            model: makes the model that answers for the person, when it is asked first.
            scripted: what is entered first, in order.
            read: reads a line; None: from the terminal.
        """
        self.policy = PlayedPolicy(tokenizer_path, self, model)
        self.replies: dict[int, list[str]] = {}
        """What was answered, by the rollout's index."""
        self._scripted, self._read, self._out = list(scripted), read or input, out or sys.stdout
        self._shown: dict[int, str] = {}
        self._left = self._helped = False

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
        if new:  # else it is the same turn: the model did not answer it
            self._shown[rollout] = prompt
            self._say(f"── rollout {rollout}, turn {turn}: {'what is new in ' if new != prompt else ''}the prompt ──\n{new}")
        if not self.replies and not self._helped:
            self._say(HELP)
            self._helped = True
        text = self._answer(prompt)
        self.replies.setdefault(rollout, []).append(text)
        return text

    def judge(self, messages: Sequence[Message]) -> str:
        """The answer to a question that a judge of the task is asked."""
        if self._left:
            raise Left("the session was ended")
        for message in messages:
            self._say(f"── a judge is asked, {message['role']} ──\n{message['content']}")
        try:
            return self._answer("")
        except ModelAsked:
            self._say("Only a turn can be the model's: answer as the judge would.")
            return self.judge(())

    def waits(self) -> None:
        """The model has been asked."""
        self._say("(the model answers)")

    def model_failed(self, why: str) -> None:
        """The model has not answered: the turn is the person's again."""
        self._say(f"error: {printable_line(why)}")

    def model_answered(self, rollout: int, text: str) -> None:
        """``text`` is its completion, without the token that ends it."""
        self.replies.setdefault(rollout, []).append(text)
        self._say(f"model> {text}")

    def _answer(self, prompt: str) -> str:
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
            if command == "/model":
                raise ModelAsked
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
        if self._scripted:
            line = self._scripted.pop(0)
            self._say(f"{before}{line}")
            return line
        try:  # who sees the prompt may interrupt at once, before anything is read
            self._out.write(before)
            self._out.flush()
            return self._read()
        except (EOFError, KeyboardInterrupt):
            raise self._end() from None

    def _end(self) -> Left:
        self._left = True
        return Left("the session was ended")

    def _say(self, text: str) -> None:
        self._out.write(printable(text) + "\n")
        self._out.flush()
