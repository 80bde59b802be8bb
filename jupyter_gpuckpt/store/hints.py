"""Hints: in which parts of the index a chunk may be named, so that a save need not read all of them.

They are only a copy, and never believed: where a chunk lies is read in the part itself. So a hint that is old or
damaged costs at most that a chunk is stored twice, and the folder can be deleted at any time.

``hints/ID`` covers many parts: `MAGIC`, the number of parts and of entries (8 bytes each), the ids of the parts (16
bytes each), every 512th entry from the first on, and the entries, sorted. An entry (8 bytes, little-endian like the
numbers) is the first 44 bits of a chunk's hash, as its highest ones, and the number of the part, from 0.
"""

from __future__ import annotations

import os
import struct
import sys
import uuid
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from .durable import make_folder, write_new
from .index import DamagedPart, open_part
from .layout import Layout

__all__ = ["Hints", "all_hints"]

MAGIC = b"gpuckpt hints 1\n"
_HEAD = struct.Struct("<QQ")
_ID = 16
_ENTRY = 8
_BLOCK = 512
"""Entries between two of those that are held in memory: one page."""

_NUMBER_BITS = 20
_NUMBER = (1 << _NUMBER_BITS) - 1

_MOST = 2**21
"""Entries of one file: they are sorted in memory, which takes some 80 bytes for each."""

_MANY_PARTS = 64
_MANY_ENTRIES = 2**16
"""From so many new ones on they are written down; fewer are quickly read."""

_MOST_BLOCKS = 8
"""Blocks that are read for one chunk: enough for the newest thousands of the snapshots that have it."""


class Hints:
    """The hints for some parts, in a file or in memory."""

    def __init__(self, parts: Sequence[str], fences: array[int], count: int, read: Callable[[int, int], bytes]) -> None:
        """Take over what is known; `read` gives so many entries from one on, as they lie in the file."""
        self.parts = parts
        self._fences = fences
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    @classmethod
    def of(cls, parts: Sequence[str], entries: array[int]) -> Hints:
        """Return those with these sorted entries."""
        return cls(parts, entries[::_BLOCK], len(entries), lambda at, count: entries[at : at + count].tobytes())

    @classmethod
    def open(cls, path: Path) -> Hints | None:
        """Return those in a file; None where it has none. Raises `OSError`."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        file = _File(fd)
        head = os.pread(fd, len(MAGIC) + _HEAD.size, 0)
        if len(head) < len(MAGIC) + _HEAD.size or not head.startswith(MAGIC):
            return None
        parts, count = _HEAD.unpack_from(head, len(MAGIC))
        fences = -(-count // _BLOCK)
        begin = len(head) + parts * _ID + fences * _ENTRY
        if count > _MOST or parts > _NUMBER or os.fstat(fd).st_size != begin + count * _ENTRY:
            return None
        raw = os.pread(fd, begin - len(head), len(head))
        ids = [raw[at : at + _ID].hex() for at in range(0, parts * _ID, _ID)]
        return cls(ids, array("Q", raw[parts * _ID :]), count, lambda at, n: file.read(begin + at * _ENTRY, n * _ENTRY))

    def parts_with(self, key: bytes) -> Iterator[str]:
        """Yield the parts that may name a chunk. Raises `OSError`."""
        low = int.from_bytes(key[:8], "big") & ~_NUMBER
        first = max(bisect_left(self._fences, low) - 1, 0)
        end = bisect_right(self._fences, low | _NUMBER)
        first = max(first, end - _MOST_BLOCKS)
        block = array("Q", self._read(first * _BLOCK, min((end - first) * _BLOCK, self._count - first * _BLOCK)))
        for at in range(bisect_right(block, low | _NUMBER) - 1, -1, -1):
            if block[at] < low:
                return
            number = block[at] & _NUMBER
            if number < len(self.parts):
                yield self.parts[number]

    def entries(self) -> array[int]:
        """Return all entries. Raises `OSError`."""
        return array("Q", self._read(0, self._count))

    def write(self, path: Path) -> None:
        """Put them into a file. Raises `OSError`."""
        ids = b"".join(map(bytes.fromhex, self.parts))
        head = MAGIC + _HEAD.pack(len(self.parts), self._count) + ids + self._fences.tobytes()
        draft = path.with_name(f"{path.name}.tmp")
        write_new(draft, head + self._read(0, self._count))
        draft.rename(path)


class _File:
    """An open file that is closed with the last who uses it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, size: int) -> bytes:
        found = os.pread(self._fd, size, offset)
        return found[: len(found) - len(found) % _ENTRY]

    def __del__(self) -> None:
        os.close(self._fd)


