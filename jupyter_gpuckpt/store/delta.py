"""Deltas: a chunk stored as what of it differs from another one, its base, which is stored by itself.

A delta is the hash of its base, a bit for each block of 512 bytes of the chunk, the first block's the lowest of the
first byte, and a frame of zstd with the blocks whose bit is set, one behind the other, combined with those of the base
at the same places by exclusive or; what the base lacks at its end is zeros. All other blocks are the base's.

Earlier versions made others, which are still read (`codec.OLD_DELTA`): of more than 64 KiB of blocks those of the base
are the dictionary of the frame, which has no header, and nothing is combined.
"""

from __future__ import annotations

import zstandard

from . import blocks
from .codec import OLD_DELTA, Bytes, compressor, decompressor

__all__ = ["LEAST", "apply", "base_of", "make"]

_COMBINED = 64 * 1024
"""Bytes of blocks that earlier versions combined, too."""
_HASH = 32
LEAST = _HASH + 2
"""Bytes that no delta has fewer than: its base's hash, bits, and something of a frame."""


def make(data: Bytes, key: bytes, base: Bytes) -> bytes:
    """Return the delta from a base, which has the hash `key`, to a chunk."""
    bits, combined = blocks.made(bytes(data), bytes(base[: len(data)]).ljust(len(data), b"\0"))
    return b"".join((key, bits, compressor().compress(combined)))


def base_of(stored: Bytes) -> bytes:
    """Return the hash of a delta's base."""
    return bytes(stored[:_HASH])


def apply(codec: int, stored: Bytes, base: Bytes, room: memoryview) -> memoryview:
    """Fill `room` with the chunk of its size that a delta makes of its base, and return it.

    Raises
    ------
    ValueError : it is no delta of a chunk of this size.
    """
    size, begin = len(room), _HASH + blocks.bits_of(len(room))
    bits, frame = bytes(stored[_HASH:begin]), stored[begin:]
    if len(bits) != blocks.bits_of(size):
        raise ValueError("it ends before its end")
    changed, upto = blocks.of_blocks(bits, size), min(size, len(base))
    room[:upto] = base[:upto]
    try:
        # Asked first: the library would make room for whatever size the frame claims.
        if zstandard.get_frame_parameters(frame).content_size != changed:
            raise ValueError("its compressed size is not that of its blocks")
        if codec == OLD_DELTA and changed > _COMBINED:
            _replace(bits, frame, base[:upto], room)
        else:
            room[upto:] = bytes(size - upto)
            blocks.apply(bits, decompressor().decompress(frame), room)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from e
    return room


def _replace(bits: bytes, frame: Bytes, base: Bytes, room: memoryview) -> None:
    """Put the blocks of a frame whose dictionary is the base's blocks into their places."""
    places = [(at, min(at + blocks.BLOCK, len(room))) for at in blocks.places(bits, len(room))]
    old = b"".join(bytes(base[begin:end]) for begin, end in places)
    # The library takes fewer than 8 bytes for none, and refuses them.
    dictionary = zstandard.ZstdCompressionDict(old, zstandard.DICT_TYPE_RAWCONTENT) if len(old) >= 512 else None
    new = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(frame)
    done = 0
    for begin, end in places:
        room[begin:end] = new[done : done + end - begin]
        done += end - begin
