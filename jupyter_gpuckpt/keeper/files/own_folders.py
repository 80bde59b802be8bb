"""Makes files in the user's own folders, on the machine's disk: never over what is there, never where a stranger leads.

What stands there for one kernel alone would take the place of the whole folder, and what that kernel creates in it
would be lost. A file that was only read is therefore made again, for everybody, where its folder is the user's own.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO

from ...snapshots.kept_files import KeptFile
from ...snapshots.needs import NeededFile

__all__ = ["environments", "finish", "is_in", "make", "makeable"]

_OWN_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_FOR_PACKAGES = ("site-packages", "dist-packages")
_OF_THE_STANDARD_LIBRARY = "lib-dynload"
_OF_THE_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/run", "/sbin", "/usr", "/var")
"""What of root's folders is not root's as a user: packages own what is in them."""


def environments(kept: Iterable[KeptFile], needed: Iterable[NeededFile]) -> frozenset[str]:
    """Return the folders that are nothing but Python and its packages; none in which a process of the kernel stands.

    Old packages made again among new ones would break both.
    """
    found = set()
    for file in kept:
        above, _, name = file.path.rpartition("/")
        if name in _OWN_ENVIRONMENT:
            found.add(above)
        elif name in _FOR_PACKAGES:
            found.add(file.path)
        elif name == _OF_THE_STANDARD_LIBRARY:
            prefix = str(Path(above).parents[1])  # of PREFIX/lib/python3.N
            found.add(above if _is_of_the_system(prefix) else prefix)
    return frozenset(found - {file.path for file in needed if stat.S_ISDIR(file.mode)})


def is_in(path: str, folders: Collection[str]) -> bool:
    """Tell whether a path is below one of some folders."""
    return any(str(above) in folders for above in Path(path).parents)


def makeable(missing: Iterable[KeptFile], environments: Collection[str]) -> frozenset[str]:
    """Return the paths of the files that can be made, of all that is `missing`, parents before what is in them.

    Of Python's `environments` it is only the folder itself.
    """
    found: set[str] = set()
    own: dict[str, bool] = {}
    for file in missing:
        above = file.path.rpartition("/")[0]
        if os.path.lexists(file.path) or is_in(file.path, environments):
            continue
        if above not in found and above not in own:
            own[above] = _is_own(above or "/")
        if above in found or own[above]:
            found.add(file.path)
    return frozenset(found)


def make(file: KeptFile, content: BinaryIO | None) -> None:
    """Make a file, folder or link; a folder gets its mode and time from `finish`, once all is in it.

    Raises
    ------
    OSError : it cannot be made, or there is something now; nothing was.
    """
    above, _, name = file.path.rpartition("/")
    folder = _open(above or "/")
    try:
        if stat.S_ISDIR(file.mode):
            os.mkdir(name, 0o700, dir_fd=folder)
        elif stat.S_ISLNK(file.mode):
            os.symlink(file.link, name, dir_fd=folder)
            if os.geteuid() == 0:
                os.chown(name, file.uid, file.gid, dir_fd=folder, follow_symlinks=False)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as new:
                try:
                    if content is not None:
                        shutil.copyfileobj(content, new)
                    new.flush()
                    _finish(new.fileno(), file)
                except BaseException:
                    os.unlink(name, dir_fd=folder)
                    raise
    finally:
        os.close(folder)


def finish(file: KeptFile) -> None:
    """Give a folder that `make` made owner, mode and time. Raises `OSError`."""
    above, _, name = file.path.rpartition("/")
    folder = _open(above or "/")
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            _finish(fd, file)
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def _finish(fd: int, file: KeptFile) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, file.uid, file.gid)
    os.fchmod(fd, stat.S_IMODE(file.mode) & ~(stat.S_ISUID | stat.S_ISGID))  # nobody asked for rights on this machine
    os.utime(fd, ns=(file.mtime, file.mtime))


def _is_own(folder: str) -> bool:
    """Tell whether files can be made in a folder: it is the user's own, or one for everybody's temporary files."""
    try:
        fd = _open(folder)
    except OSError:
        return False
    try:
        about = os.fstat(fd)
        if about.st_mode & stat.S_ISVTX:
            return os.access(folder, os.W_OK)
        return (
            about.st_uid == os.geteuid()
            and not (about.st_uid == 0 and _is_of_the_system(os.path.realpath(folder)))
            and os.access(folder, os.W_OK)
        )
    finally:
        os.close(fd)


def _is_of_the_system(folder: str) -> bool:
    return folder == "/" or folder.startswith(tuple(f"{top}/" for top in _OF_THE_SYSTEM)) or folder in _OF_THE_SYSTEM


def _open(folder: str) -> int:
    """Open a folder (O_PATH) on a way that nobody but root and this user can change.

    Raises
    ------
    OSError : it is not there, or another user can.
    """
    real = os.path.realpath(folder)
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for name in filter(None, real.split("/")):
        above = fd
        try:
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
        about = os.fstat(fd)
        is_open_to_all = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.geteuid()) or is_open_to_all:
            os.close(fd)
            raise PermissionError(errno.EPERM, "another user can change it", real)
    return fd
