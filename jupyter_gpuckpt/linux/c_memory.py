"""The memory of the C library beneath Python: a keeper lives for weeks, and works with many threads now and then."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8


def have_few_arenas() -> None:
    """Have the C library share its memory among threads: each would keep what it once had (mallopt(3))."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def give_memory_back() -> None:
    """Return to the system what the last operation had needed (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
