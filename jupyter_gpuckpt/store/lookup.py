"""Find where single chunks lie, without reading the index of all snapshots.

Hints say in which parts a chunk may be named; where it lies is read in the part, which is there and whole at that
moment. So what is found may be relied on by a session that began before, as if the whole index had been read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Iterable
from contextlib import suppress

from .hints import all_hints
from .index import DamagedPart, Index, Part, merge, open_part, sizes_of
from .layout import Layout
from .pack import Location

__all__ = ["Lookup"]

_AT_HAND = 64 * 1024 * 1024
"""Bytes of parts that are kept in memory."""

_MANY = 16
"""One part in so many of a part's chunks is enough for all of them to be gone through."""

_TRIES = 16
"""Parts that are asked for one chunk: only in a damaged store does the first one not know."""


class Lookup:
    """Where the chunks in the store are, of which many threads may ask."""

    def __init__(self, layout: Layout) -> None:
        """Begin; the session that will rely on what is found has begun. Raises `OSError`."""
        self._layout = layout
        self.found: Index = {}
        """Where the chunks are that were asked for and are there, and the bases of those that are deltas."""
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
                found = self._look(key)
                if found is None:
                    return None
                merge(self.found, found)
                at = self.found[key]
        return at

    def find_all(self, keys: Iterable[bytes]) -> None:
        """Look for many chunks at once: what is changed little has nearly all of its chunks from one snapshot."""
        left = {key for key in keys if key not in self.found}
        while left:
            if self.find(left.pop()) is None:
                continue
            with self._lock:
                part = self._last
                if part is not None and len(left) * _MANY > len(part):
                    merge(self.found, self._all_in(part, left))
                    left -= self.found.keys()

    def _all_in(self, part: Part, keys: Container[bytes]) -> Index:
        """Return where those of these chunks lie that a part names, as `_in` does."""
        try:
            found = part.with_bases(keys)
            there = {key: at for key, at in found.items() if self._is_there(at)}
        except (OSError, ValueError):
            return {}  # they are looked for one by one then
        return {key: at for key, at in there.items() if not at.base or at.base in there}

    def _look(self, key: bytes) -> Index | None:
        # What is changed little has nearly all of its chunks from one snapshot.
        found = self._in(self._last, key)
        if found is not None:
            return found
        tries = 0
        for hints in self._hints:
            with suppress(OSError):  # a chunk that is not found is stored again
                for name in hints.parts_with(key):
                    part = self._part(name)
                    found = self._in(part, key)
                    if found is not None:
                        self._last = part
                        return found
                    tries += part is not None
                    if tries >= _TRIES:
                        return None
        return None

    def _in(self, part: Part | None, key: bytes) -> Index | None:
        """Return where a chunk lies by a part, and its base if it is a delta, if their packs are there and long enough.

        By the same part: it keeps both.
        """
        try:
            at = part.get(key) if part is not None else None
            if part is None or at is None or not self._is_there(at):
                return None
            if not at.base:
                return {key: at}
            base = part.get(at.base)
            # The base first: who finds the delta finds its base, also another thread.
            return {at.base: base, key: at} if base is not None and self._is_there(base) else None
        except (OSError, ValueError):
            return None

    def _is_there(self, at: Location) -> bool:
        if at.pack not in self._sizes:
            self._sizes[at.pack] = sizes_of(self._layout, [at.pack]).get(at.pack, 0)
        return at.offset + at.stored <= self._sizes[at.pack]

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
