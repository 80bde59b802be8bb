"""Keeps a store from growing with saves of which old ones are removed: what is left of their packs is written again.

A pack stays for as long as one of its chunks is needed. Where each save brings a little and the oldest goes, as
automatic ones do, nearly every pack is kept for a small part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ..errors import GpuckptError
from ..store import Collected, Store

__all__ = ["StoreGrowth"]

log = logging.getLogger("gpuckpt.keeper")

_QUARTER = 1.25
_LEAST = 64_000_000  # bytes
_PAUSE, _TRIES = 1.0, 5  # seconds; another collection of the store is in the way for a moment


class StoreGrowth:
    """Compacts one keeper's store whenever that has grown by a quarter, in a thread that ends with the process.

    It may end in the middle: a compaction can be broken off at any point.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = threading.Event()
        self._waiting: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None

    def saved(self) -> None:
        """Look at the store: something was saved."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store-growth", daemon=True)
            self._thread.start()
        self._saved.set()

    async def settled(self) -> None:
        """Look at the store, since something was saved, and return when that is done.

        A save that had begun before packs are written again names the old ones, so that these stay.
        """
        loop, looked = asyncio.get_running_loop(), asyncio.Event()
        self._waiting.append(lambda: loop.call_soon_threadsafe(looked.set))
        self.saved()
        await looked.wait()

    def _run(self) -> None:
        size: int | None = None
        while True:
            self._saved.wait()
            self._saved.clear()
            waiting, self._waiting = self._waiting, []
            try:
                used = self._store.used()
                if size is None:
                    size = used
                elif used > max(size * _QUARTER, size + _LEAST) and (done := self._compact()) is not None:
                    size = self._store.used() - done.waiting  # that goes with the next collection
            except GpuckptError as e:
                log.warning("the store was not compacted: %s", e)
            except Exception:
                log.exception("the store was not compacted")
            for tell in waiting:
                with contextlib.suppress(RuntimeError):  # the keeper ends
                    tell()

    def _compact(self) -> Collected | None:
        """Compact the store; None where that could not be done, and is to be tried after the next save."""
        for number in range(_TRIES):
            time.sleep(_PAUSE if number else 0)
            done = self._store.compact()
            if not done.obstacle:
                log.info("the store was compacted: %.1f MB were freed", done.freed / 1e6)
                return done
        log.warning("the store was not compacted: %s", done.obstacle)
        return None
