"""What a snapshot needs of the machine's files: written down at the save, held against the disk before a restore.

Every file that the saved processes map or hold open is known by its size, and further by its build id where it is a
program or library, or else by the hash of its bytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...freeze import images
from ...freeze.elf import build_id, is_same_build

__all__ = [
    "ELSEWHERE",
    "NEEDS",
    "Marks",
    "NeededFile",
    "changed",
    "difference",
    "from_json",
    "marked",
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
    size : in bytes; None but for regular files.
    writable : whether a saved process has it open for writing: it may have grown by the time of the restore.
    build_id : of a program or library, in hexadecimal; else empty.
    hash : the BLAKE3 of its bytes, in hexadecimal, where it has no build id and is small; else empty.
    """

    path: str
    mode: int
    size: int | None = None
    writable: bool = False
    build_id: str = ""
    hash: str = ""


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
    return _in_order(
        NeededFile(file.path, file.mode, file.size, images.is_written(file.flags), file.build_id.hex())
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


def marked(files: Iterable[NeededFile], root: Path, marks: Marks) -> list[NeededFile]:
    """Return the same files with what tells them from others of their size.

    `root` is the folder that is ``/`` to the processes. What has changed already since the dump is left as it is.
    """
    return [_marked(file, root, marks) for file in files]


def _marked(file: NeededFile, root: Path, marks: Marks) -> NeededFile:
    if file.size is None or file.writable:
        return file
    at = root / file.path[1:]
    try:
        now = at.stat()
        if not stat.S_ISREG(now.st_mode) or now.st_size != file.size:
            return file
        built, digest = marks.of(at, now)
    except OSError:
        return file
    return NeededFile(file.path, file.mode, file.size, False, built, digest)


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


def _file(found: dict[str, Any]) -> NeededFile:
    file = NeededFile(**found)
    types = (str, int, str, str)
    if not all(map(isinstance, (file.path, file.mode, file.build_id, file.hash), types)) or file.path[:1] != "/":
        raise ValueError("a needed file has no path, or other members")
    return file


def difference(file: NeededFile, root: Path) -> str:
    """Return what keeps a file from being opened again, with its path and both values; empty where nothing does.

    A file that is open for writing may have grown: a log goes on, and the kernel with it from its saved offset. So may
    one that somebody else writes, where what the kernel knows of it is still its beginning.
    """
    was = _kind(file.mode) if file.size is None else "1 byte" if file.size == 1 else f"{file.size} bytes"
    at = root / file.path[1:]
    try:
        now = at.stat()
    except FileNotFoundError:
        return f"{file.path}: {'was' if file.size is None else 'had'} {was}, is gone"
    except OSError as e:
        return f"{file.path}: {e.strerror}"
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(file.mode):
        return f"{file.path}: was {_kind(file.mode)}, here {_kind(now.st_mode)}"
    if file.size is None:
        return ""
    if now.st_size != file.size and not (now.st_size > file.size and (file.writable or _begins_as(file, at))):
        return f"{file.path}: had {was}, here {now.st_size}"
    if file.build_id and not is_same_build(here := build_id(at), file.build_id):
        return f"{file.path}: another build, of the same size: was {file.build_id}, here {here or 'none'}"
    return ""


def _begins_as(file: NeededFile, at: Path) -> bool:
    """Tell whether a file that has grown begins with all that it was."""
    if not file.hash:
        return False
    with at.open("rb") as f:
        return blake3(f.read(file.size)).hexdigest() == file.hash


def changed(files: Collection[NeededFile], root: Path, marks: Marks) -> Sequence[str]:
    """Return the paths of files that have the size that they had, and other bytes: they stay as they are now."""
    found = []
    for file in files:
        at = root / file.path[1:]
        try:
            now = at.stat()
            if file.hash and now.st_size == file.size and marks.of(at, now)[1] != file.hash:
                found.append(file.path)
        except OSError:
            continue
    return found


def _kind(mode: int) -> str:
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")
