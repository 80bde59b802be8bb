"""What a terminal makes of output: colours, lines that it has room for, and a pager for what is long."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from typing import TextIO

from ..kernel.tables import Line, Marked, Meaning, one_line, printable

__all__ = ["has_colours", "in_pager", "painted", "width"]

_COLOURS: Mapping[Meaning, str] = {
    "here": "1;32",
    "good": "32",
    "busy": "33",
    "bad": "1;31",
    "quiet": "2",
    "word": "1",
}
"""The usual ones, so that they can be read on light and on dark terminals: bold, green, yellow, red, faint."""
_LESS = {"LESS": "FRX", "LV": "-c"}
"""As git has it: end at once where there is room for all, show colours, and leave the text on the terminal."""


def width(stream: TextIO | None) -> int | None:
    """Return how many columns the terminal has that a stream goes to; None where it goes to none."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def has_colours(stream: TextIO | None) -> bool:
    """Tell whether what goes to a stream may be coloured (https://no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return wanted and stream is not None and stream.isatty()


def painted(lines: Iterable[Line], *, colours: bool) -> str:
    """Return lines as a terminal is given them; nothing in them steers it but our colours."""
    return "\n".join("".join(_painted(piece, colours) for piece in line) for line in lines)


def _painted(piece: str, colours: bool) -> str:
    text = printable(one_line(piece))
    return f"\x1b[{_COLOURS[piece.meaning]}m{text}\x1b[0m" if colours and isinstance(piece, Marked) else text


def in_pager(text: str) -> bool:
    """Show a text in the pager (PAGER, or less), until it is left; return False where there is none."""
    words = shlex.split(os.environ.get("PAGER", "less"))
    if not words or words == ["cat"]:
        return False
    try:
        pager = subprocess.Popen(words, stdin=subprocess.PIPE, env={**_LESS, **os.environ})
    except OSError:
        return False
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's
    try:
        assert pager.stdin is not None
        with contextlib.suppress(BrokenPipeError), pager.stdin as stdin:  # it may be left before the end
            stdin.write(f"{text}\n".encode(errors="backslashreplace"))
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
    return True
