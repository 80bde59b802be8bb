"""Read a snapshot: every chunk is verified on its way out of the store."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import accumulate

from ..errors import Damaged
from .chunks import HOLE, Chunk, digest
from .codec import Bytes
from .contents import MAX_SIZE, Contents
from .durable import read_small
from .index import DamagedPart, Index, Part, from_packs, merge, open_part, read_index, sizes_of
from .layout import Layout
from .manifest import Manifest
from .pack import Location, PackReader, forget_rooms

__all__ = [
    "Parts",
    "damage",
    "damages",
    "locate",
    "missing",
    "parse_contents",
    "raw_contents",
    "read_chunk",
    "read_contents",
    "read_whole",
]

_FEW = 16
"""Where no more than one chunk in so many of a snapshot is asked for, each is looked up by itself."""
_SMALL = 1024 * 1024
"""Bytes of a list of files that may be kept in memory, taken apart: about 25,000 chunks, or 5 MB of memory."""
_MAX_WHOLE = 256 * 1024 * 1024
"""Bytes of a file that is read into memory as a whole."""


def damage(manifest: Manifest, path: str, why: str) -> Damaged:
    """Return the error for a snapshot that cannot be used; `path` is the file of it that is damaged, or empty."""
    return Damaged(
        f"The snapshot {manifest.name} is damaged.",
        f"{path}: {why}" if path else why,
        "Restore another snapshot. `gpuckpt check` says what else is damaged, `gpuckpt repair` repairs "
        f"what can be repaired, and `gpuckpt rm {manifest.name}` removes this one.",
        name=manifest.name,
        file=path,
    )


def read_contents(layout: Layout, manifest: Manifest) -> Contents:
    """Return the files of a snapshot, as chunks.

    Raises
    ------
    Damaged : the list of them is missing, or is not the one that was written.
    """
    return parse_contents(manifest, raw_contents(layout, manifest))


def parse_contents(manifest: Manifest, raw: bytes) -> Contents:
    """Return the files of a snapshot, as chunks, from bytes that have the hash in its manifest. Raises `Damaged`."""
    try:
        contents = _taken_apart(raw) if len(raw) <= _SMALL else Contents.from_bytes(raw)
    except ValueError as e:
        raise damage(manifest, "", f"the list of its files is not valid: {e}") from e
    if contents.size != manifest.size:
        raise damage(manifest, "", "its size is not the sum of its files' sizes")
    return contents


@lru_cache(maxsize=2)
def _taken_apart(raw: bytes) -> Contents:
    """Return what `Contents.from_bytes` does: a restore asks for the same one several times."""
    return Contents.from_bytes(raw)


def raw_contents(layout: Layout, manifest: Manifest) -> bytes:
    """Return the bytes of the list of a snapshot's files. Raises `Damaged` as `read_contents`."""
    for _ in range(2):  # a wrong byte may be one in memory only
        try:
            raw = read_small(layout.contents_of(manifest.id), MAX_SIZE)
        except OSError as e:
            raise damage(manifest, "", f"the list of its files cannot be read: {e.strerror}") from e
        if digest(raw).hex() == manifest.contents:
            return raw
    raise damage(manifest, "", "the list of its files does not have the hash that it was written with")


def locate(layout: Layout, manifest: Manifest, contents: Contents) -> Index:
    """Return where the chunks of a snapshot are: by its own part of the index, all parts, or the packs themselves.

    The bases of those that are deltas are there as well.

    Raises
    ------
    Damaged : a chunk is nowhere.
    OSError : the store cannot be read.
    """
    with suppress(FileNotFoundError, DamagedPart):
        index = _located_by(open_part(layout, manifest.id), manifest.id, contents)
        packs = {at.pack for at in index.values()}
        if not missing(contents, index, sizes_of(layout, packs)):
            return index
        sizes = sizes_of(layout, packs, fresh=True)  # another machine may have written them just now
        if not missing(contents, index, sizes):
            return index
    sizes = sizes_of(layout, layout.pack_names(), fresh=True)
    index = merge(from_packs(layout, sizes), read_index(layout))
    for path, chunk in missing(contents, index, sizes):
        raise damage(manifest, path, f"its chunk {chunk.hash.hex()[:16]} is missing from the packs")
    return index


