"""What of a kernel's host memory is stored already: a save neither copies nor hashes it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from ... import settings
from ...freeze import memory_copy, unchanged
from ...in_thread import begin_in_thread
from ...store import CHUNK, HOLE, Changed, Chunk, Piece, Writer, digest, is_zero
from ..kept_twins import are_worth_it, is_much
from .parts import CRIU_IMAGES

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["HostMemory"]

log = logging.getLogger("gpuckpt.keeper")


class HostMemory:
    """The host memory of one save, beside that of the save before; to be closed in any case."""

    def __init__(self, keeper: Keeper, writer: Writer) -> None:
        self._keeper, self._writer = keeper, writer
        self._before: memory_copy.Kept | None = None
        self._now: memory_copy.Memory | None = None
        self._asked: Future[set[unchanged.Chunk]] | None = None

    def look_up(self) -> None:
        """Begin to look up what the store has of the memory of before: it takes as long as criu does."""
        if self._asked is None and (chunks := self._keeper.twins.chunks):
            self._asked = begin_in_thread(self._looked_up, chunks)

    async def before(self) -> memory_copy.Before | None:
        """Return what is known from the save before. Raises `StoreError`."""
        if self._asked is not None:
            await asyncio.wrap_future(self._asked)
        handed_over = self._keeper.twins.hand_over()
        if handed_over is None:
            return None
        self._before, self._writer.bases = handed_over
        return memory_copy.Before(self._before, self._held, _digest, settings.unchanged() == settings.CHECK)

    def _held(self, chunks: set[unchanged.Chunk]) -> set[unchanged.Chunk]:
        return chunks & (self._looked_up(chunks) if self._asked is None else self._asked.result())

    def _looked_up(self, chunks: set[unchanged.Chunk]) -> set[unchanged.Chunk]:
        return {*self._writer.holds([Chunk(*chunk) for chunk in chunks])}

    def tell(self, memory: memory_copy.Memory | None) -> None:
        """Tell the writer how the images of memory are to be cut, and which of their chunks are known."""
        self._now = memory
        self._keeper.twins.written = [twin.pid for twin in memory.twins] if memory is not None else []
        for copy in memory.copies if memory is not None else ():
            pieces = [_piece(one) for one in copy.pieces]
            self._writer.tell(f"{CRIU_IMAGES}/{copy.image}", pieces)
            known = sum(one.size for one in pieces if isinstance(one, Chunk))
            log.info("%d of %d bytes of memory of process %d have not changed", known, copy.size, copy.process)

    async def keep(self) -> None:
        """Keep the twins of what was stored, where it was little, until the next save."""
        if (older := self._keeper.twins.hand_over()) is not None:  # this save had no use for them
            await asyncio.to_thread(older[0].end)
        await self._keeper.twins.settled()
        now = self._now
        if now is None or not now.copies or settings.unchanged() == settings.COPY:
            return
        try:
            kept = await asyncio.to_thread(self._kept, now)
        except Exception:  # what is stored is stored
            log.exception("the twins of this save are not kept")
            kept = None
        if kept is not None:
            self._now = None
            self._keeper.twins.written = ()
            self._writer.bases.saved()
            self._keeper.twins.keep(kept, self._writer.bases)

    def _kept(self, now: memory_copy.Memory) -> memory_copy.Kept | None:
        stored = {copy.process: self._writer.stored(f"{CRIU_IMAGES}/{copy.image}") for copy in now.copies}
        new = sum(chunk.size for chunks in stored.values() for chunk, is_new in chunks if is_new)
        if is_much(new, sum(copy.size for copy in now.copies)) or not are_worth_it([twin.pid for twin in now.twins]):
            return None
        with contextlib.suppress(OSError):  # a twin has ended
            return now.keep({copy.process: _parts(copy, stored[copy.process]) for copy in now.copies})
        return None

    def close(self) -> None:
        """End the twins that are not kept."""
        if self._asked is not None:
            wait([self._asked])
        self._keeper.twins.written = ()
        for one in (self._before, self._now):
            if one is not None:
                one.end()


def _piece(one: int | unchanged.Part | unchanged.Changed) -> Piece:
    if isinstance(one, int):
        return one
    if isinstance(one, unchanged.Part):
        return Chunk(*one.chunk)
    before, size = one.before.chunk
    return size if before == HOLE else Changed(size, before)


def _parts(copy: memory_copy.Copy, stored: Sequence[tuple[Chunk, bool]]) -> list[unchanged.Part]:
    return list(unchanged.parts(copy.runs, copy.trusted, (chunk for chunk, _ in stored), HOLE, CHUNK))


def _digest(data: memoryview) -> bytes:
    return HOLE if is_zero(data) else digest(data)
