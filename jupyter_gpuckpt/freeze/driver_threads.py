"""Which of a process's threads are the CUDA driver's own."""

from __future__ import annotations

from ..linux import proc

__all__ = ["is_drivers"]

_NAMED = "cuda"
"""How the driver names its threads: ``cuda-EvtHandlr``, ``cuda00010c00044`` and the like (driver 580.159)."""


def is_drivers(task: str) -> bool:
    """Tell whether a thread, by its folder in /proc, is one of the driver's. Raises `OSError` where it has ended."""
    return proc.read(f"{task}/comm").startswith(_NAMED)
