"""A stream that says it is a terminal, and what a person sees of what was written to one."""

import io
import re
import unicodedata

_PIECE = re.compile(r"\r|\n|\033\[\??\d*[A-Za-z]|[^\x00-\x1f\x7f]+|.", re.DOTALL)


class Terminal(io.StringIO):
    """Stream of a terminal, which keeps what is written."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Screen:
    """Screen of a terminal, as high as it has to be.

    It knows what the console may use, and refuses everything else.
    """

    def __init__(self, columns: int = 80):
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        """Cells of each row. A character of two cells is in the first of them, and "" in the
        other."""
        self._row, self._column = 0, 0
        self.shows_cursor = True

    @property
    def rows(self) -> list[str]:
        """Texts of the rows, without the blanks at their ends."""
        return ["".join(row).rstrip() for row in self._rows]

    def feed(self, written: str) -> "Screen":
        """Show what a program writes, and return the screen."""
        for piece in _PIECE.findall(written):
            if piece == "\r":
                self._column = 0
            elif piece == "\n":  # the driver of a terminal adds the return
                self._next_row()
            elif piece == "\033[2K":
                self._rows[self._row] = []
            elif piece == "\033[1A":
                assert self._row > 0, "the console draws above what it has written"
                self._row -= 1
            elif piece in ("\033[?25l", "\033[?25h"):
                self.shows_cursor = piece.endswith("h")
            elif not re.fullmatch(r"\033\[\d*m", piece):
                assert piece.isprintable(), f"{piece!r} is no business of the console's"
                for character in piece:
                    self._put(character)
        return self

    def _put(self, character: str) -> None:
        cells = [character, *[""] * (unicodedata.east_asian_width(character) in "WF")]
        if self._column + len(cells) > self._columns:
            self._next_row()
        row = self._rows[self._row]
        row += " " * (self._column - len(row))
        row[self._column : self._column + len(cells)] = cells
        self._column += len(cells)

    def _next_row(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append([])
