"""What of a process's memory is as it was at the save before: the pages that its twin of then shares with that of now.

A twin (`twin.py`) is a fork of the process at the instant of a save, and writes nothing. A page that the process writes
to is copied for it by the system, as after any fork. So where the twins of two saves have the same page of the
machine's memory at the same address, it has the bytes that it had, whatever the process did in between: the hash that
was made of it is good. Nothing else is relied upon, and what cannot be told counts as changed.

The numbers of pages are read from /proc/PID/pagemap, which gives them to root alone
(Documentation/admin-guide/mm/pagemap.rst of Linux).
"""

from __future__ import annotations

import functools
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from .pages import PAGE, Area, pieces

__all__ = ["Changed", "Chunk", "Part", "is_within", "partly_shared", "parts", "plan", "shared"]

Chunk = tuple[bytes, int]
"""The hash of some bytes, and how many they are."""

_NUMBER = 8  # bytes of what a pagemap has of each page
_PRESENT_AND_SHARED = b"\x80"
"""Its highest byte, the last one: the page is present, and not swapped, a file's, guarded, or this process's alone."""
_NO_NUMBER = bytes(6)
"""Stands where the system does not give a page's number, and nowhere else but in the machine's first megabyte."""
_APART = 1 << 20  # bytes between areas that are looked at together
_SPAN = 128 << 20  # bytes of memory that are looked at together
_THREADS = 4  # that look at pages


@dataclass(frozen=True)
class Part:
    """Where in memory the bytes of a chunk are."""

    where: tuple[Area, ...]
    chunk: Chunk


@dataclass(frozen=True)
class Changed:
    """A part of memory of which not all has changed since it was stored."""

    before: Part


def parts(
    runs: Sequence[Area], trusted: Sequence[Area], chunks: Iterable[Chunk], hole: bytes, most: int
) -> Iterator[Part]:
    """Yield what an image that was stored consists of.

    Parameters
    ----------
    runs : its runs of pages, in order.
    trusted : those of their areas whose bytes are a twin's; chunks that reach out of them are left out.
    chunks : what the image was stored as, in order.
    hole : stands for a hash of zeros, of any size; they are yielded in pieces of at most `most` bytes.
    """
    ends = list(accumulate(end - begin for begin, end in runs))
    bounds = list(accumulate(sum(end - begin for begin, end in piece) for piece in pieces(runs)))
    offset = 0
    for key, size in chunks:
        upto = offset + size
        while offset < upto:
            end = min(upto, offset + most, bounds[bisect_right(bounds, offset)]) if key == hole else upto
            where = tuple(_areas(runs, ends, offset, end))
            if all(is_within(area, trusted) for area in where):
                yield Part(where, (key, end - offset))
            offset = end


def _areas(runs: Sequence[Area], ends: Sequence[int], offset: int, end: int) -> Iterator[Area]:
    """Yield where in memory the bytes of an image from `offset` on are; `ends` are those of the runs in the image."""
    number = bisect_right(ends, offset)
    while offset < end:
        upto = min(end, ends[number])
        base = runs[number][1] - ends[number]
        yield base + offset, base + upto
        offset, number = upto, number + 1


def is_within(area: Area, areas: Sequence[Area]) -> bool:
    """Tell whether one of the areas, which are in order and apart, has all of this one."""
    number = bisect_right(areas, area[0], key=lambda one: one[1])
    return number < len(areas) and areas[number][0] <= area[0] and area[1] <= areas[number][1]


def shared(before: int, now: int, asked: Iterable[Area]) -> Mapping[Area, bool]:
    """Tell of areas whether all pages of them are the same in two processes that write nothing, by their pagemaps."""
    found: dict[Area, bool] = {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for seen in threads.map(functools.partial(_shared_in, before, now), _spans(sorted(asked))):
            found |= seen
    return found


def _shared_in(before: int, now: int, span: Sequence[Area]) -> Mapping[Area, bool]:
    """Tell it of areas that are near one another."""
    found: dict[Area, bool] = {}
    begin, end = span[0][0], max(end for _, end in span)
    # Pages can be moved in the machine's memory between one look and another: those of the first process were where
    # they are before the look at the second one, and after it.
    first, second, again = (_read(fd, begin, end) for fd in (before, now, before))
    for area in span:
        at, upto = ((address - begin) // PAGE * _NUMBER for address in area)
        seen = first[at:upto]
        found[area] = (
            len(seen) == upto - at
            and seen == second[at:upto] == again[at:upto]
            and seen[_NUMBER - 1 :: _NUMBER] == _PRESENT_AND_SHARED * (len(seen) // _NUMBER)
            and _NO_NUMBER not in seen
        )
    return found


def partly_shared(before: int, now: int, area: Area) -> bool:
    """Tell whether a quarter of an area's pages, and more, seem to be the same in two processes, by their pagemaps."""
    first, second = (memoryview(_read(fd, *area)) for fd in (before, now))
    if len(first) != len(second):
        return False
    changed: int = sum(map(operator.ne, first.cast("Q"), second.cast("Q")))
    return 4 * changed <= 3 * len(first) // _NUMBER


def _spans(areas: Sequence[Area]) -> Iterator[list[Area]]:
    """Yield areas, which are in order, together with their neighbours."""
    span: list[Area] = []
    for area in areas:
        if span and (area[0] - span[-1][1] > _APART or area[1] - span[0][0] > _SPAN):
            yield span
            span = []
        span.append(area)
    if span:
        yield span


def _read(pagemap: int, begin: int, end: int) -> bytes:
    """Return what a pagemap has of an area; less or nothing where the process has ended."""
    size, offset = (end - begin) // PAGE * _NUMBER, begin // PAGE * _NUMBER
    read = b""
    try:
        while len(read) < size and (more := os.pread(pagemap, size - len(read), offset + len(read))):
            read += more
    except OSError:
        return b""
    return read


def plan(runs: Sequence[Area], known: Iterable[Part], changed: Iterable[Part] = ()) -> list[int | Part | Changed]:
    """Return how an image with these runs of pages is to be cut: into parts that are known, and sizes of what is not.

    Parts that are told to have `changed` stay as they were cut. `runs` are in order. A size above `LARGEST_WINDOW`
    is of a stretch that is to be cut by its content.
    """
    by_place: dict[tuple[Area, ...], Part | Changed] = {part.where: Changed(part) for part in changed}
    by_place |= {part.where: part for part in known}
    single = sorted(where[0] for where in by_place if len(where) == 1)
    found: list[int | Part | Changed] = []
    for piece in pieces(runs):
        if (part := by_place.get(piece)) is not None:
            found.append(part)
        elif len(piece) > 1:
            found.append(sum(end - begin for begin, end in piece))
        else:
            found += _divided(piece[0], by_place, single)
    return found


def _divided(
    run: Area, by_place: Mapping[tuple[Area, ...], Part | Changed], single: Sequence[Area]
) -> Iterator[int | Part | Changed]:
    """Yield the parts of a run of which something is known, and the sizes of what is between them."""
    at, end = run
    for number in range(bisect_right(single, (at, 0)), len(single)):
        begin, upto = single[number]
        if begin >= end:
            break
        if begin < at or upto > end:
            continue
        if begin > at:
            yield begin - at
        yield by_place[(single[number],)]
        at = upto
    if at < end:
        yield end - at
