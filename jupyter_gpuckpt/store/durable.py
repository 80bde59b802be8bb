"""Files and folders that are their owner's alone from the first byte, and stay after a power cut.

Each function names the modes itself where it creates something. A umask can only take bits away
from them, so none is set: it belongs to the whole process, and other threads create files too.
Every function raises `OSError` as it comes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = [
    "FILE_MODE",
    "FOLDER_MODE",
    "free_range",
    "links_of",
    "make_folder",
    "make_parents",
    "name_new",
    "read_small",
    "refresh",
    "start_writing",
    "sync_file",
    "sync_folder",
    "write_at",
    "write_new",
]

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_START = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # linux/fcntl.h, linux/fs.h
_AT_EMPTY_PATH, _FORCE_SYNC, _NLINK = 0x1000, 0x2000, 4  # linux/fcntl.h, linux/stat.h
_ABOUT_SIZE, _NLINK_AT = 256, 16  # struct statx
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # link(2): the file system does not support hard links

_STEP = 1024 * 1024

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> bool:
    """Create the folder `path` with mode 0700; return False where it was there already."""
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        return False
    path.chmod(FOLDER_MODE)  # a strict umask may have taken bits that the owner needs
    return True


def make_parents(path: Path) -> None:
    """Create the folders above `path` that are missing, each with mode 0700, and make them last."""
    if path.parent.is_dir():
        return
    make_parents(path.parent)
    make_folder(path.parent)
    sync_folder(path.parent.parent)


def write_new(path: Path, content: bytes) -> None:
    """Create the file `path` with mode 0600, write `content` and have it on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def name_new(draft: Path, path: Path) -> None:
    """Give the file `draft` the name `path`, whole or not at all; `draft` may be gone then, or still be there.

    By a hard link, and on file systems that have none (FAT, some of networks) by a rename that never replaces.

    Raises
    ------
    FileExistsError : something has that name.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        # A file server that was asked twice, since its answer was lost, says so of what it has done itself.
        refresh(path.parent)
        with suppress(FileNotFoundError):
            if path.samefile(draft):
                return
        raise
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        if _libc.renameat2(_AT_FDCWD, os.fsencode(draft), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) != 0:
            code = ctypes.get_errno()
            if code != errno.EEXIST:
                raise  # for lack of links is what a user can look up
            raise FileExistsError(code, os.strerror(code), str(path)) from None


def write_at(fd: int, offset: int, *parts: bytes | bytearray | memoryview) -> None:
    """Write all of `parts`, one after the other, at `offset` of an open file."""
    left = [memoryview(part) for part in parts]
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def free_range(fd: int, offset: int, size: int) -> None:
    """Give back the disk or memory of a part of an open file, where the file system can: zeros stand there then."""
    _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size))


def start_writing(fd: int, offset: int, size: int) -> None:
    """Have the disk begin with a part of an open file, so that less is left for its sync; promises nothing."""
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _START)


def refresh(path: Path) -> None:
    """Have a file server asked anew how long a file is, or which names a folder has. Raises nothing.

    A client of NFS remembers both for up to a minute, also that a name is not there: another machine may have made it.
    """
    _about(_AT_FDCWD, path, _FORCE_SYNC)


def links_of(fd: int) -> int:
    """Return how many names an open file has, by what the file server says now. Raises `OSError`."""
    about = _about(fd, Path(), _AT_EMPTY_PATH | _FORCE_SYNC)
    return os.fstat(fd).st_nlink if about is None else int.from_bytes(about[_NLINK_AT : _NLINK_AT + 4], sys.byteorder)


def _about(fd: int, path: Path, flags: int) -> bytes | None:
    """Return what statx(2) says; None where it cannot."""
    about = ctypes.create_string_buffer(_ABOUT_SIZE)
    name = b"" if flags & _AT_EMPTY_PATH else os.fsencode(path)
    return about.raw if _libc.statx(fd, name, flags, _NLINK, about) == 0 else None


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of `path`, of a longer file the first `limit` + 1 bytes.

    A read that fails with an input/output error, or of a file that was replaced meanwhile on a file server, is tried
    once more; so is one of a file that is not there, as far as this machine knows.
    """
    try:
        return _read_small(path, limit)
    except OSError as e:
        if e.errno not in (errno.EIO, errno.ENOENT, errno.ESTALE):
            raise
        refresh(path.parent)
        return _read_small(path, limit)


def _read_small(path: Path, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as f:
        # Room is made for as much as is asked for: no more than there is.
        found = f.read(min(os.fstat(fd).st_size, limit) + 1)
        while len(found) <= limit and (more := f.read(min(_STEP, limit + 1 - len(found)))):
            found += more
        return found


def sync_file(path: Path) -> None:
    """Return when the content of the file `path` is on the disk."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Return when the entries of the folder `path` are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
