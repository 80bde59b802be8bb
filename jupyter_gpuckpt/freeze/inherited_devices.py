"""GPU devices that a process inherited when it was forked: found, and dropped: ``python -m`` this module, with pids.

A child forked from a process that uses CUDA can use none itself, but has its parent's device files open, and no such
process can be dumped. Children that Python's `os.fork` starts in a kernel drop them by themselves (`kernel.devices`).
Those of other programs (torch.compile's workers, the data loaders of a job) are made to from outside: the program named
above traces them, and has each of them put nothing in the place of these files and their mappings.

Lines of the program: ``dropped`` out, when all have done so.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterable

from ..linux.gpu_devices import device_files, device_mappings
from . import ptrace
from .gpu_processes import ended
from .line_program import LineProgram
from .ptrace import Call, Tracer

__all__ = ["drop_inherited", "has_inherited", "main"]

log = logging.getLogger("gpuckpt.inherited_devices")

_LIMIT = 10.0
"""Seconds for the program to start, and for every process to come to its next system call."""

_KCMP, _EVENTFD2, _DUP3, _CLOSE, _MMAP = 312, 290, 292, 3, 9  # x86-64
_KCMP_FILE = 0
_PROT_NONE = 0
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED, MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)


def has_inherited(pid: int, owners: Iterable[int]) -> bool:
    """Tell whether every device file that a process has open was opened by another one, of `owners`."""
    opened = device_files(pid)
    theirs = [(owner, file) for owner in owners for file in device_files(owner)]
    return bool(opened) and all(any(_same_file(pid, file, *other) for other in theirs) for file in opened)


def drop_inherited(pids: Iterable[int]) -> None:
    """Have processes drop their device files and what they map of them; one that cannot be made to keeps them."""
    if not ptrace.is_supported():
        return
    program = LineProgram("jupyter_gpuckpt.freeze.inherited_devices", *map(str, pids))
    try:
        dropped = program.hear(_LIMIT) == b"dropped"
        program.wait(_LIMIT)
    except TimeoutError:
        dropped = False
        program.kill()
    if not dropped:
        log.warning("inherited GPU devices were not dropped: %s", program.last_words())
    program.close()


def main(*pids: str) -> None:
    """Be that program."""
    tracer = Tracer()
    waiting = {int(pid) for pid in pids}
    for pid in waiting:
        tracer.seize(pid)
    while waiting and (call := tracer.next_call()):
        if (pid := ptrace.process_of(call.tid)) in waiting:
            _drop(tracer, call, pid)
        waiting = {other for other in waiting if other != pid and not ended(other)}
        tracer.go_on(call)
    print("dropped", flush=True)


def _drop(tracer: Tracer, call: Call, pid: int) -> None:
    """Put nothing there: the addresses and numbers stay taken, since libcuda's state in this child still names them."""
    for start, end in device_mappings(pid):
        tracer.insert(call, _MMAP, start, end - start, _PROT_NONE, _NOTHING, -1, 0)
    nothing = tracer.insert(call, _EVENTFD2, 0, os.O_CLOEXEC)  # the one file that is made without a name in memory
    for file in device_files(pid):
        tracer.insert(call, _DUP3, nothing, file, os.O_CLOEXEC)
    tracer.insert(call, _CLOSE, nothing)


def _same_file(pid: int, file: int, other: int, others: int) -> bool:
    """Tell whether descriptors of two processes are of one open file (kcmp(2)); False where that cannot be told."""
    result: int = _libc.syscall(_KCMP, pid, other, _KCMP_FILE, ctypes.c_ulong(file), ctypes.c_ulong(others))
    return result == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
