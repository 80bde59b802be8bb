"""The processes that write host memory into restored ones (`memory_writer`), from outside."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from ... import settings
from ...errors import GpuckptError
from ...freeze.line_program import LineProgram
from ...freeze.straight_runs import WORTH_IT, StraightRuns
from ...linux import memory
from ...snapshots.saved import processes_of
from ...store import Store, workers
from .memory_writer import EACH
from .parts import CRIU_IMAGES

__all__ = ["MemoryWriters"]

_FEWEST = 6
"""Processes from which on they are quicker than this one's threads; their start takes a processor 0.2 s."""
_SHARE = 16 << 20
"""Bytes that each of them has at least."""
_SOON = 512 << 20
"""Bytes from which on they are quicker where there is no GPU state: criu is done there before they are ready."""
_OTHERS = 3
"""Processors that are left to whoever does something else meanwhile."""
_EACH = 12 << 20
"""Bytes of memory that each of them takes, beside what it reads early."""
_ROOM = 1.2
"""Bytes of memory that must be free for each byte that they write."""
_THREADS = 2 << 30
"""Bytes that this process's threads write in a second: the program is not waited for longer than they would take."""
_START = 10.0
"""Seconds for which it is waited for where it was asked for."""
_WRITE = 900.0
"""Seconds: a cold disk is slow."""

log = logging.getLogger("gpuckpt.keeper")


class MemoryWriters:
    """These processes of one restore, once they have begun.

    Attributes
    ----------
    count : how many they are; 0 where this process's threads are to do it.
    """

    count = 0

    def __init__(self) -> None:
        self._program: LineProgram | None = None
        self._plan: BinaryIO | None = None
        self._turn, self._hearing = threading.Lock(), threading.Lock()
        self._patience = 0.0
        self.is_closed = False
        """Whether nobody wants the memory any more."""

    def begin(self, store: Store, name: str) -> None:
        """Have them get ready for a snapshot, where they are quicker and have room; nobody waits for that."""
        try:
            manifest = store.trusted(name)
        except GpuckptError:
            return  # who needs it is told
        saved, chosen = processes_of(manifest), settings.memory_writers()
        size = saved.private_bytes
        count = min(chosen or workers(_OTHERS), size // _SHARE)
        least = WORTH_IT if saved.cuda or chosen is not None else _SOON
        if size < least or count < (_FEWEST if chosen is None else 2):
            return
        if memory.room(os.getpid()).bytes < size * _ROOM + min(count * EACH, size) + count * _EACH:
            return
        self._patience = _START if chosen is not None else size / _THREADS
        with self._turn:
            if self.is_closed:
                return
            try:
                plan = self._plan = os.fdopen(os.memfd_create("plan"), "wb")
                module = "jupyter_gpuckpt.keeper.operations.memory_writer"
                arguments = (str(store.root), manifest.name, manifest.id, str(count), str(plan.fileno()))
                self._program = LineProgram(module, *arguments, fds=[plan.fileno()])
                self.count = count
            except OSError as e:
                log.warning("there is no other process to write the memory: %s", e)

    def plan(self, runs: Sequence[StraightRuns]) -> None:
        """Tell them what there is to write; they begin to read it."""
        with self._turn:
            if self._program is None or self._plan is None or self.is_closed or not runs:
                return
            planned = {f"{CRIU_IMAGES}/{one.image}": (one.pid, one.straight) for one in runs}
            try:
                self._plan.write(json.dumps(planned).encode())
                self._plan.seek(0)  # which writes out what is buffered, too
                self._program.tell(b"plan")
            except OSError as e:
                log.warning("other processes cannot be told what to write: %s", e)

    def write(self, pids: Mapping[int, int]) -> bool:
        """Have the memory written into these processes, by the pids in their namespace; every byte is verified.

        Returns
        -------
        Whether it is there; where it is not, part of it may be.
        """
        with self._hearing:
            program = self._program
            if program is None or self.is_closed:
                return False
            try:
                said = program.hear(self._patience)
                if said == b"ready":
                    program.tell(b" ".join(b"%d=%d" % both for both in pids.items()))
                    said = program.hear(_WRITE)
            except TimeoutError:
                said = b""
                program.kill()
            if said != b"written" and not self.is_closed:
                log.warning("other processes did not write the memory: %s", program.last_words())
            return said == b"written"

    def close(self) -> None:
        """End them, also in the middle; more than once is harmless."""
        with self._turn:
            was_closed, self.is_closed = self.is_closed, True
            if self._plan is not None:
                self._plan.close()
            if self._program is not None and not was_closed:
                self._program.kill()
                with self._hearing:  # who hears it hears its end, and not what has the number of its pipe then
                    self._program.close()
