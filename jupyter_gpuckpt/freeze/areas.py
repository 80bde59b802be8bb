"""Which memory a saved process has, and where each byte of a page image belongs, by CRIU's own images.

Fields are those of CRIU's ``images/mm.proto``, ``vma.proto`` and ``pagemap.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from . import images, pages

__all__ = ["OWN", "Area", "Memory", "memories", "wanted"]

OWN = frozenset({"heap", "stack", "anonymous memory"})
"""What an area can be whose bytes are all in the page image."""

_STACK, _HEAP = 1 << 1, 1 << 5  # criu/include/image.h, VMA_AREA_*
_FILE = 1 << 6 | 1 << 7
_SHARED = 1 << 8


@dataclass(frozen=True)
class Area:
    """A part of a process's memory: addresses from `start` up to `end`, and what it is: a file's path, or a kind."""

    start: int
    end: int
    what: str


@dataclass(frozen=True)
class Memory:
    """The memory of one process.

    Attributes
    ----------
    pid : in its namespace.
    areas : in ascending order.
    image : the name of the file that its pages are in.
    runs : first address, end, and offset in that file, of each run of pages.
    """

    pid: int
    areas: list[Area]
    image: str
    runs: list[tuple[int, int, int]]

    def addresses(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield from where to where a part of the image belongs."""
        for begin, end, at in self.runs:
            first, last = max(offset, at), min(offset + size, at + end - begin)
            if first < last:
                yield begin + first - at, begin + last - at


def wanted(name: str) -> bool:
    """Tell whether `memories` needs the image of this name."""
    return name == "files.img" or (name.startswith(("mm-", "pagemap-")) and name.endswith(".img"))


def memories(files: Mapping[str, bytes]) -> list[Memory]:
    """Return the memory of each process, by the images (name and content) that are `wanted`."""
    named = images.paths_by_id(files["files.img"])
    found = []
    for name, raw in sorted(files.items()):
        pid = name.removeprefix("mm-").removesuffix(".img")
        pagemap = files.get(f"pagemap-{pid}.img")
        if not name.startswith("mm-") or pagemap is None:
            continue
        number, runs = pages.placed(pagemap)
        areas = [Area(start, end, _what(status, named.get(file, ""))) for start, end, status, file in images.areas(raw)]
        found.append(Memory(int(pid), areas, f"pages-{number}.img", runs))
    return found


def _what(status: int, path: str) -> str:
    if status & _FILE:
        return path or "a file without a name"
    if status & _HEAP:
        return "heap"
    if status & _STACK:
        return "stack"
    return "shared memory" if status & _SHARED else "anonymous memory"
