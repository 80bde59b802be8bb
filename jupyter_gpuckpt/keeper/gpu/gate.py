"""A gate in front of CUDA calls of the kernel that do not wait by themselves while the driver has its GPU state.

The driver holds back most calls of a checkpointed process. Some end it by SIGSEGV, and some fail (measured, with the
list: docs/internals/cuda.md). All calls pass through the kernel's library, which looks for a file first
(`kernel/driver/door.c`). A file, since who waits may hold Python's lock: only the keeper, from outside, can let it go
on.
"""

from __future__ import annotations

import time
from pathlib import Path

from ... import settings

__all__ = ["close", "open_", "settle"]

_COARSE = 6
"""CLOCK_MONOTONIC_COARSE (clock_gettime(2)), by whose ticks the library looks."""


def close(run_dir: Path) -> float:
    """Have all calls of the processes of this run folder wait, from the next tick of the clock on; `settle` says which.

    Returns when that was (`time.monotonic`).
    """
    (run_dir / settings.GATE).touch(mode=0o600)
    return time.monotonic()


def settle(closed: float) -> None:
    """Wait until no call is begun any more by a thread that has seen the gate open: some milliseconds from then on."""
    time.sleep(max(0.0, closed + 2 * time.clock_getres(_COARSE) - time.monotonic()))


def open_(run_dir: Path) -> None:
    """Let them go on: all GPU state is back."""
    (run_dir / settings.GATE).unlink(missing_ok=True)
