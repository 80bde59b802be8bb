"""Delete what no snapshot needs: never anything that a manifest names, or that somebody at work may rely on.

In two phases. First the parts of the index go that belong to no snapshot: from then on nobody who begins can come to
rely on what only they named. A pack that no part names is condemned. Second, a condemned pack is deleted when all
who were at work at its condemnation have ended, and the time of grace is over. A crash at any point leaves what the
next collection completes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..durable import read_small, sync_folder, write_new
from ..index import DamagedPart, named_packs, pack_sizes
from ..layout import Layout
from ..manifest import Manifest
from ..names import session_of
from ..sessions import Lock, ended, held, settle

__all__ = ["Collected", "Named", "collect", "needless_parts", "sweep", "used", "would_collect"]

_RECORD_LIMIT = 64 * 1024 * 1024

Named = Callable[[], Sequence[Manifest] | None]
"""Reads all manifests; returns None where one cannot be read: it might name anything."""


@dataclass(frozen=True)
class Collected:
    """What a collection did, or would do, in bytes."""

    freed: int = 0
    waiting: int = 0
    """Not needed, and not yet deleted: somebody at work may rely on it, or the time of grace is not over."""
    obstacle: str = ""
    """Why nothing could be collected; empty where it could."""


_BUSY = "another collection is running"
_DAMAGE = "a manifest or a part of the index is damaged or missing, and it may name anything"


def sweep(layout: Layout, sessions: Iterable[str]) -> int:
    """Delete what those of `sessions` left behind whose process ended before their work; return the bytes freed.

    Quick: it asks neither manifests nor the index. Packs are left to `collect`. Raises `OSError`.
    """
    for path in layout.old_drafts():
        path.unlink(missing_ok=True)
    freed = 0
    for session in sorted(sessions):
        lock = ended(layout.locks, session)
        if lock is None:
            continue
        try:
            saving = layout.saving_of(session)
            freed += _bytes_in(saving)
            if saving.exists():
                shutil.rmtree(saving)
            layout.draft(session).unlink(missing_ok=True)
            layout.part_draft(session).unlink(missing_ok=True)
            layout.labels_draft(session).unlink(missing_ok=True)
            # The lock file goes last: while anything is left, the session is found again by the next sweep.
            (layout.locks / session).unlink(missing_ok=True)
        finally:
            lock.release()
    return freed


def _bytes_in(folder: Path) -> int:
    return sum(_size(f"{where}/{f}") for where, _, files in os.walk(folder) for f in files)


def _size(path: str | Path) -> int:
    """Return how many bytes a file has: none where somebody deletes it meanwhile."""
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def used(layout: Layout) -> int:
    """Return how many bytes packs, contents and index take. Raises `OSError`."""
    return sum(pack_sizes(layout).values()) + _bytes_in(layout.contents) + _bytes_in(layout.index)


def collect(layout: Layout, named: Named, grace: float = 0.0) -> Collected:
    """Delete what no snapshot in `named` needs.

    `grace` is for how many seconds a condemned pack stays at least.

    Raises
    ------
    OSError : something could not be read or deleted; the rest is completed by the next collection.
    """
    lock = Lock.take(layout.collecting)
    if lock is None:
        return Collected(obstacle=_BUSY)
    freed = 0
    try:
        freed = sweep(layout, layout.begun())
        needless = needless_parts(layout, named, settle)
        if needless is None:
            return Collected(freed, obstacle=_DAMAGE)
        # A removal that is not yet on the disk may be undone by a power cut.
        sync_folder(layout.snapshots)
        before = named_packs(layout, layout.parts())
        freed += _delete(layout.part_of(i) for i in needless)
        sync_folder(layout.index)
        freed += _delete(layout.contents_of(i) for i in needless)
        freed += _delete(layout.labels_of(i) for i in needless)
        freed += _delete(layout.leases / i for i in needless)
        return _delete_packs(layout, before, grace, lock.now(), freed)
    except DamagedPart:
        return Collected(freed, obstacle=_DAMAGE)
    finally:
        lock.release()


def would_collect(layout: Layout, named: Named) -> Collected:
    """Return what `collect` would free if nobody was at work; nothing is changed. Raises `OSError`."""
    needless = needless_parts(layout, named)
    if needless is None:
        return Collected(obstacle=_DAMAGE)
    try:
        packs = named_packs(layout, layout.parts() - needless)
    except DamagedPart:
        return Collected(obstacle=_DAMAGE)
    at_work = held(layout.locks)
    paths = [p for i in needless for p in (layout.part_of(i), layout.contents_of(i), layout.labels_of(i))]
    sizes = [_size(path) for path in paths]
    sizes += [size for p, size in pack_sizes(layout).items() if p not in packs and session_of(p) not in at_work]
    left = [_bytes_in(layout.saving_of(session)) for session in layout.begun() - at_work]
    return Collected(sum(sizes) + sum(left))


def needless_parts(layout: Layout, named: Named, look: Callable[[Path], set[str]] = held) -> set[str] | None:
    """Return the ids that no snapshot and nobody at work has; None where it cannot be known what snapshots need.

    `look` tells who is at work: `settle` where these are to be deleted.
    """
    # In this order: what was there first belongs to somebody who is still at work, or has its manifest in place.
    found = layout.parts() | layout.lists() | layout.labelled()
    at_work = look(layout.locks)
    manifests = named()
    if manifests is None:
        return None
    needed = {m.id for m in manifests}
    lost = needed - layout.parts()
    if lost and ((again := named()) is None or any(m.id in lost for m in again)):
        return None  # not as where a snapshot was removed meanwhile: its manifest goes before its part
    return found - at_work - needed


def _delete(paths: Iterable[Path]) -> int:
    freed = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed


def _delete_packs(layout: Layout, named_before: set[str], grace: float, now: float, freed: int) -> Collected:
    """Condemn the packs that no part of the index names any more, and delete those whose time has come."""
    # In this order: what was there first belongs to somebody who is still at work, or is in the index by now. And who
    # was at work before the index was read is among those waited for.
    packs = pack_sizes(layout)
    at_work = settle(layout.locks)
    named_now = named_packs(layout, layout.parts())
    # A pack that was named until just now is condemned only now: somebody may have come to rely on it meanwhile.
    condemned = {pack: entry for pack, entry in _condemned(layout).items() if pack not in named_before}
    waiting: dict[str, Any] = {}
    bytes_waiting = 0
    for pack, size in packs.items():
        if pack in named_now or session_of(pack) in at_work:
            continue
        entry = condemned.get(pack, {"since": now, "sessions": sorted(at_work)})
        entry["since"] = min(entry["since"], now)  # the clock may have been set back
        if at_work.isdisjoint(entry["sessions"]) and now - entry["since"] >= grace:
            (layout.packs / pack).unlink(missing_ok=True)
            freed += size
        else:
            waiting[pack] = entry
            bytes_waiting += size
    _write_condemned(layout, waiting)
    return Collected(freed, bytes_waiting)


def _condemned(layout: Layout) -> Mapping[str, Any]:
    """Return since when, and at whose work, packs are condemned. A damaged record counts as none: they wait longer."""
    try:
        found = json.loads(read_small(layout.condemned, _RECORD_LIMIT))
        return {str(p): {"since": float(e["since"]), "sessions": list(e["sessions"])} for p, e in found.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_condemned(layout: Layout, packs: Mapping[str, Any]) -> None:
    if not packs:
        layout.condemned.unlink(missing_ok=True)
        return
    draft = layout.condemned_draft
    draft.unlink(missing_ok=True)
    write_new(draft, json.dumps(packs).encode("ascii"))
    draft.rename(layout.condemned)
    sync_folder(layout.root)
