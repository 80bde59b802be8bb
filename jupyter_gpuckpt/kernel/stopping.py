"""Ending the cell that a snapshot was taken in, where the restore was asked for without the rest of that cell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

__all__ = ["Interruption", "StoppedHere", "end_cell"]

_STOPPED = "Stopped here: the rest of the saved cell is not run.\n"


class StoppedHere(BaseException):
    """Ends the saved cell; no `Exception`, so that a training loop that goes on after errors does not go on."""


def end_cell(shell: Any, said: str = _STOPPED) -> NoReturn:
    """End the cell that runs, with what is `said` and no traceback.

    Raises
    ------
    StoppedHere : in any case; IPython has it handled by what is set here, once.
    """
    before = shell.custom_exceptions, shell.CustomTB

    def tell(*_: Any) -> None:
        shell.custom_exceptions, shell.CustomTB = before
        print(said, end="")

    shell.custom_exceptions, shell.CustomTB = (StoppedHere,), tell
    raise StoppedHere


class Interruption:
    """Ends a cell that was saved from outside: it is interrupted like any other, but tells of that as `end_cell` does.

    What it runs knows no `StoppedHere`, and may have something to do when it is interrupted. No other cell is ever
    interrupted in its place: the one that was saved may end by itself meanwhile, and the next one begin.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._cell: object = None
        self._before: tuple[Any, Any] | None = None
        """What the shell did with exceptions, where a cell is being interrupted; None otherwise."""
        self._has_ended_it = False

    @contextlib.contextmanager
    def possible(self, cell: object) -> Iterator[Callable[[], bool]]:
        """Have a cell be interrupted where that is asked for while the context lasts; give what tells if it was."""
        if threading.current_thread() is not threading.main_thread():
            yield lambda: False  # no signal reaches it
            return
        with self._lock:
            self._cell, self._has_ended_it = cell, False
        try:
            yield lambda: self._has_ended_it
        except KeyboardInterrupt:
            if self._before is None:
                raise
            self._has_ended_it = True  # it had nothing left to run
        finally:
            # From here on the next interrupt is an error again.
            with self._lock:
                self._cell, before, self._before = None, self._before, None
            if before is not None:
                self._shell.custom_exceptions, self._shell.CustomTB = before

    def interrupt(self, cell: object) -> None:
        """Interrupt this cell if it is the one that runs (called in another thread); None is none."""
        with self._lock:
            if cell is None or self._cell is not cell or self._before is not None:
                return
            self._before = self._shell.custom_exceptions, self._shell.CustomTB
            # A cell that awaits something is cancelled by ipykernel.
            self._shell.custom_exceptions = (KeyboardInterrupt, asyncio.CancelledError)
            self._shell.CustomTB = self._tell
            os.kill(os.getpid(), signal.SIGINT)

    def _tell(self, *_: Any) -> None:
        self._has_ended_it = True
        print(_STOPPED, end="")
