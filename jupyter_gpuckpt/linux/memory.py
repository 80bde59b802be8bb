"""How much more host memory processes may take before the system or one of their cgroups runs out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import proc

__all__ = ["Room", "available", "is_in_memory", "kills", "room"]

_PROC = Path("/proc")
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
"""Kinds of file systems whose files take memory, of the cgroup of whoever writes them."""
_UNLIMITED = 1 << 60
"""Version 1 of cgroups writes the largest number of pages where there is no limit."""


@dataclass(frozen=True)
class Room:
    """How many bytes are left, and where.

    Attributes
    ----------
    where : `` in the cgroup NAME, whose FILE is SIZE``; empty where the machine's own memory is what runs out first.
    """

    bytes: int
    where: str = ""


def available(pid: int) -> int:
    """Return how many bytes the process can still take: of the system's, and of its cgroups' limits."""
    return room(pid).bytes


def room(*pids: int) -> Room:
    """Return how many bytes each of these processes can still take, and what ends it.

    The system's figure is ``MemAvailable``. A cgroup's is its limit, less what is in use and cannot be reclaimed, with
    the swap that it may still use: of the processes' own cgroups and of all above them, in version 2 of cgroups
    (``memory.max`` and ``memory.high``, Linux `cgroup-v2.rst`) and in version 1 (`cgroup-v1/memory.rst`).
    """
    return min([Room(_field(_PROC / "meminfo", "MemAvailable:") * 1024), *_rooms(pids)], key=lambda one: one.bytes)


def kills(pid: int) -> int:
    """Return how often the system has killed a process of this one's cgroup for lack of memory."""
    for _, folder, _ in _groups(pid):
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                return _field(folder / file, "oom_kill")
        break
    return 0


def is_in_memory(path: Path) -> bool:
    """Tell whether files in a folder take memory, not disk space; of one that is not there yet, where it would be."""
    while not path.exists():
        path = path.parent
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in proc.lines(_PROC / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0] in _IN_MEMORY
    return False


def _rooms(pids: tuple[int, ...]) -> Iterator[Room]:
    swap = _field(_PROC / "meminfo", "SwapFree:") * 1024
    seen = set()
    for pid in pids:
        for version, folder, name in _groups(pid):
            if folder in seen:
                continue
            seen.add(folder)
            with contextlib.suppress(OSError, ValueError):  # it may be gone by now
                yield from _in_version_2(folder, name, swap) if version == 2 else _in_version_1(folder, name, swap)


def _groups(pid: int) -> Iterator[tuple[int, Path, str]]:
    """Yield version, folder and name of a process's memory cgroups, and of all above them."""
    mounts = _mounts()
    try:
        lines = proc.lines(_PROC / str(pid) / "cgroup")
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        if version not in mounts:
            continue
        root, at = mounts[version]
        # Where a part of the tree is mounted, as in some containers, the path begins with that part's own.
        inside = path.removeprefix(root.rstrip("/")).lstrip("/")
        own = at / inside if (at / inside).is_dir() else at
        for folder in (own, *own.parents):
            yield version, folder, "/" + str(folder.relative_to(at)).lstrip(".")
            if folder == at:
                break


def _mounts() -> dict[int, tuple[str, Path]]:
    """Return root and folder of the mounted trees of memory cgroups by version (proc_pid_mountinfo(5))."""
    found: dict[int, tuple[str, Path]] = {}
    for line in proc.lines(_PROC / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        (_, _, _, root, place, *_), (kind, _, options) = before.split(), after.split(maxsplit=2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version and Path(place).is_dir():  # another mount over it may hide it
            found.setdefault(version, (root, Path(place)))
    return found


def _in_version_2(group: Path, name: str, swap: int) -> Iterator[Room]:
    for limit in ("memory.max", "memory.high"):
        most = _number(group / limit)
        if most is None:
            continue
        used = _number(group / "memory.current") or 0
        swappable = swap
        if (most_swap := _number(group / "memory.swap.max")) is not None:
            swappable = min(swap, most_swap - (_number(group / "memory.swap.current") or 0))
        left = most - used + _field(group / "memory.stat", "inactive_file") + max(0, swappable)
        yield Room(max(left, 0), _where(name, limit, most))


def _in_version_1(group: Path, name: str, swap: int) -> Iterator[Room]:
    # The second one limits memory and swap together.
    for kind, beside in (("memory", swap), ("memory.memsw", 0)):
        most = _number(group / f"{kind}.limit_in_bytes")
        if most is None:
            continue
        used = _number(group / f"{kind}.usage_in_bytes") or 0
        left = most - used + _field(group / "memory.stat", "total_inactive_file") + beside
        yield Room(max(left, 0), _where(name, f"{kind}.limit_in_bytes", most))


def _where(name: str, file: str, limit: int) -> str:
    return f" in the cgroup {name}, whose {file} is {limit / 1e6:,.0f} MB"


def _number(file: Path) -> int | None:
    """Return the number in a file of a cgroup; None where it sets no limit, or is not there."""
    try:
        text = file.read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" or int(text) >= _UNLIMITED else int(text)


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    return 0
