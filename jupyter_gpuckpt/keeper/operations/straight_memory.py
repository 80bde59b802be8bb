"""Host memory of a snapshot that goes straight from the store into the process (`freeze.long_runs` says why)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from ...errors import RestoreFailed
from ...freeze.long_runs import LongRuns
from ...snapshots.summary import current_name
from ...store import Manifest, Store
from .parts import CRIU_IMAGES

__all__ = ["StraightMemory"]

log = logging.getLogger("gpuckpt.keeper")


class StraightMemory:
    """The long runs of pages of a snapshot's process: of all other pages, criu has the images.

    Nothing that they are made of is deleted until this is closed.

    Parameters
    ----------
    images : the folder with criu's images; the store made them, but for these pages, and the pagemap is written here.

    Raises
    ------
    StoreError : not all of it is there.
    OSError : the images cannot be written.
    """

    def __init__(self, store: Store, manifest: Manifest, runs: LongRuns, images: Path) -> None:
        self._store, self._manifest, self._runs, self._images = store, manifest, runs, images
        self._path = f"{CRIU_IMAGES}/{runs.image}"
        self._pid: int | None = None
        self._placing = runs.of(self._process)
        where, takers = {CRIU_IMAGES: images}, {self._path: self._placing}
        self._files = store.postpone(manifest.name, manifest.id, where, self._path.__eq__, takers)
        runs.write_pagemap(images)

    def _process(self) -> int:
        assert self._pid is not None
        return self._pid

    async def write(self, pid: int) -> None:
        """Write it into the process that criu has restored from the images, and left stopped; every byte is verified.

        Raises
        ------
        StoreError : a byte is not what was saved; nothing of the process may run.
        RestoreFailed : it cannot be written there.
        """
        self._pid = pid
        try:
            await asyncio.to_thread(self._files.read)
        except OSError as e:
            raise RestoreFailed("The snapshot could not be restored.", f"Its memory cannot be written: {e}") from e
        finally:
            self.close()
        log.info("%d bytes of memory went straight into the process", self._runs.size)

    async def complete(self) -> None:
        """Have criu's images whole instead, every byte of them verified. Raises `StoreError`."""
        try:
            await asyncio.to_thread(self._complete)
        finally:
            self.close()

    def _complete(self) -> None:
        name = current_name(self._store, self._manifest.name, self._manifest.id)
        where = {CRIU_IMAGES: self._images}
        with contextlib.closing(self._store.postpone(name, self._manifest.id, where, self._path.__eq__)) as files:
            files.read()
        self._runs.write_pagemap(self._images, whole=True)

    def close(self) -> None:
        """Let the store delete what it wants to; more than once is harmless."""
        self._placing.close()
        self._files.close()
