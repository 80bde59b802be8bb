"""The contents of a snapshot: its files, each as the chunks that it is made of.

On disk (``contents/ID``) it is `MAGIC`, one line of JSON ``{"files": [[path, size, chunks], …]}``, and the records of
all chunks in the files' order: 32 bytes of hash and 8 of size, little-endian. Its hash stands in the manifest.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .chunks import CHUNK, HASH_OF_ZEROS, HOLE, Chunk, digest, is_zero
from .names import is_plain_path

__all__ = ["MAX_SIZE", "Contents"]

MAGIC = b"gpuckpt contents 2\n"
MAX_SIZE = 2**30
"""How long it may be, in bytes: enough for 50 TiB."""

MAX_TOTAL = 2**50
"""How many bytes all files may have together, holes included: more than any machine has."""

_RECORD = struct.Struct("<32sQ")
_MAX_HEAD = 64 * 1024 * 1024


@dataclass(frozen=True)
class Contents:
    """The files of a snapshot by path, each as its chunks in order."""

    files: Mapping[str, Sequence[Chunk]]

    @property
    def size(self) -> int:
        """Bytes of all files together, holes included."""
        return sum(map(self.size_of, self.files))

    def size_of(self, path: str) -> int:
        """Return the size of a file, in bytes."""
        return sum(chunk.size for chunk in self.files[path])

    def data_of(self, path: str) -> list[tuple[int, int]]:
        """Return where a file has bytes that are not zero, as far as whole chunks tell: from where to where each."""
        found: list[tuple[int, int]] = []
        at = 0
        for chunk in self.files[path]:
            if chunk.hash != HOLE and found and found[-1][1] == at:
                found[-1] = (found[-1][0], at + chunk.size)
            elif chunk.hash != HOLE:
                found.append((at, at + chunk.size))
            at += chunk.size
        return found

    def hashes_of(self, path: str) -> bytes:
        """Return the hashes of the pieces of `CHUNK` bytes of a file, one after the other.

        Those of a piece that is no chunk, since the file is cut otherwise there, are 32 zero bytes.
        """
        pieces = [bytes(len(HOLE))] * -(-self.size_of(path) // CHUNK)
        at = 0
        for chunk in self.files[path]:
            if at % CHUNK == 0 and chunk.size % CHUNK == 0 and (chunk.hash == HOLE or chunk.size == CHUNK):
                key = HASH_OF_ZEROS if chunk.hash == HOLE else chunk.hash
                pieces[at // CHUNK : (at + chunk.size) // CHUNK] = [key] * (chunk.size // CHUNK)
            at += chunk.size
        return b"".join(pieces)

    def are_in(self, path: str, file: Path) -> bool:
        """Tell whether a file on the disk has the bytes of the file `path`. Raises `OSError`."""
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.fstat(fd).st_size == self.size_of(path) and _same(fd, self.files[path])
        finally:
            os.close(fd)

    def chunks(self) -> Iterator[Chunk]:
        """Yield every chunk that has to be stored, those that occur twice each time."""
        return (c for chunks in self.files.values() for c in chunks if c.hash != HOLE)

    def to_bytes(self) -> bytes:
        """Return the bytes to write."""
        files = [[path, self.size_of(path), len(chunks)] for path, chunks in sorted(self.files.items())]
        head = json.dumps({"files": files}, separators=(",", ":")).encode("ascii")
        records = b"".join(_RECORD.pack(c.hash, c.size) for _, chunks in sorted(self.files.items()) for c in chunks)
        return MAGIC + head + b"\n" + records

    @staticmethod
    def from_bytes(raw: bytes) -> Contents:
        """Return the contents that `raw` is.

        Raises
        ------
        ValueError : it is none; the text says why.
        """
        if not raw.startswith(MAGIC):
            raise ValueError("it does not begin with the expected line")
        end = raw.find(b"\n", len(MAGIC), len(MAGIC) + _MAX_HEAD)
        if end < 0:
            raise ValueError("its list of files has no end")
        records = memoryview(raw)[end + 1 :]
        if len(records) % _RECORD.size:
            raise ValueError("its last record is cut")
        chunks = itertools.starmap(Chunk, _RECORD.iter_unpack(records))
        files: dict[str, Sequence[Chunk]] = {}
        total = 0
        for path, size, count in _head(raw[len(MAGIC) : end]):
            if path in files:
                raise ValueError(f"{path[:200]!a} is there twice")
            total += size
            if total > MAX_TOTAL:
                raise ValueError(f"its files have more than {MAX_TOTAL:,} bytes together")
            own = list(itertools.islice(chunks, count))
            if len(own) != count or sum(c.size for c in own) != size:
                raise ValueError(f"the chunks of {path[:200]!a} do not make up the file")
            if not all(c.size > 0 and (c.hash == HOLE or c.size <= CHUNK) for c in own):
                raise ValueError(f"a chunk of {path[:200]!a} has no chunk's size")
            files[path] = own
        if next(chunks, None) is not None:
            raise ValueError("it has chunks that belong to no file")
        _refuse_nested(files)
        return Contents(files)


def _same(fd: int, chunks: Sequence[Chunk]) -> bool:
    offset = 0
    for chunk in chunks:
        if chunk.hash == HOLE:
            steps = range(offset, offset + chunk.size, CHUNK)
            end = offset + chunk.size
            if not all(is_zero(os.pread(fd, min(CHUNK, end - at), at)) for at in steps):
                return False
        elif digest(os.pread(fd, chunk.size, offset)) != chunk.hash:
            return False
        offset += chunk.size
    return True


def _head(raw: bytes) -> Iterator[tuple[str, int, int]]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"its list of files is not JSON: {e}") from e
    if not isinstance(found, dict) or found.keys() != {"files"} or not isinstance(found["files"], list):
        raise ValueError("its list of files is none")
    for file in found["files"]:
        if not isinstance(file, list) or [type(member) for member in file] != [str, int, int]:
            raise ValueError("a file is not a path, a size and a number of chunks")
        path, size, count = file
        if not is_plain_path(path):
            raise ValueError(f"{path[:200]!a} is not a path inside the snapshot")
        if size < 0 or count < 0:
            raise ValueError(f"{path[:200]!a} has no size")
        yield path, size, count


def _refuse_nested(files: Mapping[str, object]) -> None:
    for path in files:
        parts = path.split("/")
        for length in range(1, len(parts)):
            if "/".join(parts[:length]) in files:
                raise ValueError(f"{path[:200]!a} lies in what is a file itself")
