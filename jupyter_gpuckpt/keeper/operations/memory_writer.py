"""The program whose processes write a snapshot's host memory into processes that were restored, each a share of it.

``python -m jupyter_gpuckpt.keeper.operations.memory_writer STORE NAME ID COUNT``. Chunks of host memory are small, so
that threads would stand in line for Python's lock. It prints ``ready`` when COUNT processes wait. Then it is told one
line, the pid in the namespace and the pid here of each restored process (``10000=4711 10001=4712``), and prints
``written`` when every byte was verified and is where it belongs. Whatever else comes of it, the one that started it
reads all of it itself, and finds what is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from ...errors import GpuckptError
from ...store import Postponed, Share, Store
from .parts import CRIU_IMAGES
from .straight_plan import straight_runs

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_LINE = 64 * 1024
"""Bytes of the longest line."""


def main(root: str, name: str, snapshot_id: str, count: str) -> None:
    """Be that program."""
    store = Store(Path(root))
    manifest = store.get(name)
    pids: dict[int, int] = {}
    takers = {
        f"{CRIU_IMAGES}/{one.image}": one.process(functools.partial(pids.__getitem__, one.pid))
        for one in straight_runs(store, manifest, store.contents(manifest))
    }
    files = store.postpone(name, snapshot_id, {}, takers=takers)
    line = mmap.mmap(-1, _LINE)  # which the processes see, too
    begin, tell = os.pipe()
    here = os.getpid()
    shares = [Share(number, int(count)) for number in range(int(count))]
    writers = [os.fork() or _be_writer(here, begin, line, pids, files, share) for share in shares]
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


def _be_writer(
    parent: int, begin: int, line: mmap.mmap, pids: dict[int, int], files: Postponed, share: Share
) -> NoReturn:
    """Be one of these processes."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent and os.read(begin, 1):
            told = line.readline().split()
            pids.update((int(inner), int(outer)) for inner, _, outer in (one.partition(b"=") for one in told))
            files.read(share=share)
            status = 0
    except (GpuckptError, OSError, KeyError, ValueError):
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
