"""What a chunk is: at most 2 MiB of a file, known by the BLAKE3 of its bytes; one of zeros is kept as nothing."""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

__all__ = ["CHUNK", "HASH_OF_ZEROS", "HOLE", "Changed", "Chunk", "chunk_of", "digest", "equal_pieces", "is_zero"]

CHUNK = 2 * 1024 * 1024
"""The most that a chunk holds, in bytes."""

HOLE = bytes(32)
"""What stands in place of a hash for a run of zeros, of any length. No chunk has this hash."""

_ZEROS = bytes(CHUNK)
HASH_OF_ZEROS = blake3(_ZEROS).digest()
"""What a chunk of `CHUNK` zeros would have, if it were not kept as nothing."""

_SAMPLED = 32_749
"""One byte in so many is looked at before all of them are."""

_PAGE = 4096
_FEWEST = 64
"""Pages that a chunk has at least when it is cut by content: 256 KiB."""

_LOOKED_AT = range(17, _PAGE, 538)
_LOOK = b"\x5a"
"""A page begins a chunk where these of its bytes make this: one in 256 of random ones, and none of zeros."""


class Chunk(NamedTuple):
    """A part of a file: the hash of its bytes, or `HOLE`; and how many they are."""

    hash: bytes
    size: int


class Changed(NamedTuple):
    """A part of a file, of at most `CHUNK` bytes: how many they are, and the hash of the chunk that was there before.

    That is no hole, and part of it may be the same.
    """

    size: int
    before: bytes


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32 bytes by which these are known."""
    return blake3(data).digest()


def chunk_of(key: bytes) -> Chunk:
    """Return the chunk of `CHUNK` bytes that have this hash."""
    return Chunk(HOLE if key == HASH_OF_ZEROS else key, CHUNK)


def is_zero(data: bytes | bytearray | memoryview) -> bool:
    """Tell whether at most `CHUNK` bytes are all zero."""
    if data[:1] != b"\0":  # nearly always enough
        return not data
    if any(data[::_SAMPLED]):  # nearly always enough for the others
        return False
    if len(data) == CHUNK:  # a hash is made without Python's lock, which is held while bytes are compared
        return digest(data) == HASH_OF_ZEROS
    # As bytes: a memoryview is compared one by one.
    return bytes(data) == _ZEROS[: len(data)]


def first_cut(data: memoryview) -> int:
    """Return where the first chunk of these bytes of memory ends: before a page that looks in a certain way.

    So a chunk that begins with the same page as one before ends with the same page, too, wherever the two are; and
    where pages were changed, the chunks are the same again from the first cut behind them on.
    """
    pages = len(data) // _PAGE
    if len(data) % _PAGE or pages <= _FEWEST:
        return len(data)
    looks = 0
    for offset in _LOOKED_AT:
        looks ^= int.from_bytes(data[offset::_PAGE], "little")
    at = looks.to_bytes(pages, "little").find(_LOOK, _FEWEST)
    return at * _PAGE if at > 0 else len(data)


def equal_pieces(size: int) -> list[int]:
    """Return the sizes of the pieces that a file of `size` bytes is cut into where nothing is known of it."""
    whole, rest = divmod(size, CHUNK)
    return [CHUNK] * whole + ([rest] if rest else [])
