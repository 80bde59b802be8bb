"""Where criu writes while the kernel stands still: memory, where there is plenty, and the snapshot's folder otherwise.

A disk that is busy writing earlier snapshots would hold up a frozen kernel. The memory is the sleeper's own /dev/shm:
it is freed when the images have been copied, and at the latest with the namespace.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .. import settings
from ..freeze import memory
from .namespace import Namespace

_SHARE = 4
"""A save takes one part in this many of the memory that is free, at most; else it goes to the disk directly."""
_SLACK = 64 << 20
"""Bytes that images need beside the memory of the processes: page tables, files, logs."""
_BLOCK = 16 << 20


class Staging:
    """The folder that criu writes into: `inside` as the namespace names it, `outside` as the keeper does."""

    def __init__(self, space: Namespace, folder: Path, needed: int) -> None:
        """Choose for a tree that holds `needed` bytes; `folder` is the snapshot's, in which the images end up."""
        self._folder = folder
        folder.mkdir(mode=0o700)
        self.outside, self.inside = folder, str(folder)
        in_memory = space.path(settings.NAMESPACE_STAGING_DIR)
        shutil.rmtree(in_memory, ignore_errors=True)  # of a save whose keeper was killed
        if needed + _SLACK < min(memory.available(os.getpid()) // _SHARE, shutil.disk_usage(in_memory.parent).free):
            in_memory.mkdir(mode=0o700)
            self.outside, self.inside = in_memory, settings.NAMESPACE_STAGING_DIR

    def empty(self, check: Callable[[], None]) -> None:
        """Bring the images into the snapshot's folder; `check` is called often, and may stop it by raising.

        Raises
        ------
        OSError : the disk is full or broken.
        """
        if self.outside == self._folder:
            return
        for image in self.outside.iterdir():
            with image.open("rb") as source, (self._folder / image.name).open("xb") as target:
                while block := source.read(_BLOCK):
                    check()
                    target.write(block)
            image.unlink()

    def discard(self) -> None:
        """Free the memory."""
        if self.outside != self._folder:
            shutil.rmtree(self.outside, ignore_errors=True)
