"""Mount namespaces of clients: whether root may work in one that is not the broker's own (docs/security.md).

Root looks files up there: its own programs, libraries and modules, and folders to mount at. So a namespace is entered
only where all that root looks for is what it is in the broker's own, and where nobody but root can change that.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import Refused

__all__ = ["enter", "is_of_own_user_namespace", "mounted", "of", "refuse_other", "refuse_other_root"]

_NS_GET_USERNS = 0xB701  # linux/nsfs.h
_CLONE_NEWNS = 0x00020000
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc")
"""Where root's programs look for libraries, configuration and other programs."""
_WAYS = ("/proc", "/dev")
"""What a sleeper's own /proc and /dev/shm are mounted at, or in."""
_PACKAGE = Path(__file__).parents[1]
_MOST = 4 << 20  # bytes of a list of mounts that are read
_ESCAPE = re.compile(r"\\([0-7]{3})")

_libc = ctypes.CDLL(None, use_errno=True)


def of(pid: int, own: Sequence[Path]) -> int:
    """Return the mount namespace of a process, as a descriptor, if it is to be trusted; -1 where it is the broker's.

    `own` are files and folders of root's programs, beside the system's and this Python's.

    Raises
    ------
    Refused : it is not to be trusted.
    OSError : the process has ended.
    """
    held = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        if os.path.samestat(os.fstat(held), os.stat("/proc/self/ns/mnt")):  # noqa: PTH116
            os.close(held)
            return -1
        if not is_of_own_user_namespace(held):
            raise _refused(pid, "which was not made by root")
        theirs = _read(pid, held)
        if found := _difference(_read("self"), theirs, _trees(own)):
            raise _refused(pid, found)
        refuse_other_root(pid, held)
    except BaseException:
        os.close(held)
        raise
    return held


def refuse_other(pid: int, namespace: int, sleeper: int, its_namespace: int, also: Sequence[str]) -> None:
    """Refuse to work in a sleeper for a client of another mount namespace than the sleeper was made from.

    Parameters
    ----------
    namespace : that of the client `pid`, as `of` returns it. The broker's own confines nobody.
    also : where a sleeper has mounts of its own.

    Raises
    ------
    Refused : the client would get out of its namespace.
    """
    if namespace < 0:
        return
    theirs, its = _read(pid, namespace), _read(sleeper, its_namespace)
    for place in {mount.at for mount in (*theirs.visible(), *its.visible())}:
        if not any(_is_below(place, one) for one in also) and theirs.origin(place) != its.origin(place):
            raise _refused(pid, f"and the kernel in one where {place} is another")


def refuse_other_root(pid: int, namespace: int) -> None:
    """Refuse a process whose root folder is not that of its mount namespace.

    Raises
    ------
    Refused : it has changed its root folder.
    OSError : it has ended.
    """
    if _root_of(pid) != _asked_inside(namespace):
        raise _refused(pid, "and has changed its root folder there (chroot)")


def mounted(pid: int) -> Iterator[tuple[str, str, str]]:
    """Yield where a process has something mounted, of which kind, and with which options.

    Raises
    ------
    OSError : it has ended.
    Refused : it has too many mounts.
    """
    for line in _lines(pid):
        before, _, after = line.partition(" - ")
        if after:
            fields = before.split()
            yield _path(fields[4]), after.split()[0], fields[5]


def enter(namespace: int) -> None:
    """Enter a mount namespace that `of` has returned; its root folder is that of this process then.

    Raises
    ------
    OSError : the system does not let it be done.
    """
    if namespace >= 0 and _libc.setns(namespace, _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def is_of_own_user_namespace(namespace: int) -> bool:
    """Tell whether a namespace belongs to this process's user namespace: only its root can have made or changed it."""
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))  # noqa: PTH116
    finally:
        os.close(owner)


def _is_below(path: str, folder: str) -> bool:
    """Tell whether a path is that of a folder, or of something in it."""
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


# -- what root looks up


