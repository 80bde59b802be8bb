"""Snapshots on disk: whole or not at all, their owner's alone, verified before any use.

A store is a folder::

    ROOT/                    0700
      format.json            the format's number and mandatory features
      snapshots/NAME.json    manifests; one that is in place is a snapshot that exists
      snapshots/ID.tmp       a manifest that is not yet in place
      data/ID/...            the files of one snapshot
      locks/ID               locked by whoever writes, reads or deletes data/ID

`store.writer` documents the order of writes of a save. A removal goes the other way: the manifest
is unlinked, ``snapshots/`` synced, then ``data/ID``, then ``locks/ID``.

This package knows no process, no CRIU and no Jupyter.
"""

from __future__ import annotations

from .manifest import Manifest, StoredFile
from .names import MAX_NAME, check_name
from .snapshot import Progress, Snapshot
from .store import Store
from .writer import Writer

__all__ = [
    "MAX_NAME",
    "Manifest",
    "Progress",
    "Snapshot",
    "Store",
    "StoredFile",
    "Writer",
    "check_name",
]
