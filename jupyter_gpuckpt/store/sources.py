"""The files that a snapshot is made of, as they are read to be stored."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .durable import free_range

__all__ = ["Reader", "Source"]

_AT_ONCE = 4 * 1024 * 1024
"""Bytes that are read at once: so few that they stay in the processor's cache until they are stored."""

_BLOCK = 512
"""What `st_blocks` counts, in bytes."""

_POPULATE_READ = 22
"""MADV_POPULATE_READ of linux/mman.h: have all of a mapping there, or say why not; from Linux 5.14 on."""

_local = threading.local()


@dataclass(frozen=True)
class Source:
    """A file to be stored: where it lies, how long it is (bytes), and its path inside the snapshot."""

    file: Path
    size: int
    path: str
    used_up: bool = False
    """It is freed as it is stored: there is seldom room on a disk for all of a snapshot twice."""
    own: bool = False
    """Nobody else can change it meanwhile."""


class Reader:
    """One open file, of which one thread sees one part after the other; a context manager."""

    def __init__(self, source: Source) -> None:
        """Open the file. Raises `OSError`."""
        flags = (os.O_RDWR if source.used_up else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK
        self._source = source
        self._fd = os.open(source.file, flags)
        # Seen in place it need not be copied. A hole is not: it would take memory to look at it.
        full = os.fstat(self._fd).st_blocks * _BLOCK >= source.size
        self._in_place = source.own and not source.used_up and full
        self._begin = self._end = 0
        self._block = memoryview(b"")

    def view(self, offset: int, size: int, end: int) -> memoryview:
        """Return at most `_AT_ONCE` bytes of the file, good until the next; nothing from `end` on will be wanted soon.

        Raises `OSError`, also where the file has become shorter.
        """
        if offset < self._begin or offset + size > self._end:
            upto = min(offset + _AT_ONCE, end)
            if not self._in_place or not self._map(offset, upto):
                self._read(offset, upto)
        return self._block[offset - self._begin : offset + size - self._begin]

    def free(self, offset: int, size: int) -> None:
        """Give back a part that is stored, where the file is used up."""
        if self._source.used_up:
            free_range(self._fd, offset, size)

    def _map(self, offset: int, end: int) -> bool:
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        with suppress(OSError, ValueError):  # not on this file system, or by this system
            mapped = mmap.mmap(self._fd, end - begin, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
            # An error of the disk is an error here; looking at what is not there would be a signal.
            mapped.madvise(_POPULATE_READ)
            self._block, self._begin, self._end = memoryview(mapped), begin, end
            return True
        self._in_place = False
        self._block, self._begin, self._end = memoryview(b""), 0, 0
        return False

    def _read(self, offset: int, end: int) -> None:
        # Always the same buffer: fresh memory costs more than hashing what is read.
        if not hasattr(_local, "room"):
            _local.room = bytearray(_AT_ONCE)
        room = memoryview(_local.room)
        kept = self._end - offset if self._begin <= offset < self._end else 0
        room[:kept] = self._block[len(self._block) - kept :]
        self._block, self._begin, self._end = room[:0], 0, 0
        if os.preadv(self._fd, [room[kept : end - offset]], offset + kept) != end - offset - kept:
            raise OSError(0, "the file became shorter while it was being stored")
        self._block, self._begin, self._end = room[: end - offset], offset, end

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block = memoryview(b"")
        os.close(self._fd)
