"""In which blocks of 512 bytes two chunks of a size differ, and how: the exclusive or of both.

A library computes it (`blocks.c`), where Python would hold its lock for milliseconds; Python does where there was no C
compiler to build that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

__all__ = ["BLOCK", "apply", "bits_of", "made", "of_blocks", "places"]

BLOCK = 512
"""Pages are eight times as much to look at: what a program changes is a few bytes here and there."""
_PAGE = 4096
"""Bytes that Python compares at once."""
_SMALL = 64 * 1024
"""Bytes up to which it takes longer to give Python's lock up and get it again than to do the work."""


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Return the library twice: as one whose functions are called with Python's lock, and without; None without it."""
    path = str(Path(__file__).with_name("libgpuckpt-blocks.so"))
    try:
        both = ctypes.PyDLL(path), ctypes.CDLL(path)
    except OSError:
        return None
    for one in both:
        one.gpuckpt_difference.argtypes = [*[ctypes.c_char_p] * 2, ctypes.c_size_t, *[ctypes.c_void_p] * 2]
        one.gpuckpt_difference.restype = ctypes.c_size_t
        one.gpuckpt_differ.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_char_p] * 2]
        one.gpuckpt_differ.restype = None
    return both


_built = _libraries()


def bits_of(size: int) -> int:
    """Return how many bytes the bits of a chunk of `size` bytes take, one for each block."""
    return -(-size // (BLOCK * 8))


def places(bits: bytes, size: int) -> Iterator[int]:
    """Yield where those blocks begin whose bit is set; the first block's is the lowest of the first byte."""
    return (at for number, at in enumerate(range(0, size, BLOCK)) if bits[number // 8] >> number % 8 & 1)


def of_blocks(bits: bytes, size: int) -> int:
    """Return how many bytes those blocks have."""
    blocks = -(-size // BLOCK)
    is_set = int.from_bytes(bits, "little") & ((1 << blocks) - 1)
    return is_set.bit_count() * BLOCK - (blocks * BLOCK - size if is_set >> blocks - 1 else 0)


def made(chunk: bytes, other: bytes) -> tuple[bytes, memoryview]:
    """Return the bits of the blocks that differ, and the exclusive or of these, one behind the other."""
    size = len(chunk)
    assert len(other) == size
    if _built is None:
        return _made_by_python(chunk, other)
    bits, difference = bytearray(bits_of(size)), bytearray(size)
    done = _built[size > _SMALL].gpuckpt_difference(chunk, other, size, _address(bits), _address(difference))
    return bytes(bits), memoryview(difference)[:done]


def apply(bits: bytes, difference: bytes, chunk: memoryview) -> None:
    """Make one chunk of the other, by what `made` has returned of them.

    Raises
    ------
    ValueError : these are not the bits of a chunk of this size, or there are not as many bytes as in their blocks.
    """
    size = len(chunk)
    if len(bits) != bits_of(size) or len(difference) != of_blocks(bits, size):
        raise ValueError("it has not as many bytes as its blocks")
    if _built is None:
        _apply_by_python(bits, difference, chunk)
    else:
        _built[size > _SMALL].gpuckpt_differ(_address(chunk), size, bits, difference)


def _address(room: bytearray | memoryview) -> object:
    return ctypes.byref(ctypes.c_char.from_buffer(room))  # an array's type would be made anew for each size


def _made_by_python(chunk: bytes, other: bytes) -> tuple[bytes, memoryview]:
    size = len(chunk)
    bits, found = bytearray(bits_of(size)), bytearray()
    for page in range(0, size, _PAGE):
        if chunk[page : page + _PAGE] != other[page : page + _PAGE]:
            for at in range(page, min(page + _PAGE, size), BLOCK):
                if chunk[at : at + BLOCK] != other[at : at + BLOCK]:
                    bits[at // BLOCK // 8] |= 1 << at // BLOCK % 8
                    found += _combined(chunk[at : at + BLOCK], other[at : at + BLOCK])
    return bytes(bits), memoryview(found)


def _apply_by_python(bits: bytes, difference: bytes, chunk: memoryview) -> None:
    done = 0
    for at in places(bits, len(chunk)):
        block = chunk[at : at + BLOCK]
        block[:] = _combined(bytes(block), difference[done : done + len(block)])
        done += len(block)


def _combined(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")
