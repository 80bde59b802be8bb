"""Deltas: a chunk stored as what of it differs from another one, its base, which is stored by itself.

A delta is the hash of its base, a bit for each block of 512 bytes of the chunk, the first block's the lowest of the
first byte, and a frame of zstd with the blocks whose bit is set, one behind the other. All other blocks are the base's.
Up to 64 KiB of blocks are combined with those of the base at the same places by exclusive or. Of more, these are the
dictionary of the frame, which has no header.

Few are combined since the library makes a dictionary's tables in fresh memory each time. Python combines them as whole
numbers, and holds its lock meanwhile: for 4 ms of 1 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import zstandard

from .codec import Bytes, compressor, decompressor

__all__ = ["LEAST", "apply", "base_of", "make"]

_BLOCK = 512
"""Pages are eight times as much to look at: what a program changes is a few bytes here and there."""
_PAGE = 4096
"""Bytes that are compared at once."""
_COMBINED = 64 * 1024
_HASH = 32
LEAST = _HASH + 2
"""Bytes that no delta has fewer than: its base's hash, bits, and something of a frame."""


def make(data: Bytes, key: bytes, base: Bytes) -> bytes:
    """Return the delta from a base, which has the hash `key`, to a chunk."""
    data, base = bytes(data), bytes(base)
    places: list[int] = []
    for page in range(0, len(data), _PAGE):
        if data[page : page + _PAGE] != base[page : page + _PAGE]:
            blocks = range(page, min(page + _PAGE, len(data)), _BLOCK)
            places += [at for at in blocks if data[at : at + _BLOCK] != base[at : at + _BLOCK]]
    new, old = _blocks(data, places), _blocks(base[: len(data)], places)
    bits = bytearray(_bytes_of_bits(len(data)))
    for at in places:
        bits[at // _BLOCK // 8] |= 1 << at // _BLOCK % 8
    if len(new) <= _COMBINED:
        frame = compressor().compress(_combined(new, old))
    else:
        parameters = _parameters((len(old) + len(new)).bit_length())
        frame = zstandard.ZstdCompressor(dict_data=_dictionary(old), compression_params=parameters).compress(new)
    return b"".join((key, bits, frame))


def _blocks(data: Bytes, places: Sequence[int]) -> bytes:
    if len(places) * _BLOCK >= len(data):
        return bytes(data)  # where all has changed, that takes a tenth of the time
    return b"".join([data[at : at + _BLOCK] for at in places])


def _combined(data: Bytes, other: Bytes) -> bytes:
    """Return the exclusive or of both, of which the second one is not longer."""
    return (int.from_bytes(data, "little") ^ int.from_bytes(other, "little")).to_bytes(len(data), "little")


@lru_cache
def _parameters(bits: int) -> zstandard.ZstdCompressionParameters:
    """Return those with which a dictionary and a content, together of fewer than 2**bits bytes, are seen as a whole."""
    log = min(max(bits, 10), 22)
    return zstandard.ZstdCompressionParameters.from_level(1, window_log=log, hash_log=min(log - 3, 20))


def _dictionary(raw: bytes) -> zstandard.ZstdCompressionDict | None:
    # The library takes fewer than 8 bytes for none, and refuses them.
    return zstandard.ZstdCompressionDict(raw, zstandard.DICT_TYPE_RAWCONTENT) if len(raw) >= _BLOCK else None


def base_of(stored: Bytes) -> bytes:
    """Return the hash of a delta's base."""
    return bytes(stored[:_HASH])


def apply(stored: Bytes, base: Bytes, room: memoryview) -> memoryview:
    """Fill `room` with the chunk of its size that a delta makes of its base, and return it.

    Raises
    ------
    ValueError : it is no delta of a chunk of this size.
    """
    size, begin = len(room), _HASH + _bytes_of_bits(len(room))
    bits = bytes(stored[_HASH:begin])
    if len(bits) != begin - _HASH:
        raise ValueError("it ends before its end")
    places = [at for number, at in enumerate(range(0, size, _BLOCK)) if bits[number // 8] >> number % 8 & 1]
    upto = min(size, len(base))
    room[:upto] = base[:upto]
    new = _frame(stored[begin:], _blocks(room[:upto], places), sum(min(_BLOCK, size - at) for at in places))
    done = 0
    for at in places:
        end = min(at + _BLOCK, size)
        room[at:end] = new[done : done + end - at]
        done += end - at
    return room


def _frame(frame: Bytes, old: bytes, size: int) -> memoryview:
    try:
        # Asked first: the library would make room for whatever size the frame claims.
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise ValueError("its compressed size is not that of its blocks")
        combined = size <= _COMBINED
        undone = decompressor() if combined else zstandard.ZstdDecompressor(dict_data=_dictionary(old))
        new = undone.decompress(frame)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from e
    if len(new) != size:
        raise ValueError("it has not as many bytes as its frame claims")
    return memoryview(_combined(new, old) if combined else new)


def _bytes_of_bits(size: int) -> int:
    return -(-size // (_BLOCK * 8))