def all_hints(layout: Layout) -> tuple[set[str], list[Hints]]:
    """Return the parts of the index that are there, and hints for all of them, the newest first. Raises `OSError`."""
    live = layout.parts()
    known: dict[Path, Hints] = {}
    if sys.byteorder == "little":
        known = _known(layout)
    covered = {part for hints in known.values() for part in hints.parts}
    fresh = list(_gathered(layout, sorted(live - covered)))
    if sum(len(hints.parts) for hints in fresh) >= _MANY_PARTS or sum(map(len, fresh)) >= _MANY_ENTRIES:
        with suppress(OSError):  # a disk that is full or cannot be written
            return live, _written(layout, live, fresh, known)
    return live, [*fresh, *_by_size(known.values())]


def _by_size(hints: Iterable[Hints]) -> list[Hints]:
    """Return the smallest first: they are of the newest parts."""
    return sorted(hints, key=len)


def _known(layout: Layout) -> dict[Path, Hints]:
    known = {}
    for path in layout.hinted():
        with suppress(OSError):  # deleted meanwhile, or unreadable
            hints = Hints.open(path)
            if hints is not None:
                known[path] = hints
    return known


def _gathered(layout: Layout, parts: Iterable[str]) -> Iterator[Hints]:
    """Read the keys of these parts. Raises `OSError`."""
    numbered: list[str] = []
    entries: list[int] = []
    for part in parts:
        try:
            keys = open_part(layout, part).first_bits()
        except (OSError, DamagedPart):
            continue  # it was deleted meanwhile; or nothing new is stored in reliance on it
        if numbered and (len(entries) + len(keys) > _MOST or len(numbered) == _NUMBER):
            yield Hints.of(numbered, _sorted(entries))
            numbered, entries = [], []
        number = len(numbered)
        numbered.append(part)
        entries += [bits & ~_NUMBER | number for bits in keys]
    if numbered:
        yield Hints.of(numbered, _sorted(entries))


def _sorted(entries: list[int]) -> array[int]:
    entries.sort()
    return array("Q", entries)


def _written(layout: Layout, live: Collection[str], fresh: Sequence[Hints], known: dict[Path, Hints]) -> list[Hints]:
    """Write new hints, together with those of smaller files; return all that there are then. Raises `OSError`.

    Each time the files grow, so that an entry is written again only as often as the store has doubled.
    """
    make_folder(layout.hints)
    *whole, last = fresh
    left = dict(known)
    merged = [last]
    total = len(last)
    for path, hints in sorted(known.items(), key=lambda item: len(item[1])):
        alive = sum(part in live for part in hints.parts) / max(len(hints.parts), 1)
        stay = int(alive * len(hints))
        if total + stay <= _MOST and (len(hints) <= 2 * total or alive < 0.5):
            merged.append(hints)
            total += stay
            del left[path]
    written = [*whole, _merged(merged, live)]
    files = [layout.hints / uuid.uuid4().hex for _ in written]
    for path, hints in zip(files, written, strict=True):
        hints.write(path)
    for path in layout.hinted() - left.keys() - set(files):
        path.unlink(missing_ok=True)  # merged, or damaged; another's that is new is gathered again
    return [*written[::-1], *_by_size(left.values())]


def _merged(many: Sequence[Hints], live: Collection[str]) -> Hints:
    """Return hints for all parts of these that are there. Raises `OSError`."""
    numbers: dict[str, int] = {}
    entries: list[int] = []
    for hints in reversed(many):  # the newest get the highest numbers, and so are looked at first
        fresh = [part in live and part not in numbers for part in hints.parts]
        for part, is_new in zip(hints.parts, fresh, strict=True):
            if is_new:
                numbers[part] = len(numbers)
        new = {old: numbers[part] for old, part in enumerate(hints.parts) if fresh[old]}
        entries += [e & ~_NUMBER | new[e & _NUMBER] for e in hints.entries() if e & _NUMBER in new]
    return Hints.of(list(numbers), _sorted(entries))
