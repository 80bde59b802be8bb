"""Cut the files of a snapshot into chunks and put into packs those that the store does not hold yet, on all cores."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..errors import StoreError
from . import delta
from .chunks import CHUNK, HOLE, Changed, Chunk, digest, equal_pieces, first_cut, is_zero
from .codec import DELTA, Bytes, encode
from .lookup import Lookup
from .pack import OpenPacks, PackReader, PackWriter
from .parallel import Job, Tally, run_all
from .sources import Reader, Source

__all__ = ["Bases", "Cut", "Piece", "store_files"]

Cut = Callable[[Path], Sequence[int] | None]
"""Returns the sizes of the pieces that a file is to be cut into; None leaves it to the store.

A piece longer than `CHUNK` is memory that may be found elsewhere, by whole pages, in another snapshot: it is cut by
its content.
"""

Piece = int | Chunk | Changed
"""A piece of a file: its size, as of those of `Cut`; the chunk that it is, where that is known; or what it was."""

_BATCH = 8 * 1024 * 1024
"""Bytes of one file that one job reads, about."""

_KNOWN = _BATCH // 64
"""What a chunk that is known counts for among these bytes: it is looked up, and hardly ever read."""

_STRETCH = 64 * 1024 * 1024
"""Bytes of one long piece that one job reads, about."""

_RUN_UP = 4 * 1024 * 1024
"""So many bytes before a stretch it is found out where a chunk ends at its begin: after a few chunks that are cut by
content, it is nearly always forgotten where the first one began."""

_FREED_FROM = 64 * 1024
"""The size of the pieces, in bytes, that it pays to free one by one."""

_SMALL = 64 * 1024
"""The size from which on it takes longer to make a delta than to get Python's lock for that, in bytes."""

_LITTLE = 256 * 1024 * 1024
"""Bytes up to which threads that make deltas wait for Python's lock more than for anything else."""
_FEW = 4
"""So many threads are enough then. On two processors, two need a fifth less time than four."""

_PAYS = 0.75
"""The share that a delta may take of what its chunk would take: whoever reads it reads its base as well."""
_TINY = 32
"""Where it takes one part in so many of the chunk's size, it is not looked at what that would take."""


_BASES = 32 * 1024 * 1024
"""Bytes of bases that are kept in memory from one save to the next, at most."""


class Bases:
    """The bytes of small chunks that a save made deltas of, kept so that the next one need not read them again."""

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._used: dict[bytes, bytes] = {}
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: bytes, read: Callable[[], Bytes]) -> Bytes:
        """Return a chunk that is kept, or that `read` gives. Raises as that."""
        data = self._used.get(key) or self._kept.get(key) or read()
        if len(data) < _SMALL:
            with self._lock:
                if key not in self._used and self._size + len(data) <= _BASES:
                    self._used[key] = bytes(data)
                    self._size += len(data)
        return data

    def saved(self) -> None:
        """Keep those that were asked for, and no others."""
        self._kept, self._used, self._size = self._used, {}, 0


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


@dataclass(frozen=True)
class _Encoder:
    """Encodes chunks: by themselves, or as deltas of what was there before where that takes less."""

    known: Lookup
    reader: PackReader
    bases: Bases
    packs: OpenPacks | None = None
    """Those that stay open while one thread encodes."""

    def encode(self, data: memoryview, before: bytes) -> tuple[int, Bytes]:
        """Return codec and stored bytes of a chunk; `before` is the hash of that of before, or empty."""
        base = self._base(before) if before else None
        if base is None:
            return encode(data)
        made = delta.make(data, *base)
        if len(made) * _TINY <= len(data):
            return DELTA, made
        codec, stored = encode(data)
        return (DELTA, made) if len(made) <= _PAYS * len(stored) else (codec, stored)

    def _base(self, key: bytes) -> tuple[bytes, Bytes] | None:
        """Return hash and bytes of the chunk `key`, or of its base: one that is a delta is none; None without one."""
        at = self.known.find(key)
        if at is not None and at.base:
            key, at = at.base, self.known.found[at.base]
        if at is None:
            return None
        try:
            return key, self.bases.get(key, partial(self.reader.read, key, at, self.packs))
        except (OSError, ValueError):
            return None  # it is damaged: nothing new relies on it


