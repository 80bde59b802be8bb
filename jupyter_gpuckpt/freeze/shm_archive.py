"""What lies in a kernel's /dev/shm, as the tar archive that a dump made of it (`shm_packer.c`, or tar itself).

tar unpacks it, but not the contents of large files: by one thread, and by way of its own memory, that takes longer than
all else. It is told that they are holes, and makes the files, with owners, modes and names. Several threads then copy
the contents.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ARCHIVE", "Large", "fill", "large_files", "pieces", "without"]

ARCHIVE = "shm.tar"

_RECORD = 512
_LARGE = 4 << 20
"""The size from which on a file is large, in bytes."""
_BLOCK = 4 << 20
"""So many bytes a thread copies at once."""
_OPEN = 128
"""How many files are open at once, at most."""
_COPIERS = 8
_MANY = 4
"""So many processors share out the copying of one file; with fewer it takes no less time, since each page of a file
that is mapped is cleared first."""
_READ = 1 << 20
_LONGEST_NAME = 1 << 16
_LARGEST_NUMBER = 1 << 60
_LARGEST_PIECE = 2 << 20

# In a header of the old GNU format (tar(5)).
_SIZE, _CHECKSUM, _TYPE, _MAGIC = slice(124, 136), slice(148, 156), 156, slice(257, 265)
_IS_EXTENDED, _FULL_SIZE, _IS_EXTENDED_FURTHER = 482, slice(483, 495), 504
_PLACES, _FURTHER_PLACES = range(386, 482, 24), range(0, 504, 24)
_GNU = b"ustar  \0"
_LONG_NAME, _LONG_TARGET, _FILES, _SPARSE = b"L", b"K", b"\x000", b"S"
_KNOWN = b"\x000123456SLK"


class _Unknown(Exception):
    """It is not as we, or tar by default, write it."""


@dataclass(frozen=True)
class _Part:
    """A part of a file: where in the file, how many bytes, and where in the archive they are."""

    offset: int
    size: int
    at: int


@dataclass(frozen=True)
class Large:
    """A large file."""

    path: bytes
    header: int
    """Where its header is in the archive."""
    data: int
    end: int
    """Where its content begins and what comes after it."""
    size: int
    parts: Sequence[_Part]


def large_files(archive: Path) -> list[Large]:
    """Return the large files in an archive; none where it is not as known here: tar can do it all. Raises `OSError`."""
    with archive.open("rb") as file:
        try:
            found = [one for one in _files(file.fileno()) if one.end - one.data >= _LARGE]
            return found if all(one.end <= os.fstat(file.fileno()).st_size for one in found) else []
        except (_Unknown, ValueError, OverflowError, IndexError):
            return []


def pieces(archive: Path) -> list[int]:
    """Return the sizes (bytes) of the pieces of an archive that belong together: a large file's content is one.

    So it is found again in the next archive, wherever it is there. Raises `OSError`.
    """
    found: list[int] = []
    at = 0
    for one in large_files(archive):
        found += [*_small_pieces(one.data - at), one.end - one.data]
        at = one.end
    return found + _small_pieces(archive.stat().st_size - at)


def _small_pieces(size: int) -> list[int]:
    whole, rest = divmod(size, _LARGEST_PIECE)
    return [_LARGEST_PIECE] * whole + [rest] * (rest > 0)


def without(archive: Path, large: Sequence[Large]) -> Iterator[bytes]:
    """Yield the bytes of an archive in which these files are holes alone. Raises `OSError`."""
    with archive.open("rb") as file:
        fd, at = file.fileno(), 0
        for one in large:
            yield from _bytes(fd, at, one.header)
            yield _of_a_hole(os.pread(fd, _RECORD, one.header), one.size)
            at = one.data + _padded(one.end - one.data)
        yield from _bytes(fd, at, os.fstat(fd).st_size)


def _bytes(fd: int, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        data = os.pread(fd, min(_READ, end - begin), begin)
        if not data:
            return
        yield data
        begin += len(data)


def _of_a_hole(header: bytes, size: int) -> bytes:
    new = bytearray(header)
    new[_SIZE] = _octal_or_binary(0)
    new[_TYPE] = ord(_SPARSE)
    new[_PLACES[0] : _IS_EXTENDED + 1] = bytes(_IS_EXTENDED + 1 - _PLACES[0])
    new[_PLACES[0] : _PLACES[0] + 24] = _octal_or_binary(size) + _octal_or_binary(0)
    new[_FULL_SIZE] = _octal_or_binary(size)
    new[_CHECKSUM] = b" " * 8
    new[_CHECKSUM] = b"%06o\0 " % sum(new)
    return bytes(new)


def _octal_or_binary(number: int) -> bytes:
    return b"%011o\0" % number if number < 1 << 33 else b"\x80" + number.to_bytes(11, "big")


# -- what is in it


def _files(fd: int) -> Iterator[Large]:
    """Yield the files in an archive. Raises `_Unknown`, and as what reads numbers does."""
    at, name = 0, b""
    while (header := os.pread(fd, _RECORD, at)).strip(b"\0"):
        kind = header[_TYPE : _TYPE + 1]
        if len(header) < _RECORD or header[_MAGIC] != _GNU or kind not in _KNOWN or not _is_whole(header):
            raise _Unknown
        size = _number(header[_SIZE])
        data = at + _RECORD
        if kind in _LONG_NAME + _LONG_TARGET:
            if size > _LONGEST_NAME:
                raise _Unknown
            if kind == _LONG_NAME:
                name = os.pread(fd, size, data).partition(b"\0")[0]
        else:
            path, name = name or header[:100].partition(b"\0")[0], b""
            if kind == _SPARSE:
                places, data = _places(fd, at, header)
                full = _number(header[_FULL_SIZE])
                if sum(part.size for part in places) != size or any(p.offset + p.size > full for p in places):
                    raise _Unknown
                yield Large(path, at, data, data + size, full, places)
            elif kind in _FILES:
                yield Large(path, at, data, data + size, size, [_Part(0, size, data)])
        at = data + _padded(size)


def _is_whole(header: bytes) -> bool:
    sums = sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ")
    return sums == _number(header[_CHECKSUM])


def _places(fd: int, at: int, header: bytes) -> tuple[list[_Part], int]:
    """Return the parts of a sparse file, and where its content begins."""
    found = [(header, place) for place in _PLACES]
    is_extended, data = header[_IS_EXTENDED], at + _RECORD
    while is_extended:
        extension = os.pread(fd, _RECORD, data)
        found += [(extension, place) for place in _FURTHER_PLACES]
        is_extended, data = extension[_IS_EXTENDED_FURTHER], data + _RECORD
    parts, begin = [], data
    for record, place in found:
        if size := _number(record[place + 12 : place + 24]):
            parts.append(_Part(_number(record[place : place + 12]), size, begin))
            begin += _padded(size)
    return parts, data


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
    else:
        digits = field.strip(b" \0") or b"0"
        if not digits.isdigit():
            raise _Unknown
        number = int(digits, 8)
    if number > _LARGEST_NUMBER:
        raise _Unknown
    return number


def _padded(size: int) -> int:
    return -(-size // _RECORD) * _RECORD


# -- filling the holes


def fill(archive: Path, large: Sequence[Large], into: Path) -> None:
    """Copy the contents of files, which tar has made as holes, from an archive to where they belong.

    Raises
    ------
    OSError : there is no room, or a file is not there as it was made.
    """
    processors = len(os.sched_getaffinity(0))
    copy = _copy_mapped if processors >= _MANY else _copy_written
    with archive.open("rb") as file, ThreadPoolExecutor(min(_COPIERS, processors)) as threads:
        for begin in range(0, len(large), _OPEN):
            with contextlib.ExitStack() as opened:
                jobs = []
                for one in large[begin : begin + _OPEN]:
                    fd = opened.enter_context(_opened(into, one))
                    jobs += [threads.submit(copy, file.fileno(), fd, *block) for block in _blocks(one.parts)]
                for job in jobs:
                    job.result()


@contextlib.contextmanager
def _opened(folder: Path, file: Large) -> Iterator[int]:
    """Open a file below a folder; no link is followed. It has the same mode and times afterwards."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        *above, name = [part for part in file.path.split(b"/") if part not in (b"", b".")]
        for part in above:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
        os.close(at)
        at = found
        about = os.fstat(at)
        if not stat.S_ISREG(about.st_mode) or about.st_size != file.size:
            raise OSError(0, "not as it was made", os.fsdecode(file.path))
        this = f"/proc/self/fd/{at}"
        mode = stat.S_IMODE(about.st_mode)
        if mode & 0o600 != 0o600:  # whoever is not root needs to be let in
            Path(this).chmod(mode | 0o600)
        fd = os.open(this, os.O_RDWR)
    finally:
        os.close(at)
    try:
        yield fd
        os.fchmod(fd, mode)  # writing may have changed it, too
        os.utime(fd, ns=(about.st_atime_ns, about.st_mtime_ns))
    finally:
        os.close(fd)


