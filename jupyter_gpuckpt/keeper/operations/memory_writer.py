"""The program whose processes write a snapshot's host memory into processes that were restored, each a share of it.

``python -m jupyter_gpuckpt.keeper.operations.memory_writer STORE NAME ID COUNT PLAN``. Chunks of host memory are small,
so that threads would stand in line for Python's lock. It is started before it is known what there is to write, and
imports little. The line ``plan`` says that PLAN, a file descriptor, has that now: by file of the snapshot, the process,
as its namespace names it, and the runs (`freeze.placing.Run`) that belong in it (JSON).

It prints ``ready`` when COUNT processes have begun: each reads and verifies its first `EACH` bytes while there is
nothing yet to write them into. Then it is told one line, the pid in the namespace and the pid here of each restored
process (``10000=4711 10001=4712``), and prints ``written`` when every byte was verified and is where it belongs.
Whatever else comes of it, the one that started it reads all of it itself, and finds what is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ...errors import GpuckptError
from ...freeze.placing import Placing, Run, into_process
from ...store import Postponed, Share, Store

__all__ = ["EACH", "main"]

EACH = 64 << 20
"""Bytes that each process reads before there is anything to write them into."""
_PR_SET_PDEATHSIG = 1
_LINE = 64 * 1024
"""Bytes of the longest line."""


def main(root: str, name: str, snapshot_id: str, count: str, plan: str) -> None:
    """Be that program."""
    store = Store(Path(root))
    line = mmap.mmap(-1, _LINE)  # which the processes see, too
    begin, tell = os.pipe()
    targets = _Targets(begin, line)
    if not sys.stdin.buffer.readline(_LINE).endswith(b"\n"):
        return
    with os.fdopen(int(plan), "rb") as file:
        planned: dict[str, tuple[int, list[tuple[int, int, int]]]] = json.load(file)
    takers = {
        path: _Early(into_process([Run(*run) for run in runs], functools.partial(targets.pid, pid)), targets)
        for path, (pid, runs) in planned.items()
    }
    files = store.postpone(name, snapshot_id, {}, takers=takers)
    here = os.getpid()
    shares = [Share(number, int(count)) for number in range(int(count))]
    writers = [os.fork() or _be_writer(here, targets, files, share) for share in shares]
    print("ready", flush=True)
    told = sys.stdin.buffer.readline(_LINE)
    ended = [1]
    if told.endswith(b"\n"):
        line.write(told)
        os.write(tell, b"!" * len(writers))
        ended = [os.waitpid(writer, 0)[1] for writer in writers]
    files.close()
    with contextlib.suppress(BrokenPipeError):  # nobody wants it any more
        print("not written" if any(ended) else "written", flush=True)
    os._exit(0)  # at once: the one that started it waits for its end; what still waits ends with it


class _Targets:
    """The processes that are written into, once this one is told of them; and what it has read before.

    Parameters
    ----------
    begin : a pipe, of which each process reads one byte when it may begin.
    line : what was told then.
    """

    def __init__(self, begin: int, line: mmap.mmap) -> None:
        self._begin, self._line = begin, line
        self._pids: dict[int, int] = {}
        self._read: list[tuple[Placing, int, memoryview]] = []
        self._size = 0

    @property
    def are_known(self) -> bool:
        """Whether they are there, and may be written into."""
        return bool(self._pids)

    def pid(self, inner: int) -> int:
        """Return the pid here of one. Raises `KeyError`."""
        return self._pids[inner]

    def keep(self, placing: Placing, offset: int, data: memoryview) -> None:
        """Keep bytes for them; where there are many, wait until they are known. Raises as `write`."""
        self._read.append((placing, offset, data))
        self._size += len(data)
        if self._size >= EACH:
            self.write()

    def write(self) -> None:
        """Wait until they are known, and write what was kept.

        Raises
        ------
        OSError : nobody tells of them any more, or they cannot be written into.
        RestoreFailed : one has ended.
        KeyError, ValueError : something else was told.
        """
        if not os.read(self._begin, 1):
            raise BrokenPipeError
        told = self._line.readline().split()
        self._pids.update((int(inner), int(outer)) for inner, _, outer in (one.partition(b"=") for one in told))
        for placing, offset, data in self._read:
            placing.place(offset, data)
        self._read.clear()


class _Early:
    """Takes bytes of a file before there is anything to write them into: `store.Taker`."""

    verifies = False

    def __init__(self, placing: Placing, targets: _Targets) -> None:
        self._placing, self._targets = placing, targets
        self.most, self.wants = placing.most, placing.wants

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        """Give room for these bytes, which are written when they can be. Raises as `_Targets.write`."""
        if self._targets.are_known:
            with self._placing.room(offset, size) as room:
                yield room
            return
        room = memoryview(bytearray(size))
        yield room
        self._targets.keep(self._placing, offset, room)


def _be_writer(parent: int, targets: _Targets, files: Postponed, share: Share) -> NoReturn:
    """Be one of these processes."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            files.read(share=share)
            if not targets.are_known:
                targets.write()
            status = 0
    except (GpuckptError, OSError, KeyError, ValueError):
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
