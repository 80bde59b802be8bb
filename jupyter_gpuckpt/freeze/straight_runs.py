"""Host memory that a restore brings straight into the process: criu would copy it, by one thread, from a copy.

criu reads the pages of a process from an image, which somebody has to write before, and copies them into the process.
Of ordinary memory nothing but the bytes is needed. So criu is given images that lack most of it: a pagemap without
these runs of pages, and their file without their bytes. It makes that memory, of zeros. When it is done, and the
process is still stopped, many threads write the bytes there.

The file is kept in chunks, each of which is read as a whole. So a chunk's pages go there together, or none of them.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RestoreFailed
from . import images, pages
from .ranges import Range, joined, size_of, within, without

__all__ = ["WORTH_IT", "Placing", "StraightRuns", "plan"]

_MOST = 2 << 20
"""Bytes that are taken at once: with 8 MiB, writing takes twice as long where there are many threads."""
WORTH_IT = 128 << 20
"""Bytes from which on it is quicker so. A keeper needs up to 30 MB for it, and keeps them."""


@dataclass(frozen=True)
class _Run:
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

    def __init__(self, runs: Sequence[_Run], where: Callable[[], int]) -> None:
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


@dataclass(frozen=True)
class StraightRuns:
    """The runs of pages of one process that are written straight into it.

    Attributes
    ----------
    pid : the process, as its namespace names it.
    image : the name of the file with its pages.
    """

    pid: int
    image: str
    _raw: bytes
    _straight: Sequence[_Run]
    _others: Sequence[_Run]
    _areas: Sequence[Range]
    """Where the others are in memory."""

    @property
    def size(self) -> int:
        """How many bytes they have together."""
        return sum(run.end - run.begin for run in self._straight)

    def others(self, folder: Path) -> Placing:
        """Return what takes all pages but these, for criu, into the file of the images in that folder."""
        return Placing(self._others, lambda: os.open(folder / self.image, os.O_WRONLY | os.O_NOFOLLOW))

    def process(self, pid: Callable[[], int]) -> Placing:
        """Return what takes these pages into that process (as this one names it), which is stopped."""
        return Placing(self._straight, lambda: os.open(f"/proc/{pid()}/mem", os.O_WRONLY))

    def write_pagemap(self, folder: Path, *, whole: bool = False) -> None:
        """Write the pagemap of the others among the images in that folder, or of all. Raises `OSError`."""
        (folder / f"pagemap-{self.pid}.img").write_bytes(self._raw if whole else pages.pagemap(self._raw, self._areas))


def plan(
    parents: Mapping[int, int], processes: Mapping[int, tuple[bytes, bytes]], chunks: Mapping[str, Sequence[int]]
) -> Sequence[StraightRuns]:
    """Return what of a tree's memory is written straight into the processes; nothing where that is little.

    What lies at the same addresses in a process and its parent is left to criu, since a fork may have left it to both:
    they then share those pages that are the same.

    Parameters
    ----------
    parents : each process's parent.
    processes : each one's pagemap and ``mm-N.img``.
    chunks : where the chunks of each file with pages end, ascending.
    """
    private = {pid: joined(images.private_areas(mm)) for pid, (_, mm) in processes.items()}
    found: list[StraightRuns] = []
    for pid, (pagemap, mm) in processes.items():
        kin = [other for other in private if parents.get(pid) == other or parents.get(other) == pid]
        theirs = joined(sorted(area for other in kin for area in private[other]))
        areas = joined(without(images.plain_areas(mm), theirs))
        found.append(_of_process(pid, pagemap, areas, chunks))
    found = [runs for runs in found if runs.size]
    return found if sum(runs.size for runs in found) >= WORTH_IT else []


def _of_process(pid: int, pagemap: bytes, areas: Sequence[Range], chunks: Mapping[str, Sequence[int]]) -> StraightRuns:
    """Return the runs of a process of which all that is in their chunks lies in these areas."""
    number, runs = pages.placed(pagemap)
    image = f"pages-{number}.img"
    straight: list[_Run] = []
    others: list[_Run] = []
    rest: list[Range] = []
    at = 0
    for parts in _by_chunk(runs, chunks[image]):
        size = sum(end - begin for begin, end, _ in parts)
        goes_straight = size_of(within(((begin, end) for begin, end, _ in parts), areas)) == size
        for begin, end, offset in parts:
            if goes_straight:
                _add(straight, _Run(offset, offset + end - begin, begin))
            else:
                _add(others, _Run(offset, offset + end - begin, at))
                rest.append((begin, end))
                at += end - begin
    return StraightRuns(pid, image, pagemap, straight, others, joined(rest))


def _by_chunk(runs: Iterable[tuple[int, int, int]], ends: Iterable[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the runs (first address, end, offset in the file) of each chunk, cut where chunks end."""
    left = iter(runs)
    run = next(left, None)
    for chunk_end in ends:
        parts: list[tuple[int, int, int]] = []
        while run is not None and run[2] < chunk_end:
            begin, end, offset = run
            cut = min(end, begin + chunk_end - offset)
            parts.append((begin, cut, offset))
            run = (cut, end, offset + cut - begin) if cut < end else next(left, None)
        yield parts


def _add(runs: list[_Run], run: _Run) -> None:
    """Add a run to those before it, or to the last of them where it goes on there."""
    if runs and runs[-1].end == run.begin and runs[-1].to - runs[-1].begin == run.to - run.begin:
        last = runs.pop()
        run = _Run(last.begin, run.end, last.to)
    runs.append(run)


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
