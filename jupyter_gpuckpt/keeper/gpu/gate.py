"""A gate in front of CUDA calls of the kernel that do not wait by themselves while the driver has its GPU state.

`cuCtxSynchronize` of a checkpointed process ends it by SIGSEGV (measured: docs/internals/cuda.md). The kernel's library
stands in for the runtime's function that calls it, and looks for a file first (`kernel/parking.c`). A file, since who
waits may hold Python's lock: only the keeper, from outside, can let it go on.
"""

from __future__ import annotations

from pathlib import Path

from ... import settings

__all__ = ["close", "open_"]


def close(run_dir: Path) -> None:
    """Have such calls wait, from before the driver locks the processes of this run folder."""
    (run_dir / settings.GATE).touch(mode=0o600)


def open_(run_dir: Path) -> None:
    """Let them go on: all GPU state is back."""
    (run_dir / settings.GATE).unlink(missing_ok=True)
