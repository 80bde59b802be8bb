"""Read a file once and return its size and BLAKE3.

It reads into buffers and does not map the file: a bad block under a mapping ends the whole process
with SIGBUS, and this process holds the person's kernel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from .manifest import StoredFile

__all__ = ["digest_file"]

_BUFFER = 4 * 1024 * 1024
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
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file", str(path))
        size = os.fstat(fd).st_size
        hasher = blake3(max_threads=blake3.AUTO if size >= _THREADS_FROM else 1)
        buffer = memoryview(bytearray(min(max(size, 1), _BUFFER)))
        total = 0
        while got := os.readv(fd, [buffer]):
            hasher.update(buffer[:got])
            total += got
            count(got)
        return StoredFile(total, hasher.hexdigest())
    finally:
        os.close(fd)
