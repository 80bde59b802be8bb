"""What is shown of results: lines of text, tables, and the same as HTML where there is a browser."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias

__all__ = ["Blocks", "Line", "Listing", "Marked", "Meaning", "Shown", "details", "one_line", "printable"]

Meaning: TypeAlias = Literal["here", "good", "busy", "bad", "quiet", "word"]
Line: TypeAlias = Sequence[str]
"""A line in pieces, some of which may be `Marked`."""


class Marked(str):
    """A text with a meaning, which a terminal shows by a colour."""

    __slots__ = ("meaning",)
    meaning: Meaning

    def __new__(cls, text: str, meaning: Meaning) -> Marked:
        made = super().__new__(cls, text)
        made.meaning = meaning
        return made


def printable(text: str) -> str:
    """Return the text without control characters: notes and notebooks' names must not steer what they are shown in."""
    lines = (
        line if line.isprintable() else "".join(c if c.isprintable() else " " for c in line)
        for line in text.split("\n")
    )
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Return the text without line breaks: none may look like another row."""
    return text.replace("\n", " ")


class Shown:
    """Something that shows itself as one line of text, and as HTML with the same words.

    `%gpuckpt` shows it once; it is not shown again as the value of the cell that made it.
    """

    already_shown_in: int | None = None
    restored = False
    """Whether it is given to a kernel that has been restored, or to a copy."""

    def text(self) -> str:
        raise TypeError("made by the classes below")

    def lines(self, width: int) -> list[Line]:
        """Return the same for a terminal that is so wide."""
        del width  # that breaks lines itself
        return [[line] for line in self.text().split("\n")]

    def html(self) -> str:
        first, _, rest = self.text().partition(" ")
        return f"<div><b>{html.escape(first)}</b> {html.escape(rest)}</div>"

    def mime(self) -> dict[str, str]:
        """Return the two representations, by MIME type."""
        return {"text/plain": repr(self), "text/html": printable(self.html())}

    def __repr__(self) -> str:
        return printable(self.text())

    def _ipython_display_(self) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        shell = get_ipython()
        if shell is not None and shell.execution_count == self.already_shown_in:
            return
        display(self.mime(), raw=True)


_SHORT = 24
"""How many characters a cell of a table has that is not broken into lines."""
_SHORTEST = 10
"""How many are left of one that is cut, since a terminal is narrow."""
_GAP = "  "


class Listing(Shown):
    """A table; `empty` is said when it has no rows.

    On a narrow terminal the cells of `elastic` columns, named by their heads, are cut, and where that is not enough
    the `spare` ones are left out, the first of them first.
    """

    def __init__(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        empty: str,
        faults: Sequence[str],
        *,
        elastic: Collection[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self._head, self._rows, self._empty, self._faults = head, rows, empty, list(faults)
        self._elastic, self._spare = elastic, spare

    def text(self) -> str:
        if not self._rows:
            return "\n".join([self._empty, *self._faults])
        columns = []
        for column in self._columns():
            width = _width(column)
            columns.append([one_line(cell).ljust(width) for cell in column])
        lines = [line.rstrip() for line in map(_GAP.join, zip(*columns, strict=True))]
        return "\n".join(lines + self._faults)

    def lines(self, width: int) -> list[Line]:
        faults = [[line] for fault in self._faults for line in fault.split("\n")]
        if not self._rows:
            return [[self._empty], *faults]
        columns = self._fitted(width)
        padded = [[(cell, " " * (most - len(cell)) + _GAP) for cell in column] for column, most in _measured(columns)]
        return [*(_line(row) for row in zip(*padded, strict=True)), *faults]

    def _columns(self) -> list[tuple[str, ...]]:
        """Return the table by columns: there may be ten thousand rows."""
        return [*zip(*([self._head, *self._rows] if any(self._head) else self._rows), strict=True)]

    def _fitted(self, width: int) -> list[Sequence[str]]:
        """Return the columns that a terminal has room for, as far as that can be; those that are empty are left out."""
        whole = [column for at, column in enumerate(self._columns()) if at == 0 or any(column[1:])]
        columns: list[Sequence[str]] = [*whole]
        for spare in ("", *self._spare):
            whole = [column for column in whole if not spare or column[0] != spare]
            columns = [*whole]
            for least in (_SHORT, _SHORTEST):
                for at in sorted(range(len(columns)), key=lambda at: -_width(columns[at])):
                    over = sum(_width(column) + len(_GAP) for column in columns) - len(_GAP) - width
                    if over <= 0:
                        return columns
                    if columns[at][0] in self._elastic:
                        room = max(least, _width(columns[at]) - over)
                        columns[at] = [_cut(cell, room) for cell in columns[at]]
        return columns

    def html(self) -> str:
        faults = "".join(f'<div style="white-space:pre-line">{html.escape(fault)}</div>' for fault in self._faults)
        if not self._rows:
            return f"<div>{html.escape(self._empty)}</div>{faults}"

        def row(cells: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align:left;{_breaks(cell)}">{html.escape(cell)}</{tag}>' for cell in cells
            )

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self._rows)
        head = f"<thead><tr>{row(self._head, 'th')}</tr></thead>" if any(self._head) else ""
        return f"<table>{head}<tbody>{body}</tbody></table>{faults}"


def _breaks(cell: str) -> str:
    """Return the style by which a long cell gives room to the short ones, such as times, which stay on one line."""
    return "white-space:nowrap" if len(cell) <= _SHORT else "overflow-wrap:anywhere"


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _measured(columns: Iterable[Sequence[str]]) -> Iterable[tuple[Sequence[str], int]]:
    return ((column, _width(column)) for column in columns)


def _cut(text: str, width: int) -> str:
    """Return as much of a text as there is room for, with the meaning that it has."""
    if len(text) <= width:
        return text
    short = f"{text[: width - 1]}…"
    return Marked(short, text.meaning) if isinstance(text, Marked) else short


def _line(cells: Iterable[tuple[str, str]]) -> Line:
    """Return a line of cells, each with what stands behind it, without what ends it and is seen by nobody."""
    pieces = [piece for cell in cells for piece in cell]
    while pieces and not pieces[-1].strip():
        pieces.pop()
    return pieces


class Blocks(Shown):
    """Texts and tables, one below the other."""

    def __init__(self, blocks: Sequence[str | Listing]) -> None:
        self._blocks = [block for block in blocks if block]

    def text(self) -> str:
        return "\n\n".join(block if isinstance(block, str) else block.text() for block in self._blocks)

    def lines(self, width: int) -> list[Line]:
        found: list[Line] = []
        for block in self._blocks:
            own = [[line] for line in block.split("\n")] if isinstance(block, str) else block.lines(width)
            found += [[], *own] if found else own
        return found

    def html(self) -> str:
        return "".join(
            f'<div style="white-space:pre-line">{html.escape(block)}</div>' if isinstance(block, str) else block.html()
            for block in self._blocks
        )


def details(pairs: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> Listing:
    """Return a table of names and values, with notes below it."""
    return Listing(["", ""], [list(pair) for pair in pairs if pair[1]], "", notes)
