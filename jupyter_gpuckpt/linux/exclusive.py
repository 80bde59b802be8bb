"""What only one program at a time can have, and who has it: locks of files (flock(2), fcntl(2)), and terminals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import proc

__all__ = ["WHOLE", "HeldLock", "held_locks", "terminals"]

WHOLE = "FLOCK"
"""The kind of lock of flock(2). Those of fcntl(2), of a process or of an open file, stand in each other's way, too."""
_KINDS = {WHOLE: WHOLE, "POSIX": "range", "OFDLCK": "range"}


@dataclass(frozen=True)
class HeldLock:
    """A lock of a file that a process has.

    Attributes
    ----------
    is_whole : of flock(2), which knows nothing of those of fcntl(2).
    writes : nobody else may have one.
    pid : who took it; -1 where the system does not say.
    file : its file system's device and its inode.
    start, end : the first byte and the last; None for all that follow.
    """

    is_whole: bool
    writes: bool
    pid: int
    file: tuple[int, int]
    start: int
    end: int | None


def held_locks(without: Iterable[int] = ()) -> list[HeldLock]:
    """Return the locks of files on this machine, as far as its /proc shows them, but for those of some processes."""
    theirs = {lock for pid in without for lock in _locks_of(pid)}
    with contextlib.suppress(OSError):
        return [
            lock for line in proc.lines("/proc/locks") if (lock := _parsed(line)) is not None and lock not in theirs
        ]
    return []


def _locks_of(pid: int) -> Iterator[HeldLock]:
    """Yield the locks that what a process has open holds, whoever took them."""
    for fd in _entries(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            for line in proc.lines(fd):
                if line.startswith("lock:") and (lock := _parsed(line.removeprefix("lock:"))) is not None:
                    yield lock


def _parsed(line: str) -> HeldLock | None:
    """Return what a line of proc_locks(5) says; None for a lock that is waited for, or of another kind."""
    words = line.split()
    if len(words) != 8 or words[1] not in _KINDS:
        return None
    _, kind, _, access, pid, file, start, end = words
    major, minor, inode = file.split(":")
    device = os.makedev(int(major, 16), int(minor, 16))
    last = None if end == "EOF" else int(end)
    return HeldLock(kind == WHOLE, access == "WRITE", int(pid), (device, int(inode)), int(start), last)


def terminals(pids: Iterable[int]) -> set[int]:
    """Return the numbers of the terminals (pty(7)) of which these processes have one of the two ends."""
    found = set()
    for pid in pids:
        for fd in _entries(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError):
                target = str(fd.readlink())
                if target.startswith("/dev/pts/") and target != "/dev/pts/ptmx":
                    found.add(int(target.removeprefix("/dev/pts/")))
                elif target in ("/dev/ptmx", "/dev/pts/ptmx"):
                    lines = proc.lines(f"/proc/{pid}/fdinfo/{fd.name}")
                    found |= {int(line.split()[1]) for line in lines if line.startswith("tty-index:")}
    return found


def _entries(folder: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(folder).iterdir())
    return []
