"""The index: which pack holds which chunk.

Each snapshot has its part, ``index/ID``, which names all chunks of that snapshot, also those that others have too; the
index is all parts together. So a part goes with its snapshot, and what no part names is no longer needed. A part is
`MAGIC`, records in the order of their hashes, and the BLAKE3 of all that.
"""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache

from .chunks import digest
from .durable import read_small, refresh, sync_folder, write_new
from .layout import Layout
from .names import pack_name, session_of
from .pack import Location, entries, plausible

__all__ = [
    "DamagedPart",
    "Index",
    "Part",
    "from_packs",
    "named_packs",
    "open_part",
    "open_parts",
    "pack_sizes",
    "part_from_bytes",
    "part_size",
    "part_to_bytes",
    "read_index",
    "read_part",
    "sizes_of",
    "write_part",
]

MAGIC = b"gpuckpt index 2\n"
_RECORD = struct.Struct("<32s16sIQIIB3x")
"""Hash; the pack's session and number; offset, stored size, size; codec."""

_FIRST_BITS = struct.Struct(">Q64x")
_PACK_OF = struct.Struct("<32x16sI20x")
_PLACE = struct.Struct("<32x16sIQI8x")
"""What stands in a record, where only that is wanted."""

_SEAL = 32
_MAX_SIZE = 4 * 2**30
_SMALL = 2 * 2**20
"""Bytes of a part that may be kept in memory, taken apart: about 25,000 chunks, or 8 MB of memory."""

Index = dict[bytes, Location]
"""Where each chunk lies, by its hash."""


class DamagedPart(ValueError):
    """A part of the index was changed or is incomplete; what it said can be read from the packs again."""


def write_part(layout: Layout, part: str, chunks: Mapping[bytes, Location], session: str) -> None:
    """Put a part with these chunks in place, also of an older one, and have it on the disk; as work of `session`.

    Raises `OSError`.
    """
    draft = layout.part_draft(session)
    draft.unlink(missing_ok=True)  # of one who was killed while rewriting it
    write_new(draft, part_to_bytes(chunks))
    draft.rename(layout.part_of(part))
    sync_folder(layout.index)


def part_to_bytes(chunks: Mapping[bytes, Location]) -> bytes:
    """Return the bytes of a part with these chunks."""
    raw = MAGIC + b"".join(_record(key, at) for key, at in sorted(chunks.items()))
    return raw + digest(raw)


def _record(key: bytes, at: Location) -> bytes:
    session, number = bytes.fromhex(session_of(at.pack)), int(at.pack[33:])
    return _RECORD.pack(key, session, number, at.offset, at.stored, at.size, at.codec)


def read_part(layout: Layout, session: str) -> Index:
    """Return one part.

    Raises
    ------
    DamagedPart : it is not the one that was written.
    OSError : it is missing or cannot be read.
    """
    try:
        return part_from_bytes(read_small(layout.part_of(session), _MAX_SIZE))
    except ValueError as e:
        raise DamagedPart(session) from e


