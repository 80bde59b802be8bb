"""Packs: files that hold many chunks, each behind a header that says what it is.

A pack is `MAGIC`, then entries without gaps: a header (``magic, codec, stored size, size, hash``: 4, 1 with 3 of
padding, 4, 4 and 32 bytes, little-endian) and the stored bytes, which begin with the hash of another chunk where they
are a delta. So the index can be made again from the packs. A pack is written once, by one session whose id its name
begins with, and never changed.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from . import delta
from .chunks import CHUNK, digest
from .codec import DELTAS, KNOWN, RAW, Bytes, decode
from .durable import FILE_MODE, start_writing, sync_folder, write_at
from .names import pack_name

__all__ = [
    "HEADER",
    "Location",
    "OpenPacks",
    "PackBuilder",
    "PackReader",
    "PackWriter",
    "entries",
    "forget_rooms",
    "plausible",
    "verified",
]

MAGIC = b"gpuckpt pack 2\n\0"
PACK = 64 * 1024 * 1024
"""How long a pack grows before the next is begun, in bytes."""

_STEP = 8 * 1024 * 1024
"""From so many bytes of a pack to the next the disk is told to begin."""

_ENTRY = struct.Struct("<4sB3xII32s")
_ENTRY_MAGIC = b"CHNK"
HEADER = _ENTRY.size
"""Bytes that a chunk takes in a pack beside those that are stored."""

_SMALL = 64 * 1024
"""Bytes up to which it takes longer to fill memory that is there than to have the library make room."""

_local = threading.local()


class Location(NamedTuple):
    """Where a chunk is stored: the pack's name, where its bytes begin there, how many they are, and what they are."""

    pack: str
    offset: int
    stored: int
    size: int
    codec: int
    base: bytes = b""
    """The hash of the chunk that it is a delta of, which is none; empty where it is stored by itself."""

    @property
    def taken(self) -> int:
        """Bytes that it takes in its pack, its header included."""
        return HEADER + self.stored


@dataclass
class _Open:
    """A pack that is being written."""

    name: str
    fd: int
    end: int = len(MAGIC)
    writing: int = 0
    """Threads that write in it now."""
    full: bool = False
    begun: int = 0
    """Up to where the disk was told to write."""


@dataclass
class PackWriter:
    """The packs of one session; many threads may `put` at the same time."""

    folder: Path
    session: str
    room: int | None = None
    """How many bytes may be put; None where there is no limit but the disk's."""
    placed: dict[bytes, Location] = field(default_factory=dict)
    """The chunks that were put, by hash."""
    _current: _Open | None = None
    _open: list[_Open] = field(default_factory=list)
    """All that are not finished: also a full one that a thread could not write into."""
    _packs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: bytes, size: int, codec: int, stored: bytes | bytearray | memoryview) -> None:
        """Store a chunk of `size` bytes, encoded as `stored`. Raises `OSError`, EDQUOT where there is no room."""
        header = _ENTRY.pack(_ENTRY_MAGIC, codec, len(stored), size, key)
        with self._lock:
            if self.room is not None:
                self.room -= len(header) + len(stored)
                if self.room < 0:
                    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            pack = self._current or self._begin()
            at = pack.end
            pack.end += len(header) + len(stored)
            pack.writing += 1
            if pack.end >= PACK:
                pack.full, self._current = True, None
            begun = pack.begun
            if at - begun >= _STEP:
                pack.begun = at
        try:
            write_at(pack.fd, at, header, stored)
            if at - begun >= _STEP:
                start_writing(pack.fd, begun, at - begun)
        finally:
            with self._lock:
                pack.writing -= 1
                done = pack.full and pack.writing == 0
        if done:
            self._end(pack)
        with self._lock:
            self.placed[key] = _location(pack.name, at + len(header), len(stored), size, codec, stored)

    def _begin(self) -> _Open:
        self._packs += 1
        name = pack_name(self.session, self._packs)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(self.folder / name, flags, FILE_MODE)
        self._current = _Open(name, fd)
        self._open.append(self._current)
        os.fchmod(fd, FILE_MODE)
        write_at(fd, 0, MAGIC)
        return self._current

    def _end(self, pack: _Open) -> None:
        try:
            os.fsync(pack.fd)
        finally:
            with self._lock:
                self._open.remove(pack)
            os.close(pack.fd)

    def finish(self) -> None:
        """Have everything that was put on the disk; called once, when no thread puts any more. Raises `OSError`."""
        if self._current is not None:
            self._end(self._current)
            self._current = None
        if self._packs:
            sync_folder(self.folder)

    def close(self) -> None:
        """Let go of packs that are not finished, when no thread puts any more; harmless after `finish`."""
        while self._open:
            os.close(self._open.pop().fd)
        self._current = None


