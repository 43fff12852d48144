"""Prints to a terminal, above a status line that is drawn again in place.

While the status is shown, this process's stdout and stderr print above it too, as far as they are a
terminal. Of a line that has not ended, such as a progress bar, the status shows the newest state;
it is printed when it ends. So no two texts are mixed on a line, whoever prints.

`rich` draws. Texts of users and models are given to it as they are: it reads no markup in them,
highlights nothing and breaks no line of its own accord.
"""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO, cast

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchtitan.experiments.rl.process.output import can_redraw

logger = logging.getLogger(__name__)


class LiveTerminal:
    """A terminal with a status line. Any thread may call it.

    A terminal that can't be written any more gets nothing from then on, with a line in the log: no
    run ends because nobody reads what it prints.
    """

    def __init__(self, stream: TextIO, status: Callable[[], str], *, has_colours: bool):
        """Show no status yet.

        Args:
            stream: stream of the terminal.
            status: returns the line to show now; empty is none.
            has_colours: True to print in colours.
        """
        self._status = status
        self._console = Console(
            file=stream,
            force_terminal=True,
            force_interactive=True,
            color_system="standard" if has_colours else None,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        self._live = Live(
            self,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._lock = threading.RLock()
        self._streams: dict[str, LineStream] = {}
        """Streams of this process that print above the status, by their names in ``sys``."""
        self._is_shown = False
        self._is_closed = False
        self._failure: Exception | None = None
        """Error by which the terminal can't be written any more; None while it can."""

    def __rich__(self) -> Group:
        """Return the status as it is now, under the lines that have not ended.

        It is cut where the terminal ends. There is none before ``show`` and after ``close``.
        """
        if not self._is_shown:
            return Group()
        shown = [text for text in (*self._unfinished(), Text(self._status())) if text]
        for text in shown:
            text.no_wrap = True
            text.overflow = "crop"
        return Group(*shown)

    def show(self) -> None:
        """Draw the status in place of what was shown, from the first call until ``close``."""
        with self._held():
            if self._is_closed:
                return
            if not self._is_shown:
                self._is_shown = True
                self._start()
            self._draw()

    def print(self, text: str, *, style: str = "") -> None:
        """Print whole lines. A terminal breaks those that are too wide for it."""
        with self._held():
            self._draw(Text(text, style=style))

    def print_wrapped(self, text: str, *, label: str = "", indent: int) -> None:
        """Print a paragraph, broken between words where the terminal ends.

        A paragraph with a word that is wider than the terminal stays whole: it is a path or a
        command, which people copy.

        Args:
            text: a single line.
            label: stands before the first line.
            indent: number of blanks before each other line.
        """
        width = self._console.width - indent
        lines = [text]
        if max(map(cell_len, text.split()), default=0) <= width:
            wrapped = Text(text).wrap(self._console, width)
            lines = [line.plain.rstrip() for line in wrapped]
        self.print(label + f"\n{' ' * indent}".join(lines))

    def close(self) -> None:
        """Erase the status, and give the process its streams back. No status is shown again."""
        with self._held():
            self._is_closed = True
            if not self._is_shown:
                return
            for name, stream in self._streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.proxied)
            unfinished = self._unfinished()
            for stream in self._streams.values():
                stream.unfinished.clear()
            if unfinished:
                self._draw(*unfinished)
            self._is_shown = False
            self._try(self._live.stop)

    def write(self, stream: "LineStream", text: str) -> None:
        """Print the lines of a stream that ``text`` ends."""
        thread = threading.get_ident()
        with self._held():
            *lines, line = (stream.unfinished.pop(thread, "") + text).split("\n")
            if line:
                stream.unfinished[thread] = line[line.rstrip("\r").rfind("\r") + 1 :]
            if lines:
                self._draw(*map(_shown, lines))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep other threads from drawing in the block.

        That the terminal broke in the block is logged after it: a thread that logs may hold a lock
        of its handler, and wait for this one.
        """
        with self._lock:
            was_broken = self._failure is not None
            yield
            breaks_now = self._failure is not None and not was_broken
        if breaks_now:
            logger.warning(
                "the terminal can't be written any more (%s); the run goes on", self._failure
            )

    def _unfinished(self) -> list[Text]:
        """Return the lines that have not ended, in their newest states."""
        return [
            _shown(line) for stream in self._streams.values() for line in stream.unfinished.values()
        ]

    def _start(self) -> None:
        for name in ("stdout", "stderr"):
            stream: TextIO = getattr(sys, name)
            if can_redraw(stream):
                self._streams[name] = LineStream(self, stream)
                setattr(sys, name, self._streams[name])
        self._try(self._live.start)
        # A run that is killed can't show the cursor again, so it stays visible.
        self._try(partial(self._console.show_cursor, True))

    def _draw(self, *printed: Text) -> None:
        """Print lines, and the status under them if it is shown."""
        if printed:
            self._try(partial(self._console.print, *printed, sep="\n"))
        else:
            self._try(self._live.refresh)

    def _try(self, write: Callable[[], object]) -> None:
        """Write to the terminal, unless it can't be written any more."""
        if self._failure is not None:
            return
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._failure = error


class LineStream(io.TextIOBase):
    """Stands in for stdout or stderr: a ``LiveTerminal`` prints its lines when they end."""

    def __init__(self, terminal: LiveTerminal, proxied: TextIO):
        self.proxied = proxied
        """Stream that this one stands in for."""
        self.unfinished: dict[int, str] = {}
        """Lines that have not ended, in their newest states, by the thread that writes them. One
        ``print`` writes a line in several pieces, beside other threads."""
        self._terminal = terminal

    def write(self, text: str, /) -> int:
        """Print the lines that ``text`` ends."""
        self._terminal.write(self, text)
        return len(text)

    def flush(self) -> None:
        """Show the lines that have not ended, if there are any."""
        if self.unfinished:
            self._terminal.show()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the terminal."""
        return self.proxied.encoding

    @property
    def buffer(self) -> io.BufferedIOBase:
        """Return the stream of bytes, which prints past the status."""
        return cast(io.BufferedIOBase, self.proxied.buffer)

    def fileno(self) -> int:
        """Return the descriptor of the terminal."""
        return self.proxied.fileno()

    def isatty(self) -> bool:
        """Return True: it stands in for terminals only."""
        return True


def _shown(line: str) -> Text:
    """Return what a terminal shows of a line that a stream got, in its colours.

    A progress bar begins each of its states with a carriage return, or ends it with one. Codes that
    would move the cursor or clear the screen are left out.
    """
    return Text.from_ansi(line.rstrip("\r"))
