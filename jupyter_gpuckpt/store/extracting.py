"""Put the bytes of a snapshot's files where they are wanted: into files, or into other hands."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from .chunks import HOLE, Chunk
from .contents import Contents
from .durable import FILE_MODE, make_folder, write_at
from .index import Index
from .layout import Layout
from .manifest import Manifest
from .pack import PackReader
from .parallel import Job, Progress, Tally, run_all, workers
from .reading import damages

__all__ = ["ALL", "Share", "Taker", "fill", "is_below", "make_files"]

_BATCH = 8 * 1024 * 1024
"""Bytes of one file that one job writes, at most."""
_FOR_OTHERS = 3
"""Processors that are left to whoever takes bytes, or does something else."""
_TURN = 64 * 1024
"""Bytes that a thread decompresses and verifies while another one has Python's lock for its own chunk.

Measured on 16 processors: 1,600 chunks of 230 kB on average were there after 0.25 s by 13 threads, 0.18 s by 8 or 5,
and 0.27 s by 3; 970 of which a quarter was wanted after 0.23, 0.15, 0.11 and 0.10 s.
"""


class Share(NamedTuple):
    """What one of several processes does, each by a single thread: which of them it is, and of how many."""

    number: int
    of: int


ALL = Share(0, 1)


class Taker(Protocol):
    """Takes the bytes of one file of a snapshot in place of the file; many threads may use it."""

    @property
    def most(self) -> int:
        """How many bytes it takes at once: no fewer than a chunk has."""

    @property
    def verifies(self) -> bool:
        """Whether it sees to it itself that what it takes has the right hash: it is not hashed here then."""

    def wants(self, offset: int, size: int) -> bool:
        """Tell whether it takes any of these bytes; what nobody takes is not read."""

    def room(self, offset: int, size: int) -> AbstractContextManager[memoryview]:
        """Give room for these bytes of the file, of which none are zeros alone; after the block they are taken."""


def is_below(path: str, folders: Collection[str]) -> bool:
    """Tell whether a file of a snapshot lies in one of these folders of the snapshot."""
    top, _, rest = path.partition("/")
    return bool(rest) and top in folders


def make_files(contents: Contents, folder: Path, elsewhere: Mapping[str, Path]) -> dict[str, Path]:
    """Make the files of a snapshot in `folder`, which exists, for their owner alone, of zeros; return where each is.

    What lies in a folder of the snapshot that `elsewhere` names goes into the folder there, which exists; so may files
    of zeros in it, whose memory was made ready.

    Raises
    ------
    OSError : the folder cannot be written.
    """
    made = {folder, *elsewhere.values()}
    targets = {}
    for path in contents.files:
        is_elsewhere = is_below(path, elsewhere)
        top, _, rest = path.partition("/")
        target = targets[path] = elsewhere[top] / rest if is_elsewhere else folder / path
        _make_folders(target.parent, made)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | (0 if is_elsewhere else os.O_EXCL) | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.ftruncate(fd, contents.size_of(path))
        finally:
            os.close(fd)
    return targets


def fill(
    layout: Layout,
    manifest: Manifest,
    contents: Contents,
    index: Index,
    targets: Mapping[str, Path],
    progress: Progress | None,
    takers: Mapping[str, Taker],
    *,
    aside: bool = False,
    share: Share = ALL,
) -> None:
    """Write the bytes of a snapshot's files into those that `make_files` made; holes stay where zeros were.

    `takers` take the bytes of files in place of them. With `aside`, others have work to do meanwhile that is waited
    for. Of a `share`, the other processes do the rest.

    Raises
    ------
    Damaged : a byte is not the one that was saved; nothing that was written or taken may be used then. Of what a
        taker verifies, it may not have been noticed.
    OSError : they cannot be written.
    """
    filling = _Filling(manifest, PackReader(layout.packs, index), index)
    jobs: list[Job] = []
    last: list[Job] = []
    # The largest first, so that no thread is left alone with one at the end.
    for path in sorted(contents.files, key=contents.size_of, reverse=True):
        chunks = contents.files[path]
        if path in takers:
            taker = takers[path]
            left = contents.size_of(path)
            for offset, batch in _batches(chunks, taker.most, taker.wants):
                last.append(partial(filling.hand_over, path, taker, offset, batch))
                left -= sum(chunk.size for chunk in batch)
            last.append(lambda tally, left=left: tally.add(left))  # type: ignore[misc]
            continue
        for offset, batch in _batches(chunks, _BATCH):
            jobs.append(partial(filling.write, path, targets[path], offset, batch))
    report = (lambda done: progress("verify", done, contents.size)) if progress else (lambda _: None)
    # Who takes needs a moment to begin.
    jobs = (jobs + last)[share.number :: share.of]
    most = 1 if share.of > 1 else min(workers(_FOR_OTHERS if takers or aside else 0), _useful(contents))
    run_all(jobs, report, most)


def _useful(contents: Contents) -> int:
    """Return how many threads help: more than these would stand in line for Python's lock, and be slower than fewer."""
    sizes = [chunk.size for chunks in contents.files.values() for chunk in chunks if chunk.hash != HOLE]
    return 2 + sum(sizes) // (len(sizes) * _TURN) if sizes else 1


def _make_folders(folder: Path, made: set[Path]) -> None:
    if folder not in made:
        _make_folders(folder.parent, made)
        make_folder(folder)
        made.add(folder)


def _batches(
    chunks: Sequence[Chunk], most: int, wanted: Callable[[int, int], bool] = lambda *_: True
) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield the chunks of a file, those that are wanted, in batches of so many bytes, each with where it begins."""
    at = size = 0
    batch: list[Chunk] = []
    for chunk in chunks:
        is_wanted = wanted(at, chunk.size)
        if batch and (not is_wanted or size + chunk.size > most):
            yield at - size, batch
            size, batch = 0, []
        if is_wanted:
            batch.append(chunk)
            size += chunk.size
        at += chunk.size
    if batch:
        yield at - size, batch


@dataclass(frozen=True)
class _Filling:
    """Verifies the chunks of one snapshot, and puts them where they are wanted."""

    manifest: Manifest
    reader: PackReader
    index: Index

    def hand_over(self, path: str, taker: Taker, offset: int, chunks: Sequence[Chunk], tally: Tally) -> None:
        """Give bytes to somebody who takes them: verified ones, unless that is left to whoever takes them."""
        size, verify = sum(chunk.size for chunk in chunks), not taker.verifies
        if any(chunk.hash != HOLE for chunk in chunks):
            with taker.room(offset, size) as room, self.reader.opened() as packs:
                begin = 0
                for chunk in chunks:
                    with room[begin : begin + chunk.size] as part:
                        if chunk.hash == HOLE:
                            part[:] = bytes(chunk.size)
                        else:
                            at = self.index[chunk.hash]
                            with damages(self.manifest, path, chunk, at):
                                data = self.reader.read_into(part, chunk.hash, at, packs, verify=verify)
                            if data is not part:
                                part[:] = data
                    begin += chunk.size
        tally.add(size)

    def write(self, path: str, target: Path, offset: int, chunks: Sequence[Chunk], tally: Tally) -> None:
        """Write verified bytes into a file."""
        fd = os.open(target, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            with self.reader.opened() as packs:
                for chunk in chunks:
                    if chunk.hash != HOLE:
                        at = self.index[chunk.hash]
                        with damages(self.manifest, path, chunk, at):
                            data = self.reader.read(chunk.hash, at, packs)
                        write_at(fd, offset, data)
                    offset += chunk.size
                    tally.add(chunk.size)
        finally:
            os.close(fd)
