"""Delete what no snapshot needs: never anything that a manifest names, or that somebody uses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .durable import sync_folder
from .layout import Layout
from .locks import Lock

__all__ = ["discard", "sweep"]


def discard(layout: Layout, snapshot_id: str) -> int:
    """Delete the data of a snapshot whose manifest is known to be gone; return the bytes freed.

    Data that is in use stays, for a later `sweep`, and counts as nothing freed. Raises `OSError`.
    """
    lock = Lock.alone(layout.lock_of(snapshot_id))
    if lock is None:
        return 0
    try:
        return _delete(layout, snapshot_id)
    finally:
        lock.release()


def sweep(layout: Layout, named: Callable[[], frozenset[str] | None]) -> int:
    """Delete what lies there without a manifest that names it; return the bytes freed.

    `named` reads the manifests and returns the ids in them, or None where one cannot be read: it
    might name anything, so nothing is deleted then. Raises `OSError`.
    """
    for path in layout.old_marks():
        path.unlink(missing_ok=True)
    known = named()
    if known is None:
        return 0
    for snapshot_id in layout.drafts() & known:  # its writer ended right after the commit
        layout.draft(snapshot_id).unlink(missing_ok=True)
    locked: dict[str, Lock] = {}
    try:
        for snapshot_id in sorted(layout.ids() - known):
            lock = Lock.alone(layout.lock_of(snapshot_id))
            if lock is not None:
                locked[snapshot_id] = lock
        if not locked:
            return 0
        # A removal that is not yet on the disk may be undone by a power cut.
        sync_folder(layout.snapshots)
        # Asked again: a writer holds its lock until its manifest is in place, so that what has
        # none now, under our lock, will never get one.
        known = named()
        if known is None:
            return 0
        return sum(_delete(layout, i) for i in locked if i not in known)
    finally:
        for lock in locked.values():
            lock.release()


def _delete(layout: Layout, snapshot_id: str) -> int:
    # The lock file goes last: while anything is left, the id is found again by the next sweep.
    data = layout.data_of(snapshot_id)
    freed = _bytes_in(data)
    if data.is_dir() and not data.is_symlink():
        shutil.rmtree(data)
    layout.draft(snapshot_id).unlink(missing_ok=True)
    layout.lock_of(snapshot_id).unlink(missing_ok=True)
    return freed


def _bytes_in(folder: Path) -> int:
    return sum(os.lstat(Path(where, f)).st_size for where, _, files in os.walk(folder) for f in files)