def store_files(
    sources: Sequence[Source],
    cut: Cut,
    known: Lookup,
    reader: PackReader,
    packs: PackWriter,
    report: Callable[[int], None],
    told: Mapping[str, Sequence[Piece]],
    bases: Bases,
) -> dict[str, list[Chunk]]:
    """Return each file as its chunks, all of them in packs and on the disk; `report` gets the bytes done.

    `known` says what the store holds already, and `reader` reads it. Of some files it is `told` how they are cut, which
    of their chunks are known, and what was there before others: of the known ones what the store holds is not read.
    The bytes of `bases` are not read again.

    Raises
    ------
    OSError : a file cannot be read, is not as long as it was, or the packs cannot be written.
    StoreError : a chunk that was read is not the one that was told.
    ValueError : chunks were told of what is no file of these, or of another size.
    """
    if unknown := told.keys() - {source.path for source in sources}:
        raise ValueError(f"chunks were told of {', '.join(sorted(unknown))}")
    claims, encoder = _Claims(known), _Encoder(known, reader, bases)
    found: dict[str, list[list[Chunk]]] = {}
    jobs: list[Job] = []
    of_small: list[Job] = []
    left = 0  # bytes of what is not known
    # The largest first, so that no thread is left alone with one at the end.
    for source in sorted(sources, key=lambda s: -s.size):
        batches = found[source.path] = []
        for offset, batch in _batches(_pieces(source, cut, told)):
            left += sum(_size(piece) for piece in batch if not isinstance(piece, Chunk))
            if len(batch) > 1 or _size(batch[0]) <= CHUNK:
                batches.append([])
                job = partial(_store, source, offset, batch, claims, encoder, packs, batches[-1])
                (of_small if _are_small_deltas(batch) else jobs).append(job)
                continue
            piece = _LongPiece(source, offset, offset + _size(batch[0]))
            for number in range(piece.stretches):
                batches.append([])
                jobs.append(partial(_store_stretch, piece, number, claims, encoder, packs, batches[-1]))
    if of_small:
        jobs.insert(0, partial(_one_after_the_other, of_small))
    threads = min(len(os.sched_getaffinity(0)), _FEW) if of_small and left <= _LITTLE else None
    run_all(jobs, report, threads)
    packs.finish()
    return {path: _joined(batches) for path, batches in found.items()}


def _pieces(source: Source, cut: Cut, told: Mapping[str, Sequence[Piece]]) -> Sequence[Piece]:
    if source.path in told:
        if (size := sum(map(_size, told[source.path]))) != source.size:
            raise ValueError(f"chunks of {size:,} bytes were told of {source.path}, which has {source.size:,}")
        return told[source.path]
    pieces = cut(source.file)
    return pieces if pieces is not None and sum(pieces) == source.size else equal_pieces(source.size)


def _are_small_deltas(batch: Sequence[Piece]) -> bool:
    """Tell whether a batch has small pieces of which deltas may be made.

    Threads that do that take turns with Python's lock so often that two of them need half as long again as one.
    """
    sizes = [piece.size for piece in batch if isinstance(piece, Changed)]
    return bool(sizes) and sum(sizes) < len(sizes) * _SMALL


def _one_after_the_other(jobs: Iterable[Job], tally: Tally) -> None:
    for job in jobs:
        job(tally)


def _size(piece: Piece) -> int:
    return piece if isinstance(piece, int) else piece.size


def _batches(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """Yield pieces in batches, each with the offset at which it begins; one that is to be cut is a batch of its own."""
    begin = offset = work = 0
    batch: list[Piece] = []
    for piece in pieces:
        is_long = isinstance(piece, int) and piece > CHUNK
        if batch and (is_long or work >= _BATCH):
            yield begin, batch
            begin, batch, work = offset, [], 0
        batch.append(piece)
        offset += _size(piece)
        work += piece if isinstance(piece, int) else _KNOWN
        if is_long:
            yield begin, batch
            begin, batch, work = offset, [], 0
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
    pieces: Sequence[Piece],
    claims: _Claims,
    encoder: _Encoder,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    end = offset
    with Reader(source) as reader, encoder.reader.opened() as opened:
        encoder = replace(encoder, packs=opened)
        for number, piece in enumerate(pieces):
            size = _size(piece)
            if isinstance(piece, Chunk):
                chunk = piece
                if chunk.hash != HOLE and claims.known.find(chunk.hash) is None:
                    _put_known(reader.view(offset, size, offset + size), chunk, claims, encoder, packs)
            else:
                if offset >= end:  # up to the next that is known, where there may be nothing to be read
                    end = offset + _up_to_a_known(itertools.islice(pieces, number, None))
                before = piece.before if isinstance(piece, Changed) else b""
                chunk = _put(reader.view(offset, size, end), claims, encoder, packs, before)
                if size >= _FREED_FROM:
                    reader.free(offset, size)
            into.append(chunk)
            offset += size
            tally.add(size)


def _up_to_a_known(pieces: Iterable[Piece]) -> int:
    """Return how many bytes come before the first piece that is known."""
    size = 0
    for piece in pieces:
        if isinstance(piece, Chunk):
            break
        size += _size(piece)
    return size


def _put_known(data: memoryview, chunk: Chunk, claims: _Claims, encoder: _Encoder, packs: PackWriter) -> None:
    if _put(data, claims, encoder, packs) != chunk:
        raise StoreError(
            "The snapshot could not be stored.",
            "Memory does not have the hash that was computed of it before.",
            "Save again. If it fails again with memory of a GPU, that may be faulty: `nvidia-smi -q -d ECC` tells.",
        )


def _store_stretch(
    piece: _LongPiece,
    number: int,
    claims: _Claims,
    encoder: _Encoder,
    packs: PackWriter,
    into: list[Chunk],
    tally: Tally,
) -> None:
    with Reader(piece.source) as reader:
        offset, end = piece.stretch(reader, number)
        while offset < end:
            data = reader.view(offset, min(CHUNK, end - offset), end)
            data = data[: first_cut(data)]
            into.append(_put(data, claims, encoder, packs))
            reader.free(offset, len(data))
            offset += len(data)
            tally.add(len(data))


def _put(data: memoryview, claims: _Claims, encoder: _Encoder, packs: PackWriter, before: bytes = b"") -> Chunk:
    if is_zero(data):
        return Chunk(HOLE, len(data))
    chunk = Chunk(digest(data), len(data))
    if claims.take(chunk.hash):
        codec, stored = encoder.encode(data, before)
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
