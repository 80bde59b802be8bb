"""Read a file once and return its size and BLAKE3.

It reads into buffers and does not map the file: a bad block under a mapping ends the whole process
with SIGBUS, and this process holds the person's kernel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from blake3 import blake3

from .manifest import StoredFile

__all__ = ["digest_file"]

_BUFFER = 4 * 1024 * 1024
"""Measured: from here on, reading ahead on a second thread costs next to nothing."""

_THREADS_FROM = 1024 * 1024
"""Shorter files are hashed on one thread: more would cost more than they bring."""


def digest_file(path: Path, count: Callable[[int], None]) -> StoredFile:
    """Return size and hash of the file at `path`; `count` gets each number of bytes read.

    Raises
    ------
    OSError : it cannot be read, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a regular file", str(path))
        hasher = blake3(max_threads=blake3.AUTO if about.st_size >= _THREADS_FROM else 1)
        total = 0
        pieces = _ahead(fd) if about.st_size > _BUFFER else _in_turn(fd, about.st_size)
        with closing(pieces):  # before `fd` is: the second thread may still be reading
            for piece in pieces:
                hasher.update(piece)
                total += len(piece)
                count(len(piece))
        return StoredFile(total, hasher.hexdigest())
    finally:
        os.close(fd)


def _in_turn(fd: int, size: int) -> Generator[memoryview, None, None]:
    buffer = memoryview(bytearray(max(size, 1)))
    while got := os.readv(fd, [buffer]):
        yield buffer[:got]


def _ahead(fd: int) -> Generator[memoryview, None, None]:
    """Read one buffer while the other is being hashed."""
    ready, filling = memoryview(bytearray(_BUFFER)), memoryview(bytearray(_BUFFER))
    with ThreadPoolExecutor(1, "gpuckpt-read") as reader:
        pending = reader.submit(os.readv, fd, [ready])
        while got := pending.result():
            pending = reader.submit(os.readv, fd, [filling])
            yield ready[:got]
            ready, filling = filling, ready
