"""Which file system a folder is on, as proc(5), mountinfo, says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from . import proc

__all__ = ["LAYERS", "MOUNTS", "filesystem", "is_network", "mounted_from", "nearest"]

MOUNTS = Path("/proc/self/mountinfo")
LAYERS = ("overlay", "aufs", "fuse.fuse-overlayfs")
"""Those of a container's own files."""
_ENCRYPTED = ("fuse.gocryptfs", "fuse.encfs", "fuse.cryfs", "fuse.securefs")
"""What is in a home of these is not to be on the disk as it is."""
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "afs", "ocfs2", "gfs2")


def is_network(kind: str) -> bool:
    """Tell whether several machines may have a file system of this type; one of FUSE's counts as such."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in (*LAYERS, *_ENCRYPTED))


def nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110


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
    for line in proc.lines(mounts):
        own, _, of_type = line.partition(" - ")
        if own.split()[2] == wanted:
            yield own.split(), of_type.split(" ", 2)
