"""Files that live about as long as the kernel: a snapshot has their content, and a restore makes those that are gone.

They are the files that its processes write, its FIFOs, and its temporary folders: a restart, or the end of a worker,
deletes many of them, and criu opens every file of a process again. They are made where they stood, on the machine's own
disk: the kernel goes on with them as with any file of its own. What is there is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...snapshots import databases
from ...snapshots.needs import NeededFile
from ...snapshots.temporary import temporary_above

__all__ = ["ARCHIVE", "keep", "make", "unmake"]

ARCHIVE = "lifetime.tar"
"""The part of a snapshot that holds them."""

_LARGEST = 16 << 20
"""Bytes of one at most."""
_TOGETHER = 64 << 20
"""Bytes of all at most: the small ones come first."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_MOST = 10_000
"""How many files of temporary folders are kept at most."""


def keep(
    needed: Sequence[NeededFile], folders: Sequence[str], root: Path, archive: Path
) -> tuple[list[NeededFile], list[str]]:
    """Write the content of these files into `archive`.

    `folders` are the temporary folders that the kernel deletes with itself, and `root` is what is ``/`` to it. Returned
    is all that is `needed`, with the kept ones marked, and the paths of temporary files that are too large to be kept.

    Raises
    ------
    OSError : it cannot be written.
    """
    # criu says no size of those that are appended to
    sizes = {file.path: file.size for file in needed if file.writable and stat.S_ISREG(file.mode)}
    fifos = {file.path for file in needed if stat.S_ISFIFO(file.mode)}
    above = {one for path in (*sizes, *fifos, *folders) for one in temporary_above(root, path)}
    inside = [path for folder in folders for path in _in(root, folder) if path not in sizes]
    candidates = [*inside[:_MOST], *fifos.difference(inside), *sizes]
    room = _TOGETHER
    kept = set()
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for folder in sorted(above):
            _add(tar, root, folder, None, 0)
        for path in sorted(candidates, key=lambda path: (sizes.get(path) or 0, path)):
            size = _add(tar, root, path, sizes.get(path), min(room, _LARGEST))
            if size is not None:
                room -= size
                kept.add(path)
    kept -= _torn(needed, root)
    temporary = {*inside, *(path for path in sizes if temporary_above(root, path))}
    large = sorted(path for path in temporary - kept if (root / path[1:]).is_file())
    return [replace(file, kept=True) if file.path in kept else file for file in needed], large


def _torn(needed: Sequence[NeededFile], root: Path) -> set[str]:
    """Return the paths of databases that are `REMEMBERED`, and of their logs, written to before all of it was read."""
    found = set()
    for file in needed:
        if file.database in databases.REMEMBERED:
            try:
                is_whole = (root / file.path[1:]).stat().st_mtime_ns == file.mtime
            except OSError:
                is_whole = False
            if not is_whole:
                found |= {file.path, databases.log_of(file.path, file.database)}
    return found


def _in(root: Path, folder: str) -> list[str]:
    """Return the paths of a temporary folder and of what is in it, as the processes see it; of too many only some."""
    found = [folder]
    for at, folders, files in os.walk(root / folder[1:]):
        inside = f"/{Path(at).relative_to(root)}"
        found += [f"{inside}/{name}" for name in (*folders, *files)]
        if len(found) > _MOST:
            break
    return found


