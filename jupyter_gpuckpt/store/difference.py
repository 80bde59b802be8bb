"""What one snapshot holds and another does not, by their chunks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from .chunks import HOLE, Chunk
from .contents import Contents

__all__ = ["Change", "changed_ranges", "difference"]


@dataclass(frozen=True)
class Change:
    """What became of one file from one snapshot to another."""

    path: str
    old: int | None
    """Its size in the first snapshot, in bytes; None where it is not there."""
    new: int | None
    """Its size in the second."""
    changed: int
    """Bytes of it in the second, in chunks that no file of the first has: what did not only move."""


def difference(old: Contents, new: Contents) -> list[Change]:
    """Return what became of each file, those with the most changed bytes first."""
    known = {chunk.hash for chunk in old.chunks()}
    changes = [
        Change(
            path,
            old.size_of(path) if path in old.files else None,
            new.size_of(path) if path in new.files else None,
            sum(c.size for c in new.files.get(path, ()) if c.hash != HOLE and c.hash not in known),
        )
        for path in sorted({*old.files, *new.files})
    ]
    return sorted(changes, key=lambda change: -change.changed)


def changed_ranges(chunks: Iterable[Chunk], known: Container[bytes]) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each chunk of a file that is not among those that are known by their hashes."""
    offset = 0
    for chunk in chunks:
        if chunk.hash != HOLE and chunk.hash not in known:
            yield offset, chunk.size
        offset += chunk.size
