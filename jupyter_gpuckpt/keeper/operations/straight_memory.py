"""Host memory of a snapshot that goes straight from the store into the process (`freeze.straight_runs` says why)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import RestoreFailed
from ...freeze import criu_errors
from ...freeze.placing import into_process
from ...freeze.straight_runs import StraightRuns
from ...linux import memory
from ...snapshots.summary import current_name
from ...store import Manifest, Store
from .criu_run import say_if_killed
from .memory_writers import MemoryWriters
from .parts import CRIU_IMAGES

__all__ = ["StraightMemory", "has_room_for"]

_ROOM, _ROOM_BEFORE = 1.1, 1.2
"""Bytes of memory that must be free for each byte that is written straight; and before: others may take some of it."""

log = logging.getLogger("gpuckpt.keeper")


def has_room_for(runs: Sequence[StraightRuns], images: int) -> bool:
    """Tell whether so much memory is free that they may be written straight; criu needs less at once, from the disk.

    Parameters
    ----------
    images : bytes of all that is taken out of the store for criu; what is not written straight is there twice.
    """
    size = _size(runs)
    return memory.room(os.getpid()).bytes > size * _ROOM_BEFORE + 2 * (images - size)


class StraightMemory:
    """The pages of a snapshot's processes that are written straight into them: of all others, criu has the images.

    Nothing that they are made of is deleted until this is closed.

    Parameters
    ----------
    images : the folder with criu's images; the store made them, but for these pages, and the pagemaps are written here.
    writers : the processes that write them, if there are any; they are closed with this.

    Raises
    ------
    StoreError : not all of it is there.
    OSError : the images cannot be written.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        runs: Sequence[StraightRuns],
        images: Path,
        writers: MemoryWriters,
    ) -> None:
        self._store, self._manifest, self._images, self._writers = store, manifest, images, writers
        self._runs = {f"{CRIU_IMAGES}/{one.image}": one for one in runs}
        self._pids: dict[int, int] = {}
        self._written_by = 1
        self._kills = memory.kills(os.getpid())
        self._size = _size(runs)
        self._takers = {
            path: into_process(one.straight, functools.partial(self._pids.__getitem__, one.pid))
            for path, one in self._runs.items()
        }
        where = {CRIU_IMAGES: images}
        self._files = store.postpone(manifest.name, manifest.id, where, self._runs.__contains__, self._takers)
        for one in runs:
            one.write_pagemap(images)

    async def write(self, outer: Callable[[int], int | None]) -> None:
        """Write it into the processes that criu has restored from the images, and left stopped; every byte is verified.

        Parameters
        ----------
        outer : the pid that this process knows for one of the snapshot's; None where there is no such process.

        Raises
        ------
        StoreError : a byte is not what was saved; nothing of the processes may run.
        RestoreFailed : it cannot be written there.
        """
        try:
            self._refuse_without_room()
            for one in self._runs.values():
                pid = outer(one.pid)
                if pid is None:
                    raise RestoreFailed(
                        "The snapshot could not be restored.",
                        "One of its processes ended before its memory was there.",
                        "Look with `dmesg` whether it was killed, and restore again.",
                    )
                self._pids[one.pid] = pid
            await asyncio.to_thread(self._read)
        except RestoreFailed as e:
            say_if_killed(e, self._kills)
            raise
        finally:
            self.close()
        by = self._written_by
        log.info("%d bytes of memory went straight into %d processes, by %d", self._size, len(self._runs), by)

    def _refuse_without_room(self) -> None:
        """Write nothing for which there is no memory: the system might kill this process for it.

        A process that is written to keeps its memory until the writer is done, also where the system has killed it.
        """
        room = memory.room(os.getpid())
        if room.bytes < self._size * _ROOM:
            why = f"There is too little memory{room.where}: {self._size / 1e6:,.0f} MB more are needed."
            raise RestoreFailed("The snapshot could not be restored.", why, criu_errors.Cause.NO_MEMORY.advice)

    def _read(self) -> None:
        writers = self._writers
        if writers.write(self._pids) or writers.is_closed:
            self._written_by = writers.count
            return
        try:
            self._files.read()  # also where those failed: it says why
        except OSError as e:
            raise RestoreFailed("The snapshot could not be restored.", f"Its memory cannot be written: {e}") from e

    async def complete(self) -> None:
        """Have criu's images whole instead, every byte of them verified. Raises `StoreError`."""
        try:
            await asyncio.to_thread(self._complete)
        finally:
            self.close()

    def _complete(self) -> None:
        name = current_name(self._store, self._manifest.name, self._manifest.id)
        files = self._store.postpone(name, self._manifest.id, {CRIU_IMAGES: self._images}, self._runs.__contains__)
        with contextlib.closing(files):
            files.read()
        for one in self._runs.values():
            one.write_pagemap(self._images, whole=True)

    def close(self) -> None:
        """Let the store delete what it wants to; more than once is harmless."""
        self._writers.close()
        for taker in self._takers.values():
            taker.close()
        self._files.close()


def _size(runs: Sequence[StraightRuns]) -> int:
    return sum(one.size for one in runs)
