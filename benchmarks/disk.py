"""What the disk does by itself: the limits that saves and restores are held against."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PIECE = 8 << 20
_MOST_WRITTEN = 8 << 30


def write_seconds(folder: Path, size: int) -> float:
    """Return how long so many random bytes take until they are synced, written one after the other.

    More than 8 GiB are not written, but their time is multiplied.
    """
    piece, written = os.urandom(_PIECE), min(size, _MOST_WRITTEN)
    path = folder / "written"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(written // _PIECE):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds * size / written


def forget(folder: Path) -> None:
    """Have the page cache forget all files of a folder, which have been synced."""
    for path in _files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def read_seconds(folder: Path) -> float:
    """Return how long all files of a folder take to be read from the disk, with a thread for each processor."""
    forget(folder)
    pieces = [(path, at) for path in _files(folder) for at in range(0, path.stat().st_size, _PIECE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(_read, pieces):
            pass
    return time.perf_counter() - began


def _read(piece: tuple[Path, int]) -> None:
    path, at = piece
    file = os.open(path, os.O_RDONLY)
    try:
        os.pread(file, _PIECE, at)
    finally:
        os.close(file)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
