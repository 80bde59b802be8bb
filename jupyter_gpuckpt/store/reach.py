"""Whether locks on a folder are seen by the other machines that share it, as its mount says."""

from __future__ import annotations

from pathlib import Path

from ..linux.file_systems import MOUNTS, filesystem

__all__ = ["locks_reach"]

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
