"""Who uses a snapshot's data: writer and readers share a lock on it, deletion needs it alone.

The lock is `flock` on the empty file ``locks/ID``. The system drops it with its holder, so there is
no stale lock to recognise: not after a kill, a reused pid, a changed clock or a suspended machine.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from .durable import FILE_MODE

__all__ = ["Lock"]


class Lock:
    """A lock that is held until `release`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def shared(cls, path: Path) -> Lock | None:
        """Wait for a share of the lock at `path`, created where it is missing.

        Returns None where the data was deleted while this waited.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        return cls._take(fd, fcntl.LOCK_SH)

    @classmethod
    def alone(cls, path: Path) -> Lock | None:
        """Take the lock at `path` alone, or return None where anybody holds it."""
        # Opened for writing: NFS gives an exclusive lock on nothing less.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        return cls._take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def _take(cls, fd: int, operation: int) -> Lock | None:
        try:
            fcntl.flock(fd, operation)
            if os.fstat(fd).st_nlink:
                return cls(fd)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def release(self) -> None:
        """Give the lock back; once is enough, more is harmless. Raises nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # A lock that is not given back is dropped with the process: no reason to fail what is done.
        with suppress(OSError):
            # Not by the close alone: a process forked meanwhile holds the same open file.
            fcntl.flock(fd, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(fd)
