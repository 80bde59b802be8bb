"""The moment between two cells: where a long one is followed by a save, the next one, which may wait already, is not
begun before the kernel was frozen. Else nothing would be saved while a notebook is run as a whole.
"""

from __future__ import annotations

import threading

__all__ = ["BetweenCells"]

_LONGEST = 5.0
"""How long the next cell waits at most, in seconds: a keeper that hangs delays it no longer."""


class BetweenCells:
    """That of one kernel."""

    def __init__(self) -> None:
        self._after: float | None = None
        self._over = threading.Event()
        self._over.set()

    def set(self, after: float | None) -> None:
        """Have cells wait that follow one of so many seconds; None for no cells, also for one that waits now."""
        self._after = after
        self._over.set()

    def cell_ended(self, seconds: float) -> bool:
        """Take note of the end of a cell; tell whether the next one is to wait."""
        waits = self._after is not None and seconds >= self._after
        if waits:
            self._over.clear()
        return waits

    def end(self) -> None:
        """Let the next cell begin."""
        self._over.set()

    def wait(self) -> None:
        """Wait until the next cell may begin (called by the kernel in its main thread)."""
        self._over.wait(_LONGEST)
        self._over.set()
