"""Folders that this user alone can write in: what stands in others' may have been put there by somebody else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["make_private", "why_not_private"]


def why_not_private(path: Path) -> str:
    """Return who else could have put there what stands in a folder; empty where nobody could, or it is missing."""
    try:
        # A link of somebody else's can lead to a folder of this user's that was not meant.
        link, about = path.lstat(), path.stat()
    except FileNotFoundError:
        return ""
    for one in (link, about):
        if one.st_uid != os.geteuid():
            return f"{path} belongs to uid {one.st_uid}, and this is uid {os.geteuid()}"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write in {path}: its mode is {stat.S_IMODE(about.st_mode):04o}"
    return ""


def make_private(path: Path) -> None:
    """Make a folder for this user alone, unless it is there.

    Raises
    ------
    OSError : it cannot be made; or it is there, and somebody else could have put something into it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := why_not_private(path):
        raise PermissionError(errno.EACCES, why)
