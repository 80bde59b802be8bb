"""What a chunk is: at most 2 MiB of a file, known by the BLAKE3 of its bytes; one of zeros is kept as nothing."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

__all__ = ["CHUNK", "HOLE", "Chunk", "digest", "equal_pieces", "is_zero"]

CHUNK = 2 * 1024 * 1024
"""The most that a chunk holds, in bytes."""

HOLE = bytes(32)
"""What stands in place of a hash for a run of zeros, of any length. No chunk has this hash."""

_ZEROS = bytes(CHUNK)


@dataclass(frozen=True)
class Chunk:
    """A part of a file: the hash of its bytes, or `HOLE`; and how many they are."""

    hash: bytes
    size: int


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32 bytes by which these are known."""
    return blake3(data).digest()


def is_zero(data: bytes | bytearray) -> bool:
    """Tell whether at most `CHUNK` bytes are all zero."""
    if data[:1] != b"\0":  # nearly always enough
        return not data
    return data == (_ZEROS if len(data) == CHUNK else _ZEROS[: len(data)])


def equal_pieces(size: int) -> list[int]:
    """Return the sizes of the pieces that a file of `size` bytes is cut into where nothing is known of it."""
    whole, rest = divmod(size, CHUNK)
    return [CHUNK] * whole + ([rest] if rest else [])
