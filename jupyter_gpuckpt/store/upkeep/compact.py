"""Write packs again of which little is still needed: the rest of them is freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..index import DamagedPart, Index, merge, named_packs, open_parts, pack_sizes, read_part, write_part
from ..layout import Layout
from ..names import pack_name, session_of
from ..pack import HEADER, Location, PackReader, PackWriter
from ..reach import locks_reach
from ..sessions import Lock, Session, held, settle
from .collect import Collected, Named, collect, needless_parts, would_collect

__all__ = ["compact", "would_compact"]

_SPARSE = 0.5
"""A pack of which a smaller share is needed is written again."""


def compact(layout: Layout, named: Named, grace: float = 0.0) -> Collected:
    """Collect, copy what is needed of sparse packs to new ones, and collect these; arguments and errors as `collect`.

    A snapshot's part of the index changes only when the copies it names are on the disk.
    """
    first = collect(layout, named, grace)
    if first.obstacle or not locks_reach(layout.root):  # two machines that write packs again need the lock
        return first
    lock = Lock.take(layout.collecting)
    if lock is None:
        return first
    try:
        written = _copy(layout)
    except DamagedPart:
        written = 0
    finally:
        lock.release()
    if not written:
        return first
    second = collect(layout, named, grace)
    freed = first.freed + second.freed - written  # less than nothing where the packs that were copied have to wait
    return Collected(max(0, freed), second.waiting + min(0, freed), second.obstacle)


def would_compact(layout: Layout, named: Named) -> Collected:
    """Return what `compact` would free if nobody was at work; nothing is changed. Raises `OSError`."""
    first = would_collect(layout, named)
    needless = None if first.obstacle else needless_parts(layout, named)
    if needless is None:
        return first
    try:
        at_work = held(layout.locks)
        plan = _plan(layout, layout.parts() - at_work - needless, at_work)
    except DamagedPart:
        return first
    sizes = pack_sizes(layout)
    copied = {key: at.taken for chunks in plan.chunks.values() for key, at in chunks.items()}
    return Collected(first.freed + sum(sizes.get(pack, 0) for pack in plan.packs) - sum(copied.values()))


@dataclass(frozen=True)
class _Plan:
    """What is to be written again: the sparse packs, the chunks of them that are needed, the parts that name them."""

    packs: set[str]
    chunks: dict[str, Index]
    bases: Index
    """Where the bases are of those chunks that are deltas, in whatever packs."""
    users: list[str]


def _plan(layout: Layout, parts: Iterable[str], at_work: set[str]) -> _Plan:
    """Find what is worth writing again of what the `parts` need. Raises `DamagedPart`, `OSError`."""
    sparse = _sparse(layout, parts, named_packs(layout, at_work), at_work)
    users = [name for name, part in open_parts(layout, parts if sparse else ()) if not sparse.isdisjoint(part.packs())]
    return _Plan(sparse, *_needed(layout, users, sparse), users)


def _copy(layout: Layout) -> int:
    """Have the needed chunks of sparse packs in new ones, and the index name these; return the bytes written."""
    session = Session(layout.locks, "compact")
    packs = PackWriter(layout.packs, session.id)
    try:
        at_work = settle(layout.locks)
        plan = _plan(layout, layout.parts() - at_work, at_work)
        reader = PackReader(layout.packs, plan.bases)
        for are_deltas in (False, True):  # of a chunk that is stored both ways, not the delta is copied
            for chunks in plan.chunks.values():
                _copy_pack(reader, {key: at for key, at in chunks.items() if bool(at.base) == are_deltas}, packs)
        packs.finish()
        for part in plan.users:
            chunks = read_part(layout, part)
            moved = {key: packs.placed[key] for key, at in chunks.items() if _may_move(key, at, plan, packs.placed)}
            if moved:
                write_part(layout, part, {**chunks, **moved}, session.id)
        return sum(at.taken for at in packs.placed.values())
    finally:
        packs.close()
        session.close()


def _may_move(key: bytes, at: Location, plan: _Plan, placed: Index) -> bool:
    """Tell whether a part that names a chunk there can name its copy: not where that is a delta that the part's is not.

    The part need not have its base, or has the chunk as one.
    """
    return at.pack in plan.packs and key in placed and placed[key].base in (b"", at.base)


def _sparse(layout: Layout, parts: Iterable[str], in_use: set[str], at_work: set[str]) -> set[str]:
    """Return the packs to be written again."""
    places: set[tuple[bytes, int, int, int]] = set()
    for _, part in open_parts(layout, parts):
        places.update(part.places())
    taken: dict[tuple[bytes, int], int] = defaultdict(int)
    for session, number, _, stored in places:
        taken[session, number] += HEADER + stored
    sizes = pack_sizes(layout)
    needed = {pack_name(session.hex(), number): size for (session, number), size in taken.items()}
    return {
        pack
        for pack, size in needed.items()
        if pack not in in_use and session_of(pack) not in at_work and size < _SPARSE * sizes.get(pack, 0)
    }


def _needed(layout: Layout, parts: Iterable[str], packs: set[str]) -> tuple[dict[str, Index], Index]:
    """Return the chunks in these packs that the parts name, by pack; and where the bases of deltas among them are."""
    needed: dict[str, Index] = defaultdict(dict)
    bases: Index = {}
    for part in parts:
        with suppress(FileNotFoundError):  # it is deleted meanwhile
            index = read_part(layout, part)
            for key, at in index.items():
                if at.pack in packs:
                    needed[at.pack][key] = at
                    merge(bases, {at.base: index[at.base]} if at.base else {})
    return needed, bases


def _copy_pack(reader: PackReader, chunks: Index, packs: PackWriter) -> None:
    for key, at in chunks.items():
        if key in packs.placed:
            continue
        try:
            stored = reader.stored(key, at)
        except (OSError, ValueError):
            continue  # it stays where it is, damaged: that is for `check` to say
        packs.put(key, at.size, at.codec, stored)
