"""Memory that saves and restores are about to take: several at once, of several keepers, do not count on the same.

A claim is a file in the kernel's folder, as long as what is claimed, and counts while its maker holds its lock: the
system drops that with a keeper that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import settings
from ..client.record import KernelFolder
from ..linux.lock_files import is_locked
from ..linux.private_folders import make_private

__all__ = ["MemoryClaim", "claimed", "remove_left"]

_NAME = "claim-"
_TURNS = "claims.lock"
_LONGEST_WAIT = 0.2  # how long a claim waits for others that are being made: a kernel may be paused, in seconds
_LOOK = 0.001  # seconds


class MemoryClaim:
    """So many bytes of memory that no other keeper of this user's counts on, until `release`."""

    def __init__(self, kernel_dir: Path, size: int) -> None:
        self.file = kernel_dir / f"{_NAME}{uuid.uuid4().hex}"
        self._fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.ftruncate(self._fd, size)  # it takes no space

    @classmethod
    def where(cls, fits: Callable[[int], bool], kernel_dir: Path, size: int) -> MemoryClaim | None:
        """Claim memory where it `fits` beside so many bytes that others have claimed; None where it does not.

        It is claimed before that is looked at: of two that do not wait for each other, one sees the other.

        Raises
        ------
        OSError : it cannot be written down.
        """
        with _one_after_another():
            claim = cls(kernel_dir, size)
            if fits(claimed(but=claim.file)):
                return claim
            claim.release()
            return None

    def release(self) -> None:
        """Give it up; more than once is harmless."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self.file.unlink(missing_ok=True)
        os.close(fd)


def claimed(but: Path | None = None) -> int:
    """Return how many bytes the keepers of this user have claimed on this machine; `but` for those of one file."""
    found = 0
    for file in settings.kernels_dir().glob(f"*/{_NAME}*"):
        if file != but and KernelFolder(file.parent).is_here() and is_locked(file):
            with contextlib.suppress(FileNotFoundError):  # it was just released
                found += file.stat().st_size
    return found


def remove_left(kernel_dir: Path) -> None:
    """Remove the claims of a keeper that was killed, which count no longer."""
    for file in kernel_dir.glob(f"{_NAME}*"):
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_after_another() -> Iterator[None]:
    """Wait for a claim that somebody else is making, but not for one who is stopped in the middle.

    Of some that are made at the same moment, all would go without otherwise.
    """
    folder = settings.shared_dir()
    make_private(folder)
    # Not the kernels' folder itself, which every keeper has locked (`keep_from_cleaning`).
    fd = os.open(folder / _TURNS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)
