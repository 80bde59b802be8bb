"""Empties rooms as the program that holds GPU memory does, into a file: ``python -m room_emptier ROOMS FILE LAST``.

It ends after the LAST room without a word of it, as if it was killed.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path


def main(rooms: str, file: str, last: str) -> None:
    """Do so."""
    with Path(rooms).open("r+b") as opened, Path(file).open("r+b") as into:
        mapped = mmap.mmap(opened.fileno(), 0)
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin):
            at, size, to = map(int, line.split()[1:])
            into.seek(to)
            into.write(mapped[at : at + size])
            if number == int(last):
                return
            mapped[at : at + size] = b"\xee" * size  # whoever fills it next must fill all of it
            print(at, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