def _trees(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return below which folders a namespace must be as the broker's own, since root may look files up there."""
    python = map(Path, (sys.prefix, sys.base_prefix, sys.executable, *filter(os.path.isabs, sys.path)))
    named = (path for one in (*folders, *python, _PACKAGE) for path in _on_the_way(one.absolute()))
    return tuple(sorted({*_SYSTEM, *map(str, named)}))


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield a path, and what it is by each of the links that lead to it."""
    yield path
    yield path.resolve()
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            target = part.parent / part.readlink() / path.relative_to(part)
            yield from _on_the_way(Path(os.path.normpath(target)))
            return


# -- what is mounted


@dataclass(frozen=True)
class _Mount:
    """A line of /proc/PID/mountinfo (proc_pid_mountinfo(5)): device and path there of what is mounted `at` a path."""

    id: str
    parent: str
    device: str
    root: str
    at: str


class _Mounts:
    """The mounts of a namespace, with those that others hide."""

    def __init__(self, lines: Iterable[str]) -> None:
        found = [_Mount(*fields[:3], *map(_path, fields[3:5])) for line in lines if (fields := line.split())]
        self._in = {(mount.parent, mount.at): mount for mount in found}
        ids = {mount.id for mount in found}
        self._all = found
        self._first = next((mount for mount in found if mount.at == "/" and mount.parent not in ids - {mount.id}), None)

    def visible(self) -> Iterator[_Mount]:
        """Yield the mounts that a lookup of their own path comes to."""
        return (mount for mount in self._all if self._of(mount.at) is mount)

    def origin(self, path: str) -> tuple[str, str] | None:
        """Return the device of what is at a path, and its path there; None where there is no root folder."""
        mount = self._of(path)
        if mount is None:
            return None
        rest = path[len(mount.at) :] if mount.at != "/" else path
        return mount.device, os.path.normpath(f"{mount.root}/{rest}")

    def _of(self, path: str) -> _Mount | None:
        """Return the mount that a path without links leads to."""
        mount = self._first
        parts = path.split("/")
        for place in ("/", *("/".join(parts[:end]) for end in range(2, len(parts) + 1))) if path != "/" else ("/",):
            while mount is not None and (over := self._in.get((mount.id, place))) is not None and over is not mount:
                mount = over
        return mount


def _difference(ours: _Mounts, theirs: _Mounts, own: Sequence[str]) -> str:
    """Say in which place that root needs, or on the way there, something else is mounted; nothing where it is not.

    A mount that hides nothing (a folder that is bound to itself, read-only for instance) is none.
    """
    if theirs.origin("/") is None:
        return "whose mounts cannot all be seen"
    needed = (*own, *_WAYS)
    for place in sorted({mount.at for mount in (*theirs.visible(), *ours.visible())} | {"/"}):
        if any(_is_below(path, place) for path in needed) and theirs.origin(place) != ours.origin(place):
            return f"where {place} is not the machine's own"
    for mount in theirs.visible():
        if any(_is_below(mount.at, tree) for tree in own) and theirs.origin(mount.at) != ours.origin(mount.at):
            return f"where {mount.at} is not the machine's own"
    return ""


def _read(pid: int | str, held: int = -1) -> _Mounts:
    """Return the mounts of a process, which is in the namespace that is `held`.

    Raises
    ------
    OSError : it has ended.
    Refused : it is in another one, or has too many.
    """
    return _Mounts(_lines(pid, held))


def _lines(pid: int | str, held: int = -1) -> list[str]:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:  # of one namespace from here on
        if held >= 0 and not os.path.samestat(os.fstat(held), os.stat(f"/proc/{pid}/ns/mnt")):  # noqa: PTH116
            raise _refused(pid, "which it changes at this moment")
        raw = file.read(_MOST + 1)
    if len(raw) > _MOST:
        raise _refused(pid, "with too many mounts")
    return raw.decode("utf-8", "surrogateescape").split("\n")


def _path(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


# -- its root folder


def _root_of(pid: int) -> tuple[int, int, str]:
    folder = os.open(f"/proc/{pid}/root", os.O_PATH)
    try:
        return _told(folder, f"/proc/self/fdinfo/{folder}")
    finally:
        os.close(folder)


def _told(folder: int, fdinfo: str, at: int | None = None) -> tuple[int, int, str]:
    about = os.fstat(folder)
    info = os.open(fdinfo, os.O_RDONLY, dir_fd=at)
    try:
        mount = next(line for line in os.read(info, 4096).decode().splitlines() if line.startswith("mnt_id:"))
    finally:
        os.close(info)
    return about.st_dev, about.st_ino, mount


def _asked_inside(namespace: int) -> tuple[int, int, str] | None:
    """Return what `_root_of` says of a process that enters a namespace; it looks up nothing there but its root."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _tell_root(namespace, write)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        words = told.read().decode().split(" ", 2)
    os.waitpid(child, 0)
    return (int(words[0]), int(words[1]), words[2]) if len(words) == 3 else None


def _tell_root(namespace: int, to: int) -> NoReturn:
    try:
        fdinfo = os.open("/proc/self/fdinfo", os.O_RDONLY | os.O_DIRECTORY)
        enter(namespace)
        root = os.open("/", os.O_PATH)
        os.write(to, " ".join(map(str, _told(root, str(root), fdinfo))).encode())
    finally:
        os._exit(0)


def _refused(pid: int | str, why: str) -> Refused:
    return Refused(
        "The broker does not serve this process.",
        f"Process {pid} lives in another mnt namespace than the broker, {why}.",
        "Start it outside of that namespace, or have an administrator make one that differs only in folders for data, "
        "such as /tmp, /var/tmp and /dev/shm (`PrivateTmp=yes` of systemd, `job_container/tmpfs` of Slurm).",
    )
