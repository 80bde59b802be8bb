"""Tags and pins: what a user says about a snapshot after it was saved, beside its manifest, which never changes.

``labels/ID.json`` is ``{"pinned": bool, "tags": [text, …]}``; a snapshot without the file has neither.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from .durable import read_small, sync_folder, write_new
from .layout import Layout
from .sessions import Session

__all__ = ["Labels", "read_labels", "write_labels"]

_LIMIT = 64 * 1024


@dataclass(frozen=True)
class Labels:
    """What was said about a snapshot."""

    pinned: bool = False
    """Whether it must not be removed or replaced."""
    tags: tuple[str, ...] = ()


def read_labels(layout: Layout, snapshot_id: str) -> Labels:
    """Return the labels of a snapshot; where they are damaged, it counts as pinned. Raises `OSError`."""
    try:
        found = json.loads(read_small(layout.labels_of(snapshot_id), _LIMIT))
        return Labels(bool(found["pinned"]), tuple(map(str, found["tags"])))
    except FileNotFoundError:
        return Labels()
    except (ValueError, KeyError, TypeError):
        return Labels(pinned=True)


def write_labels(layout: Layout, snapshot_id: str, labels: Labels) -> None:
    """Have the labels of a snapshot on the disk. Raises `OSError`."""
    session = Session(layout.locks, "label")
    try:
        draft = layout.labels_draft(session.id)
        write_new(draft, json.dumps(asdict(labels)).encode("ascii"))
        draft.rename(layout.labels_of(snapshot_id))
        sync_folder(layout.labels)
    finally:
        session.close()
