"""Where a kernel's bytes lie before they are stored and while they are restored: in memory, where there is plenty.

A disk that is busy writing earlier snapshots would hold up a frozen kernel. The memory is the sleeper's own: it is
freed when the bytes have been stored or restored, and at the latest with the namespace. What several keepers take at
once has to be plenty together (`memory_claim`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .. import settings
from ..freeze import shm_archive
from ..freeze.populate import populate
from ..freeze.vram import VramFiles
from ..linux import memory
from .memory_claim import MemoryClaim, claimed
from .namespace import Namespace

_SHARE = 4
"""criu's images take one part in this many of the memory that is free, at most; else they go to the disk directly."""
_SLACK = 64 << 20
"""Bytes that images need beside the memory of the processes: page tables, files, logs."""
_WORTH_PREPARING = 16 << 20
"""Bytes in /dev/shm from which on it pays to have the memory ready that they are copied into."""
_HEADERS = 1 << 20
"""Bytes that their archive takes beside them, about."""


def vram_files(space: Namespace) -> VramFiles:
    """Return the files in which a namespace's processes have their VRAM while it is not on a GPU."""
    return VramFiles(space.path(settings.NAMESPACE_VRAM_DIR), settings.NAMESPACE_VRAM_DIR)


def claim_memory(space: Namespace, needed: int, *, copies: int = 1) -> MemoryClaim | None:
    """Claim what criu's images of so many bytes take of the namespace's memory; None where they go to the disk.

    They go there as well where there is no room for so many `copies`, which others claim for themselves.

    Raises
    ------
    OSError : it cannot be written down.
    """
    room = shutil.disk_usage(space.path(settings.NAMESPACE_STAGING_DIR).parent).free
    if needed + _SLACK >= room:
        return None
    return MemoryClaim.where(lambda others: _is_plenty(needed * copies, others), space.kernel_dir, needed + _SLACK)


def likely_in_memory(needed: int) -> bool:
    """Tell whether images of so many bytes would lie in the memory of a namespace, as far as the machine has it."""
    return _is_plenty(needed, claimed())


def _is_plenty(needed: int, others: int) -> bool:
    """Tell whether memory is plenty for so many bytes, beside those that other keepers are about to take."""
    return needed + _SLACK < (memory.available(os.getpid()) - others) // _SHARE


def disk_folder() -> Path:
    """Return the folder below which files go that shall not take memory: the kernels' own, or else the store.

    Folders such as XDG_RUNTIME_DIR lie in memory: what is put there counts to the limit of a job's or kernel's cgroup.
    Where both do, it is the kernels' own.
    """
    own, store = settings.kernels_dir(), settings.store_dir()
    return store if memory.is_in_memory(own) and not memory.is_in_memory(store) else own


def discard_left(space: Namespace) -> None:
    """Free the memory of what a save had taken: it is stored, or the save's keeper was killed."""
    for folder in (settings.NAMESPACE_STAGING_DIR, settings.NAMESPACE_REST_DIR):
        shutil.rmtree(space.path(folder), ignore_errors=True)
    vram_files(space).discard_links()


class Staging:
    """What one save has taken, until it is stored; `images` is the folder for criu's where there is no memory.

    The VRAM of a kernel that `sleeps` lies where it is; from `keep` on it is held by other names as well, since the
    kernel may be woken before all is stored.

    Attributes
    ----------
    vram : the files that VRAM goes into.
    rest : the folder for what is not criu's, known likewise; as the keeper names it.
    outside, inside : the folder that criu writes into, as the keeper names it and as the namespace does; known once it
        is `open_for` so many bytes.
    """

    def __init__(self, space: Namespace, images: Path, *, sleeps: bool = False) -> None:
        discard_left(space)
        self._space = space
        self._memory = space.path(settings.NAMESPACE_STAGING_DIR)
        self.outside, self.inside = images, str(images)
        self._rest_in_memory = space.path(settings.NAMESPACE_REST_DIR)
        self.rest, self.rest_inside = images.parent, str(images.parent)
        self._claim: MemoryClaim | None = None
        self._ready = 0
        self._kept: list[int] = []
        self.vram = vram_files(space)
        self._has_vram = not sleeps
        if self._has_vram:
            self.vram.discard()

    def prepare(self, shared_files: int, needed: int) -> None:
        """Have memory ready for so many bytes of files in /dev/shm, if there is plenty for all that is `needed`.

        What is made ready before the kernel is paused need not be cleared while it is. Raises `OSError`.
        """
        if shared_files >= _WORTH_PREPARING and (claim := claim_memory(self._space, needed)) is not None:
            self._claim, self._ready = claim, shared_files + _HEADERS
            self._rest_in_memory.mkdir(mode=0o700)
            populate(self._rest_in_memory / shm_archive.ARCHIVE, self._ready)

    def open_for(self, needed: int) -> None:
        """Choose where criu writes so many bytes. Raises `OSError`."""
        if self._claim is not None:
            self._claim.release()
        # What is ready is taken already.
        self._claim = claim_memory(self._space, max(0, needed - self._ready))
        if self.in_memory:
            self.outside, self.inside = self._memory, settings.NAMESPACE_STAGING_DIR
            self.rest, self.rest_inside = self._rest_in_memory, settings.NAMESPACE_REST_DIR
            self.rest.mkdir(mode=0o700, exist_ok=True)
        else:
            shutil.rmtree(self._rest_in_memory, ignore_errors=True)
        self.outside.mkdir(mode=0o700)

    @property
    def in_memory(self) -> bool:
        """Whether criu's folder lies in memory, so that the kernel is not paused for the disk."""
        return self._claim is not None

    def keep(self) -> None:
        """Hold on to what was taken, also if the namespace ends: from now on the folders go by other names."""
        if not self._has_vram:
            self.vram, self._has_vram = self.vram.linked(), True
        self.vram.outside = self._held(self.vram.outside)
        if self.in_memory:
            self.outside, self.rest = self._held(self.outside), self._held(self.rest)

    def _held(self, folder: Path) -> Path:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._kept.append(fd)
        return Path(f"/proc/self/fd/{fd}")

    def discard(self) -> None:
        """Free the memory."""
        if self._has_vram:
            self.vram.discard()
        discard_left(self._space)
        while self._kept:
            os.close(self._kept.pop())
        if self._claim is not None:
            self._claim.release()
