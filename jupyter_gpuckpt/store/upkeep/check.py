"""Say what is damaged in a store, and which snapshots that touches. Nothing is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...errors import Damaged, GpuckptError
from ..index import DamagedPart, Index, from_packs, pack_sizes, read_part, with_bases
from ..layout import Layout
from ..manifest import Manifest
from ..pack import Location, PackReader
from ..parallel import Progress, Tally, run_all
from ..reading import missing, read_contents

__all__ = ["Checked", "Fault", "check"]

_BATCH = 32


@dataclass(frozen=True)
class Fault:
    """One damage."""

    what: str
    """What is damaged: ``manifest``, ``contents``, ``index``, ``pack``, ``chunk``."""
    why: str
    snapshots: tuple[str, ...]
    """The names of those that cannot be restored for it; empty where it does no harm yet."""


@dataclass
class Checked:
    """What was looked at, and what was found."""

    snapshots: int = 0
    chunks: int = 0
    read: int = 0
    """Bytes of chunks that were read and held against their hashes."""
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class _Chunk:
    """A chunk, where it is, and which snapshots need it."""

    key: bytes
    at: Location
    base: Location | None
    """Where the chunk is that it is a delta of, if it is one."""
    users: set[str]


def check(
    layout: Layout,
    manifests: Sequence[Manifest],
    broken: Sequence[GpuckptError],
    read_data: bool,
    progress: Progress | None,
) -> Checked:
    """Look through the store of which these are the manifests, and the errors of those that cannot be read.

    `progress` is called with the stage ``check``. Raises `OSError`.
    """
    found = Checked(snapshots=len(manifests))
    found.faults += [Fault("manifest", e.why, (str(e.data.get("name", "")),)) for e in broken]
    chunks: dict[tuple[bytes, Location], _Chunk] = {}
    sizes = pack_sizes(layout)
    for manifest in manifests:
        found.faults += _check_snapshot(layout, manifest, sizes, chunks)
    found.faults += _check_strays(layout, {m.id for m in manifests})
    found.chunks = len(chunks)
    if read_data:
        _check_data(layout, list(chunks.values()), found, progress)
        found.faults += _check_headers(layout, list(chunks.values()))
    return found


def _check_snapshot(
    layout: Layout, manifest: Manifest, sizes: Mapping[str, int], chunks: dict[tuple[bytes, Location], _Chunk]
) -> list[Fault]:
    """Check what is written about a snapshot, and add its chunks to `chunks`, with the bases of those that are deltas.

    Two snapshots can have the same chunk at two places.
    """
    names = (manifest.name,)
    try:
        contents = read_contents(layout, manifest)
    except Damaged as e:
        return [Fault("contents", e.why, names)]
    part: Index = {}
    faults = []
    try:
        part = read_part(layout, manifest.id)
    except (DamagedPart, FileNotFoundError):
        faults.append(Fault("index", "its part of the index is damaged or missing; `repair` rebuilds it", names))
    lost = missing(contents, part, sizes) if part or not faults else []
    if lost:
        files = ", ".join(sorted({path for path, _ in lost}))
        why = f"{len({c.hash for _, c in lost})} chunks of {files} are not in the packs"
        faults.append(Fault("pack", why, names))
    gone = {chunk.hash for _, chunk in lost}
    there = {chunk.hash for chunk in contents.chunks() if chunk.hash in part} - gone
    for key, at in with_bases(part, there).items():
        base = part[at.base] if at.base else None
        chunks.setdefault((key, at), _Chunk(key, at, base, set())).users.add(manifest.name)
    return faults


def _check_strays(layout: Layout, known: set[str]) -> list[Fault]:
    """Look at the parts of the index that belong to no snapshot: a damaged one keeps everything from being deleted."""
    faults = []
    for part in sorted(layout.parts() - known):
        try:
            read_part(layout, part)
        except FileNotFoundError:
            continue
        except DamagedPart:
            faults.append(Fault("index", f"{part}, of no snapshot, is damaged; `repair` deletes it", ()))
    return faults


def _check_data(layout: Layout, chunks: Sequence[_Chunk], found: Checked, progress: Progress | None) -> None:
    order = sorted(chunks, key=lambda chunk: (chunk.at.pack, chunk.at.offset))
    total = sum(chunk.at.size for chunk in order)
    bad: list[Fault] = []
    batches = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
    run_all(
        [partial(_read, layout, batch, bad) for batch in batches],
        (lambda done: progress("check", done, total)) if progress else (lambda _: None),
    )
    found.read = total
    found.faults += sorted(bad, key=lambda fault: fault.why)


def _read(layout: Layout, chunks: Sequence[_Chunk], bad: list[Fault], tally: Tally) -> None:
    for chunk in chunks:
        reader = PackReader(layout.packs, {} if chunk.base is None else {chunk.at.base: chunk.base})
        try:
            reader.read(chunk.key, chunk.at)
        except (OSError, ValueError) as e:
            why = f"{chunk.key.hex()[:16]} in pack {chunk.at.pack}: {e}"
            bad.append(Fault("chunk", why, tuple(sorted(chunk.users))))
        tally.add(chunk.at.size)


def _check_headers(layout: Layout, chunks: Sequence[_Chunk]) -> list[Fault]:
    """Check that the index could be made again from the packs."""
    by_pack: dict[str, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_pack[chunk.at.pack].append(chunk)
    faults = []
    for pack, held in sorted(by_pack.items()):
        told = from_packs(layout, [pack])
        if any(told.get(chunk.key) != chunk.at for chunk in held):
            faults.append(Fault("pack", f"{pack}: its own list of chunks is damaged; `repair` copies them", ()))
    return faults
