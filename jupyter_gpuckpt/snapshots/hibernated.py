"""What becomes of the snapshot of a hibernated kernel that needs it no longer."""

from __future__ import annotations

import logging

from ..errors import GpuckptError, NoSuchSnapshot
from ..store import Store
from .summary import HIBERNATED, current_name

__all__ = ["forget", "remove"]

log = logging.getLogger("gpuckpt.keeper")


def remove(store: Store, name: str) -> None:
    """Remove such a snapshot, which is pinned. Raises `StoreError`."""
    store.pin(name, False)
    store.remove(name)


def forget(store: Store, name: str, snapshot_id: str) -> None:
    """Remove the snapshot of a kernel that no longer needs it; one that somebody renamed or tagged is theirs."""
    try:
        now = current_name(store, name, snapshot_id)
        labels = store.labels(store.get(now))
        if now == name and labels.tags == (HIBERNATED,):
            remove(store, now)
        else:
            store.tag(now, [], [HIBERNATED])
    except NoSuchSnapshot:
        pass
    except (GpuckptError, OSError):
        log.exception("the snapshot of a hibernated kernel could not be removed")
