"""A program of several processes, each with memory that was changed at random before and after forks.

``python random_tree.py SEED FOLDER``: in folders in that one, there is a file in ``forked`` for each process but the
first, and one named by its id in ``there`` or ``gone`` for each that is there to stay, or ended. When a folder ``N``
appears beside them, each process writes what it has in its memory, as a hash, to ``N/PID``, from 0 on. With ``end``
there, all end.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import signal
import subprocess
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
            area = mmap.mmap(-1, choose.randrange(1, 7) * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
            (folder / "forked" / f"{os.getpid()}-{generation}-{child}").touch()
            if os.fork() == 0:
                memory.choices.seed(seed * 100 + generation * 10 + child)
                break
        if os.getpid() != first and memory.choices.random() < 0.2:
            (folder / "gone" / str(os.getpid())).touch()
            sys.exit()  # its children become those of another process
    for _ in range(14):
        memory.change()
    if os.getpid() == first:
        alone = [sys.executable, __file__, str(seed), str(folder), "alone"]
        (folder / "forked" / "alone").touch()
        subprocess.Popen(alone)
    answer(memory, folder)


def answer(memory: Memory, folder: Path) -> None:
    """Say that this process is there, and answer until the end."""
    (folder / "there" / str(os.getpid())).touch()
    asked = 0
    while not (folder / "end").exists():
        if (folder / str(asked)).exists():
            draft = folder / str(asked) / f"{os.getpid()}.draft"
            draft.write_text(memory.told())
            draft.rename(draft.with_suffix(""))
            asked += 1
        time.sleep(0.02)


def be_alone(seed: int, folder: Path) -> None:
    """Be a process with much memory that no fork has left to it."""
    memory = Memory(seed)
    memory.areas.append(mmap.mmap(-1, 150 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory.areas[0][:] = memory.choices.randbytes(150 * MIB)
    answer(memory, folder)


if __name__ == "__main__":
    (main if len(sys.argv) == 3 else be_alone)(int(sys.argv[1]), Path(sys.argv[2]))
