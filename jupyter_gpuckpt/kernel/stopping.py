"""Ending the cell that a snapshot was taken in, where the restore was asked for without the rest of that cell."""

from __future__ import annotations

import asyncio
import os
import signal
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

    What it runs knows no `StoppedHere`, and may have something to do when it is interrupted.
    """

    def __init__(self, shell: Any) -> None:
        self._shell, self._has_ended_it = shell, False
        self._before = shell.custom_exceptions, shell.CustomTB

    def interrupt(self) -> None:
        """Interrupt the cell (called in another thread)."""
        # A cell that awaits something is cancelled by ipykernel.
        self._shell.custom_exceptions = (KeyboardInterrupt, asyncio.CancelledError)
        self._shell.CustomTB = self._tell
        os.kill(os.getpid(), signal.SIGINT)

    def _tell(self, *_: Any) -> None:
        self._has_ended_it = True
        print(_STOPPED, end="")

    def is_over(self) -> bool:
        """Tell, when the cell has ended, whether it did so by this; the next interrupt is an error again."""
        self._shell.custom_exceptions, self._shell.CustomTB = self._before
        return self._has_ended_it
