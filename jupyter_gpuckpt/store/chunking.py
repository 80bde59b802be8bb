"""Cut the files of a snapshot into chunks and put into packs those that the store does not hold yet, on all cores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..errors import StoreError
from .chunks import CHUNK, HOLE, Chunk, chunk_of, digest, equal_pieces, first_cut, is_zero
from .codec import encode
from .lookup import Lookup
from .pack import PackWriter
from .parallel import Tally, run_all
from .sources import Reader, Source

__all__ = ["Cut", "store_files"]

Cut = Callable[[Path], Sequence[int] | None]
"""Returns the sizes of the pieces that a file is to be cut into; None leaves it to the store.

A piece longer than `CHUNK` is memory that may be found elsewhere, by whole pages, in another snapshot: it is cut by
its content.
"""

_BATCH = 8 * 1024 * 1024
"""Bytes of one file that one job reads, about."""

_HASHES = 64
"""Chunks whose hashes are given that one job looks at."""

_STRETCH = 64 * 1024 * 1024
"""Bytes of one long piece that one job reads, about."""

_RUN_UP = 4 * 1024 * 1024
"""So many bytes before a stretch it is found out where a chunk ends at its begin: after a few chunks that are cut by
content, it is nearly always forgotten where the first one began."""

_FREED_FROM = 64 * 1024
"""The size of the pieces, in bytes, that it pays to free one by one."""


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
    sources: Sequence[Source],
    cut: Cut,
    known: Lookup,
    packs: PackWriter,
    report: Callable[[int], None],
    hashed: Mapping[str, Sequence[bytes]],
) -> dict[str, list[Chunk]]:
    """Return each file as its chunks, all of them in packs and on the disk; `report` gets the bytes done.

    `known` says what the store holds already. Files that are `hashed` are cut every `CHUNK` bytes, and the hash of each
    chunk is given: what the store holds of them is not read.

    Raises
    ------
    OSError : a file cannot be read, is not as long as it was, or the packs cannot be written.
    StoreError : a chunk that was read does not have the hash that was given.
    ValueError : hashes were given for what is no file of these, or of another size.
    """
    if unknown := hashed.keys() - {source.path for source in sources}:
        raise ValueError(f"hashes were given for {', '.join(sorted(unknown))}")
    claims = _Claims(known)
    found: dict[str, list[list[Chunk]]] = {}
    jobs: list[Callable[[Tally], None]] = []
    # The largest first, so that no thread is left alone with one at the end.
    for source in sorted(sources, key=lambda s: -s.size):
        if source.path in hashed:
            keys, batches = hashed[source.path], found.setdefault(source.path, [])
            if len(keys) * CHUNK != source.size:
                raise ValueError(f"{len(keys)} hashes were given for {source.size:,} bytes")
            for first in range(0, len(keys), _HASHES):
                batches.append([])
                jobs.append(partial(_store_hashed, source, keys, first, claims, packs, batches[-1]))
            continue
        pieces = cut(source.file)
        if pieces is None or sum(pieces) != source.size:
            pieces = equal_pieces(source.size)
        batches = found[source.path] = []
        for offset, sizes in _batches(pieces):
            if sizes[0] <= CHUNK:
                batches.append([])
                jobs.append(partial(_store, source, offset, sizes, claims, packs, batches[-1]))
                continue
            piece = _LongPiece(source, offset, offset + sizes[0])
            for number in range(piece.stretches):
                batches.append([])
                jobs.append(partial(_store_stretch, piece, number, claims, packs, batches[-1]))
    run_all(jobs, report)
    packs.finish()
    return {path: _joined(batches) for path, batches in found.items()}


def _batches(pieces: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield pieces in batches, each with the offset at which it begins; a long piece is one of its own."""
    begin = offset = 0
    batch: list[int] = []
    for size in pieces:
        if size > CHUNK:
            if batch:
                yield begin, batch
            yield offset, [size]
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


@dataclass
class _LongPiece:
    """A long piece, in stretches that jobs store at the same time, and that end where chunks do by their content."""

    source: Source
    begin: int
    end: int
    _cuts: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stretches(self) -> int:
        """How many there are."""
        return -(-(self.end - self.begin) // _STRETCH)

    def stretch(self, reader: Reader, number: int) -> tuple[int, int]:
        """Return where in the file a stretch begins and ends; to be asked before any of it is freed."""
        with self._lock:
            return self._cut(reader, number), self._cut(reader, number + 1)

    def _cut(self, reader: Reader, number: int) -> int:
        if number in (0, self.stretches):
            return self.begin if number == 0 else self.end
        if number not in self._cuts:
            about = self.begin + number * _STRETCH
            at = about - _RUN_UP
            while at < about:
                at += first_cut(reader.view(at, min(CHUNK, self.end - at), self.end))
            self._cuts[number] = at
        return self._cuts[number]


def _store(
    source: Source,
    offset: int,
    sizes: Sequence[int],
    claims: _Claims,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    end = offset + sum(sizes)
    with Reader(source) as reader:
        for size in sizes:
            into.append(_put(reader.view(offset, size, end), claims, packs))
            if size >= _FREED_FROM:
                reader.free(offset, size)
            offset += size
            tally.add(size)


def _store_hashed(
    source: Source,
    keys: Sequence[bytes],
    first: int,
    claims: _Claims,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    with Reader(source) as reader:
        for number, key in enumerate(keys[first : first + _HASHES], first):
            chunk = chunk_of(key)
            if chunk.hash != HOLE and claims.known.find(key) is None:
                begin = number * CHUNK
                if _put(reader.view(begin, CHUNK, begin + CHUNK), claims, packs) != chunk:
                    raise StoreError(
                        "The snapshot could not be stored.",
                        "GPU memory does not have the hash that was computed of it on the GPU.",
                        "Save again. If it fails again, the GPU may be faulty: `nvidia-smi -q -d ECC` tells.",
                    )
            into.append(chunk)
            tally.add(CHUNK)


def _store_stretch(
    piece: _LongPiece, number: int, claims: _Claims, packs: PackWriter, into: list[Chunk], tally: Tally
) -> None:
    with Reader(piece.source) as reader:
        offset, end = piece.stretch(reader, number)
        while offset < end:
            data = reader.view(offset, min(CHUNK, end - offset), end)
            data = data[: first_cut(data)]
            into.append(_put(data, claims, packs))
            reader.free(offset, len(data))
            offset += len(data)
            tally.add(len(data))


def _put(data: memoryview, claims: _Claims, packs: PackWriter) -> Chunk:
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