class PackBuilder:
    """A pack in memory, to be sent elsewhere."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.name = pack_name(session, 1)
        self.content = bytearray(MAGIC)
        self.placed: dict[bytes, Location] = {}

    def put(self, key: bytes, at: Location, stored: Bytes) -> None:
        """Add a chunk that lies elsewhere as `at` says."""
        self.content += _ENTRY.pack(_ENTRY_MAGIC, at.codec, at.stored, at.size, key)
        self.placed[key] = at._replace(pack=self.name, offset=len(self.content))
        self.content += stored


class PackReader:
    """Reads chunks, each of them verified; many threads may read at the same time."""

    def __init__(self, folder: Path, index: Mapping[bytes, Location] = MappingProxyType({})) -> None:
        """Read from the packs in `folder`; `index` says where the chunks are that others are deltas of."""
        self._folder = folder
        self._index = index

    def read(self, key: bytes, at: Location, packs: OpenPacks | None = None) -> Bytes:
        """Return the bytes of a chunk, good until this thread reads the next.

        A read that fails, or gives other bytes, is tried once more, from the disk: a read may fail once, and a wrong
        byte may be one in memory only.

        Raises
        ------
        OSError : it cannot be read.
        ValueError : these are not the bytes that were stored; the text says how.
        """
        return self._read_twice(key, at, packs)[1]

    def read_into(self, room: memoryview, key: bytes, at: Location, packs: OpenPacks, *, verify: bool = True) -> Bytes:
        """Read a chunk straight into `room`, which has its size, and return it. Raises as `read`.

        What somebody else will `verify` is not hashed, unless it is a delta.
        """
        return self._read_twice(key, at, packs, room, verify=verify)[1]

    def opened(self) -> OpenPacks:
        """Return a context in which packs are opened once, for one thread."""
        return OpenPacks(self._folder)

    def stored(self, key: bytes, at: Location) -> Bytes:
        """Return the bytes of a chunk as they are stored; they are verified, and good until the next. As `read`."""
        return self._read_twice(key, at)[0]

    def _read_twice(
        self,
        key: bytes,
        at: Location,
        packs: OpenPacks | None = None,
        room: memoryview | None = None,
        *,
        verify: bool = True,
    ) -> tuple[Bytes, Bytes]:
        with nullcontext(packs) if packs is not None else self.opened() as opened:
            try:
                return self._read(opened, key, at, room, fresh=False, verify=verify)
            except (OSError, ValueError):
                return self._read(opened, key, at, room, fresh=True, verify=verify)

    def _read(
        self, packs: OpenPacks, key: bytes, at: Location, room: memoryview | None, *, fresh: bool, verify: bool
    ) -> tuple[Bytes, Bytes]:
        """Return a chunk as it is stored, and its bytes, which are in `room` where there is one."""
        if at.codec not in DELTAS:
            return _read(packs, key, at, room, fresh=fresh, verify=verify)
        where = self._index.get(at.base)
        if where is None or where.codec in DELTAS:
            raise ValueError(f"{_named(at.base)} is not in the packs")
        try:
            base = _read(packs, at.base, where, None, fresh=fresh, of="base")[1]
        except (OSError, ValueError) as e:
            raise ValueError(f"{_named(at.base)}, in pack {where.pack}, cannot be used: {e}") from e
        stored = _stored(packs, at, _buffer("stored", at.stored), fresh=fresh)
        if delta.base_of(stored) != at.base:
            raise ValueError("it is a delta of another chunk than the index says")
        data = delta.apply(at.codec, stored, base, _buffer("decoded", at.size) if room is None else room)
        if digest(data) != key:
            raise ValueError("its bytes do not have the hash of those that were saved")
        return stored, data


def _named(base: bytes) -> str:
    return f"the chunk {base.hex()[:16]} that it is a delta of"


class OpenPacks:
    """Packs that stay open once they have been read from, until the context ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}

    def open(self, name: str) -> int:
        """Return the descriptor of a pack. Raises `OSError`."""
        if name not in self._fds:
            self._fds[name] = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        return self._fds[name]

    def __enter__(self) -> OpenPacks:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _read(
    packs: OpenPacks,
    key: bytes,
    at: Location,
    room: memoryview | None,
    *,
    fresh: bool,
    of: Literal["decoded", "base"] = "decoded",
    verify: bool = True,
) -> tuple[Bytes, Bytes]:
    """Return a chunk that is stored by itself, as it is stored, and its bytes, which are in `room` where there is one.

    Where there is none they are in this thread's room for what is `of` that kind, or in fresh memory.
    """
    if room is None and (at.codec == RAW or at.size > _SMALL):
        room = _buffer(of, at.size)
    stored = _stored(
        packs, at, room if room is not None and at.codec == RAW else _buffer("stored", at.stored), fresh=fresh
    )
    return stored, (
        verified(key, at.codec, stored, at.size, room) if verify else decode(at.codec, stored, at.size, room)
    )


