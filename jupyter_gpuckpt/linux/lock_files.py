"""Who holds a lock file: the system drops a lock with its holder, so it tells who lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

KEEPER_LOCK = "keeper.lock"
"""Locked for as long as the kernel's keeper lives; in the kernel's folder, and linked into its run folder."""


def is_locked(path: Path) -> bool:
    """Tell whether somebody holds this lock file; looking does not get in the way of others who look."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def keep_from_cleaning(folder: Path) -> None:
    """Have what lies in a folder left alone for as long as this process lives, however old it becomes.

    Of old files in /tmp and the like, systemd removes none below a folder that somebody has locked (tmpfiles.d(5)).
    Several processes may do so.
    """
    with contextlib.suppress(OSError):  # a file system without locks: nothing there is cleaned either
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
