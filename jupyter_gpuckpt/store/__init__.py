"""Snapshots on disk: each distinct byte once, whole or not at all, verified before any use.

A store is a folder::

    ROOT/                    0700
      format.json            the format's number and mandatory features
      snapshots/NAME.json    manifests; one that is in place is a snapshot that exists
      contents/ID            which chunks the files of a snapshot are made of
      index/ID               which packs hold those chunks
      packs/ID-N             the chunks
      labels/ID.json         tags and pin of a snapshot
      saving/ID/...          files of a snapshot that is being saved, or restored where there is no other disk
      locks/ID               who is at work
      leases/ID              whose hibernated kernel a snapshot is

Names that end with ``.tmp`` are of what is not yet in place. `store.writer` documents the order of writes of a save,
`store.upkeep.collect` that of a deletion. What is in `store.transfer` moves snapshots to other places and back, and
`store.trust` says whose are used.

This package knows no process, no CRIU and no Jupyter.
"""

from __future__ import annotations

from .chunking import Bases, Piece
from .chunks import CHUNK, HASH_OF_ZEROS, HOLE, Changed, Chunk, digest, is_zero
from .committing import name_taken
from .contents import Contents
from .extracting import Share, Taker
from .labels import Labels
from .manifest import Manifest
from .names import MAX_NAME, check_key, check_name, key_of, name_of
from .parallel import Progress, workers
from .postponed import Postponed
from .reading import Parts
from .sessions import Holder, Session
from .snapshot import Snapshot
from .store import BeingSaved, Store
from .upkeep.collect import Collected
from .working_folder import WorkingFolder
from .writer import Writer

__all__ = [
    "CHUNK",
    "HASH_OF_ZEROS",
    "HOLE",
    "MAX_NAME",
    "Bases",
    "BeingSaved",
    "Changed",
    "Chunk",
    "Collected",
    "Contents",
    "Holder",
    "Labels",
    "Manifest",
    "Parts",
    "Piece",
    "Postponed",
    "Progress",
    "Session",
    "Share",
    "Snapshot",
    "Store",
    "Taker",
    "WorkingFolder",
    "Writer",
    "check_key",
    "check_name",
    "digest",
    "is_zero",
    "key_of",
    "name_of",
    "name_taken",
    "workers",
]
