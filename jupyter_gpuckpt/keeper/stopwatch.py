"""What each step of an operation took, for the keeper's log."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Times steps that follow one another."""

    def __init__(self) -> None:
        self._laps: list[tuple[str, float]] = []

    def begin(self, step: str) -> None:
        """End the step before, and begin this one."""
        self._laps.append((step, time.monotonic()))

    def __str__(self) -> str:
        ends = [*(began for _, began in self._laps[1:]), time.monotonic()]
        return ", ".join(f"{step} {end - began:.2f}" for (step, began), end in zip(self._laps, ends, strict=True))
