"""Pages that the kernel writes to between all saves are copied right after each, before a cell has to wait for that.

A save leaves a fork of the kernel, its twin (docs/internals/criu.md): the first write to a page after it waits for a
copy, as after any fork. The interpreter writes to two or three thousand pages between two saves, of which a cell that
does next to nothing has eight hundred: they cost it 2 to 3 ms. So what was written to before the last save and before
the one before it, too, is copied in the background as soon as the kernel runs again.

Which pages those are is told by /proc/self/pagemap: what was written to since the fork is this process's alone
(Documentation/admin-guide/mm/pagemap.rst of Linux, bit 56). So is what was copied ahead and not written to, and the
next save has to look at its bytes: an eighth is not copied each time, to see whether it is written to. The system
takes 50 ns for each page that it is asked about, so that of memory where nothing had been written to an eighth is
looked at each time.

What is written down here changes memory that the next save stores: it is kept in few bytes.
"""

from __future__ import annotations

import ctypes
import os
import re
from array import array
from collections.abc import Callable, Iterator

from ..linux import proc

__all__ = ["PageCopies"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NUMBER = 8  # bytes of what a pagemap has of each page
_OWN = re.compile(rb"\x81+")
"""By the highest byte of that: present and this process's alone, and not swapped, a file's or guarded."""
_MADV_POPULATE_WRITE = 23
_WINDOW = 512 * _PAGE
_MOST_MEMORY = 4 << 30  # bytes
_MOST_RUNS = 8_192
_MOST_WRITTEN, _MOST_COPIED = 16_384, 8_192  # pages
_SHARES = 8


class PageCopies:
    """Those of this process. Runs of pages are the addresses of each one's begin and end, one after the other."""

    def __init__(self) -> None:
        self._before, self._often = array("Q"), array("Q")
        self._saves = 0

    def note(self) -> None:
        """See what has been written to since the save before: the kernel is about to be saved."""
        where = {begin // _WINDOW for begin, _ in _runs(self._before)}
        try:
            written = _written(lambda window: not where or window in where or window % _SHARES == self._saves % _SHARES)
        except OSError:  # not every system tells it
            written = array("Q")
        often = _in_both(self._before, written)
        self._before, self._often = written, often if _pages(often) <= _MOST_COPIED else array("Q")
        self._saves += 1

    def make(self) -> None:
        """Copy what is written to often: the kernel runs again."""
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # Nothing is written, so that it does no harm where something else is mapped there by now, or nothing. Before
        # Linux 5.14 there is no such advice, and a cell waits as it would have.
        for begin, end in _runs(self._often):
            if begin // _PAGE % _SHARES != self._saves % _SHARES:
                libc.madvise(begin, end - begin, _MADV_POPULATE_WRITE)


def _written(is_asked: Callable[[int], bool]) -> array[int]:
    """Return the runs of pages that have been written to, in order; none where those are too many to be copied.

    It `is_asked` of a window by its number: its address by its size.

    Raises
    ------
    OSError : the system does not say.
    """
    found, pages, left = array("Q"), 0, _MOST_MEMORY
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for first, last in _private():
            if last - first > left:
                continue
            left -= last - first
            for window in range(first // _WINDOW, -(-last // _WINDOW)):
                if not is_asked(window):
                    continue
                begin, end = max(window * _WINDOW, first), min((window + 1) * _WINDOW, last)
                seen = os.pread(pagemap.fileno(), (end - begin) // _PAGE * _NUMBER, begin // _PAGE * _NUMBER)
                for run in _OWN.finditer(seen[_NUMBER - 1 :: _NUMBER]):
                    found.extend((begin + run.start() * _PAGE, begin + run.end() * _PAGE))
                    pages += run.end() - run.start()
                    if pages > _MOST_WRITTEN or len(found) > 2 * _MOST_RUNS:
                        return array("Q")
    return found


def _private() -> Iterator[tuple[int, int]]:
    """Yield the areas of this process's memory that may be written to, and which no other process is to share."""
    for line in proc.lines("/proc/self/maps"):
        where, may, *_ = line.split(maxsplit=2)
        if may.startswith("rw") and may.endswith("p"):
            begin, _, end = where.partition("-")
            yield int(begin, 16), int(end, 16)


def _in_both(some: array[int], others: array[int]) -> array[int]:
    """Return the runs of pages that are in both."""
    found = array("Q")
    one, other = 0, 0
    while one < len(some) and other < len(others):
        begin, end = max(some[one], others[other]), min(some[one + 1], others[other + 1])
        if begin < end:
            found.extend((begin, end))
        if some[one + 1] < others[other + 1]:
            one += 2
        else:
            other += 2
    return found


def _runs(of: array[int]) -> Iterator[tuple[int, int]]:
    return zip(of[::2], of[1::2], strict=True)


def _pages(runs: array[int]) -> int:
    return sum(end - begin for begin, end in _runs(runs)) // _PAGE
