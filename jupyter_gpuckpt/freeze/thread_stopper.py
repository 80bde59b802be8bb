"""The program that holds a process's threads still, but for one: ``python -m jupyter_gpuckpt.freeze.thread_stopper``.

The one left over parks the process's GPU memory: nothing may use the GPU then, and no other thread can know that. The
driver's own threads go on too, since they do what the driver is told from outside.

Lines: ``ready`` out; ``hold PID TID SECONDS`` in, and out ``still`` when every other thread is, each asleep in a system
call where it holds no lock that the one left over might need. Where one works on for that long, ``restless``, and all
go on; with ``hold-all PID TID SECONDS`` they are held all the same. ``hold-stopped`` does the same to a process that
stands still (SIGSTOP), which goes on then, but for what is held. When this program ends, however it ends, all go on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container

from .driver_threads import is_drivers
from .ptrace import Halt

__all__ = ["main"]

_NAP = 0.002  # for how long those that were awake are let go on, in seconds
_STOPS = 1.0
"""How long a thread that is told to stop has for it, in seconds: where the processors are busy, it waits for one."""


def main() -> None:
    """Be that program."""
    print("ready", flush=True)
    command, _, rest = sys.stdin.readline().strip().partition(" ")
    if not rest:
        return
    pid, tid, seconds = rest.split()
    halt = Halt()
    still = _hold(halt, int(pid), int(tid), time.monotonic() + float(seconds), stands_still=command == "hold-stopped")
    if not still and command == "hold":
        print("restless", flush=True)
        return
    print("still", flush=True)
    sys.stdin.readline()
    halt.end()
    os._exit(0)  # which lets them go on in any case, but a millisecond later


def _hold(halt: Halt, pid: int, left_over: int, deadline: float, *, stands_still: bool) -> bool:
    """Hold the threads still; tell whether each of them sleeps."""
    held: set[int] = set()
    left_alone = {left_over}
    while True:
        # Threads that start meanwhile are found by a second look.
        threads = _threads(pid, held, left_alone)
        new = threads - held
        if not halt.hold(new, max(deadline, time.monotonic() + _STOPS)):
            return False
        held = threads
        if stands_still:
            os.kill(pid, signal.SIGCONT)
            stands_still = False
        awake = halt.awake()
        if not (new or awake):
            return True
        if awake:
            if time.monotonic() > deadline:
                return False
            halt.let_go(awake)
            time.sleep(_NAP)
            if not halt.hold(awake, max(deadline, time.monotonic() + _STOPS)):
                return False


def _threads(pid: int, known: Container[int], left_alone: set[int]) -> set[int]:
    """Return the process's threads, without those that are left alone, to which the driver's are added."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        tid = int(name)
        try:
            if tid not in known and tid not in left_alone and is_drivers(f"/proc/{pid}/task/{tid}"):
                left_alone.add(tid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if tid not in left_alone:
            found.add(tid)
    return found


if __name__ == "__main__":
    main()