def _blocks(parts: Sequence[_Part]) -> Iterator[tuple[int, int, int]]:
    """Yield parts of files in blocks: where they begin in the file, their size, and where they are in the archive."""
    for part in parts:
        offset, end = part.offset, part.offset + part.size
        while offset < end:
            upto = min(end, offset + _BLOCK)
            yield offset, upto - offset, part.at + offset - part.offset
            offset = upto


def _copy_mapped(archive: int, file: int, offset: int, size: int, at: int) -> None:
    """Copy a block into a file that is mapped: tmpfs lets one write(2) at a time into a file."""
    begin = offset - offset % mmap.PAGESIZE
    with mmap.mmap(file, offset + size - begin, mmap.MAP_SHARED, offset=begin) as mapped, memoryview(mapped) as memory:
        # Where there is no room, the system says so here: nothing else touches what is mapped.
        done = 0
        while done < size:
            with memory[offset - begin + done :] as rest:
                got = os.preadv(archive, [rest], at + done)
            if got == 0:
                raise OSError(0, "the archive ends too early")
            done += got


def _copy_written(archive: int, file: int, offset: int, size: int, at: int) -> None:
    """Write a block into a file, from an archive that is mapped: the page need not be cleared first."""
    begin = at - at % mmap.PAGESIZE
    length = at + size - begin
    mapped = mmap.mmap(archive, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin)
    with mapped, memoryview(mapped) as memory:
        done = 0
        while done < size:
            with memory[at - begin + done :] as rest:
                done += os.pwrite(file, rest, offset + done)
