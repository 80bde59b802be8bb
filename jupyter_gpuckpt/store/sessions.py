"""Who is at work in the store: each writer, reader and collection holds a session, ``locks/ID``, until its end.

What is held is the lock (`flock`) of that file; the text in it, with holder and time, is for people. The system drops
the lock with its holder, so that a stale one is known for certain: after a kill, with a reused pid, a changed clock or
a suspended machine.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ..errors import Busy
from .durable import FILE_MODE, read_small
from .names import is_id

__all__ = ["Holder", "Lock", "Session", "held", "holder"]

_MAX_TEXT = 4096
_MOST_BY = 200
_LOOKS = 20
_BETWEEN_LOOKS = 0.02
"""How often, and after how many seconds again, it is seen whether somebody is at work on a snapshot."""


class Lock:
    """A lock on a file, held until `release`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def wait(cls, path: Path) -> Lock:
        """Take the lock at `path`, created where it is missing, as soon as nobody else holds it. Raises `OSError`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """Take the lock at `path`, created where it is missing; None where somebody holds it, or just gave it up."""
        # Opened for writing: NFS gives an exclusive lock on nothing less.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def stands(self) -> bool:
        """Tell whether it is held and its file still there: who deletes that takes the lock away."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def write(self, text: bytes) -> None:
        """Put `text` into the file. Raises `OSError`."""
        os.pwrite(self._fd, text, 0)


@dataclass(frozen=True)
class Holder:
    """Who holds a session, as it said itself."""

    id: str
    work: str
    """What for: ``save``, ``read``, ``collect``."""
    pid: int
    host: str
    since: str
    """UTC, ISO 8601."""
    name: str = ""
    """The key of the snapshot that is saved; empty where none is."""
    by: str = ""
    """Which notebook or kernel is saved so, for people."""


class Session:
    """The right to rely on what the store holds: until `close` nothing is deleted that was there at the beginning."""

    __slots__ = ("_lock", "_path", "id")

    def __init__(self, locks: Path, work: str, of: str | None = None, *, name: str = "", by: str = "") -> None:
        """Begin; `work`, `name` and `by` are as `Holder` has them. Its id is its own, or that of the snapshot `of`.

        Raises
        ------
        Busy : somebody else is at work on that snapshot.
        OSError : the file of the lock cannot be written.
        """
        patience = _LOOKS
        while True:
            self.id = of or uuid.uuid4().hex
            self._path = locks / self.id
            lock = Lock.take(self._path)
            if lock is not None:
                break
            if of is not None:
                # Others hold it for a moment as well, to see whether somebody does.
                patience -= 1
                if patience:
                    time.sleep(_BETWEEN_LOOKS)
                    continue
                raise Busy(
                    "The same snapshot is already being added to the store.",
                    f"the lock of {self._path} is held",
                    "Wait until that is done.",
                )
            self._path.unlink(missing_ok=True)  # somebody looked at it between its creation and its locking
        self._lock = lock
        about = {
            "work": work,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "name": name,
            "by": by[-_MOST_BY:],
        }
        with suppress(OSError):  # it is for people only, and a full disk must not keep anybody from reading
            lock.write(json.dumps(about).encode("ascii"))

    @classmethod
    def for_reading(cls, locks: Path) -> Session | None:
        """Begin to read; None where the disk cannot be written: nothing can be deleted from there either."""
        try:
            return cls(locks, "read")
        except OSError as e:
            if e.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return None
            raise

    def stands(self) -> bool:
        """Tell whether the session is still known to others: somebody may have deleted its file."""
        return self._lock.stands()

    def close(self) -> None:
        """End it; more than once is harmless. Raises nothing."""
        if self._lock.stands():
            with suppress(OSError):
                self._path.unlink()
        self._lock.release()


def held(locks: Path) -> set[str]:
    """Return the ids of the sessions that somebody holds; Raises `OSError`."""
    return {path.name for path in locks.iterdir() if is_id(path.name) and _is_held(path)}


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder(locks: Path, session: str) -> Holder | None:
    """Return who holds a session by its own words; None where it has not said so or is over."""
    try:
        found = json.loads(read_small(locks / session, _MAX_TEXT))
        named = (str(found.get(key, "")) for key in ("name", "by"))
        return Holder(session, str(found["work"]), int(found["pid"]), str(found["host"]), str(found["since"]), *named)
    except (OSError, ValueError, KeyError, TypeError):
        return None
