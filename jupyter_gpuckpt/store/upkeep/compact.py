"""Write packs anew of which little is still needed: the rest of them is freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..codec import encode
from ..index import DamagedPart, Index, named_packs, open_part, pack_sizes, read_part, write_part
from ..layout import Layout
from ..names import pack_name, session_of
from ..pack import HEADER, PackReader, PackWriter
from ..sessions import Lock, Session, held
from .collect import Collected, Named, collect

__all__ = ["compact"]

_SPARSE = 0.5
"""A pack of which a smaller share is needed is written anew."""


def compact(layout: Layout, named: Named, grace: float = 0.0) -> Collected:
    """Collect, copy what is needed of sparse packs to new ones, and collect these; arguments and errors as `collect`.

    A snapshot's part of the index changes only when the copies it names are on the disk.
    """
    first = collect(layout, named, grace)
    lock = None if first.obstacle else Lock.take(layout.collecting)
    if lock is None:
        return first
    try:
        copied = _copy(layout)
    except DamagedPart:
        copied = False
    finally:
        lock.release()
    if not copied:
        return first
    second = collect(layout, named, grace)
    return Collected(first.freed + second.freed, second.waiting, second.obstacle)


def _copy(layout: Layout) -> bool:
    """Have the needed chunks of sparse packs in new ones, and the index name these; tell whether there were any."""
    session = Session(layout.locks, "compact")
    packs = PackWriter(layout.packs, session.id)
    try:
        at_work = held(layout.locks)
        parts = layout.parts() - at_work
        sparse = _sparse(layout, parts, named_packs(layout, at_work), at_work)
        users = [part for part in parts if sparse and not sparse.isdisjoint(open_part(layout, part).packs())]
        for pack, chunks in _needed(layout, users, sparse).items():
            _copy_pack(layout, pack, chunks, packs)
        packs.finish()
        for part in users:
            chunks = read_part(layout, part)
            moved = {key: packs.placed[key] for key, at in chunks.items() if at.pack in sparse and key in packs.placed}
            if moved:
                write_part(layout, part, {**chunks, **moved}, session.id)
        return bool(packs.placed)
    finally:
        packs.close()
        session.close()


def _sparse(layout: Layout, parts: Iterable[str], in_use: set[str], at_work: set[str]) -> set[str]:
    """Return the packs to be written anew."""
    places: set[tuple[bytes, int, int, int]] = set()
    for part in parts:
        places.update(open_part(layout, part).places())
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


def _needed(layout: Layout, parts: Iterable[str], packs: set[str]) -> dict[str, Index]:
    """Return the chunks in these packs that the parts name, by pack."""
    needed: dict[str, Index] = defaultdict(dict)
    for part in parts:
        for key, at in read_part(layout, part).items():
            if at.pack in packs:
                needed[at.pack][key] = at
    return needed


def _copy_pack(layout: Layout, pack: str, chunks: Index, packs: PackWriter) -> None:
    reader = PackReader(layout.packs)
    for key, at in chunks.items():
        try:
            data = reader.read(key, at)
        except (OSError, ValueError):
            continue  # it stays where it is, damaged: that is for `check` to say
        if key not in packs.placed:
            codec, stored = encode(data)
            packs.put(key, at.size, codec, stored)