def _located_by(part: Part, snapshot_id: str, contents: Contents) -> Index:
    keys = {chunk.hash for chunks in contents.files.values() for chunk in chunks}
    try:
        if len(keys) * _FEW > len(part):
            return part.index()
        found = {key: at for key in keys if (at := part.get(key)) is not None}
        bases = {at.base for at in found.values() if at.base}
        return merge(found, {key: at for key in bases if (at := part.get(key)) is not None})
    except ValueError as e:
        raise DamagedPart(snapshot_id) from e


def missing(contents: Contents, index: Index, sizes: Mapping[str, int]) -> list[tuple[str, Chunk]]:
    """Return the chunks that are not to be found, each with the file that it belongs to.

    `sizes` are those of the packs, in bytes.
    """
    return [
        (path, chunk)
        for path, chunks in contents.files.items()
        for chunk in chunks
        if chunk.hash != HOLE and not _is_there(chunk, index, sizes)
    ]


def _is_there(chunk: Chunk, index: Mapping[bytes, Location], sizes: Mapping[str, int]) -> bool:
    at = index.get(chunk.hash)
    if at is None or at.size != chunk.size or not _reaches(at, sizes):
        return False
    base = index.get(at.base) if at.base else None
    return not at.base or (base is not None and not base.base and _reaches(base, sizes))


def _reaches(at: Location, sizes: Mapping[str, int]) -> bool:
    return at.offset + at.stored <= sizes.get(at.pack, 0)


def read_whole(layout: Layout, manifest: Manifest, contents: Contents, index: Index) -> dict[str, bytes]:
    """Return the verified bytes of these files of a snapshot, by path.

    Raises
    ------
    Damaged : a byte is not the one that was saved, or a file is larger than any that is read whole.
    """
    for path in contents.files:
        if contents.size_of(path) > _MAX_WHOLE:
            raise damage(manifest, path, f"it has {contents.size_of(path)} bytes, more than such a file ever has")
    reader = PackReader(layout.packs, index)
    try:
        return {
            path: b"".join(
                bytes(chunk.size)
                if chunk.hash == HOLE
                else bytes(read_chunk(manifest, reader, path, chunk, index[chunk.hash]))
                for chunk in chunks
            )
            for path, chunks in contents.files.items()
        }
    finally:
        forget_rooms()


class Parts:
    """Reads parts of the files of a snapshot, without reading the files; the chunk read last is at hand."""

    def __init__(self, layout: Layout, manifest: Manifest, contents: Contents, index: Index) -> None:
        self._manifest, self._files, self._index = manifest, contents.files, index
        self._reader = PackReader(layout.packs, index)
        self._ends: dict[str, list[int]] = {}
        self._last = (HOLE, b"")

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return `size` verified bytes of a file from `offset` on; fewer where it ends. Raises `Damaged`."""
        chunks = self._files[path]
        ends = self._ends.setdefault(path, list(accumulate(chunk.size for chunk in chunks)))
        found = bytearray()
        for number in range(bisect_right(ends, offset), len(chunks)):
            chunk = chunks[number]
            begin = ends[number] - chunk.size
            if begin >= offset + size:
                break
            first, last = max(offset - begin, 0), min(offset + size - begin, chunk.size)
            if chunk.hash == HOLE:
                found += bytes(last - first)
            else:
                found += memoryview(self._whole(path, chunk))[first:last]
        return bytes(found)

    def _whole(self, path: str, chunk: Chunk) -> bytes:
        if self._last[0] != chunk.hash:
            data = read_chunk(self._manifest, self._reader, path, chunk, self._index[chunk.hash])
            self._last = chunk.hash, bytes(data)
        return self._last[1]


def read_chunk(manifest: Manifest, reader: PackReader, path: str, chunk: Chunk, at: Location) -> Bytes:
    """Return the verified bytes of a chunk of the file `path`. Raises `Damaged`."""
    with damages(manifest, path, chunk, at):
        return reader.read(chunk.hash, at)


@contextmanager
def damages(manifest: Manifest, path: str, chunk: Chunk, at: Location) -> Iterator[None]:
    """Tell of a chunk that cannot be read as `Damaged`."""
    try:
        yield
    except (OSError, ValueError) as e:
        if isinstance(e, OSError) and e.errno == errno.EFAULT:  # the mapping that it is read into has no room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from e
        why = (e.strerror or str(e)) if isinstance(e, OSError) else str(e)
        raise damage(manifest, path, f"chunk {chunk.hash.hex()[:16]} in pack {at.pack}: {why}") from e
