"""Bytes on their way to a GPU through a little memory: threads fill it, and who holds GPU memory empties it.

The memory is a file that both have mapped, cut into rooms of equal size. The program (`vram_holder`) is told which room
has which bytes of the parked memory, and answers with the room when it has copied them. It may verify all of them, when
they are there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from .line_program import LineProgram
from .ranges import Range, without

__all__ = ["READY", "READY_TO_VERIFY", "StagingBuffer"]

READY, READY_TO_VERIFY = b"ready", b"ready to verify"
"""What the program says first: whether it can verify what it is brought."""

_MORE = 8
"""Rooms beside one for each processor: some are on their way while the others are filled."""
_LIMIT = 60.0  # for how long the program may do nothing, in seconds


class StagingBuffer:
    """The file with the rooms, and who waits for one; many threads may use it.

    Parameters
    ----------
    file : where the file is made; it has no name any more once the program has it.
    """

    ROOM = 8 << 20
    """Bytes of one room."""

    def __init__(self, file: Path) -> None:
        self._file = file
        size = ((os.cpu_count() or 1) + _MORE) * self.ROOM
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            self._mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._rooms = range(0, size, self.ROOM)
        self._free = deque(self._rooms)
        self._told: set[int] = set()
        """Those that the program has not emptied yet."""
        self._program: LineProgram | None = None
        self._ready = self._failed = self._verifies = False
        self._there: list[Range] = []
        self._telling, self._hearing = threading.Lock(), threading.Lock()
        self._goes_on = threading.Event()
        self._goes_on.set()

    def start(self, program: LineProgram) -> None:
        """Say which program empties the rooms; it has been started, and will say that it is ready."""
        self._program = program

    @property
    def most(self) -> int:
        """How many bytes a room has."""
        return self.ROOM

    def wants(self, offset: int, size: int) -> bool:
        """Tell whether any of these bytes go there: all do that are not there already."""
        return any(True for _ in without([(offset, offset + size)], self._there))

    @property
    def verifies(self) -> bool:
        """Whether the program will verify what it is brought; to be asked when it is ready."""
        return self._verifies

    def until_ready(self) -> bool:
        """Wait until the program is ready, and tell whether it is; nobody fills a room yet."""
        with self._hearing:
            if not self._ready and not self._failed:
                self._hear()
            return self._ready

    def has(self, ranges: list[Range]) -> None:
        """Say what is on the GPU already, while nobody fills a room."""
        self._there = ranges

    def lacks(self, ranges: list[Range], size: int) -> None:
        """Say what of all bytes is not on the GPU, now that it was verified; nobody will verify what comes for that."""
        self._there, self._verifies = list(without([(0, size)], ranges)), False

    def hold_back(self) -> None:
        """Have whoever wants room wait until `go_on`."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Give room again."""
        self._goes_on.set()

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        """Give room for these bytes of the parked memory; after the block they go to the GPU, unless it raises."""
        self._goes_on.wait()
        at = self._free_room()
        try:
            with memoryview(self._mapped) as rooms, rooms[at : at + size] as room:
                yield room
        except BaseException:
            self._free.append(at)
            raise
        with self._telling:
            if self._program is None or self._failed:
                self._free.append(at)
            else:
                self._told.add(at)
                self._program.tell(b"bring %d %d %d" % (at, size, offset))

    def finish(self) -> bool:
        """Wait until all is on the GPU, and tell whether it is."""
        with self._hearing:
            while not self._failed and not (self._ready and len(self._free) == len(self._rooms)):
                self._hear()
        return not self._failed

    def close(self) -> None:
        """Free the memory; nobody fills a room any more."""
        self._file.unlink(missing_ok=True)
        self._mapped.close()

    def _free_room(self) -> int:
        with self._hearing:
            while not self._free:
                self._hear()
            return self._free.popleft()

    def _hear(self) -> None:
        try:
            said = self._program.hear(_LIMIT) if self._program is not None else b""
        except TimeoutError:
            said = b""
        if said in (READY, READY_TO_VERIFY):
            self._ready, self._verifies = True, said == READY_TO_VERIFY
            self._file.unlink(missing_ok=True)
        elif said.isdigit():
            self._told.remove(int(said))
            self._free.append(int(said))
        else:
            # What is filled from now on goes nowhere, and is asked for once more by another way. Those that are being
            # filled are lent to nobody else all the same: their bytes would not be what was read.
            with self._telling:
                self._failed = True
                self._free.extend(self._told)
                self._told.clear()
