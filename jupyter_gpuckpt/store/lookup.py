"""Find where single chunks lie, without reading the index of all snapshots.

Hints say in which parts a chunk may be named; where it lies is read in the part, which is there and whole at that
moment. So what is found may be relied on by a session that began before, as if the whole index had been read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress

from .hints import all_hints
from .index import DamagedPart, Part, open_part, sizes_of
from .layout import Layout
from .pack import Location

__all__ = ["Lookup"]

_AT_HAND = 64 * 1024 * 1024
"""Bytes of parts that are kept in memory."""

_TRIES = 16
"""Parts that are asked for one chunk: only in a damaged store does the first one not know."""


class Lookup:
    """Where the chunks in the store are, of which many threads may ask."""

    def __init__(self, layout: Layout) -> None:
        """Begin; the session that will rely on what is found has begun. Raises `OSError`."""
        self._layout = layout
        self.found: dict[bytes, Location] = {}
        """Where the chunks are that were asked for and are there."""
        self._live, self._hints = all_hints(layout)
        self._parts: OrderedDict[str, Part | None] = OrderedDict()
        self._at_hand = 0
        self._last: Part | None = None
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def find(self, key: bytes) -> Location | None:
        """Return where a chunk lies; None where no part of the index names it, in a pack that is there.

        A part that is damaged counts as none: nothing new is stored in reliance on it.
        """
        at = self.found.get(key)
        if at is None:
            with self._lock:
                at = self._look(key)
            if at is not None:
                self.found[key] = at
        return at

    def _look(self, key: bytes) -> Location | None:
        # What is changed little has nearly all of its chunks from one snapshot.
        at = self._in(self._last, key)
        if at is not None:
            return at
        tries = 0
        for hints in self._hints:
            with suppress(OSError):  # a chunk that is not found is stored again
                for name in hints.parts_with(key):
                    part = self._part(name)
                    at = self._in(part, key)
                    if at is not None:
                        self._last = part
                        return at
                    tries += part is not None
                    if tries >= _TRIES:
                        return None
        return None

    def _in(self, part: Part | None, key: bytes) -> Location | None:
        """Return where a chunk lies by a part, if its pack is there and long enough."""
        try:
            at = part.get(key) if part is not None else None
            if at is None:
                return None
            if at.pack not in self._sizes:
                self._sizes[at.pack] = sizes_of(self._layout, [at.pack]).get(at.pack, 0)
            return at if at.offset + at.stored <= self._sizes[at.pack] else None
        except (OSError, ValueError):
            return None

    def _part(self, name: str) -> Part | None:
        if name not in self._live:
            return None
        if name in self._parts:
            self._parts.move_to_end(name)
            return self._parts[name]
        part = None
        with suppress(OSError, DamagedPart):
            part = open_part(self._layout, name)
            self._at_hand += part.size
        self._parts[name] = part
        while self._at_hand > _AT_HAND and len(self._parts) > 1:
            _, oldest = self._parts.popitem(last=False)
            self._at_hand -= oldest.size if oldest is not None else 0
        return part
