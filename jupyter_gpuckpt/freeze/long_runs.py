"""Host memory that a restore brings straight into the process: criu would copy it, by one thread, from a copy.

criu reads the pages of a process from an image, which somebody has to write before, and copies them into the process.
Of a process's large arrays nothing but the bytes is needed. So criu is given images that lack them: a pagemap without
these runs of pages, and their file without their bytes. It makes that memory, of zeros. When it is done, and the
process is still stopped, many threads write the bytes there; where all of them have to be verified before criu begins,
they are gathered in memory until then.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import images, pages
from .ranges import Range, joined, size_of, within

__all__ = ["LONG", "Gathered", "LongRuns", "Placing", "plan"]

LONG = 64 << 10
"""Bytes from which on a run of pages is long: fewer make more runs than their bytes are worth."""
_MOST = 2 << 20
"""Bytes that are taken at once: with 8 MiB, writing takes twice as long where there are many threads."""
_WORTH_IT = 64 << 20
"""Bytes from which on it is quicker so."""
_THREADS = 8
"""That write gathered bytes into a process: they do not need Python's lock."""


@dataclass(frozen=True)
class _Run:
    """Bytes of the file with the pages, from `begin` to `end`, and where the first of them belongs."""

    begin: int
    end: int
    to: int


class _Opened:
    """A file that bytes are written into, opened when the first of them come; many threads may use it."""

    def __init__(self, where: Callable[[], int]) -> None:
        self._where, self._opening = where, threading.Lock()
        self._fd: int | None = None

    def place(self, offset: int, size: int) -> memoryview | None:
        """Return nothing: its bytes are written."""
        return None

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes there. Raises `OSError`."""
        with self._opening:
            if self._fd is None:
                self._fd = self._where()
        _write(self._fd, data, offset)

    def close(self) -> None:
        """Close what was opened; more than once is harmless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class Gathered:
    """Bytes of a process's, in memory of this one's until that is there; many threads may bring them.

    Parameters
    ----------
    runs : where they belong.
    """

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs, self.runs = runs, list[_Run]()
        at = 0
        for run in runs:
            self.runs.append(_Run(run.begin, run.end, at))
            at += run.end - run.begin
        self._mapped = mmap.mmap(-1, at, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a Linux without huge pages
            self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(self._mapped)

    def place(self, offset: int, size: int) -> memoryview | None:
        """Return where bytes are here, to be put there straight."""
        return self._bytes[offset : offset + size]

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes there."""
        self._bytes[offset : offset + len(data)] = data

    def move(self, pid: int) -> None:
        """Write all of it where it belongs in a process (as this one names it) that is stopped. Raises `OSError`."""
        parts = [
            (here.to + at, min(_MOST, run.end - run.begin - at), run.to + at)
            for here, run in zip(self.runs, self._runs, strict=True)
            for at in range(0, run.end - run.begin, _MOST)
        ]
        fd = os.open(f"/proc/{pid}/mem", os.O_WRONLY)
        try:
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
                list(threads.map(lambda part: _write(fd, self._bytes[part[0] : part[0] + part[1]], part[2]), parts))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Free the memory, when no thread uses it any more; more than once is harmless."""
        self._bytes.release()
        self._mapped.close()


class Placing:
    """Takes bytes of the file with the pages, and puts them where they belong: `store.Taker`."""

    most = _MOST

    def __init__(self, runs: Sequence[_Run], into: _Opened | Gathered) -> None:
        self._runs, self._into = runs, into
        self._ranges: list[Range] = [(run.begin, run.end) for run in runs]
        self._rooms = threading.local()

    def wants(self, offset: int, size: int) -> bool:
        """Tell whether any of these bytes belong there."""
        return any(True for _ in within([(offset, offset + size)], self._ranges))

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        """Give room for these bytes; after the block they are where they belong. Raises `OSError`."""
        at = bisect.bisect_right(self._runs, offset, key=lambda run: run.end)
        run = self._runs[at]
        is_one_s = run.begin <= offset and offset + size <= run.end
        place = self._into.place(run.to + offset - run.begin, size) if is_one_s else None
        if place is not None:
            with place:
                yield place
            return
        if not hasattr(self._rooms, "bytes"):
            self._rooms.bytes = bytearray(_MOST)
        with memoryview(self._rooms.bytes) as whole, whole[:size] as room:
            yield room
            while at < len(self._runs) and (run := self._runs[at]).begin < offset + size:
                first, last = max(run.begin, offset), min(run.end, offset + size)
                with room[first - offset : last - offset] as part:
                    self._into.write(part, run.to + first - run.begin)
                at += 1

    def close(self) -> None:
        """Let go of what they are put into, when no thread puts any; more than once is harmless."""
        self._into.close()


@dataclass(frozen=True)
class LongRuns:
    """The long runs of pages of one process.

    Attributes
    ----------
    image : the name of the file with its pages.
    """

    image: str
    _pagemap: str
    _raw: bytes
    _long: Sequence[_Run]
    _others: Sequence[_Run]
    _areas: Sequence[Range]
    """Where the others are in memory."""

    @property
    def size(self) -> int:
        """How many bytes they have together."""
        return sum(run.end - run.begin for run in self._long)

    def others(self, folder: Path) -> Placing:
        """Return what takes all pages but these, for criu, into the file of the images in that folder."""
        return Placing(self._others, _Opened(lambda: os.open(folder / self.image, os.O_WRONLY | os.O_NOFOLLOW)))

    def of(self, pid: Callable[[], int]) -> Placing:
        """Return what takes these pages into that process (as this one names it), which is stopped."""
        return Placing(self._long, _Opened(lambda: os.open(f"/proc/{pid()}/mem", os.O_WRONLY)))

    def gather(self) -> tuple[Gathered, Placing]:
        """Return memory for these pages, and what takes them into it."""
        gathered = Gathered(self._long)
        return gathered, Placing(gathered.runs, gathered)

    def write_pagemap(self, folder: Path, *, whole: bool = False) -> None:
        """Write the pagemap of the others among the images in that folder, or of all. Raises `OSError`."""
        (folder / self._pagemap).write_bytes(self._raw if whole else pages.pagemap(self._raw, self._areas))


def plan(pagemap: tuple[str, bytes], mm: bytes) -> LongRuns | None:
    """Return the long runs of a process by its pagemap (its name, too) and ``mm-N.img``; None where they are little."""
    name, raw = pagemap
    areas = joined(images.plain_areas(mm))
    number, runs = pages.placed(raw)
    long: list[_Run] = []
    others: list[_Run] = []
    at = 0
    for begin, end, offset in runs:
        # It is one area's, or of several side by side.
        if end - begin >= LONG and size_of(within([(begin, end)], areas)) == end - begin:
            long.append(_Run(offset, offset + end - begin, begin))
        else:
            others.append(_Run(offset, offset + end - begin, at))
            at += end - begin
    if sum(run.end - run.begin for run in long) < _WORTH_IT:
        return None
    are_long = {run.to for run in long}
    rest = [(begin, end) for begin, end, _ in runs if begin not in are_long]
    return LongRuns(f"pages-{number}.img", name, raw, long, others, rest)


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
