"""Put the bytes of a snapshot's files where they are wanted: into files, or out of the packs into other hands."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from .chunks import HOLE, Chunk
from .contents import Contents
from .durable import FILE_MODE, make_folder, write_at
from .index import Index
from .layout import Layout
from .manifest import Manifest
from .pack import OpenPacks, PackReader
from .parallel import Job, Progress, Tally, run_all
from .reading import damages, read_chunk

__all__ = ["Piece", "Taker", "fill", "is_below", "make_files"]

_BATCH = 8 * 1024 * 1024
"""Bytes of one file that one job writes, about."""


class Piece(NamedTuple):
    """Bytes of a pack: where they begin there, how many they are, and where they belong in a file of the snapshot."""

    offset: int
    size: int
    to: int


class Taker(Protocol):
    """Takes the bytes of one file of a snapshot straight out of the packs, where it can; many threads may call it."""

    def take(self, pack: int, pieces: Sequence[Piece]) -> bool:
        """Tell whether these bytes of a pack, which is open under that descriptor, are taken.

        If so, the taker holds the pages of memory that it takes them from: the system cannot put others in their place
        any more, and what is verified afterwards is what was taken.
        """

    def wrote(self, offset: int, size: int) -> None:
        """Hear of bytes that are in the file, verified: they were not taken, or what was taken of them is wrong."""


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
    in_memory: Collection[str],
    progress: Progress | None,
    takers: Mapping[str, Taker],
) -> None:
    """Write the bytes of a snapshot's files into those that `make_files` made; holes stay where zeros were.

    `in_memory` are the folders of the snapshot whose files lie in memory; `takers` those who take files of them.

    Raises
    ------
    Damaged : a byte is not the one that was saved; nothing that was written or taken may be used then.
    OSError : they cannot be written.
    """
    reader = PackReader(layout.packs)
    jobs: list[Job] = []
    last: list[Job] = []
    with ExitStack() as stack:
        # The largest first, so that no thread is left alone with one at the end.
        for path in sorted(contents.files, key=contents.size_of, reverse=True):
            chunks = contents.files[path]
            if path in takers:
                # Last, since it takes a taker a moment to be ready.
                handed = stack.enter_context(_Handed(manifest, reader, index, path, targets[path], takers[path]))
                last += handed.jobs(chunks)
                continue
            write = _write_in_place if is_below(path, in_memory) else _write
            for offset, batch in _batches(chunks):
                jobs.append(partial(write, manifest, reader, index, path, targets[path], offset, batch))
        report = (lambda done: progress("verify", done, contents.size)) if progress else (lambda _: None)
        run_all(jobs + last, report)


def _make_folders(folder: Path, made: set[Path]) -> None:
    if folder not in made:
        _make_folders(folder.parent, made)
        make_folder(folder)
        made.add(folder)


def _batches(chunks: Sequence[Chunk]) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield the chunks of a file in batches, each with the offset at which it begins."""
    begin = offset = 0
    batch: list[Chunk] = []
    for chunk in chunks:
        batch.append(chunk)
        offset += chunk.size
        if offset - begin >= _BATCH:
            yield begin, batch
            begin, batch = offset, []
    if batch:
        yield begin, batch


class _Handed:
    """One file in memory that somebody takes; a context manager. What is not taken is written into it."""

    def __init__(
        self,
        manifest: Manifest,
        reader: PackReader,
        index: Index,
        path: str,
        target: Path,
        taker: Taker,
    ) -> None:
        self._manifest, self._reader, self._index = manifest, reader, index
        self._path, self._target, self._taker = path, target, taker

    def __enter__(self) -> _Handed:
        self._fd = os.open(self._target, os.O_RDWR | os.O_NOFOLLOW)
        self._mapped = mmap.mmap(self._fd, 0)
        self._view = memoryview(self._mapped)
        return self

    def __exit__(self, *_: object) -> None:
        self._view.release()
        self._mapped.close()
        os.close(self._fd)

    def jobs(self, chunks: Sequence[Chunk]) -> Iterator[Job]:
        """Yield a job for each pack: what is taken of one is taken at once."""
        by_pack: dict[str, list[tuple[int, Chunk]]] = {}
        offset = holes = 0
        for chunk in chunks:
            if chunk.hash == HOLE:
                holes += chunk.size
            else:
                by_pack.setdefault(self._index[chunk.hash].pack, []).append((offset, chunk))
            offset += chunk.size
        for pack, placed in by_pack.items():
            placed.sort(key=lambda one: self._index[one[1].hash].offset)
            yield partial(self._hand_over, pack, placed)
        yield lambda tally: tally.add(holes)

    def _hand_over(self, pack: str, placed: Sequence[tuple[int, Chunk]], tally: Tally) -> None:
        with self._reader.opened() as packs:
            taken = self._have_taken(pack, placed, packs, tally)
            for offset, chunk in placed:
                if offset in taken:
                    continue
                at = self._index[chunk.hash]
                with self._view[offset : offset + chunk.size] as room, damages(self._manifest, self._path, chunk, at):
                    data = self._reader.read_into(room, chunk.hash, at, packs)
                    is_there = data is room
                if not is_there:
                    write_at(self._fd, offset, data)  # not into the mapping, as below
                self._taker.wrote(offset, chunk.size)
                tally.add(chunk.size)

    def _have_taken(
        self, pack: str, placed: Sequence[tuple[int, Chunk]], packs: OpenPacks, tally: Tally
    ) -> Collection[int]:
        """Have taken what can be; return the offsets in the file of what was, and is right."""
        at_hand = [one for one in placed if self._reader.is_at_hand(self._index[one[1].hash], packs)]
        pieces = [Piece(self._index[chunk.hash].offset, chunk.size, offset) for offset, chunk in at_hand]
        right: set[int] = set()
        if pieces and self._taker.take(packs.open(pack), pieces):
            for offset, chunk in at_hand:
                if self._reader.is_right(chunk.hash, self._index[chunk.hash], packs):
                    right.add(offset)
                    tally.add(chunk.size)
        return right


def _write(
    manifest: Manifest,
    reader: PackReader,
    index: Index,
    path: str,
    target: Path,
    offset: int,
    chunks: Sequence[Chunk],
    tally: Tally,
) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        for chunk in chunks:
            if chunk.hash != HOLE:
                write_at(fd, offset, read_chunk(manifest, reader, path, chunk, index[chunk.hash]))
            offset += chunk.size
            tally.add(chunk.size)
    finally:
        os.close(fd)


def _write_in_place(
    manifest: Manifest,
    reader: PackReader,
    index: Index,
    path: str,
    target: Path,
    offset: int,
    chunks: Sequence[Chunk],
    tally: Tally,
) -> None:
    """Do as `_write` for a file that lies in memory: what is read is verified there, and copied no second time."""
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW)
    try:
        size = offset - begin + sum(chunk.size for chunk in chunks)
        with mmap.mmap(fd, size, offset=begin) as mapped, memoryview(mapped) as view, reader.opened() as packs:
            for chunk in chunks:
                if chunk.hash != HOLE:
                    at, start = index[chunk.hash], offset - begin
                    with view[start : start + chunk.size] as room, damages(manifest, path, chunk, at):
                        data = reader.read_into(room, chunk.hash, at, packs)
                        is_there = data is room
                    if not is_there:
                        write_at(fd, offset, data)  # not into the mapping: a full disk would be a signal there
                offset += chunk.size
                tally.add(chunk.size)
    finally:
        os.close(fd)
