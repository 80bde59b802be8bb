"""Databases that a kernel has open, some with files of their own beside them: of SQLite, DuckDB, LMDB and bbolt."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from ..freeze.images import Lock

__all__ = [
    "DUCKDB",
    "REMEMBERED",
    "SQLITE",
    "changing",
    "heads",
    "is_index",
    "kind",
    "log_of",
    "main_of",
    "written_by_lmdb",
]

SQLITE, DUCKDB, LMDB, BBOLT = "SQLite", "DuckDB", "LMDB", "bbolt"

REMEMBERED = (DUCKDB, BBOLT)
"""Who has one of these open for writing has in memory what is free in the file, and would destroy a later one."""

_BESIDE = {SQLITE: ("-wal", "-shm", "-journal"), DUCKDB: (".wal",)}
_LMDB_MARK = b"\xde\xc0\xef\xbe"
_BBOLT_MARK = b"\xed\xda\x0c\xed"
# https://www.sqlite.org/fileformat.html, DuckDB's MainHeader, and behind the headers of their pages LMDB's MDB_meta and
# bbolt's (https://github.com/etcd-io/bbolt, internal/common/meta.go: magic, version, size of a page)
_MARKS = ((0, b"SQLite format 3\0", SQLITE), (8, b"DUCK", DUCKDB), (16, _LMDB_MARK, LMDB), (16, _BBOLT_MARK, BBOLT))
_BBOLT_PAGE = struct.Struct("<24xI")
# LMDB's MDB_txninfo: where the writer's lock begins, and of glibc's pthread_mutex_t who holds it, and its kind
_LMDB_WRITER = struct.Struct("<64xI12xI")
_HOLDER, _ROBUST = 0x3FFFFFFF, 0x10
# SQLite's os.h and wal.c: the bytes that it locks for as long as a transaction may write
_RESERVED = 0x40000001
_WAL_WRITER = 120
_HEADS = 3 * 4096
"""Bytes of DuckDB's headers: its MainHeader, and two DatabaseHeaders that are written in turn, counting."""
_MOST_HEADS = 1 << 20


def kind(file: Path) -> str:
    """Return which program's database a file is; empty for none. Raises `OSError`."""
    with file.open("rb") as f:
        head = f.read(24)
    return next((name for at, mark, name in _MARKS if head[at:].startswith(mark)), "")


def heads(file: Path) -> str:
    """Return the BLAKE3 of the headers of a database of DuckDB's or bbolt's, in hexadecimal. Raises `OSError`.

    A checkpoint, or in bbolt a commit, writes one of them last of all, and nothing else does: until then all that they
    lead to stays as it is.
    """
    with file.open("rb") as f:
        head = f.read(_BBOLT_PAGE.size)
        # Two pages that are written in turn.
        is_bbolt = head[16:].startswith(_BBOLT_MARK) and len(head) == _BBOLT_PAGE.size
        size = min(2 * max(4096, _BBOLT_PAGE.unpack(head)[0]), _MOST_HEADS) if is_bbolt else _HEADS
        return blake3(head + f.read(max(0, size - len(head)))).hexdigest()


def log_of(path: str, kind: str = DUCKDB) -> str:
    """Return the path of the log of a database; empty where those of that kind have none."""
    return path + _BESIDE[DUCKDB][0] if kind == DUCKDB else ""


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


def written_by_lmdb(mapped: Iterable[str], root: Path) -> set[str]:
    """Return the paths of LMDB's databases of which a process below `root` holds the writer's lock.

    That is a mutex in a file that all who use the database have `mapped`, with the number of a thread: `root` is the
    root folder of a namespace, in whose /proc it is looked for.
    """
    found = set()
    for path in mapped:
        if path.endswith("/lock.mdb"):
            main = path.removesuffix("lock.mdb") + "data.mdb"
        elif path.endswith("-lock"):
            main = path.removesuffix("-lock")
        else:
            continue
        holder = _writer(root / path[1:])
        if holder and (root / "proc" / str(holder)).exists():
            found.add(main)
    return found


def _writer(lock_file: Path) -> int:
    """Return the number of the thread that holds the writer's lock of a database of LMDB's; 0 for none."""
    with contextlib.suppress(OSError, struct.error), lock_file.open("rb") as file:
        head = file.read(_LMDB_WRITER.size)
        lock, kind = _LMDB_WRITER.unpack(head)
        if head.startswith(_LMDB_MARK) and kind & _ROBUST:
            return int(lock & _HOLDER)
    return 0


def is_index(path: str) -> bool:
    """Tell whether a file beside a database of SQLite's is the index of its log, which SQLite makes again by itself."""
    return path.endswith("-shm")
