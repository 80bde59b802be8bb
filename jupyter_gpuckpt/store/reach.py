"""Whether locks on a folder are seen by the other machines that share it, as its mount says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .durable import read_small

__all__ = ["MOUNTS", "filesystem", "locks_reach", "mounted_from"]

MOUNTS = Path("/proc/self/mountinfo")
_MOST = 16 * 1024 * 1024
_FUSE_THAT_LOCKS = frozenset({"fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.mfs", "fuse.juicefs"})
_LOCAL_ALONE = frozenset({"9p", "virtiofs", "beegfs", "fuse", "vboxsf"})
"""Which keep locks to the machine that takes them, or are known to do so where nobody has changed that."""


def locks_reach(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Tell whether all machines that can have this folder see each other's locks on it; a disk has one machine only.

    Raises `OSError`.
    """
    kind, options = filesystem(folder, mounts)
    if kind == "nfs":  # before version 4
        return not {"nolock", "local_lock=all", "local_lock=flock"} & options
    if kind == "lustre":
        return "localflock" not in options
    return kind not in _LOCAL_ALONE and (not kind.startswith("fuse.") or kind in _FUSE_THAT_LOCKS)


def filesystem(folder: Path, mounts: Path = MOUNTS) -> tuple[str, set[str]]:
    """Return the type of the file system that a folder is on, and its options; of one that is not told, nothing.

    Raises `OSError`.
    """
    for own, (kind, _, options) in _mounts_of(folder, mounts):
        return kind, {*own[5].split(","), *options.split(",")}
    return "", set()


def mounted_from(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return which folder of its file system is mounted where this one is, or empty. Raises `OSError`."""
    resolved = folder.resolve()
    found = [own for own, _ in _mounts_of(folder, mounts) if resolved.is_relative_to(own[4])]
    return max(found, key=lambda own: len(own[4]))[3] if found else ""


def _mounts_of(folder: Path, mounts: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the mounts of the file system that a folder is on: proc(5), mountinfo, before and after its dash."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in os.fsdecode(read_small(mounts, _MOST)).splitlines():
        own, _, of_type = line.partition(" - ")
        if own.split()[2] == wanted:
            yield own.split(), of_type.split(" ", 2)
