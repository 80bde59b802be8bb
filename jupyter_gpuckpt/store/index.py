"""The index: which pack holds which chunk.

Each snapshot has its part, ``index/ID``, which names all chunks of that snapshot, also those that others have too; the
index is all parts together. So a part goes with its snapshot, and what no part names is no longer needed. A part is
`MAGIC`, records in the order of their hashes, and the BLAKE3 of all that.

Where chunks are deltas, the part names their bases as well, whether or not a file has them, and says of each delta
which record its base has: so whatever asks what a snapshot needs hears of them. Such a part begins with
`MAGIC_WITH_DELTAS` and the number of records, and behind these come the deltas, each as two numbers of records.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache

from .chunks import digest
from .codec import DELTAS
from .durable import read_small, refresh, sync_folder, write_new
from .layout import Layout
from .names import pack_name, session_of
from .pack import Location, entries, plausible

__all__ = [
    "DamagedPart",
    "Index",
    "Part",
    "from_packs",
    "merge",
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
    "with_bases",
    "write_part",
]

MAGIC = b"gpuckpt index 2\n"
MAGIC_WITH_DELTAS = b"gpuckpt index 3\n"
_COUNT = struct.Struct("<Q")
_DELTA = struct.Struct("<II")
"""The number of a delta's record, and that of its base."""

_RECORD = struct.Struct("<32s16sIQIIB3x")
"""Hash; the pack's session and number; offset, stored size, size; codec."""

_FIRST = struct.Struct(">Q")
_FIRST_BITS = struct.Struct(">Q64x")
_PACK_OF = struct.Struct("<32x16sI20x")
_PLACE = struct.Struct("<32x16sIQI8x")
"""What stands in a record, where only that is wanted."""

_FEW = 32
"""Chunks that are asked for before it pays to take the first bits of all hashes out of a part."""
_SEAL = 32
_MAX_SIZE = 4 * 2**30
_SMALL = 2 * 2**20
"""Bytes of a part that may be kept in memory, taken apart: about 25,000 chunks, or 8 MB of memory."""

Index = dict[bytes, Location]
"""Where each chunk lies, by its hash; with each delta its base, which is none."""


def merge(index: Index, others: Mapping[bytes, Location]) -> Index:
    """Add `others` to an index, and return it; a chunk that one of both has by itself is not a delta then.

    So bases stay what they are, whoever stored the same chunk as a delta.
    """
    for key, at in others.items():
        if not at.base or key not in index or index[key].base:
            index[key] = at
    return index