class Part:
    """One part, of which few chunks are asked for: it is taken apart no further than that needs."""

    def __init__(self, raw: bytes) -> None:
        """Take a part's bytes. Raises `ValueError` where they are not the ones that were written."""
        self._records = _records(raw)

    def __len__(self) -> int:
        """Return how many chunks it names."""
        return len(self._records) // _RECORD.size

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return len(self._records)

    def get(self, key: bytes) -> Location | None:
        """Return where a chunk lies; None where the part does not name it. Raises `ValueError` as `part_from_bytes`."""
        at = bisect_left(range(len(self)), key, key=self._key)
        if at == len(self) or self._key(at) != key:
            return None
        return _location(*_RECORD.unpack_from(self._records, at * _RECORD.size)[1:])

    def index(self) -> Index:
        """Return where all of its chunks lie. Raises `ValueError` as `part_from_bytes`."""
        return dict(_taken_apart(bytes(self._records)) if self.size <= _SMALL else _all_of(self._records))

    def among(self, keys: Container[bytes]) -> Index:
        """Return where those of these chunks lie that it names. Raises `ValueError` as `part_from_bytes`."""
        return {key: _location(*where) for key, *where in _RECORD.iter_unpack(self._records) if key in keys}

    def packs_among(self, packs: Container[str]) -> set[str]:
        """Return those of these packs that it names."""
        named = (_pack(writer, number) for writer, number in _PACK_OF.iter_unpack(self._records))
        return {pack for pack in named if pack in packs}

    def first_bits(self) -> list[int]:
        """Return the first 64 bits of the hash of each chunk, in their order."""
        return [bits for (bits,) in _FIRST_BITS.iter_unpack(self._records)]

    def packs(self) -> set[str]:
        """Return the names of the packs that it names."""
        return {pack_name(writer.hex(), number) for writer, number in set(_PACK_OF.iter_unpack(self._records))}

    def places(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield for each chunk its pack's session and number, its offset, and its stored size (bytes)."""
        return _PLACE.iter_unpack(self._records)

    def _key(self, at: int) -> bytes:
        return bytes(self._records[at * _RECORD.size : at * _RECORD.size + 32])


def _all_of(records: bytes | memoryview) -> Index:
    return {key: _location(*where) for key, *where in _RECORD.iter_unpack(records)}


@lru_cache(maxsize=2)
def _taken_apart(records: bytes) -> Index:
    """Return what `_all_of` does: a restore asks for the same one several times."""
    return _all_of(records)


def open_part(layout: Layout, part: str) -> Part:
    """Return one part, to ask for few of its chunks. Raises as `read_part`."""
    try:
        return Part(read_small(layout.part_of(part), _MAX_SIZE))
    except ValueError as e:
        raise DamagedPart(part) from e


def open_parts(layout: Layout, parts: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Yield these parts with their names, but for those that are deleted meanwhile. Raises as `read_part`."""
    for name in parts:
        try:
            part = open_part(layout, name)
        except FileNotFoundError:
            continue
        yield name, part


def part_size(chunks: int) -> int:
    """Return how long a part with so many chunks is, in bytes."""
    return len(MAGIC) + chunks * _RECORD.size + _SEAL


def part_from_bytes(raw: bytes) -> Index:
    """Return the part that these bytes are.

    Raises
    ------
    ValueError : they are not the ones that were written.
    """
    return Part(raw).index()


def _records(raw: bytes) -> memoryview:
    """Return the records in the bytes of a part. Raises `ValueError` where these are not the ones that were written."""
    body, seal = memoryview(raw)[:-_SEAL], raw[-_SEAL:]
    if raw[: len(MAGIC)] != MAGIC or (len(body) - len(MAGIC)) % _RECORD.size or digest(body) != seal:
        raise ValueError("it does not have the hash that it was written with")
    return body[len(MAGIC) :]


def _location(writer: bytes, number: int, offset: int, stored: int, size: int, codec: int) -> Location:
    if not plausible(codec, stored, size):
        raise ValueError("a chunk in it has no chunk's size")
    return Location(_pack(writer, number), offset, stored, size, codec)


@lru_cache(maxsize=1024)  # chunks side by side mostly are in the same packs
def _pack(writer: bytes, number: int) -> str:
    return pack_name(writer.hex(), number)


def read_index(layout: Layout) -> Index:
    """Return the index as far as its parts can be read, without chunks whose pack is not there or too short.

    Raises `OSError`.
    """
    index: Index = {}
    for session in layout.parts():
        try:
            index.update(read_part(layout, session))
        except (FileNotFoundError, DamagedPart):
            continue  # it was deleted meanwhile; or nothing new is stored in reliance on it
    sizes = pack_sizes(layout)
    return {key: at for key, at in index.items() if at.offset + at.stored <= sizes.get(at.pack, 0)}


def named_packs(layout: Layout, sessions: Iterable[str]) -> set[str]:
    """Return the packs that these parts of the index name.

    Raises
    ------
    DamagedPart : one of them is damaged.
    OSError : one of them cannot be read.
    """
    return {pack for _, part in open_parts(layout, sessions) for pack in part.packs()}


def pack_sizes(layout: Layout) -> dict[str, int]:
    """Return the size of each pack, in bytes, by its name. Raises `OSError`."""
    return sizes_of(layout, layout.pack_names())


def sizes_of(layout: Layout, packs: Iterable[str], *, fresh: bool = False) -> dict[str, int]:
    """Return the size of each of these packs that is there, in bytes, by its name.

    With `fresh` a file server is asked, whatever it has said before. Raises `OSError`.
    """
    sizes = {}
    folder = str(layout.packs)
    for pack in packs:
        with suppress(FileNotFoundError):
            if fresh:
                refresh(layout.packs / pack)
            about = os.lstat(f"{folder}/{pack}")  # there can be very many
            if stat.S_ISREG(about.st_mode):
                sizes[pack] = about.st_size
    return sizes


def from_packs(layout: Layout, names: Iterable[str]) -> Index:
    """Return what an index of these packs says, by the packs' own headers. Raises `OSError`."""
    index: Index = {}
    for name in sorted(names):
        index.update(entries(layout.packs / name))
    return index
