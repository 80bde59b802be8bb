"""Cut the files of a snapshot into chunks and put into packs those that the store does not hold yet, on all cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .chunks import CHUNK, HOLE, Chunk, digest, equal_pieces, first_cut, is_zero
from .codec import encode
from .durable import free_range
from .lookup import Lookup
from .pack import PackWriter
from .parallel import Tally, run_all

__all__ = ["Cut", "Source", "store_files"]

Cut = Callable[[Path], Sequence[int] | None]
"""Returns the sizes of the pieces that a file is to be cut into; None leaves it to the store.

A piece longer than `CHUNK` is memory that may be found elsewhere, by whole pages, in another snapshot: it is cut by
its content.
"""

_BATCH = 8 * 1024 * 1024
"""Bytes of one file that one job reads, about."""

_STRETCH = 64 * 1024 * 1024
"""Bytes of one long piece that one job reads; only at the ends of these, chunks are cut by place."""

_FREED_FROM = 64 * 1024
"""The size of the pieces, in bytes, that it pays to free one by one."""

_local = threading.local()


@dataclass(frozen=True)
class Source:
    """A file to be stored: where it lies, how long it is (bytes), and its path inside the snapshot.

    One that is `used_up` is freed as it is stored: there is seldom room on a disk for all of a snapshot twice.
    """

    file: Path
    size: int
    path: str
    used_up: bool


@dataclass
class _Claims:
    """Which chunks somebody stores already, so that no two threads store the same."""

    known: Lookup
    _claimed: set[bytes] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, key: bytes) -> bool:
        """Tell whether the caller has to store this chunk."""
        with self._lock:
            if key in self._claimed:
                return False
            self._claimed.add(key)
        return self.known.find(key) is None


def store_files(
    sources: Sequence[Source], cut: Cut, known: Lookup, packs: PackWriter, report: Callable[[int], None]
) -> dict[str, list[Chunk]]:
    """Return each file as its chunks, all of them in packs and on the disk; `report` gets the bytes done.

    `known` says what the store holds already.

    Raises
    ------
    OSError : a file cannot be read, is not as long as it was, or the packs cannot be written.
    """
    claims = _Claims(known)
    found: dict[str, list[list[Chunk]]] = {}
    jobs = []
    # The largest first, so that no thread is left alone with one at the end.
    for source in sorted(sources, key=lambda s: -s.size):
        pieces = cut(source.file)
        if pieces is None or sum(pieces) != source.size:
            pieces = equal_pieces(source.size)
        batches = found[source.path] = []
        for offset, sizes in _batches(pieces):
            batches.append([])
            store = _store if sizes[0] <= CHUNK else _store_long
            jobs.append(partial(store, source, offset, sizes, claims, packs, batches[-1]))
    run_all(jobs, report)
    packs.finish()
    return {path: _joined(batches) for path, batches in found.items()}


def _batches(pieces: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield pieces in batches, each with the offset at which it begins; a stretch of a long piece is one of its own."""
    begin = offset = 0
    batch: list[int] = []
    for size in pieces:
        if size > CHUNK:
            if batch:
                yield begin, batch
            for at in range(0, size, _STRETCH):
                yield offset + at, [min(_STRETCH, size - at)]
            offset += size
            begin, batch = offset, []
            continue
        batch.append(size)
        offset += size
        if offset - begin >= _BATCH:
            yield begin, batch
            begin, batch = offset, []
    if batch:
        yield begin, batch


def _store(
    source: Source,
    offset: int,
    sizes: Sequence[int],
    claims: _Claims,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    fd = os.open(source.file, (os.O_RDWR if source.used_up else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for size in sizes:
            data = _read(fd, offset, size)
            into.append(_put(data, claims, packs))
            if source.used_up and size >= _FREED_FROM:
                free_range(fd, offset, size)
            offset += size
            tally.add(size)
    finally:
        os.close(fd)


def _store_long(
    source: Source,
    offset: int,
    sizes: Sequence[int],
    claims: _Claims,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    """Store a stretch of a long piece, cut by its content."""
    end = offset + sum(sizes)
    fd = os.open(source.file, (os.O_RDWR if source.used_up else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        while offset < end:
            data = memoryview(_read(fd, offset, min(CHUNK, end - offset)))
            data = data[: first_cut(data)]
            into.append(_put(data, claims, packs))
            if source.used_up:
                free_range(fd, offset, len(data))
            offset += len(data)
            tally.add(len(data))
    finally:
        os.close(fd)


def _read(fd: int, offset: int, size: int) -> bytes | bytearray:
    data: bytes | bytearray
    if size != CHUNK:
        data = os.pread(fd, size, offset)
    else:
        # Always the same buffer: fresh memory for each chunk costs more than hashing it.
        if not hasattr(_local, "buffer"):
            _local.buffer = bytearray(CHUNK)
        buffer: bytearray = _local.buffer
        data = buffer if os.preadv(fd, [buffer], offset) == size else b""
    if len(data) != size:
        raise OSError(0, "the file became shorter while it was being stored")
    return data


def _put(data: bytes | bytearray | memoryview, claims: _Claims, packs: PackWriter) -> Chunk:
    if is_zero(data):
        return Chunk(HOLE, len(data))
    chunk = Chunk(digest(data), len(data))
    if claims.take(chunk.hash):
        codec, stored = encode(data)
        packs.put(chunk.hash, chunk.size, codec, stored)
    return chunk


def _joined(batches: Sequence[Sequence[Chunk]]) -> list[Chunk]:
    """Return the batches as one list, in which holes side by side are one."""
    chunks: list[Chunk] = []
    for chunk in (c for batch in batches for c in batch):
        if chunk.hash == HOLE and chunks and chunks[-1].hash == HOLE:
            chunks[-1] = Chunk(HOLE, chunks[-1].size + chunk.size)
        else:
            chunks.append(chunk)
    return chunks
