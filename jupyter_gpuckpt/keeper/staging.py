"""Where a kernel's bytes go while it stands still: memory, where there is plenty, and the snapshot's folder otherwise.

A disk that is busy writing earlier snapshots would hold up a frozen kernel. The memory is the sleeper's own: it is
freed when the bytes have been copied, and at the latest with the namespace.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import settings
from ..freeze import memory
from ..freeze.vram import VramFiles
from .namespace import Namespace

_SHARE = 4
"""criu's images take one part in this many of the memory that is free, at most; else they go to the disk directly."""
_SLACK = 64 << 20
"""Bytes that images need beside the memory of the processes: page tables, files, logs."""
_BLOCK = 8 << 20
_THREADS = 8


def vram_files(space: Namespace) -> VramFiles:
    """Return the files in which a namespace's processes have their VRAM while it is not on a GPU."""
    return VramFiles(space.path(settings.NAMESPACE_VRAM_DIR), settings.NAMESPACE_VRAM_DIR)


class Staging:
    """What one save has taken, until it lies in the snapshot's folders `images` and `vram`.

    Attributes
    ----------
    vram : the files that VRAM goes into.
    outside, inside : the folder that criu writes into, as the keeper names it and as the namespace does; known once it
        is `open_for` so many bytes.
    """

    def __init__(self, space: Namespace, images: Path, vram: Path) -> None:
        self._memory = space.path(settings.NAMESPACE_STAGING_DIR)
        self._images, self._vram = images, vram
        self.outside, self.inside = images, str(images)
        shutil.rmtree(self._memory, ignore_errors=True)  # of a save whose keeper was killed
        self.vram = vram_files(space)
        self.vram.discard()

    def open_for(self, needed: int) -> None:
        """Choose where criu writes so many bytes."""
        self._images.mkdir(mode=0o700)
        room = min(memory.available(os.getpid()) // _SHARE, shutil.disk_usage(self._memory.parent).free)
        if needed + _SLACK < room:
            self._memory.mkdir(mode=0o700)
            self.outside, self.inside = self._memory, settings.NAMESPACE_STAGING_DIR

    def bring(self, check: Callable[[], None]) -> None:
        """Bring everything into the snapshot's folders; `check` is called often, and may stop it by raising.

        Raises
        ------
        OSError : the disk is full or broken.
        """
        if self.outside != self._images:
            _copy(self.outside, self._images, check)
        self._vram.mkdir(mode=0o700)
        _copy(self.vram.outside, self._vram, check)

    def discard(self) -> None:
        """Free the memory."""
        self.vram.discard()
        shutil.rmtree(self._memory, ignore_errors=True)


def place_vram(folder: Path, space: Namespace) -> None:
    """Put the VRAM of a snapshot where the processes that are restored into this namespace take it from.

    Raises
    ------
    OSError : there is no memory for it.
    """
    _copy(folder, vram_files(space).outside, lambda: None)


def _copy(source: Path, target: Path, check: Callable[[], None]) -> None:
    """Copy the files of a folder, in several threads."""
    mine = threading.local()

    def copy(file: Path, offset: int) -> None:
        check()
        if not hasattr(mine, "block"):
            mine.block = mmap.mmap(-1, _BLOCK)
        with file.open("rb", buffering=0) as read, (target / file.name).open("r+b", buffering=0) as written:
            count = os.preadv(read.fileno(), [mine.block], offset)
            view = memoryview(mine.block)[:count]
            while view:
                done = os.pwrite(written.fileno(), view, offset)
                view, offset = view[done:], offset + done

    jobs = []
    for file in source.iterdir():
        (target / file.name).touch(mode=0o600, exist_ok=False)
        jobs += [(file, offset) for offset in range(0, file.stat().st_size, _BLOCK)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda job: copy(*job), jobs))
