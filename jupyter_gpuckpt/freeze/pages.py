"""Where the pages lie in CRIU's images of memory: ``pages-N.img`` holds them without gaps, a pagemap says which.

A pagemap is two magic numbers, then messages, each behind its 32-bit length: one that names N, then one for each run of
pages (CRIU's ``images/pagemap.proto``). There can be very many runs, and few fields matter, so that they are read here
without a protobuf library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import images

__all__ = ["LONG", "Area", "apart", "joined", "pagemap", "pieces", "placed", "windows"]

Area = tuple[int, int]
"""A run of pages: its first address, and its end."""

PAGE = 4096
LARGEST_WINDOW = 2 * 1024 * 1024
"""Pages are kept together with those of the same window of address space, of so many bytes at most."""
SMALLEST_WINDOW = 16 * 1024
_WINDOWS = 2048
"""So many windows an image has, about, where they are neither largest nor smallest: what a program changes lies all
over its memory, a few bytes here and there, and of a small kernel nearly all large windows would be changed."""
LONG = 2 * LARGEST_WINDOW
"""Bytes from which on a run of pages is long: an array of its own, which may be elsewhere in the next dump."""
_LARGEST_HEAP = 64 * 1024 * 1024
"""A heap of more bytes is cut as arrays are: it would make the windows of all other memory larger."""

_PAGES_ID = 1
_ADDRESS, _COUNT, _IN_PARENT, _FLAGS, _LONG_COUNT = 1, 2, 3, 4, 5  # CRIU before 4.2 has no long count
_PRESENT = 4
_VARINT = 0


def windows(image: Path) -> Sequence[int] | None:
    """Return the sizes (bytes) of the pieces of a ``pages-N.img`` that belong together.

    A long run of pages is one piece, however long, but for a heap's. Scattered ones make a piece with those of the same
    window of memory: so they are found again wherever they stand in another dump of the process. None for any other
    file, and where no pagemap explains it.
    """
    if not (image.name.startswith("pages-") and image.suffix == ".img"):
        return None
    number = image.stem.removeprefix("pages-")
    for pagemap in sorted(image.parent.glob("pagemap-*.img")):
        messages = _messages(pagemap.read_bytes())
        try:
            if str(next(messages, {}).get(_PAGES_ID)) == number:
                mm = pagemap.with_name(pagemap.name.replace("pagemap-", "mm-"))
                heaps = images.heaps(mm.read_bytes()) if mm.exists() else []
                runs = apart(joined(_runs(messages)), heaps)
                return [sum(end - begin for begin, end in piece) for piece in pieces(runs)]
        except (IndexError, struct.error):
            return None  # not as this version of CRIU writes it
    return None


def placed(pagemap: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """Return which ``pages-N.img`` a pagemap is of, and of each run of pages first address, end, and offset in it."""
    messages = _messages(pagemap)
    number = next(messages, {}).get(_PAGES_ID, 0)
    runs = []
    offset = 0
    for begin, end in joined(_runs(messages)):
        runs.append((begin, end, offset))
        offset += end - begin
    return number, runs


def pagemap(raw: bytes, runs: Iterable[tuple[int, int]]) -> bytes:
    """Return a pagemap with the head of another, in which these runs of pages (first address, end) are present."""
    (head,) = struct.unpack_from("<I", raw, 8)
    out = bytearray(raw[: 12 + head])
    for begin, end in runs:
        count = (end - begin) // PAGE
        fields = ((_ADDRESS, begin), (_COUNT, count), (_FLAGS, _PRESENT), (_LONG_COUNT, count))
        message = b"".join(_packed(number << 3 | _VARINT) + _packed(value) for number, value in fields)
        out += struct.pack("<I", len(message)) + message
    return bytes(out)


def _packed(value: int) -> bytes:
    """Return a whole number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pieces(runs: Iterable[Area]) -> list[tuple[Area, ...]]:
    """Return where the pieces of an image with these runs of pages, which are in order, are in memory.

    One that is longer than `LARGEST_WINDOW` is a long run; the others are small.
    """
    found: list[list[Area]] = []
    last = -1
    runs = list(runs)
    window_size = _window(sum(end - begin for begin, end in runs if end - begin < LONG))
    for begin, end in runs:
        if end - begin >= LONG:
            found.append([(begin, end)])
            last = -1
            continue
        at = begin
        while at < end:
            window = at // window_size
            upto = min(end, (window + 1) * window_size)
            if window == last:
                found[-1].append((at, upto))
            else:
                found.append([(at, upto)])
            at, last = upto, window
    return [tuple(piece) for piece in found]


def _window(scattered: int) -> int:
    """Return the size of the windows that so many bytes are cut into: a power of two, which seldom becomes another."""
    wanted = 1 << max(0, scattered // _WINDOWS - 1).bit_length()
    return min(max(wanted, SMALLEST_WINDOW), LARGEST_WINDOW)


def joined(runs: Iterable[Area]) -> list[Area]:
    """Return runs of pages, which are in order, with those side by side as one."""
    found: list[Area] = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        elif end > begin:
            found.append((begin, end))
    return found


def apart(runs: Iterable[Area], heaps: Sequence[Area]) -> list[Area]:
    """Return runs of pages with those of heaps in parts, none of which is long: they are cut into windows.

    A heap stays where it is, and what a program changes lies all over it: with large chunks it would be stored as a
    whole by each save.
    """
    if sum(end - begin for begin, end in heaps) > _LARGEST_HEAP:
        return list(runs)
    found: list[Area] = []
    for begin, end in runs:
        at = begin
        for first, last in heaps:
            inside = range(first + LARGEST_WINDOW - first % LARGEST_WINDOW, last, LARGEST_WINDOW)
            for cut in (first, *inside, last):
                if at < cut < end:
                    found.append((at, cut))
                    at = cut
        found.append((at, end))
    return found


def _runs(messages: Iterator[dict[int, int]]) -> Iterator[Area]:
    """Yield first address and end of each run of pages that are in the image."""
    for run in messages:
        present = run[_FLAGS] & _PRESENT if _FLAGS in run else not run.get(_IN_PARENT)
        if present:
            address = run.get(_ADDRESS, 0)
            yield address, address + (run.get(_LONG_COUNT) or run.get(_COUNT, 0)) * PAGE


def _messages(raw: bytes) -> Iterator[dict[int, int]]:
    """Yield each message as its whole-number fields."""
    at = 8
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        yield _fields(raw, at + 4, at + 4 + size)
        at += 4 + size


def _fields(raw: bytes, at: int, end: int) -> dict[int, int]:
    found: dict[int, int] = {}
    while at < end:
        tag, at = _varint(raw, at)
        if tag & 7 != _VARINT:
            raise IndexError("a field is no whole number")
        found[tag >> 3], at = _varint(raw, at)
    return found


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
