"""Host memory that a restore brings straight into the process: criu would copy it, by one thread, from a copy.

criu reads the pages of a process from an image, which somebody has to write before, and copies them into the process.
Of ordinary memory, and of pages of mapped files that the process has changed for itself (of libraries as they are
loaded, above all), nothing but the bytes is needed. So criu is given images that lack most of it: a pagemap without
these runs of pages, and their file without their bytes. It makes that memory, of zeros, or maps the file. When it is
done, and the process is still stopped, many threads write the bytes there.

The file is kept in chunks, each of which is read as a whole. So a chunk's pages go there together, or none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import images, pages
from .placing import Placing, Run
from .ranges import Range, joined, size_of, within, without

__all__ = ["WORTH_IT", "StraightRuns", "plan"]

WORTH_IT = 128 << 20
"""Bytes from which on it is quicker so. A keeper needs up to 30 MB for it, and keeps them."""


@dataclass(frozen=True)
class StraightRuns:
    """The runs of pages of one process that are written straight into it.

    Attributes
    ----------
    pid : the process, as its namespace names it.
    image : the name of the file with its pages.
    straight : these runs.
    """

    pid: int
    image: str
    straight: Sequence[Run]
    _raw: bytes
    _others: Sequence[Run]
    _areas: Sequence[Range]
    """Where the others are in memory."""

    @property
    def size(self) -> int:
        """How many bytes they have together."""
        return sum(run.end - run.begin for run in self.straight)

    def others(self, folder: Path) -> Placing:
        """Return what takes all pages but these, for criu, into the file of the images in that folder."""
        return Placing(self._others, lambda: os.open(folder / self.image, os.O_WRONLY | os.O_NOFOLLOW))

    def write_pagemap(self, folder: Path, *, whole: bool = False) -> None:
        """Write the pagemap of the others among the images in that folder, or of all. Raises `OSError`."""
        (folder / f"pagemap-{self.pid}.img").write_bytes(self._raw if whole else pages.pagemap(self._raw, self._areas))


def plan(
    parents: Mapping[int, int],
    processes: Mapping[int, tuple[bytes, bytes]],
    chunks: Mapping[str, Sequence[int]],
    *,
    read_only: bool,
) -> Sequence[StraightRuns]:
    """Return what of a tree's memory is written straight into the processes; nothing where that is little.

    What lies at the same addresses in a process and its parent is left to criu, since a fork may have left it to both:
    they then share those pages that are the same.

    Parameters
    ----------
    parents : each process's parent.
    processes : each one's pagemap and ``mm-N.img``.
    chunks : where the chunks of each file with pages end, ascending.
    read_only : whether memory that cannot be written by its process may be, too (`placing.reaches_read_only`).
    """
    private = {pid: joined(images.private_areas(mm)) for pid, (_, mm) in processes.items()}
    found: list[StraightRuns] = []
    for pid, (pagemap, mm) in processes.items():
        kin = [other for other in private if parents.get(pid) == other or parents.get(other) == pid]
        theirs = joined(sorted(area for other in kin for area in private[other]))
        areas = joined(without(images.plain_areas(mm, read_only=read_only), theirs))
        found.append(_of_process(pid, pagemap, areas, chunks))
    found = [runs for runs in found if runs.size]
    return found if sum(runs.size for runs in found) >= WORTH_IT else []


def _of_process(pid: int, pagemap: bytes, areas: Sequence[Range], chunks: Mapping[str, Sequence[int]]) -> StraightRuns:
    """Return the runs of a process of which all that is in their chunks lies in these areas."""
    number, runs = pages.placed(pagemap)
    image = f"pages-{number}.img"
    straight: list[Run] = []
    others: list[Run] = []
    rest: list[Range] = []
    at = 0
    for parts in _by_chunk(runs, chunks[image]):
        size = sum(end - begin for begin, end, _ in parts)
        goes_straight = size_of(within(((begin, end) for begin, end, _ in parts), areas)) == size
        for begin, end, offset in parts:
            if goes_straight:
                _add(straight, Run(offset, offset + end - begin, begin))
            else:
                _add(others, Run(offset, offset + end - begin, at))
                rest.append((begin, end))
                at += end - begin
    return StraightRuns(pid, image, straight, pagemap, others, joined(rest))


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


def _add(runs: list[Run], run: Run) -> None:
    """Add a run to those before it, or to the last of them where it goes on there."""
    if runs and runs[-1].end == run.begin and runs[-1].to - runs[-1].begin == run.to - run.begin:
        last = runs.pop()
        run = Run(last.begin, run.end, last.to)
    runs.append(run)
