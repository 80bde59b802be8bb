"""Keeps a store from growing with saves of which old ones are removed: what is left of their packs is written again.

A pack stays for as long as one of its chunks is needed. Where each save brings a little and the oldest goes, as
automatic ones do, nearly every pack is kept for a small part of it.
"""

from __future__ import annotations

import logging
import threading

from ..errors import GpuckptError
from ..store import Store

__all__ = ["StoreGrowth"]

log = logging.getLogger("gpuckpt.keeper")

_QUARTER = 1.25
_LEAST = 64_000_000  # bytes


class StoreGrowth:
    """Compacts one keeper's store whenever that has grown by a quarter, in a thread that ends with the process.

    It may end in the middle: a compaction can be broken off at any point.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = threading.Event()
        self._thread: threading.Thread | None = None

    def saved(self) -> None:
        """Look at the store: something was saved."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store-growth", daemon=True)
            self._thread.start()
        self._saved.set()

    def _run(self) -> None:
        size: int | None = None
        while True:
            self._saved.wait()
            self._saved.clear()
            try:
                if size is None:
                    size = self._store.used()
                elif self._store.used() > max(size * _QUARTER, size + _LEAST):
                    freed = self._store.compact().freed
                    size = self._store.used()
                    log.info("the store was compacted: %.1f MB were freed, it takes %.1f MB", freed / 1e6, size / 1e6)
            except GpuckptError as e:
                log.warning("the store was not compacted: %s", e)