def with_bases(index: Mapping[bytes, Location], keys: Iterable[bytes]) -> Index:
    """Return where these chunks lie, and the bases of those that are deltas. Raises `KeyError` where one is missing."""
    found = {key: index[key] for key in keys}
    return merge(found, {at.base: index[at.base] for at in [*found.values()] if at.base})


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
    """Return the bytes of a part with these chunks.

    Raises
    ------
    ValueError : a delta is among them without its base.
    """
    order = sorted(chunks.items())
    records = b"".join(_record(key, at) for key, at in order)
    deltas = [(number, at.base) for number, (_, at) in enumerate(order) if at.base]
    if not deltas:
        raw = MAGIC + records
        return raw + digest(raw)
    if not all(base in chunks and not chunks[base].base for _, base in deltas):
        raise ValueError("a chunk is a delta of one that is not there by itself")
    numbers = {key: number for number, (key, _) in enumerate(order)}
    pairs = b"".join(_DELTA.pack(number, numbers[base]) for number, base in deltas)
    raw = MAGIC_WITH_DELTAS + _COUNT.pack(len(order)) + records + pairs
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
        self._raw = raw
        self._records, self._bases = _taken_apart(raw)
        self._asked = 0
        self._firsts: array[int] | None = None

    def __len__(self) -> int:
        """Return how many chunks it names."""
        return len(self._records) // _RECORD.size

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return len(self._records)

    @property
    def has_deltas(self) -> bool:
        """Whether it names any."""
        return bool(self._bases)

    def get(self, key: bytes) -> Location | None:
        """Return where a chunk lies; None where the part does not name it. Raises `ValueError` as `part_from_bytes`."""
        at = self._place(key)
        if at == len(self) or self._key(at) != key:
            return None
        return self._location(at, *_RECORD.unpack_from(self._records, at * _RECORD.size)[1:])

    def _place(self, key: bytes) -> int:
        """Return the number of a chunk's record, or of the one before which it would stand."""
        if self._firsts is None:
            self._asked += 1
            if self._asked <= _FEW:
                return bisect_left(range(len(self)), key, key=self._key)
            self._firsts = array("Q", self.first_bits())
        (first,) = _FIRST.unpack_from(key)
        at, end = bisect_left(self._firsts, first), len(self)
        while at < end and self._firsts[at] == first and self._key(at) < key:
            at += 1
        return at

    def index(self) -> Index:
        """Return where all of its chunks lie. Raises `ValueError` as `part_from_bytes`."""
        return dict(_index_of(self._raw) if self.size <= _SMALL else self._all())

    def _all(self) -> Index:
        records = enumerate(_RECORD.iter_unpack(self._records))
        return {key: self._location(number, *where) for number, (key, *where) in records}

    def among(self, keys: Container[bytes]) -> Index:
        """Return where those of these chunks lie that it names. Raises `ValueError` as `part_from_bytes`."""
        records = enumerate(_RECORD.iter_unpack(self._records))
        return {key: self._location(number, *where) for number, (key, *where) in records if key in keys}

    def with_bases(self, keys: Container[bytes]) -> Index:
        """Return where those of these chunks lie that it names, and before each delta its base. Raises as `among`."""
        found: Index = {}
        for number, (key, *where) in enumerate(_RECORD.iter_unpack(self._records)):
            if key not in keys:
                continue
            if (base := self._bases.get(number)) is not None:
                _, *of_base = _RECORD.unpack_from(self._records, base * _RECORD.size)
                found[self._key(base)] = self._location(base, *of_base)
            found[key] = self._location(number, *where)
        return found

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

    def _location(
        self, record: int, writer: bytes, number: int, offset: int, stored: int, size: int, codec: int
    ) -> Location:
        base = self._bases.get(record)
        if not plausible(codec, stored, size) or (base is None) == (codec in DELTAS):
            raise ValueError("a chunk in it has no chunk's size, or is a delta of none")
        return Location(_pack(writer, number), offset, stored, size, codec, b"" if base is None else self._key(base))


@lru_cache(maxsize=2)
def _index_of(raw: bytes) -> Index:
    """Return what `Part.index` does: a restore asks for the same one several times."""
    return Part(raw)._all()


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


def _taken_apart(raw: bytes) -> tuple[memoryview, dict[int, int]]:
    """Return the records in the bytes of a part, and of each delta's record the number of its base's.

    Raises `ValueError` where these are not the ones that were written.
    """
    body, seal = memoryview(raw)[:-_SEAL], raw[-_SEAL:]
    if digest(body) != seal:
        raise ValueError("it does not have the hash that it was written with")
    magic, rest = bytes(body[: len(MAGIC)]), body[len(MAGIC) :]
    size, deltas = len(rest), rest[:0]
    if magic == MAGIC_WITH_DELTAS and len(rest) >= _COUNT.size:
        (count,) = _COUNT.unpack_from(rest)
        rest = rest[_COUNT.size :]
        size = count * _RECORD.size
        rest, deltas = rest[:size], rest[size:]
    elif magic != MAGIC:
        raise ValueError("it is no part of an index")
    if len(rest) != size or size % _RECORD.size or len(deltas) % _DELTA.size:
        raise ValueError("it is not as long as it says")
    bases = dict(_DELTA.iter_unpack(deltas))
    if any(max(pair) >= size // _RECORD.size or pair[1] in bases for pair in bases.items()):
        raise ValueError("a delta in it has no base")
    return rest, bases


@lru_cache(maxsize=1024)  # chunks side by side mostly are in the same packs
def _pack(writer: bytes, number: int) -> str:
    return pack_name(writer.hex(), number)


def read_index(layout: Layout) -> Index:
    """Return the index as far as its parts can be read, without chunks whose pack is not there or too short.

    Raises `OSError`.
    """
    index: Index = {}
    sizes: dict[str, int] = {}
    for session in layout.parts():
        try:
            part = read_part(layout, session)
        except (FileNotFoundError, DamagedPart):
            continue  # it was deleted meanwhile; or nothing new is stored in reliance on it
        new = {at.pack for at in part.values()} - sizes.keys()
        sizes.update({**dict.fromkeys(new, 0), **sizes_of(layout, new)})
        merge(index, {key: at for key, at in part.items() if at.offset + at.stored <= sizes[at.pack]})
    return index


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
        merge(index, dict(entries(layout.packs / name)))
    return index