def _add(tar: tarfile.TarFile, root: Path, path: str, size: int | None, room: int) -> int | None:
    """Put a folder, FIFO, link, or the first `size` bytes of a file, into an archive; return how much, None if nothing.

    A file that has less than `size` by now, or that there is no `room` for, is left out.
    """
    at = root / path[1:]
    member = tarfile.TarInfo(path)
    try:
        about = at.lstat()
        member.mode, member.uid, member.gid = stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid
        if stat.S_ISDIR(about.st_mode):
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
            return 0
        if stat.S_ISFIFO(about.st_mode):
            member.type = tarfile.FIFOTYPE
            tar.addfile(member)
            return 0
        if stat.S_ISLNK(about.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, str(at.readlink())
            tar.addfile(member)
            return 0
        member.size = about.st_size if size is None else size
        if not stat.S_ISREG(about.st_mode) or about.st_size < member.size or member.size > room:
            return None
        with at.open("rb") as f:
            content = f.read(member.size)
    except OSError:
        return None  # deleted meanwhile
    if len(content) < member.size:
        return None
    tar.addfile(member, io.BytesIO(content))
    return member.size


def make(archive: Path, needed: Collection[NeededFile]) -> list[Path]:
    """Make what is not there any more of the files in `archive`; return what was made, parents first.

    Raises
    ------
    OSError : it cannot be made; nothing was.
    """
    known = {file.path: file for file in needed}
    made: list[Path] = []
    try:
        with tarfile.open(archive) as tar:
            for member in sorted(tar, key=lambda one: (not one.isdir(), one.name)):
                at = Path("/", member.name)
                if os.path.lexists(at) or not at.parent.is_dir():
                    continue
                if (file := known.get(str(at))) is not None and not file.kept:
                    continue
                _refuse_strange(at, member.uid)
                if member.issym():
                    _link(at, member)
                    made.append(at)
                    continue
                fd = _new(at, member)
                made.append(at)
                try:
                    if (content := tar.extractfile(member)) is not None:
                        _write(fd, _content(str(at), content.read(), known, made))
                    _finish(fd, member, file)
                finally:
                    os.close(fd)
    except BaseException:
        unmake(made)
        raise
    return made


def _refuse_strange(at: Path, owner: int) -> None:
    """Refuse to write below a temporary folder that somebody else has made since, under the name of one that was ours.

    Raises
    ------
    PermissionError : it is another user's, or a link.
    """
    for folder in temporary_above(Path("/"), str(at)):
        about = Path(folder).lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid not in (owner, os.geteuid()):
            raise PermissionError(errno.EPERM, "the folder belongs to another user", folder)


def unmake(made: Sequence[Path]) -> None:
    """Delete what `make` made: the restore came to nothing."""
    for at in reversed(made):
        with contextlib.suppress(OSError):
            at.rmdir() if stat.S_ISDIR(at.lstat().st_mode) else at.unlink()


def _content(path: str, saved: bytes, known: Mapping[str, NeededFile], made: Collection[Path]) -> bytes:
    """Return what a file is made of: what it was, but zeros where a database beside it may have taken that in by now.

    SQLite takes them for a log and an index without anything in them, and reads the database itself. One of DuckDB's
    that has taken its log in is refused.
    """
    main = known.get(databases.main_of(path, [(file.path, file.database) for file in known.values()]))
    if main is None or main.in_transaction or main.database == databases.DUCKDB:
        return saved
    if databases.is_index(path):
        return bytes(len(saved))
    with contextlib.suppress(OSError):
        if Path(main.path) in made or Path(main.path).stat().st_mtime_ns == main.mtime:
            return saved
    return bytes(len(saved))


def _new(at: Path, member: tarfile.TarInfo) -> int:
    """Make a folder, a FIFO or a file, and return a descriptor of it. Raises `OSError`."""
    if member.isdir():
        at.mkdir(mode=0o700)
        return os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if member.isfifo():
        os.mkfifo(at, 0o600)
        return os.open(at, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    return os.open(at, _NEW, 0o600)


def _link(at: Path, member: tarfile.TarInfo) -> None:
    """Make a symbolic link, which has its owner, and leads wherever it led. Raises `OSError`."""
    at.symlink_to(member.linkname)
    if os.geteuid() == 0:
        os.chown(at, member.uid, member.gid, follow_symlinks=False)


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _finish(fd: int, member: tarfile.TarInfo, file: NeededFile | None) -> None:
    """Give what was made owner, mode and time; by its descriptor, since its name may be somebody else's by now."""
    if os.geteuid() == 0:
        os.fchown(fd, member.uid, member.gid)
    os.fchmod(fd, stat.S_IMODE(member.mode))
    if file is not None and file.mtime:
        os.utime(fd, ns=(file.mtime, file.mtime))
