"""Compress a chunk where that pays: a sample decides, so that weights and random bytes cost next to nothing.

A restore of GPU memory waits for decompression longer than for anything else: a processor decompresses 1.3 GB/s, and
hashes 6.5. Weights in bfloat16 would take 0.78 of their size, and come back half as fast.
"""

from __future__ import annotations

import threading

import zstandard

__all__ = [
    "DELTA",
    "DELTAS",
    "KNOWN",
    "OLD_DELTA",
    "RAW",
    "ZSTD",
    "Bytes",
    "compressor",
    "decode",
    "decompressor",
    "encode",
]

Bytes = bytes | bytearray | memoryview

RAW, ZSTD = 0, 1
KNOWN = (RAW, ZSTD)

OLD_DELTA, DELTA = 2, 3
DELTAS = (OLD_DELTA, DELTA)
"""Those of `store.delta`, which take another chunk; the other two are of chunks by themselves."""

_LEVEL = 1
_SLICE = 4096
_SLICES = 4
_PAYS = 0.75
"""The share of its size that a chunk, and its sample before it, may have after compression."""

_local = threading.local()


def encode(data: bytes | bytearray | memoryview) -> tuple[int, bytes | bytearray | memoryview]:
    """Return how a chunk is to be stored: the codec, and the bytes."""
    compress = compressor().compress
    if len(data) > 2 * _SLICES * _SLICE:
        step = len(data) // _SLICES
        sample = b"".join(bytes(data[at : at + _SLICE]) for at in range(0, step * _SLICES, step))
        if len(compress(sample)) > _PAYS * len(sample):
            return RAW, data
    packed = compress(data)
    return (ZSTD, packed) if len(packed) <= _PAYS * len(data) else (RAW, data)


def decode(codec: int, stored: Bytes, size: int, room: memoryview | None = None) -> Bytes:
    """Return the `size` bytes of a chunk; what was compressed comes to lie in `room`, where there is one of that size.

    Straight there is quicker by far where many threads decode: fresh memory has to be cleared for each chunk, and is
    copied with Python's lock held.

    Raises
    ------
    ValueError : these are not `size` bytes in that codec.
    """
    if codec == RAW:
        found: Bytes = stored
    elif codec == ZSTD:
        try:
            # Asked first: the library would make room for whatever size the frame claims.
            if zstandard.get_frame_parameters(stored).content_size != size:
                raise ValueError("its compressed size is not the chunk's")
            found = decompressor().decompress(stored) if room is None else _decompressed_into(room, stored)
        except zstandard.ZstdError as e:
            raise ValueError(str(e)) from e
    else:
        raise ValueError(f"codec {codec} is not known")
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes in place of {size}")
    return found


def _decompressed_into(room: memoryview, stored: Bytes) -> memoryview:
    """Fill `room`, and return what of it was filled."""
    done = 0
    with decompressor().stream_reader(stored) as reader:
        while done < len(room) and (got := reader.readinto(room[done:])):
            done += got
    return room if done == len(room) else room[:done]


# One for each thread: they are not to be shared, and making one costs more than compressing a page.


def compressor() -> zstandard.ZstdCompressor:
    """Return this thread's."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found
