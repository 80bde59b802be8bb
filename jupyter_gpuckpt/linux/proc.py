"""Reading /proc, where names (of threads, files, sockets, control groups) are bytes of any kind.

What is no text in them becomes what `os.fsdecode` makes of it, and a line ends with a newline and nothing else: a name
can have every other sign that ends a line elsewhere.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["lines", "read", "shown"]

_BLOCK = 1 << 16  # bytes


def read(path: str | Path) -> str:
    """Return what a file of /proc says.

    Raises
    ------
    OSError : it is gone, or must not be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Many of these are read while a kernel is paused, and this takes a third of what `Path.read_bytes` does.
        found = b"".join(iter(functools.partial(os.read, file, _BLOCK), b""))
    finally:
        os.close(file)
    return found.decode("utf-8", "surrogateescape")


def lines(path: str | Path) -> list[str]:
    """Return the lines of a file of /proc. Raises `OSError` as `read` does."""
    return read(path).removesuffix("\n").split("\n")


def shown(name: str) -> str:
    """Return a name as it can be shown to a user: what cannot be printed is replaced."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in name)
