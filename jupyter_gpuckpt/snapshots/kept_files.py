"""The files that a snapshot keeps with it (``save --with-files``): which they are, and how they lie in it.

Kept are the files that the processes map or hold open, and Python's environment, so that later imports work; each as
the processes see it, with mode, owner, time and links. ``files.json`` lists them. A large file is a part of the
snapshot by itself (``files/N``), small ones lie one behind the other in bundles (``files/bN``): a chunk for each of
some ten thousand small files would make every list of chunks as long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from blake3 import blake3

from ..errors import SaveFailed
from ..store import Writer
from .needs import ELSEWHERE, NeededFile
from .saved import OwnFiles

__all__ = ["FILES", "TABLE", "Kept", "KeptFile", "from_json", "keep", "survey"]

TABLE = "files.json"
"""The part of a snapshot that lists its own files."""
FILES = "files"
"""The folder of the snapshot that their bytes lie in."""

_PART = re.compile(r"files/b?[0-9]{6,10}", re.ASCII)
_SMALL = 64 << 10
"""Bytes that a file may have that lies in a bundle."""
_BUNDLE = 2 << 20
"""Bytes of a bundle at most: those of a chunk."""
_ENDS_BUNDLE = 64
"""One path in so many ends a bundle, so that a file more moves few others."""
_MANY_LINKS = 40
"""Links that one path may lead over (path_resolution(7))."""
_COPIED = 256 << 20
"""Bytes of a file that is open for writing up to which it is copied at once: it may be cut short meanwhile."""
_OF_THE_DRIVER = ("libcuda.so", "libcudadebugger.so", "libnvidia-")
"""Libraries that belong to the machine's NVIDIA driver, and to no other."""
_DERIVED = "__pycache__"
"""Folders of compiled modules: Python makes them again, and uses none whose source is another."""
_NOT_IMPORTED = ("test", "config-")
"""In the standard library's folder: its own tests, and what only links programs."""
_OTHER_ENVIRONMENTS = ("envs", "pkgs")
"""In the folder of conda itself: its other environments, and what it has downloaded."""


class KeptFile(NamedTuple):
    """One file, folder or link.

    Attributes
    ----------
    path : absolute, as the processes see it, and without links but the last part.
    mode, uid, gid, mtime : as stat(2) has them; mtime in nanoseconds.
    size : in bytes; 0 but for regular files.
    link : what a link says; else empty.
    part, offset : the part of the snapshot in which the bytes lie, and where in it; an empty file has none.
    hash : the BLAKE3 of the bytes in hexadecimal, of one in a bundle.
    writable : whether the kernel has it open for writing.
    loose : whether it is a module among a user's other files: another version of it is not in the way.
    """

    path: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int = 0
    link: str = ""
    part: str = ""
    offset: int = 0
    hash: str = ""
    writable: bool = False
    loose: bool = False


@dataclass(frozen=True)
class Kept:
    """The files of a snapshot, parents before what is in them."""

    files: Sequence[KeptFile]

    def summary(self) -> OwnFiles:
        """Return what the manifest says of them: how many regular files, and their bytes."""
        regular = [file for file in self.files if stat.S_ISREG(file.mode)]
        return OwnFiles(count=len(regular), bytes=sum(file.size for file in regular))

    def to_json(self) -> bytes:
        """Return what is written into the snapshot."""
        return json.dumps({"files": self.files}, separators=(",", ":")).encode("ascii")


