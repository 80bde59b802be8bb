"""Databases that a kernel has open: SQLite's and DuckDB's, which have files of their own beside them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from ..freeze.images import Lock

__all__ = ["DUCKDB", "SQLITE", "changing", "heads", "is_index", "kind", "log_of", "main_of"]

SQLITE, DUCKDB = "SQLite", "DuckDB"

_BESIDE = {SQLITE: ("-wal", "-shm", "-journal"), DUCKDB: (".wal",)}
# https://www.sqlite.org/fileformat.html, and DuckDB's MainHeader
_MARKS = ((0, b"SQLite format 3\0", SQLITE), (8, b"DUCK", DUCKDB))
# SQLite's os.h and wal.c: the bytes that it locks for as long as a transaction may write
_RESERVED = 0x40000001
_WAL_WRITER = 120
_HEADS = 3 * 4096
"""Bytes of DuckDB's headers: its MainHeader, and two DatabaseHeaders that are written in turn, counting."""


def kind(file: Path) -> str:
    """Return which program's database a file is; empty for none. Raises `OSError`."""
    with file.open("rb") as f:
        head = f.read(16)
    return next((name for at, mark, name in _MARKS if head[at:].startswith(mark)), "")


def heads(file: Path) -> str:
    """Return the BLAKE3 of the headers of a database of DuckDB's, in hexadecimal. Raises `OSError`.

    A checkpoint writes one of them last of all, and nothing else does: until then all that they lead to stays as it is.
    """
    with file.open("rb") as f:
        return blake3(f.read(_HEADS)).hexdigest()


def log_of(duckdb: str) -> str:
    """Return the path of the log of a database of DuckDB's."""
    return duckdb + _BESIDE[DUCKDB][0]


def main_of(path: str, databases: Iterable[tuple[str, str]]) -> str:
    """Return which of the databases, given by path and kind, a file stands beside as a part of it; empty for none."""
    return next((main for main, kind in databases for end in _BESIDE.get(kind, ()) if path == main + end), "")


def changing(locks: Iterable[Lock]) -> set[str]:
    """Return the paths of SQLite's databases in the middle of a transaction that writes, and of those beside them.

    Their content and the memory of the process belong together until it ends.
    """
    mains = set()
    for lock in (lock for lock in locks if not lock.is_whole):
        if lock.writes and lock.length and lock.holds(_RESERVED):  # others lock all of a file
            mains.add(lock.path)
        elif lock.writes and lock.path.endswith("-shm") and lock.holds(_WAL_WRITER):
            mains.add(lock.path.removesuffix("-shm"))
    return {main + end for main in mains for end in ("", "-wal", "-journal")}


def is_index(path: str) -> bool:
    """Tell whether a file beside a database of SQLite's is the index of its log, which SQLite makes again by itself."""
    return path.endswith("-shm")
