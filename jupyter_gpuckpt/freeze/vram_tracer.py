"""The program that has a CUDA process put its VRAM into files: ``python -m jupyter_gpuckpt.freeze.vram_tracer``.

At a checkpoint libcuda makes one mapping for what was in the memory of all GPUs (driver 580.159: ``mmap`` with
MAP_PRIVATE, MAP_ANONYMOUS and MAP_POPULATE), copies it there, and unmaps it when all is back. This program watches the
process's system calls until then, and has that mapping made of a file instead. The bytes then lie in the file when the
checkpoint ends; criu finds a file mapped and leaves its bytes out of the images; and nothing was copied twice. It ends
with that: the mapping comes after about 70 calls, and 700 to 6,000 more follow, each of which would take 30 µs longer.

Arguments: the folder for the file as this program reaches it, the same as the process does, the process's id, the name
of the file, and how many bytes to prepare it for. Lines: ``ready`` out, ``go`` in, ``tracing`` out; with the next line
in, or the end of the input, the program ends as well. However it ends, the process goes on.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path

from .driver_threads import is_drivers
from .populate import populate, resize
from .ptrace import Call, Tracer

__all__ = ["main"]

_MMAP, _OPENAT, _CLOSE = 9, 257, 3  # x86-64
_AT_FDCWD = -100
_FOR_VRAM = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x8000  # MAP_POPULATE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_BELOW_STACK = 4096  # bytes below the stack pointer: beyond the 128 that a function may use (x86-64 ABI)
_LAST_ERROR = 4095  # a result of -1 to -4095 is an error's number


class _Diversion:
    """Has the mapping that one process makes for its VRAM made of a file."""

    def __init__(self, outside: Path, inside: str, pid: int) -> None:
        self._outside, self._inside, self._pid = outside, inside, pid
        self._busy = threading.Lock()

    def run(self) -> None:
        """Do so, unless the process ends before, or this program is told to."""
        tracer = Tracer()
        tracer.seize(self._pid)
        print("tracing", flush=True)
        while call := tracer.next_call():
            with self._busy:
                if self._is_for_vram(call) and self._divert(tracer, call):
                    return
                tracer.go_on(call)

    def end(self) -> None:
        """End this program; the process is in no call that was put in place of its own."""
        with self._busy:
            os._exit(0)

    def _is_for_vram(self, call: Call) -> bool:
        """Tell whether it is that of the driver's own threads: the program's run on, and may make such a one, too."""
        if call.number != _MMAP or call.arguments[2] != _READ_WRITE or call.arguments[3] & _FOR_VRAM != _FOR_VRAM:
            return False
        try:
            return is_drivers(f"/proc/{self._pid}/task/{call.tid}")
        except OSError:
            return False

    def _divert(self, tracer: Tracer, call: Call) -> bool:
        address, length, protection, flags = call.arguments[:4]
        try:
            resize(self._outside, length)
            at = call.stack - _BELOW_STACK
            with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(at)
                memory.write(self._inside.encode() + b"\0")
        except OSError:
            return False
        opened = tracer.insert(call, _OPENAT, _AT_FDCWD, at, os.O_RDWR | os.O_CLOEXEC, 0)
        if opened < 0:
            return False
        shared = flags & ~(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | mmap.MAP_SHARED
        mapped = tracer.insert(call, _MMAP, address, length, protection, shared, opened, 0)
        tracer.insert(call, _CLOSE, opened)
        if -_LAST_ERROR <= mapped < 0:
            return False
        tracer.answer(call, mapped)
        return True


def main(outside: str, inside: str, pid: str, name: str, size: str) -> None:
    """Be that program."""
    file = Path(outside, name)
    diversion = _Diversion(file, f"{inside}/{name}", int(pid))
    populate(file, int(size))
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return

    def until_told() -> None:
        sys.stdin.readline()
        diversion.end()

    threading.Thread(target=until_told, daemon=True).start()
    diversion.run()
    diversion.end()


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
