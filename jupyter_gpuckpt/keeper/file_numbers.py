"""The numbers (inodes) of files in a kernel's /dev/shm, of which none may come twice in its life.

Programs know a file by its device and its number: torch takes a tensor that another process sends it for one that it
has already where these are the same. The /dev/shm of a fresh sleeper counts from the beginning, and gets the device of
one that is gone, often of one that the same kernel had before.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FEW", "following", "pass_over"]

FEW = 4096
"""How many numbers are rather passed over, for 1 to 10 µs each, than another sleeper is started."""


def following(shared_memory: Path) -> tuple[str, int]:
    """Return the device of a /dev/shm, and the number that the next file there gets. Raises `OSError`."""
    fd = os.open(shared_memory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        about = os.fstat(fd)
    finally:
        os.close(fd)
    return str(about.st_dev), about.st_ino + 1


def pass_over(shared_memory: Path, number: int) -> None:
    """Have the next file in a /dev/shm get this number, or a later one. Raises `OSError`."""
    while following(shared_memory)[1] < number:
        pass
