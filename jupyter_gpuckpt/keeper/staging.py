"""Where criu's images lie before they are stored and while they are restored: in memory, where there is plenty.

A disk that is busy writing earlier snapshots would hold up a frozen kernel. The memory is the sleeper's own /dev/shm:
it is freed when the images have been stored or restored, and at the latest with the namespace.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .. import settings
from ..freeze import memory
from .namespace import Namespace

_SHARE = 4
"""Images take one part in this many of the memory that is free, at most; else it goes to the disk directly."""
_SLACK = 64 << 20
"""Bytes that images need beside the memory of the processes: page tables, files, logs."""


def fits_in_memory(space: Namespace, needed: int) -> bool:
    """Tell whether images of so many bytes should lie in the namespace's memory for a while."""
    room = min(memory.available(os.getpid()) // _SHARE, shutil.disk_usage(space.shared_memory).free)
    return needed + _SLACK < room


class Staging:
    """The folder that criu writes into: `inside` as the namespace names it, `outside` as the keeper does."""

    def __init__(self, space: Namespace, folder: Path, needed: int) -> None:
        """Choose for a tree that holds `needed` bytes; `folder` is on the store's disk, and yet to be made."""
        memory_folder = space.path(settings.NAMESPACE_STAGING_DIR)
        shutil.rmtree(memory_folder, ignore_errors=True)  # of a save whose keeper was killed
        self.in_memory = fits_in_memory(space, needed)
        self.outside, self.inside = folder, str(folder)
        if self.in_memory:
            self.outside, self.inside = memory_folder, settings.NAMESPACE_STAGING_DIR
        self.outside.mkdir(mode=0o700)

    def discard(self) -> None:
        """Free the memory."""
        if self.in_memory:
            shutil.rmtree(self.outside, ignore_errors=True)
