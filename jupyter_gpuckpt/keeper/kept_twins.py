"""The twins of a kernel's last save, kept for the next one to see what has changed, for as long as they cost little.

A twin takes memory for each page that the kernel has written to since, and each first write to one takes longer. So
twins are ended once much has changed, or memory gets scarce. Where it runs out all the same, the system ends them
before the kernel (`Twin`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..linux import memory, processes
from ..linux.c_memory import give_memory_back

if TYPE_CHECKING:
    from ..freeze.memory_copy import Kept  # not at a job's start: it would wait for all that this needs
    from ..store import Bases

__all__ = ["KeptTwins", "are_worth_it", "is_much"]

log = logging.getLogger("gpuckpt.keeper")

_FEW = 4
"""One part in so many of what a kernel has in memory is not much."""
_LITTLE = 64 << 20
"""So many bytes are not either."""
_LOOK = 1.0  # how often it is looked at what they cost, in seconds
_SHARE = 100  # one part in so many of the time goes into that, at most
_NEVER_TOO_MUCH = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"  # all memory counts that a process might write to (proc_sys_vm(5))


def is_much(changed: int, size: int) -> bool:
    """Tell whether so many bytes are too much of a kernel's memory of this size for its twins to be kept."""
    return changed > max(size // _FEW, _LITTLE)


def are_worth_it(pids: Sequence[int]) -> bool:
    """Tell whether twins are to be kept: memory would do if all of theirs were copied."""
    own = processes.anonymous_bytes(pids)
    shared = processes.private_bytes(pids) - own
    # They hold on to memory that the kernel shares with others, and may have given up meanwhile.
    is_strict = _NEVER_TOO_MUCH.read_text().strip() == _STRICT
    return bool(pids) and not is_strict and not is_much(shared, own) and memory.room(*pids).bytes > own


class KeptTwins:
    """The twins that a keeper keeps, if any.

    Attributes
    ----------
    written : the pids of those of the save that is being written.
    reads_ahead : whether the next save reads the list of mappings before the kernel is paused; not in one that changes
        them without end.
    """

    def __init__(self) -> None:
        self.reads_ahead = True
        self.written: Sequence[int] = ()
        self._kept: tuple[Kept, Bases] | None = None
        self._ending: Sequence[int] = ()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Those of all twins: processes that are no part of the kernel."""
        kept = self._kept[0].twins if self._kept is not None else ()
        return [*self.written, *self._ending, *(twin.pid for twin in kept)]

    @property
    def chunks(self) -> set[tuple[bytes, int]]:
        """What was stored of the memory of those that are kept: hashes, and bytes of each."""
        return self._kept[0].chunks if self._kept is not None else set()

    def hand_over(self) -> tuple[Kept, Bases] | None:
        """Give them away, and what their save has read: they are the caller's to end."""
        kept, self._kept = self._kept, None
        if kept is not None and self._watch is not None:
            self._watch.cancel()
        return kept

    async def settled(self) -> None:
        """Wait until those have ended that cost too much: what is written down of others has the same name."""
        if self._ending and self._watch is not None:
            await asyncio.wait([self._watch])

    def keep(self, kept: Kept, bases: Bases) -> None:
        """Keep these until they cost too much, and with them what their save has read of the store."""
        self._kept = kept, bases
        self._watch = asyncio.create_task(self._end_in_time(kept))

    async def _end_in_time(self, kept: Kept) -> None:
        all_of_it = processes.anonymous_bytes(twin.pid for twin in kept.twins)
        pause = _LOOK
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            if await asyncio.to_thread(_is_too_much, kept, all_of_it):
                break
            pause = max(_LOOK, (time.monotonic() - began) * _SHARE)
        if self._kept is not None and self._kept[0] is kept:
            # They are there for a while yet, and a save must not take them for processes of the kernel's.
            self._kept, self._ending = None, [twin.pid for twin in kept.twins]
            try:
                await asyncio.to_thread(kept.end)
            finally:
                self._ending = ()
                give_memory_back()  # what their save had read of the store, tens of megabytes


def _is_too_much(kept: Kept, all_of_it: int) -> bool:
    with contextlib.suppress(OSError):  # one has ended
        own = sum(twin.own_bytes() for twin in kept.twins)
        if are_worth_it([twin.pid for twin in kept.twins]) and not is_much(own, all_of_it):
            return False
    log.info("the memory of the last save is not kept any longer: most would be copied, or it takes too much")
    return True
