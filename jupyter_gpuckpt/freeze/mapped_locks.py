"""Locks of files that their process has mapped, which our library in criu (`criu_locks.c`) takes again in a restore."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

from . import images

__all__ = ["asked_for"]


def asked_for(folder: Path) -> Mapping[str, str]:
    """Return what criu's environment has to have for that, in a restore of the images in a folder."""
    locks = (
        f"{lock.pid}:{lock.fd}:{fcntl.F_WRLCK if lock.writes else fcntl.F_RDLCK}:{lock.start}:{lock.length} "
        for lock in images.locks(folder)
        if lock.is_lost
    )
    return {"GPUCKPT_RESTORE_LOCKS": "".join(locks)}