def _stored(packs: OpenPacks, at: Location, room: memoryview, *, fresh: bool) -> memoryview:
    """Fill `room` with a chunk as it is stored, and return it."""
    fd = packs.open(at.pack)
    if fresh:
        os.posix_fadvise(fd, at.offset, at.stored, os.POSIX_FADV_DONTNEED)
    if os.preadv(fd, [room], at.offset) != at.stored:
        raise ValueError("the pack ends before its end")
    return room


def verified(key: bytes, codec: int, stored: Bytes, size: int, room: memoryview | None = None) -> Bytes:
    """Return the bytes of a chunk that is stored as `stored`; in `room`, where they are decompressed to there.

    Raises
    ------
    ValueError : they are not those of the chunk `key`.
    """
    data = decode(codec, stored, size, room)
    if digest(data) != key:
        raise ValueError("its bytes do not have the hash of those that were saved")
    return data


def _buffer(of: Literal["stored", "decoded", "base"], size: int) -> memoryview:
    """Return this thread's room for `size` bytes, always the same for a chunk: fresh memory costs more than hashing it.

    Where many threads read, it costs more than all else: each time all of them wait for the map of their memory.
    """
    if size > CHUNK:
        return memoryview(bytearray(size))
    if not hasattr(_local, of):
        setattr(_local, of, memoryview(bytearray(CHUNK)))
    found: memoryview = getattr(_local, of)
    return found[:size]


def forget_rooms() -> None:
    """Give up this thread's rooms: it may live for long, and seldom reads."""
    _local.__dict__.clear()


def entries(path: Path) -> Iterator[tuple[bytes, Location]]:
    """Yield the chunks of a pack by its own headers, up to the first that is none.

    The bytes behind the headers are not looked at. Raises `OSError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        end = os.fstat(fd).st_size
        if os.pread(fd, len(MAGIC), 0) != MAGIC:
            return
        at = len(MAGIC)
        while len(header := os.pread(fd, _ENTRY.size, at)) == _ENTRY.size:
            magic, codec, stored, size, key = _ENTRY.unpack(header)
            at += _ENTRY.size
            if magic != _ENTRY_MAGIC or not plausible(codec, stored, size) or at + stored > end:
                return
            begin = os.pread(fd, delta.LEAST, at) if codec in DELTAS else b""
            yield key, _location(path.name, at, stored, size, codec, begin)
            at += stored
    finally:
        os.close(fd)


def plausible(codec: int, stored: int, size: int) -> bool:
    """Tell whether a chunk can have these sizes."""
    if not 0 < size <= CHUNK:
        return False
    if codec in DELTAS:
        return delta.LEAST <= stored < size
    return codec in KNOWN and (stored == size if codec == RAW else 0 < stored < size)


def _location(pack: str, offset: int, stored: int, size: int, codec: int, begin: Bytes) -> Location:
    """Return the location of a chunk of which the stored bytes begin so."""
    return Location(pack, offset, stored, size, codec, delta.base_of(begin) if codec in DELTAS else b"")
