"""A program of several processes, each with memory that was changed at random before and after forks.

``python random_tree.py SEED FOLDER``: each process that forks one, is there to stay, or has ended leaves a file of that
process's id in ``forked``, ``there`` or ``gone``, folders in that one. When a folder ``N`` appears beside them, each
process writes what it has in its memory, as a hash, to ``N/PID``, from 0 on. With ``end`` there, all end.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

MIB = 1 << 20
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Memory:
    """Areas of private memory, and what can be done to them."""

    def __init__(self, seed: int) -> None:
        self.areas: list[mmap.mmap] = []
        self.choices = random.Random(seed)

    def change(self) -> None:
        """Do something to an area, or to its place in memory."""
        choose = self.choices
        if not self.areas or choose.random() < 0.4:
            area = mmap.mmap(-1, choose.randrange(4, 12) * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            area[:] = choose.randbytes(MIB) * (len(area) // MIB)
            self.areas.append(area)
            return
        area = choose.choice(self.areas)
        first = choose.randrange(len(area) // _PAGE)
        pages = min(choose.choice([1, 3, 16, 300]), len(area) // _PAGE - first)
        match choose.choice(["write", "scatter", "zero", "forget", "advise", "protect", "drop", "grow"]):
            case "write":
                area[first * _PAGE : (first + pages) * _PAGE] = choose.randbytes(pages * _PAGE)
            case "scatter":
                for at in range(first * _PAGE, len(area), 7 * _PAGE):
                    area[at] = choose.randrange(256)
            case "zero":
                area[first * _PAGE : (first + pages) * _PAGE] = bytes(pages * _PAGE)
            case "forget":
                area.madvise(mmap.MADV_DONTNEED, first * _PAGE, pages * _PAGE)
            case "advise":
                area.madvise(choose.choice([mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE]))
            case "protect":
                # Two areas for the system, as long as a part cannot be written.
                place = address(area) + first * _PAGE
                _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(pages * _PAGE), mmap.PROT_READ)
                self.areas.remove(area)
                READ_ONLY.append(area)
            case "drop":
                self.areas.remove(area)
                area.close()
            case "grow":
                area.resize(len(area) + 2 * MIB)
                area[-MIB:] = choose.randbytes(MIB)

    def told(self) -> str:
        """Return what there is, and where, as a hash."""
        found = hashlib.blake2b()
        for area in (*self.areas, *READ_ONLY):
            found.update(f"{address(area)} {len(area)} ".encode())
            found.update(area)
        return found.hexdigest()


READ_ONLY: list[mmap.mmap] = []


def address(area: mmap.mmap) -> int:
    """Return where an area is."""
    byte = ctypes.c_char.from_buffer(area)
    try:
        return ctypes.addressof(byte)
    finally:
        del byte


def main(seed: int, folder: Path) -> None:
    """Become a tree of processes, and answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    memory, first = Memory(seed), os.getpid()
    for generation in range(3):
        for _ in range(memory.choices.randrange(4, 9)):
            memory.change()
        for child in range(2):
            if (pid := os.fork()) == 0:
                memory.choices.seed(seed * 100 + generation * 10 + child)
                break
            (folder / "forked" / str(pid)).touch()
        if os.getpid() != first and memory.choices.random() < 0.2:
            (folder / "gone" / str(os.getpid())).touch()
            sys.exit()  # its children become those of another process
    for _ in range(14):
        memory.change()
    (folder / "there" / str(os.getpid())).touch()
    asked = 0
    while not (folder / "end").exists():
        if (folder / str(asked)).exists():
            answer = folder / str(asked) / f"{os.getpid()}.draft"
            answer.write_text(memory.told())
            answer.rename(answer.with_suffix(""))
            asked += 1
        time.sleep(0.02)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
