"""What a person sees of what a program writes to a terminal."""

import re

_PIECE = re.compile(r"\r|\n|\033\[K|\033\[\d*m|[^\x00-\x1f\x7f]+|.", re.DOTALL)


class Screen:
    """A terminal that is as high as it has to be. It knows what the console may use, and refuses everything else."""

    def __init__(self, columns: int = 80):
        self._columns = columns
        self._rows, self._row, self._column = [""], 0, 0

    @property
    def rows(self) -> list[str]:
        """Without blanks at their ends."""
        return [row.rstrip() for row in self._rows]

    def feed(self, written: str) -> "Screen":
        for piece in _PIECE.findall(written):
            if piece == "\r":
                self._column = 0
            elif piece == "\n":  # the driver of a terminal adds the return
                self._next_row()
            elif piece == "\033[K":
                self._rows[self._row] = self._rows[self._row][: self._column]
            elif piece.startswith("\033["):
                pass
            else:
                assert piece.isprintable(), f"{piece!r} is no business of the console's"
                for character in piece:
                    self._put(character)
        return self

    def _put(self, character: str) -> None:
        if self._column == self._columns:
            self._next_row()
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _next_row(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append("")
