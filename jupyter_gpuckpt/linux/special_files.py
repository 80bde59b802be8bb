"""Whether a file system holds what a running kernel's folder has: FIFOs, sockets, and files with a second name."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

from .file_systems import nearest

__all__ = ["holds_special_files"]

_CANNOT = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO, errno.EMLINK}
"""What file systems say that have no such files: exFAT by FUSE gives EIO, others EPERM or EOPNOTSUPP."""


def holds_special_files(folder: Path) -> bool:
    """Tell whether such files can be made in a folder, or in the nearest above it that is there.

    Where that cannot be tried, in a folder of somebody else's or on a full disk, they are taken to.
    """
    trial = nearest(folder) / f".gpuckpt-{os.getpid()}-{threading.get_native_id()}"
    try:
        trial.mkdir(mode=0o700)
    except OSError:
        return True
    try:
        (trial / "file").touch(0o600)
        os.link(trial / "file", trial / "second")
        os.mkfifo(trial / "fifo", 0o600)
        os.mknod(trial / "socket", stat.S_IFSOCK | 0o600)
    except OSError as e:
        return e.errno not in _CANNOT
    finally:
        with contextlib.suppress(OSError):
            for made in trial.iterdir():
                made.unlink()
            trial.rmdir()
    return True
