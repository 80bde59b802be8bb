"""Pages of host memory, as they come out of the store, are written to where they belong: into a process, or a file."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import RestoreFailed
from .ranges import Range, within

__all__ = ["Placing", "Run", "into_process", "reaches_read_only"]

_MOST = 2 << 20
"""Bytes that are taken at once: with 8 MiB, writing takes twice as long where there are many threads."""


class Run(NamedTuple):
    """Bytes of the file with the pages, from `begin` to `end`, and where the first of them belongs."""

    begin: int
    end: int
    to: int


class Placing:
    """Takes bytes of the file with the pages, and writes them to where they belong: `store.Taker`.

    Parameters
    ----------
    where : opens what they belong in, when the first of them come.
    """

    most = _MOST
    verifies = False

    def __init__(self, runs: Sequence[Run], where: Callable[[], int]) -> None:
        self._runs, self._where = runs, where
        self._ranges: list[Range] = [(run.begin, run.end) for run in runs]
        self._rooms, self._opening = threading.local(), threading.Lock()
        self._fd: int | None = None

    def wants(self, offset: int, size: int) -> bool:
        """Tell whether any of these bytes belong there."""
        return any(True for _ in within([(offset, offset + size)], self._ranges))

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        """Give room for these bytes; after the block they are where they belong. Raises `OSError`, `RestoreFailed`."""
        if not hasattr(self._rooms, "bytes"):
            self._rooms.bytes = bytearray(_MOST)
        with memoryview(self._rooms.bytes) as whole, whole[:size] as room:
            yield room
            self.place(offset, room)

    def place(self, offset: int, data: memoryview) -> None:
        """Write these bytes of the file to where they belong. Raises `OSError`, `RestoreFailed`."""
        fd, end = self._opened(), offset + len(data)
        for at in range(bisect.bisect_right(self._runs, offset, key=lambda run: run.end), len(self._runs)):
            run = self._runs[at]
            if run.begin >= end:
                break
            first, last = max(run.begin, offset), min(run.end, end)
            with data[first - offset : last - offset] as part:
                _write(fd, part, run.to + first - run.begin)

    def _opened(self) -> int:
        with self._opening:
            if self._fd is None:
                self._fd = self._where()
            return self._fd

    def close(self) -> None:
        """Close what was opened; more than once is harmless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def into_process(runs: Sequence[Run], pid: Callable[[], int]) -> Placing:
    """Return what takes these runs into that process (as this one names it), which is stopped."""
    return Placing(runs, lambda: os.open(f"/proc/{pid()}/mem", os.O_WRONLY))


@functools.cache
def reaches_read_only() -> bool:
    """Tell whether memory that a process cannot write itself can be written from here: a system can forbid it.

    Its parameter ``proc_mem.force_override`` does (Linux 6.12, Documentation/admin-guide/kernel-parameters.txt).
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    arguments = (ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = ctypes.c_void_p(libc.mmap(None, *arguments, ctypes.c_long(0)))
    try:
        with open("/proc/self/mem", "wb", buffering=0) as memory:
            return os.pwrite(memory.fileno(), b"1", int(address.value or 0)) == 1
    except OSError:
        return False
    finally:
        libc.munmap(address, ctypes.c_size_t(mmap.PAGESIZE))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise RestoreFailed(
                "The snapshot could not be restored.",
                "A process of it was killed while its memory was written.",
                "Look with `dmesg` whether memory ran out: then end other programs, or allow more, and restore again.",
            )
        data, offset = data[written:], offset + written
