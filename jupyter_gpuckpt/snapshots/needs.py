"""What a snapshot needs of the machine's files: written down at the save, held against the disk before a restore.

Every file that the saved processes map or hold open is known by its size, and further by its build id where it is a
program or library, or else by the hash of its bytes, or by when it was last written.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Container, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import cast

from blake3 import blake3

from .. import checked
from ..freeze import images
from ..freeze.elf import build_id, is_same_build
from . import databases
from .temporary import can_be_made

__all__ = [
    "ELSEWHERE",
    "NEEDS",
    "Marks",
    "NeededFile",
    "changed",
    "difference",
    "from_json",
    "marked",
    "obstacle_in_database",
    "of_images",
    "of_snapshot",
    "to_json",
]

NEEDS = "needs.json"
"""The part of a snapshot that says it."""

ELSEWHERE = ("/dev/", "/proc/", "/sys/")
"""Not files of the disk: /dev/shm travels with the snapshot, the others are the system's."""

_HASHED = 16 << 20
"""Bytes that a file may have whose content is told from another's of the same size; data can be very large."""


@dataclass(frozen=True)
class NeededFile:
    """A file, folder or FIFO that a saved tree maps, holds open or stands in.

    Attributes
    ----------
    path : absolute.
    mode : as stat(2) has it.
    size : in bytes; None but for regular files, and for those that are appended to.
    writable : whether a saved process has it open for writing, or writes it by memory that it shares with it: it may
        have another size by the time of the restore.
    mapped : whether memory of a saved process lies in it: it must not be shorter then. Old snapshots do not say.
    build_id : of a program or library, in hexadecimal; else empty.
    hash : the BLAKE3 of its bytes, in hexadecimal, where it has no build id, is small and not `writable`; of a database
        that is, and is `databases.REMEMBERED`, of its headers; else empty.
    mtime : when it was last written, in nanoseconds, as stat(2) has it; 0 where it was written again at once, and None
        where nothing is known of that.
    database : whose database it is, where it is one (`databases.kind`).
    in_transaction : whether a transaction of SQLite's or LMDB's was open that writes into it: it must not have changed.
    kept : whether the snapshot has its content (`lifetime`).
    """

    path: str
    mode: int
    size: int | None = None
    writable: bool = False
    build_id: str = ""
    hash: str = ""
    mtime: int | None = None
    database: str = ""
    in_transaction: bool = False
    kept: bool = False
    mapped: bool = True


_MEMBERS = {field.name for field in fields(NeededFile)}

_MOST_MARKS = 20_000


class Marks:
    """Build ids and hashes of files, kept for as long as the files are the same (by inode, size and times)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[str, str]] = {}

    def of(self, file: Path, now: os.stat_result) -> tuple[str, str]:
        """Return the build id of a regular file, or else, of a small one, the hash. Raises `OSError`."""
        key = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if key not in self._known:
            if len(self._known) >= _MOST_MARKS:
                self._known.clear()  # files that change are others each time
            built = build_id(file)
            self._known[key] = built, "" if built or now.st_size > _HASHED else blake3(file.read_bytes()).hexdigest()
        return self._known[key]


def of_images(folder: Path) -> list[NeededFile]:
    """Return the files that a dump names, as criu's images in `folder` describe them: without hashes."""
    named = [file for file in images.named_files(folder) if not file.path.startswith(ELSEWHERE)]
    mapped, written = images.mapped_files(folder), images.written_by_mappings(folder)
    return _in_order(
        NeededFile(
            file.path,
            file.mode,
            file.size,
            images.is_written(file.flags) or file.path in written,
            file.build_id.hex(),
            mapped=file.path in mapped,
        )
        for file in named
    )


def of_snapshot(folder: Path) -> list[NeededFile]:
    """Return the files that a snapshot needs whose parts lie in `folder`, as it says or else criu's images in it do.

    Raises
    ------
    ValueError : what it says is not valid.
    """
    said = folder / NEEDS
    return from_json(said.read_bytes()) if said.exists() else of_images(folder / "criu")


def _in_order(files: Iterable[NeededFile]) -> list[NeededFile]:
    """Return each file once; what one process writes is written for those that only read it, too."""
    found = set(files)
    written = {file.path for file in found if file.writable}
    merged = {replace(file, writable=True) if file.path in written else file for file in found}
    return sorted(merged, key=lambda file: file.path)


def marked(
    files: Iterable[NeededFile], root: Path, marks: Marks, folder: Path, in_transaction: Iterable[str] = ()
) -> list[NeededFile]:
    """Return the same files with what tells them from others of their size.

    `root` is the folder that is ``/`` to the processes, and `folder` that of criu's images. What has changed already
    since the dump is left as it is. Databases are `in_transaction` of which the images do not tell it.
    """
    frozen = (folder / "files.img").stat().st_mtime_ns
    changing = databases.changing(images.locks(folder)).union(in_transaction)
    return [_marked(file, root, marks, frozen, file.path in changing) for file in files]


def _marked(file: NeededFile, root: Path, marks: Marks, frozen: int, in_transaction: bool) -> NeededFile:
    if file.size is None:
        return file
    at = root / file.path[1:]
    try:
        now = at.stat()
        if not stat.S_ISREG(now.st_mode):
            return file
        is_as_taken = now.st_size == file.size
        built, digest = ("", "") if file.writable or not is_as_taken else marks.of(at, now)
        database = "" if built else databases.kind(at)
        mtime = now.st_mtime_ns if is_as_taken and now.st_mtime_ns < frozen else 0
        if file.writable and database in databases.REMEMBERED and mtime:
            digest = databases.heads(at)
    except OSError:
        return file
    return replace(
        file,
        build_id=built if is_as_taken and not file.writable else file.build_id,
        hash=digest,
        mtime=mtime,
        database=database,
        in_transaction=in_transaction,
    )


