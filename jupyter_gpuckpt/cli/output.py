"""What the command line writes: results on standard output, errors and progress on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Any, TextIO

from ..checked import to_json
from ..errors import Cancelled, GpuckptError, NoSuchKernel, NoSuchSnapshot, Unavailable
from ..kernel.show import progress_text
from ..kernel.tables import Marked, Shown, printable
from ..kernel.words import Usage
from ..operations.pace import Pace
from ..operations.results import Progress as Report
from ..spelling import in_a_terminal
from . import terminal

DONE, FAILED, USAGE, NOT_FOUND, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

_PROGRESS_AFTER = 1.0  # seconds
_REDRAW = 0.5  # seconds
_CLEAR_LINE = "\r\x1b[K"


def exit_status(error: GpuckptError) -> int:
    """Return the exit status that tells a script what kind of error it was."""
    if isinstance(error, Usage):
        return USAGE
    if isinstance(error, NoSuchKernel | NoSuchSnapshot):
        return NOT_FOUND
    if isinstance(error, Unavailable):
        return UNAVAILABLE
    return INTERRUPTED if isinstance(error, Cancelled) else FAILED


def told(error: GpuckptError) -> dict[str, Any]:
    """Return an error as JSON types, as a terminal is told it."""
    return error.spelled(in_a_terminal).as_dict()


def result(as_json: bool, document: object, shown: str | Shown) -> None:
    """Print what a command found or did: one JSON document, or text for people."""
    if as_json:
        _write(sys.stdout, json.dumps(to_json(document), indent=2))
    elif shown:
        _write(sys.stdout, _for_people(shown))


def paged(args: argparse.Namespace, document: object, shown: Shown) -> None:
    """Print what may be long: on a terminal in a pager, unless `--no-pager` says otherwise."""
    wanted = sys.stdout is not None and sys.stdout.isatty() and not (args.json or args.no_pager)
    if not (wanted and terminal.in_pager(_for_people(shown))):
        result(args.json, document, shown)


def _for_people(shown: str | Shown) -> str:
    """Return a result for standard output: a terminal's width and colours are what that shows it with."""
    columns = terminal.width(sys.stdout)
    if isinstance(shown, str) or columns is None:
        return printable(shown if isinstance(shown, str) else shown.text())
    return terminal.painted(shown.lines(columns), colours=terminal.has_colours(sys.stdout))


def failure(as_json: bool, error: GpuckptError) -> None:
    """Print an error: as JSON on standard output, where a program reads on, or for people on standard error."""
    if as_json:
        try:
            _write(sys.stdout, json.dumps({"error": told(error)}, indent=2))
            return
        except OSError:  # it may be the very error to print
            pass
    said = error.spelled(in_a_terminal)
    parts: list[list[str]] = [[Marked(line, "bad")] for line in said.what.split("\n")]
    for word, text in (("Why:", said.why), ("Next:", said.then)):
        first, *more = text.split("\n")
        parts += [[Marked(word, "word"), f" {first}"], *([line] for line in more)] if text else []
    with contextlib.suppress(OSError):
        _write(sys.stderr, terminal.painted(parts, colours=terminal.has_colours(sys.stderr)))


def note(text: str) -> None:
    """Print something for people that is no result, on standard error."""
    with contextlib.suppress(OSError):  # there is no place left to complain about it
        _write(sys.stderr, printable(text))


def finish() -> None:
    """Flush standard output, so that nothing is left for Python to complain about at its end.

    Raises
    ------
    OSError : it could not be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError:
        _discard(sys.stdout)
        raise


def _write(stream: TextIO, text: str) -> None:
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        print(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding), file=stream, flush=True)
    except BrokenPipeError:
        _discard(stream)  # whoever read has read enough, as `head` does


def pass_on(piece: bytes) -> None:
    """Print bytes as they are, at once."""
    try:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise


def _discard(stream: TextIO) -> None:
    """Let go of what a stream still holds: Python would try to write it once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class Progress:
    """One line on a terminal that says how far an operation is; gone at the end.

    It is shown from the first second on, and at once where somebody wants the operation cancelled.

    Where standard error is no terminal nothing is shown.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._latest = Report(stage="starting")
        self._pace = Pace()
        self._began = time.monotonic()
        self._cancelling = self._shown = False
        self._over = threading.Event()
        self._writing = threading.RLock()
        # A thread: the keeper is silent through a long stage, and the seconds must go on all the same.
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._drawing = threading.Thread(target=self._draw, daemon=True) if terminal else None

    def __enter__(self) -> Progress:
        if self._drawing is not None:
            self._drawing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._drawing is not None:
            self._drawing.join()

    def take(self, progress: Report) -> None:
        """Take in what the keeper reports."""
        self._latest = progress

    def amount(self, _: str, done: int, total: int) -> None:
        """Take in how much of what the verb says is done, in bytes."""
        self._latest = self._pace.take(time.monotonic(), "", done, total)

    def cancel(self) -> None:
        """Say from now on that it is being cancelled."""
        self._cancelling = True
        if self._drawing is not None:
            self._show()

    def _draw(self) -> None:
        wait = _PROGRESS_AFTER
        while not self._over.wait(wait):
            self._show()
            wait = _REDRAW
        if self._shown:
            self._write(_CLEAR_LINE)

    def _show(self) -> None:
        seconds = time.monotonic() - self._began
        line = progress_text(self._verb, replace(self._latest, seconds=seconds, cancelling=self._cancelling))
        self._shown = True
        self._write(_CLEAR_LINE + printable(line)[: (terminal.width(sys.stderr) or 80) - 1])

    def _write(self, text: str) -> None:
        with self._writing:  # by the main thread, too, in the middle of whatever it does
            sys.stderr.write(text)
            sys.stderr.flush()
