"""The processes that write host memory into restored ones (`memory_writer`), from outside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from ... import settings
from ...freeze.line_program import LineProgram
from ...store import Manifest, Store, workers

__all__ = ["MemoryWriters"]

_FEWEST = 6
"""Processes from which on they are quicker than this one's threads; their start takes a processor 0.2 s."""
_SHARE = 16 << 20
"""Bytes that each of them has at least."""
_OTHERS = 3
"""Processors that are left to whoever does something else meanwhile."""
_START = 10.0
_WRITE = 900.0
"""Seconds: a cold disk is slow."""

log = logging.getLogger("gpuckpt.keeper")


class MemoryWriters:
    """One such program, from its start, which nobody waits for, to `close`.

    Parameters
    ----------
    count : how many processes it has.
    """

    MEMORY = 12 << 20
    """Bytes that each process takes."""

    def __init__(self, store: Store, manifest: Manifest, count: int) -> None:
        self._program = LineProgram(
            "jupyter_gpuckpt.keeper.operations.memory_writer", str(store.root), manifest.name, manifest.id, str(count)
        )
        self.count = count
        self._closing = threading.Lock()
        self._is_closed = False

    @classmethod
    def worth_it(cls, size: int) -> int:
        """Return how many processes should write so many bytes; 0 where this one's threads are quicker."""
        chosen = settings.memory_writers()
        count = min(chosen or workers(_OTHERS), size // _SHARE)
        return count if count >= (_FEWEST if chosen is None else 2) else 0

    def write(self, pids: Mapping[int, int]) -> bool:
        """Have the memory written into these processes, by the pids in their namespace; every byte is verified.

        Returns
        -------
        Whether it is there; where it is not, part of it may be.
        """
        try:
            said = self._program.hear(_START)
            if said == b"ready":
                self._program.tell(b" ".join(b"%d=%d" % both for both in pids.items()))
                said = self._program.hear(_WRITE)
        except TimeoutError:
            said = b""
            self._program.kill()
        if said != b"written" and not self._is_closed:
            log.warning("other processes did not write the memory: %s", self._program.last_words())
        return said == b"written"

    @property
    def is_closed(self) -> bool:
        """Whether nobody wants the memory any more."""
        return self._is_closed

    def close(self) -> None:
        """End it, also in the middle; more than once is harmless."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._program.kill()
                self._program.close()