def to_json(files: Iterable[NeededFile]) -> bytes:
    """Return what is written into the snapshot."""
    return json.dumps({"files": [asdict(file) for file in files]}, separators=(",", ":")).encode("ascii")


def from_json(raw: bytes) -> list[NeededFile]:
    """Return what `to_json` wrote.

    Raises
    ------
    ValueError : it did not.
    """
    try:
        return _in_order(_file(found) for found in json.loads(raw)["files"])
    except (KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"the list of needed files is not valid: {e}") from e


def _file(found: object) -> NeededFile:
    file = checked.from_json(NeededFile, found)
    # One that a later version knows more of cannot be compared with what is here.
    if file.path[:1] != "/" or not set(cast("dict[str, object]", found)) <= _MEMBERS:
        raise ValueError("a needed file has no path, or members that are not known here")
    return file


def difference(file: NeededFile, root: Path) -> str:
    """Return what keeps a file from being opened again, with its path and both values; empty where nothing does.

    A file that is open for writing may have another size: a log goes on, or is started again, and the kernel goes on at
    its saved offset. One that somebody else writes may have grown, where what the kernel knows of it is its beginning.
    """
    was = _kind(file.mode) if file.size is None else "1 byte" if file.size == 1 else f"{file.size} bytes"
    at = root / file.path[1:]
    try:
        now = at.stat(follow_symlinks=not stat.S_ISLNK(file.mode))  # of a link itself, that is open (O_PATH)
    except FileNotFoundError:
        if file.kept and can_be_made(at):
            return ""
        return f"{file.path}: {'was' if file.size is None else 'had'} {was}, is gone"
    except OSError as e:
        return f"{file.path}: {e.strerror}"
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(file.mode):
        return f"{file.path}: was {_kind(file.mode)}, here {_kind(now.st_mode)}"
    if file.size is None:
        return ""
    if now.st_size != file.size and not _may_have_size(now.st_size, file, at):
        return f"{file.path}: had {was}, here {now.st_size}"
    if file.in_transaction and file.mtime != now.st_mtime_ns:
        database = file.database or databases.SQLITE
        return f"{file.path}: a transaction of {database}'s was open, and the file was written to since"
    if file.build_id and not is_same_build(here := build_id(at), file.build_id):
        return f"{file.path}: a different build of the same size: was {file.build_id}, here {here or 'none'}"
    return ""


def _may_have_size(size: int, file: NeededFile, at: Path) -> bool:
    """Tell whether a file can be opened again that has another size."""
    if file.writable:
        return not file.mapped or size > (file.size or 0)  # memory behind the end of a file kills who touches it
    return size > (file.size or 0) and _begins_as(file, at)


def _begins_as(file: NeededFile, at: Path) -> bool:
    """Tell whether a file that has grown begins with all that it was."""
    if not file.hash:
        return False
    with at.open("rb") as f:
        return blake3(f.read(file.size)).hexdigest() == file.hash


def obstacle_in_database(file: NeededFile, files: Container[str], root: Path) -> str:
    """Return why a database that was open for writing, and is `REMEMBERED`, cannot be gone on with; empty where it can.

    `files` are the paths of all that the snapshot needs.
    """
    at, log = root / file.path[1:], databases.log_of(file.path, file.database)
    try:
        now = at.stat()
        is_as_was = databases.heads(at) == file.hash if file.hash else now.st_mtime_ns == file.mtime
        return "" if is_as_was and now.st_size >= (file.size or 0) else "it was written to since"
    except FileNotFoundError:
        # Made again, it would be read with a log that is not its own.
        is_strange = file.kept and log and log not in files and os.path.lexists(root / log[1:])
        return f"it is gone, but its log ({log}) exists" if is_strange else ""
    except OSError as e:
        return f"{e.strerror}"


def changed(files: Collection[NeededFile], root: Path, marks: Marks) -> dict[NeededFile, str]:
    """Return in words what is not as it was of files that may have changed, by file: they stay as they are now.

    A database is told in place of the files beside it.
    """
    found: dict[NeededFile, str] = {}
    known = {file.path: file for file in files}
    mains = [(file.path, file.database) for file in files if file.database]
    for file in files:
        main = databases.main_of(file.path, mains)
        how = _change(file, root, marks)
        if not how and file.database == databases.DUCKDB:
            log = databases.log_of(file.path)
            how = "a file that belongs to it is new" if log not in known and os.path.lexists(root / log[1:]) else ""
        if how and (not main or known[main] not in found):
            found[known[main] if main else file] = f"a file that belongs to it {how}" if main else how
    return found


def _change(file: NeededFile, root: Path, marks: Marks) -> str:
    if file.size is None:
        return ""
    at = root / file.path[1:]
    try:
        now = at.stat()
        if now.st_size != file.size:
            return f"had {file.size:,} bytes, has {now.st_size:,}"
        if file.hash and not file.writable:
            return "different contents, same size" if marks.of(at, now)[1] != file.hash else ""
    except OSError:
        return ""  # gone: it is refused, or brought
    is_known = not file.build_id and file.mtime is not None
    return "written to since, same size" if is_known and now.st_mtime_ns != file.mtime else ""


def _kind(mode: int) -> str:
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    names[stat.S_IFLNK] = "a link"
    return names.get(stat.S_IFMT(mode), "a device")
