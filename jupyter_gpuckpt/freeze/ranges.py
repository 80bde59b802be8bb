"""Ranges of a file's bytes: pairs of where each begins and ends, in ascending order and apart."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Range", "data_of", "joined", "size_of", "within", "without"]

Range = tuple[int, int]


def size_of(ranges: Iterable[Range]) -> int:
    """Return how many bytes they have together."""
    return sum(end - begin for begin, end in ranges)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in ascending order, those that touch as one."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def within(ranges: Iterable[Range], others: Sequence[Range]) -> Iterator[Range]:
    """Yield what of these ranges lies in the others, cut where those are cut."""
    for begin, end in ranges:
        for at in range(bisect.bisect_right(others, begin, key=lambda other: other[1]), len(others)):
            if others[at][0] >= end:
                break
            yield max(begin, others[at][0]), min(end, others[at][1])


def without(ranges: Iterable[Range], others: Sequence[Range]) -> Iterator[Range]:
    """Yield what of these ranges lies in none of the others."""
    for begin, end in ranges:
        at = begin
        for first, last in within([(begin, end)], others):
            if first > at:
                yield at, first
            at = last
        if at < end:
            yield at, end


def data_of(fd: int) -> list[Range]:
    """Return where an open file has bytes that are not holes. Raises `OSError`."""
    found: list[Range] = []
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # none from there on (ENXIO)
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        found.append((begin, at))
    return found
