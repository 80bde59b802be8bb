"""How fast something goes that is counted in bytes, and how long the rest of it will take."""

from __future__ import annotations

from collections import deque

from .results import Progress

__all__ = ["Pace"]

_LOOKS_BACK = 10.0
"""Over how many seconds it is measured: what a snapshot shares with another goes by faster than the rest."""
_AT_LEAST = 1.0
"""After how many seconds something can be said."""


class Pace:
    """The last seconds of something that moves on; moments are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._total = 0
        self._seen: deque[tuple[float, int]] = deque()

    def take(self, moment: float, stage: str, done: int, total: int) -> Progress:
        """Take in how far it is; return that, where known with bytes a second (``rate``) and seconds ``left``.

        These are not known at the beginning, nor where nothing has moved for a while. Something with another total is
        another.
        """
        if total != self._total or (self._seen and done < self._seen[-1][1]):
            self._seen.clear()
            self._total = total
        self._seen.append((moment, done))
        while moment - self._seen[0][0] > _LOOKS_BACK:
            self._seen.popleft()
        began, before = self._seen[0]
        if moment - began < _AT_LEAST or done == before:
            return Progress(stage=stage, done=done, total=total)
        rate = (done - before) / (moment - began)
        return Progress(stage=stage, done=done, total=total, rate=rate, left=(total - done) / rate)
