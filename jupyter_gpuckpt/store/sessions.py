"""Who is at work in the store: each writer, reader and collection holds a session, ``locks/ID``, until its end.

What is held is the lock of that file; the text in it, with holder and time, is for people. The system drops the lock
with its holder, so that a stale one is known for certain: after a kill, with a reused pid, a changed clock or a
suspended machine. Where locks are not seen by other machines (`reach`), the text counts: a session of another machine
is held until its file is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ..errors import Busy
from ..linux.host import Host
from .durable import FILE_MODE, links_of, read_small, refresh
from .names import is_id
from .reach import locks_reach

__all__ = ["MOST_BY", "Holder", "Lock", "Session", "ended", "held", "holder", "settle"]

_MAX_TEXT = 8192
MOST_BY = 200
"""Characters of who saves something that are told: its last ones."""
_LOOKS = 20
_BETWEEN_LOOKS = 0.02
"""How often, and after how many seconds again, it is seen whether somebody is at work on a snapshot."""


class Lock:
    """A lock on a file, held until `release`: `flock`, and with it the lock of fcntl(2) for this open file.

    A server of NFS keeps its clients' locks of both kinds as the second kind: only so a process on the server itself,
    which has the folder as a disk of its own, and those on other machines see each other's.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def wait(cls, path: Path) -> Lock:
        """Take the lock at `path`, created where it is missing, as soon as nobody else holds it. Raises `OSError`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _of_this_file(fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def take(cls, path: Path, *, create: bool = True) -> Lock | None:
        """Take the lock at `path`, created where it is missing; None where somebody holds it, or just gave it up.

        Raises
        ------
        FileNotFoundError : it is missing, and not to be created.
        OSError : it cannot be taken.
        """
        # Opened for writing: NFS gives an exclusive lock on nothing less.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), FILE_MODE)
        try:
            lock = cls(fd)
            if lock._try() and links_of(fd):
                return lock
        except BaseException as e:
            os.close(fd)
            if isinstance(e, OSError) and e.errno == errno.ESTALE:  # deleted on a file server
                return None
            raise
        lock.release()
        return None

    def _try(self) -> bool:
        """Take it, or take it anew, if nobody else holds it. Raises `OSError`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _of_this_file(self._fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says fcntl(2)
            return False
        return True

    def release(self) -> None:
        """Give the lock back; once is enough, more is harmless. Raises nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # A lock that is not given back is dropped with the process: no reason to fail what is done.
        # Not by the close alone: a process forked meanwhile holds the same open file.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        with suppress(OSError):
            _of_this_file(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
        with suppress(OSError):
            os.close(fd)

    def stands(self) -> bool:
        """Tell whether it is held and its file still there: who deletes that, or finds it free, takes the lock away.

        A file server takes locks from a machine that it has not heard of for a while. Taken anew, they are good if
        nobody has found them free meanwhile. Raises `OSError`.
        """
        try:
            return self._fd >= 0 and self._try() and links_of(self._fd) > 0
        except OSError as e:
            if e.errno in (errno.ESTALE, errno.EBADF):  # of a client of NFS that was given up
                return False
            raise

    def now(self) -> float:
        """Return what time it is for the file system: one clock for all machines. Raises `OSError`."""
        os.utime(self._fd)
        return os.fstat(self._fd).st_mtime


def _of_this_file(fd: int, command: int, kind: int) -> None:
    """Take or give back the lock of fcntl(2) on all of an open file. Raises `OSError`."""
    try:
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system that has no such locks
            raise


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
    machine: str = ""
    boot: str = ""
    """As `linux.host.Host` has them."""
    name: str = ""
    """The key of the snapshot that is saved; empty where none is."""
    by: str = ""
    """Which notebook or kernel is saved so, for people."""

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it is this machine's."""
        return Host(self.host, self.machine, self.boot).is_this()


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
        apart = of is not None and not locks_reach(locks)
        while True:
            self.id = of or uuid.uuid4().hex
            self._path = locks / self.id
            lock = None if apart and _is_elsewhere(self._path) else Lock.take(self._path)
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
        with suppress(OSError):  # a full disk must not keep anybody from reading
            this = Host.this()
            about = {
                "work": work,
                "pid": os.getpid(),
                "host": this.name,
                "machine": this.machine,
                "boot": this.boot,
                "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "name": name,
                "by": by[-MOST_BY:],
            }
            self._say(json.dumps(about).encode("ascii"))

    def _say(self, text: bytes) -> None:
        # By another open file, whose end has a client of NFS send it: others read it meanwhile.
        fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, text.ljust(os.fstat(fd).st_size), 0)  # a holder before this one may have said more
        finally:
            os.close(fd)

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
        """Tell whether the session is still known to others: somebody may have deleted its file. Raises `OSError`."""
        return self._lock.stands()

    def close(self) -> None:
        """End it; more than once is harmless. Raises nothing."""
        with suppress(OSError):
            if self._lock.stands():
                self._path.unlink()
        self._lock.release()


def held(locks: Path) -> set[str]:
    """Return the ids of the sessions that somebody holds. Raises `OSError`."""
    return {name for name, lock in _looked_at(locks) if lock is None}


def settle(locks: Path) -> set[str]:
    """Delete the files of sessions that nobody holds, and return the ids of the others.

    Whoever deletes what the holder of a session may need looks so: a holder from which a file server has taken the
    lock, since its machine was cut off, sees that the file is gone (`Lock.stands`). Raises `OSError`.
    """
    found = set()
    for name, lock in _looked_at(locks):
        if lock is None:
            found.add(name)
        else:
            (locks / name).unlink(missing_ok=True)
    return found


def _looked_at(locks: Path) -> Iterator[tuple[str, Lock | None]]:
    """Yield each session that is not over, and for as long as it is looked at its lock, if nobody else holds that."""
    refresh(locks)
    apart = not locks_reach(locks)
    for name in os.listdir(locks):  # noqa: PTH208 - names are what is wanted
        if is_id(name):
            try:
                lock = None if apart and _is_elsewhere(locks / name) else Lock.take(locks / name, create=False)
            except FileNotFoundError:
                continue
            try:
                yield name, lock
            finally:
                if lock is not None:
                    lock.release()


def ended(locks: Path, session: str) -> Lock | None:
    """Take the lock of a session of which something is left; None where somebody holds it. Raises `OSError`."""
    path = locks / session
    return None if not locks_reach(locks) and _is_elsewhere(path) else Lock.take(path)


def _is_elsewhere(path: Path) -> bool:
    """Tell whether a session is one of another machine, or says not whose, where its lock would not be seen."""
    if not path.exists():
        return False
    found = holder(path.parent, path.name)
    return found is None or not found.is_of_this_machine


def holder(locks: Path, session: str) -> Holder | None:
    """Return who holds a session by its own words; None where it has not said so or is over."""
    try:
        found = json.loads(read_small(locks / session, _MAX_TEXT))
        named = (str(found.get(key, "")) for key in ("machine", "boot", "name", "by"))
        return Holder(session, str(found["work"]), int(found["pid"]), str(found["host"]), str(found["since"]), *named)
    except (OSError, ValueError, KeyError, TypeError):
        return None
