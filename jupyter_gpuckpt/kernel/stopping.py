"""Ending the cell that a snapshot was taken in, where the restore was asked for without the rest of that cell."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["StoppedHere", "end_cell"]


class StoppedHere(BaseException):
    """Ends the saved cell; no `Exception`, so that a training loop that goes on after errors does not go on."""


def end_cell(shell: Any, said: str = "Stopped here: the rest of the saved cell is not run.\n") -> NoReturn:
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
