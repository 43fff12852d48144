"""Last words of this process: a line that is printed if code of the user's ends it.

``os._exit`` and a segmentation fault leave Python no chance to say what was called. A shell, which
outlives this process, keeps the line, and prints it when its pipe closes before the line was taken
back.
"""

import contextlib
import subprocess
from typing import Self

from torchtitan.experiments.rl.printable import printable_line

SCRIPT = (
    'while IFS= read -r line; do last=$line; done; [ -z "$last" ] || printf "%s\\n" "$last" >&2'
)
"""Program of the shell: print the last line of its input to stderr, unless that is empty."""


class LastWords:
    """Line that is on stderr after the death of this process, as long as the block runs."""

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(["/bin/sh", "-c", SCRIPT], stdin=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.set("")
        with self._shell:  # closes the pipe, and waits for the shell
            pass

    def set(self, line: str) -> None:
        """Replace the line; "" takes it back."""
        pipe = self._shell.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # a shell that has ended prints nothing
            pipe.write(printable_line(line) + "\n")
            pipe.flush()
