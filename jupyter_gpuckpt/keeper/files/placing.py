"""Puts a snapshot's own files in place inside a sleeper's mount namespace; nothing on the machine's disk changes.

Run as a program in the namespace, with the standard library alone (`python -I -S placing.py place PLAN`, and once the
processes are restored, `seal PLAN`). The plan is JSON:

- ``files``: pairs of a file and the file that it stands in place of.
- ``folders``, the deepest first: what stands in place of a folder, that folder, and the names of what only the first
  one has. The rest of the folder shows through, each entry by itself. What is created in it is lost with the sleeper.
- ``sealed``: those of the folders that are made read-only by themselves, for that reason; after criu, which creates
  files there for those that are open and deleted.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import stat
import sys
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 0x20, 0x1000, 0x4000
MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # it has no function in the C library

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def _bind(source: str, target: str, flags: int = 0) -> None:
    done = _libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND | flags, None)
    _check(done, f"mount {source} on {target}")


def _make_read_only(target: str) -> None:
    _check(_libc.mount(None, os.fsencode(target), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None), f"remount {target}")


def _show_through(source: str, folder: str, own: set[str]) -> None:
    """Give `source` what `folder` has beside `own`, and the folder's mode and owner."""
    for name in own:
        path = os.path.join(source, name)  # noqa: PTH118
        if not os.path.islink(path):  # noqa: PTH114
            _bind(path, path)  # it stays writable
    for entry in os.scandir(folder):
        if entry.name in own:
            continue
        path = os.path.join(source, entry.name)  # noqa: PTH118
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), path)  # noqa: PTH115, PTH211
            continue
        if entry.is_dir():
            os.mkdir(path)  # noqa: PTH102
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _bind(entry.path, path, MS_REC)
    about = os.stat(folder)  # noqa: PTH116
    os.chown(source, about.st_uid, about.st_gid)
    os.chmod(source, stat.S_IMODE(about.st_mode))  # noqa: PTH101


def _become_root(source: str) -> None:
    """Make a folder the root of all processes of the namespace (pivot_root(2))."""
    _bind(source, source, MS_REC)
    os.chdir(source)
    _check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _seal(folder: str) -> None:
    """Make a folder read-only; not one for temporary files, nor one in which a deleted file is open for writing."""
    if os.stat(folder).st_mode & stat.S_ISVTX:  # noqa: PTH116
        return
    try:
        _make_read_only(folder)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise


def _place(what: dict[str, Any]) -> None:
    for source, target in what["files"]:
        _bind(source, target)
    for source, folder, own in what["folders"]:
        _show_through(source, folder, set(own))
        if folder == "/":
            _become_root(source)
        else:
            _bind(source, folder, MS_REC)


def main(step: str, plan: str) -> None:
    """Do one step of what the plan says."""
    with open(plan, encoding="utf-8") as f:
        what = json.load(f)
    if step == "place":
        _place(what)
    else:
        for folder in what["sealed"]:
            _seal(folder)


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