def from_json(raw: bytes) -> Kept:
    """Return what `Kept.to_json` wrote.

    Raises
    ------
    ValueError : it did not, or a path leads where no file is kept.
    """
    try:
        files = [KeptFile(*found) for found in json.loads(raw)["files"]]
    except (KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"the list of kept files is not valid: {e}") from e
    for file in files:
        if [type(member) for member in file] != [str, *[int] * 5, str, str, int, str, bool, bool]:
            raise ValueError("a kept file has members of other types")
        parts = file.path.split("/")
        if parts[0] or len(parts) < 2 or {"", ".", ".."} & set(parts[1:]) or "\0" in file.path:
            raise ValueError(f"{file.path[:200]!a} is no absolute path in its one spelling")
        if (file.path + "/").startswith(ELSEWHERE):
            raise ValueError(f"{file.path[:200]!a} is the system's")
        if stat.S_IFMT(file.mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ValueError(f"{file.path[:200]!a} is neither a file nor a folder nor a link")
        if (file.part and not _PART.fullmatch(file.part)) or min(file.size, file.offset) < 0:
            raise ValueError(f"{file.path[:200]!a} lies in no part of a snapshot")
    if len({file.path for file in files}) != len(files):
        raise ValueError("a file is there twice")
    return Kept(files)


class _Survey:
    """Collects what there is, by path; `root` is the folder that is ``/`` to the processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: dict[str, os.stat_result] = {}
        self.links: dict[str, str] = {}
        self._walked: set[str] = set()

    def at(self, path: str) -> Path:
        """Return how a path of the processes is reached."""
        return self.root / path.lstrip("/")

    def reach(self, path: str) -> str | None:
        """Note every folder and link on the way to a path, and what is there; return the path without links.

        None where there is nothing, or what the system has.
        """
        pending = [part for part in reversed(path.split("/")) if part]
        reached = ""
        followed = 0
        while pending:
            part = pending.pop()
            if part in (".", ".."):
                reached = reached.rpartition("/")[0] if part == ".." else reached
                continue
            here = f"{reached}/{part}"
            if (here + "/").startswith(ELSEWHERE):
                return None
            try:
                about = self.at(here).lstat()
                if stat.S_ISLNK(about.st_mode):
                    self.found[here], self.links[here] = about, os.readlink(self.at(here))  # noqa: PTH115
            except OSError:
                return None
            if not stat.S_ISLNK(about.st_mode):
                self.found[here], reached = about, here
                continue
            followed += 1
            if followed > _MANY_LINKS:
                return None
            pending += [step for step in reversed(self.links[here].split("/")) if step]
            if self.links[here].startswith("/"):
                reached = ""
        return reached or None

    def tree(self, top: str, leave_out: Iterable[str] = ()) -> None:
        """Note a folder and all in it, and the files that links in it lead to; at its top some names are left out."""
        reached = self.reach(top)
        if reached is None or not stat.S_ISDIR(self.found[reached].st_mode):
            return
        folders = [reached]
        while folders:
            folder = folders.pop()
            if folder in self._walked:
                continue
            self._walked.add(folder)
            names = self._names(folder)
            if folder == reached:
                names = [name for name in names if not name.startswith(tuple(leave_out))]
            folders += [path for name in names if (path := f"{folder}/{name}") and self._note(path)]

    def _names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self.at(folder)) if name != _DERIVED]  # noqa: PTH208
        except OSError:
            return []  # deleted meanwhile

    def _note(self, path: str) -> bool:
        """Note what is at a path; tell whether it is a folder."""
        try:
            about = self.at(path).lstat()
        except OSError:
            return False  # deleted meanwhile
        if stat.S_ISLNK(about.st_mode):
            target = self.reach(path)
            # A folder that a link leads to is kept where it is a package: others may hold anything.
            if target is not None and self.at(f"{target}/__init__.py").exists():
                self.tree(target)
            return False
        self.found[path] = about
        return stat.S_ISDIR(about.st_mode)

    def modules(self, top: str) -> None:
        """Note the modules and packages that lie in a folder, and nothing else of it."""
        reached = self.reach(top)
        for name in self._names(reached) if reached else ():
            path = f"{reached}/{name}"
            if self.at(f"{path}/__init__.py").exists():
                self.tree(path)
            elif name.endswith((".py", ".so")):
                self.reach(path)


def survey(root: Path, needed: Sequence[NeededFile], environment: Mapping[str, Sequence[str]]) -> list[KeptFile]:
    """Return what is to be kept, parents before what is in them, not yet placed in any part.

    Parameters
    ----------
    root : the folder that is ``/`` to the processes.
    needed : what they map, hold open or stand in.
    environment : what the kernel says of its Python (`kernel.environment`); empty where it says nothing.
    """
    look = _Survey(root)
    writable = {file.path for file in needed if file.writable}
    for file in needed:
        look.reach(file.path)
    for path in environment.get("files", ()):
        look.reach(path)
    for path in environment.get("folders", ()):
        leave_out: tuple[str, ...] = ()
        if look.at(f"{path}/lib-dynload").exists():
            # What others installed beside the standard library is named by itself where it is used.
            leave_out = (*_NOT_IMPORTED, "site-packages")
        elif look.at(f"{path}/conda-meta").exists():
            leave_out = _OTHER_ENVIRONMENTS
        look.tree(path, leave_out)
    exact = set(look.found)
    for path in environment.get("modules", ()):
        look.modules(path)
    return [
        KeptFile(
            path,
            about.st_mode,
            about.st_uid,
            about.st_gid,
            about.st_mtime_ns,
            about.st_size if stat.S_ISREG(about.st_mode) else 0,
            look.links.get(path, ""),
            writable=path in writable,
            loose=path not in exact,
        )
        for path, about in sorted(look.found.items(), key=lambda found: found[0].split("/"))
        if stat.S_IFMT(about.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        and not path.rpartition("/")[2].startswith(_OF_THE_DRIVER)
    ]


def keep(
    files: Sequence[KeptFile], root: Path, writer: Writer, limit: int, go_on: Callable[[], object] = lambda: None
) -> Kept:
    """Make the files parts of the snapshot that `writer` writes, and the list of them.

    `go_on` is called at each of them, and may raise where the rest is not wanted any more.

    Raises
    ------
    SaveFailed : they have more than `limit` bytes; the largest folders are named.
    OSError : one cannot be read or copied.
    """
    _refuse_too_much(files, limit)
    folder = writer.directory / FILES
    folder.mkdir(mode=0o700)
    bundles = _Bundles(folder)
    kept = []
    for number, file in enumerate(files, 1):
        go_on()
        at = root / file.path[1:]
        if not file.size:
            kept.append(file)
        elif file.size <= _SMALL:
            try:
                content = at.read_bytes()
            except FileNotFoundError:
                continue  # deleted meanwhile
            kept.append(bundles.add(file, content))
        else:
            part = f"{FILES}/{number:06d}"
            if file.writable and file.size <= _COPIED:
                shutil.copyfile(at, writer.directory / part)
                file = file._replace(size=(writer.directory / part).stat().st_size)
            else:
                writer.add(at, part, file.size)
            kept.append(file._replace(part=part))
    bundles.close()
    result = Kept(kept)
    (writer.directory / TABLE).write_bytes(result.to_json())
    return result


class _Bundles:
    """Writes small files one behind the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 1
        self._content = bytearray()

    def add(self, file: KeptFile, content: bytes) -> KeptFile:
        """Put a file into a bundle; return it as it lies there."""
        if len(self._content) + len(content) > _BUNDLE:
            self.close()
        part, offset = f"{FILES}/{self._name()}", len(self._content)
        self._content += content
        if zlib.crc32(os.fsencode(file.path)) % _ENDS_BUNDLE == 0:
            self.close()
        if not content:
            return file._replace(size=0)
        return file._replace(size=len(content), part=part, offset=offset, hash=blake3(content).hexdigest())

    def close(self) -> None:
        """End a bundle: the next file begins another."""
        if self._content:
            (self._folder / self._name()).write_bytes(self._content)
            self._number += 1
            self._content.clear()

    def _name(self) -> str:
        return f"b{self._number:06d}"


def _refuse_too_much(files: Sequence[KeptFile], limit: int) -> None:
    total = sum(file.size for file in files)
    if total <= limit:
        return
    by_folder: dict[str, int] = defaultdict(int)
    for file in files:
        for parent in PurePosixPath(file.path).parents:
            by_folder[str(parent)] += file.size
    # Those that hold the most, and nothing that holds all of it.
    largest = sorted(by_folder, key=lambda folder: (-by_folder[folder], -len(folder)))[:5]
    named = ", ".join(f"{folder} ({by_folder[folder] / 1e6:,.0f} MB)" for folder in largest)
    raise SaveFailed(
        "The {kernel} was not saved; it keeps running.",
        f"The files to include have {total / 1e6:,.0f} MB, and the limit is {limit / 1e6:,.0f} MB. "
        f"Most of it is in {named}.",
        "Save without --with-files, or set GPUCKPT_FILES_LIMIT to more where the Jupyter server starts.",
        bytes=total,
        limit=limit,
    )
