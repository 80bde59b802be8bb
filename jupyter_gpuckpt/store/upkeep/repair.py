"""Repair what can be repaired: make the index again from what the packs hold, every byte of it verified.

No snapshot is removed, and no chunk deleted. What is damaged leaves the index, so that a save of the same bytes stores
them again; a repair after that mends the older snapshots, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import Damaged
from ..codec import encode
from ..contents import Contents
from ..durable import FOLDER_MODE, sync_folder
from ..index import DamagedPart, Index, from_packs, merge, pack_sizes, read_part, with_bases, write_part
from ..layout import Layout
from ..manifest import Manifest
from ..pack import Location, PackReader, PackWriter
from ..reading import missing, read_contents
from ..sessions import Lock, Session, settle

__all__ = ["Repaired", "repair"]


@dataclass
class Repaired:
    """What a repair did."""

    mended: list[str] = field(default_factory=list)
    """The snapshots whose part of the index was made again; those in `lost` may be among them."""
    lost: dict[str, str] = field(default_factory=dict)
    """The snapshots that cannot be restored all the same, and why."""


def repair(layout: Layout, manifests: Sequence[Manifest]) -> Repaired:
    """Mend the store of which these are the manifests that can be read. Raises `OSError`."""
    lock = Lock.wait(layout.collecting)
    try:
        session = Session(layout.locks, "repair")
        packs = PackWriter(layout.packs, session.id)
        try:
            return _repair(layout, manifests, session.id, packs)
        finally:
            packs.close()
            session.close()
    finally:
        lock.release()


def _repair(layout: Layout, manifests: Sequence[Manifest], session: str, packs: PackWriter) -> Repaired:
    for folder in layout.folders:
        folder.chmod(FOLDER_MODE)
    for path in layout.hinted():  # parts of the index will name more than they did
        path.unlink(missing_ok=True)
    done = Repaired()
    search = _Search(layout, *_candidates(layout), packs)
    readable: dict[str, tuple[Manifest, Contents]] = {}
    for manifest in manifests:
        try:
            contents = read_contents(layout, manifest)
        except Damaged as e:
            done.lost[manifest.name] = e.why
            continue
        readable[manifest.name] = manifest, contents
        for key in {chunk.hash for chunk in contents.chunks()}:
            search.find(key)
    packs.finish()
    good = merge(search.good, packs.placed)
    sizes = pack_sizes(layout)
    for name, (manifest, contents) in readable.items():
        part = with_bases(good, (chunk.hash for chunk in contents.chunks() if chunk.hash in good))
        if part != _part(layout, manifest.id):
            write_part(layout, manifest.id, part, session)
            done.mended.append(name)
        lost = {chunk.hash for _, chunk in missing(contents, part, sizes)}
        if lost:
            files = ", ".join(sorted({path for path, chunk in missing(contents, part, sizes)}))
            done.lost[name] = f"{len(lost)} chunks of {files} are lost"
    _delete_strays(layout, {m.id for m in manifests})
    return done


def _candidates(layout: Layout) -> tuple[Index, dict[bytes, list[Location]]]:
    """Return what the packs' own lists say, and everywhere a chunk may be by them and the index."""
    told = from_packs(layout, pack_sizes(layout))
    candidates: dict[bytes, list[Location]] = defaultdict(list)
    for part in sorted(layout.parts()):
        for key, at in (_part(layout, part) or {}).items():
            if at not in candidates[key]:
                candidates[key].append(at)
    for key, at in told.items():
        if at not in candidates[key]:
            candidates[key].append(at)
    return told, candidates


def _part(layout: Layout, part: str) -> Index | None:
    try:
        return read_part(layout, part)
    except (FileNotFoundError, DamagedPart):
        return None


@dataclass
class _Search:
    """Finds where chunks are whole, of all `candidates`; one that its pack's own list does not name is copied."""

    layout: Layout
    told: Index
    candidates: Mapping[bytes, Sequence[Location]]
    packs: PackWriter
    good: Index = field(default_factory=dict)
    """Where those are that were found."""
    _sought: set[bytes] = field(default_factory=set)
    """Those that were looked for by themselves."""

    def find(self, key: bytes) -> None:
        """Enter into `good` where a chunk is whole; as a delta only where it is nowhere by itself."""
        if self._is_by_itself(key) or key in self.good:
            return
        for at in self._of(key):
            if at.base and self._is_by_itself(at.base) and self._take(key, at):
                return

    def _is_by_itself(self, key: bytes) -> bool:
        if key not in self._sought:
            self._sought.add(key)
            any(self._take(key, at) for at in self._of(key) if not at.base)  # up to the first
        return key in self.good and not self.good[key].base

    def _of(self, key: bytes) -> Sequence[Location]:
        return sorted(self.candidates.get(key, ()), key=lambda at: self.told.get(key) != at)

    def _take(self, key: bytes, at: Location) -> bool:
        with suppress(OSError, ValueError):
            data = PackReader(self.layout.packs, self.good).read(key, at)
            self.good[key] = at
            if self.told.get(key) != at:
                codec, stored = encode(data)
                self.packs.put(key, at.size, codec, stored)
            return True
        return False


def _delete_strays(layout: Layout, known: set[str]) -> None:
    """Delete damaged parts of the index that belong to no snapshot."""
    for part in layout.parts() - known - settle(layout.locks):
        if _part(layout, part) is None:
            layout.part_of(part).unlink(missing_ok=True)
    sync_folder(layout.index)
