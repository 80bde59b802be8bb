"""Host memory of a snapshot that goes straight from the store into the process (`freeze.long_runs` says why)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from ...errors import Cancelled, RestoreFailed
from ...freeze.long_runs import Gathered, LongRuns
from ...snapshots.summary import current_name
from ...store import Manifest, Store
from ..memory_claim import MemoryClaim
from .parts import CRIU_IMAGES

__all__ = ["StraightMemory"]

log = logging.getLogger("gpuckpt.keeper")


class StraightMemory:
    """The long runs of pages of a snapshot's process: of all other pages, criu has the images.

    Nothing that they are made of is deleted until this is closed.

    Parameters
    ----------
    images : the folder with criu's images; the store made them, but for these pages, and the pagemap is written here.
    claim : the memory for having them twice; where there is none, they are read when the process is there.

    Attributes
    ----------
    is_read : set when what else is to be read need not wait for them any longer.

    Raises
    ------
    StoreError : not all of it is there.
    OSError : the images cannot be written.
    """

    def __init__(
        self, store: Store, manifest: Manifest, runs: LongRuns, images: Path, claim: MemoryClaim | None
    ) -> None:
        self._store, self._manifest, self._runs, self._images, self._claim = store, manifest, runs, images, claim
        self._path = f"{CRIU_IMAGES}/{runs.image}"
        self._pid: int | None = None
        self._gathered: Gathered | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopped = False
        self.is_read = asyncio.Event()
        if claim is None:
            self._placing = runs.of(self._process)
        else:
            self._gathered, self._placing = runs.gather()
        where, takers = {CRIU_IMAGES: images}, {self._path: self._placing}
        self._files = store.postpone(manifest.name, manifest.id, where, self._path.__eq__, takers)
        runs.write_pagemap(images)

    def _process(self) -> int:
        assert self._pid is not None
        return self._pid

    def begin(self) -> None:
        """Begin to gather them, where there is memory for it."""
        if self._gathered is None:
            self.is_read.set()
        else:
            self._reading = asyncio.create_task(asyncio.to_thread(self._files.read, self._go_on))
            self._reading.add_done_callback(lambda _: self.is_read.set())

    def _go_on(self, stage: str, done: int, total: int) -> None:
        if self._stopped:
            raise Cancelled("The restore was aborted.", "", "")

    async def write(self, pid: int) -> None:
        """Write it into the process that criu has restored from the images, and left stopped; every byte is verified.

        Raises
        ------
        StoreError : a byte is not what was saved; nothing of the process may run.
        RestoreFailed : it cannot be written there.
        """
        self._pid = pid
        try:
            if self._gathered is None:
                await asyncio.to_thread(self._files.read)
            else:
                assert self._reading is not None
                await asyncio.shield(self._reading)
                await asyncio.to_thread(self._gathered.move, pid)
        except OSError as e:
            raise RestoreFailed("The snapshot could not be restored.", f"Its memory cannot be written: {e}") from e
        finally:
            await self.close()
        log.info("%d bytes of memory went straight into the process", self._runs.size)

    async def complete(self) -> None:
        """Have criu's images whole instead, every byte of them verified. Raises `StoreError`."""
        try:
            await asyncio.to_thread(self._complete)
        finally:
            await self.close()

    def _complete(self) -> None:
        name = current_name(self._store, self._manifest.name, self._manifest.id)
        where = {CRIU_IMAGES: self._images}
        with contextlib.closing(self._store.postpone(name, self._manifest.id, where, self._path.__eq__)) as files:
            files.read()
        self._runs.write_pagemap(self._images, whole=True)

    async def close(self) -> None:
        """Let the store delete what it wants to, and free the memory; more than once is harmless."""
        self._stopped = True
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()  # seen
        self.is_read.set()
        self._placing.close()
        self._files.close()
        if self._claim is not None:
            self._claim.release()
