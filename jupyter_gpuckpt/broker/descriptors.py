"""Descriptors that a process of root's was started with, or has opened: none of them is for anybody else.

Python opens its own such that an exec closes them; what others have left open is passed on by each exec, and whoever
has a descriptor has what it stands for, whatever the rights to it are now.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

__all__ = ["close_all", "close_at_exec", "turn_away"]

_STANDARD = (0, 1, 2)


def close_all(but: Collection[int]) -> None:
    """Close what this process was started with, from 3 on; of the standard ones, none is missing afterwards."""
    for descriptor in _opened():
        if descriptor not in but:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    while null in _STANDARD:
        null = os.dup(null)
    os.dup2(null, 0)
    os.close(null)


def close_at_exec(but: Collection[int]) -> None:
    """Have an exec close everything from 3 on, whoever opened it."""
    for descriptor in _opened():
        if descriptor not in but:
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)


def turn_away() -> None:
    """Have nothing to do any more with the terminal, the session and the log of whoever started this process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in _STANDARD:
        os.dup2(null, standard)
    os.close(null)


def _opened() -> list[int]:
    return [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if descriptor not in _STANDARD]  # noqa: PTH208
