"""Fetch a snapshot from a remote: who made it is checked first, then only the chunks that the store lacks travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...errors import NoSuchSnapshot, Refused
from ..chunks import digest
from ..incoming import Incoming
from ..index import Index, part_size
from ..manifest import Manifest
from ..pack import Location, verified
from ..parallel import Progress, Tally, run_all
from ..store import Store
from .remote_listing import listed
from .remote_store import MAX_PACK, RemoteStore

__all__ = ["Pulled", "pull"]

_RUN = 8 * 1024 * 1024
"""Bytes of a pack that are asked for at once, about."""

_GAP = 128 * 1024
"""So many bytes that are not needed are read rather than asked around."""


@dataclass(frozen=True)
class Pulled:
    """What was fetched."""

    manifest: Manifest
    fetched: int
    """Bytes of chunks that were fetched, as they are stored."""
    found: int
    """Bytes of chunks that the store had already, as they are."""


def pull(
    store: Store,
    at: RemoteStore,
    name: str = "",
    *,
    replace: bool = False,
    older: bool = False,
    quota: int | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Fetch the snapshot `name`, or the only one that is there; `progress` gets the stage ``fetch``.

    With `replace` it may replace one of that name; with `older` it may be older than one that was here before. A
    snapshot for which the store would take more than `quota` bytes fails.

    Raises
    ------
    NoSuchSnapshot : there is none of that name.
    Refused : no name was given, and there are several.
    Untrusted : nobody who is trusted made it, or it is an older one. Nothing was written.
    Damaged : what the remote holds is not what was sent there.
    NameTaken, Pinned, Busy : as `Store.incoming`.
    RemoteError : the remote cannot be reached; what has arrived is not fetched again.
    """
    name = name or _only(store, at)
    raw = at.manifest(name)
    store.trust.check(raw, name)
    manifest = Manifest.from_json(raw, name)
    if not older:
        store.trust.check_newest(raw, manifest)
    if store.holds(manifest):
        store.trust.note_newest(raw, manifest)
        return Pulled(store.get(name), 0, manifest.size)
    with store.incoming(raw, name, replace=replace, quota=quota, resumable=True) as incoming:
        contents = at.contents(manifest)
        if digest(contents).hex() != manifest.contents:
            raise at.unusable(f"contents/{manifest.id}", "it does not have the hash that the manifest names")
        missing = incoming.missing(contents)
        fetched = _fetch(at, manifest, incoming, missing, progress)
        incoming.commit()
    store.trust.note_newest(raw, manifest)
    sizes = incoming.sizes()
    return Pulled(manifest, fetched, sum(size for key, size in sizes.items() if key not in missing))


def _only(store: Store, at: RemoteStore) -> str:
    found = listed(at, store.trust)
    if len(found) == 1 and found[0].error is not None:
        raise found[0].error
    names = [one.name for one in found]
    if len(names) == 1:
        return names[0]
    if not names:
        raise NoSuchSnapshot(f"There are no snapshots at {at.shown}.", "none were sent there", "Check the address.")
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise Refused("Nothing was fetched.", f"there are several snapshots at {at.shown}: {shown}", "Name one of them.")


def _fetch(
    at: RemoteStore, manifest: Manifest, incoming: Incoming, missing: set[bytes], progress: Progress | None
) -> int:
    """Bring in what is missing; return how many bytes that were."""
    if not missing:
        return 0
    sizes = incoming.sizes()
    try:
        named = at.part(manifest.id, part_size(len(sizes))).among(missing)
    except FileNotFoundError:
        raise at.unusable(f"index/{manifest.id}", "it is missing") from None
    except ValueError as e:
        raise at.unusable(f"index/{manifest.id}", str(e)) from e
    wanted: Index = {key: where for key, where in named.items() if where.size == sizes[key]}
    if len(wanted) < len(missing):
        raise at.unusable(f"index/{manifest.id}", f"it lacks {len(missing) - len(wanted)} chunks of the snapshot")
    total = sum(where.stored for where in wanted.values())
    report = (lambda done: progress("fetch", done, total)) if progress else (lambda _: None)
    jobs = [partial(_fetch_run, at, incoming, run) for run in _runs(manifest, wanted, at)]
    run_all(jobs, report, at.threads)
    return total


def _runs(
    manifest: Manifest, wanted: Mapping[bytes, Location], at: RemoteStore
) -> Iterator[list[tuple[bytes, Location]]]:
    """Yield what is to be asked for at once: chunks of one pack that lie near each other, in their order."""
    packs: dict[str, list[tuple[bytes, Location]]] = defaultdict(list)
    for key, where in wanted.items():
        if where.offset + where.stored > MAX_PACK:
            raise at.unusable(
                f"packs/{where.pack}", f"a chunk is said to lie at {where.offset:,}, where no pack reaches"
            )
        packs[where.pack].append((key, where))
    for pack in sorted(packs):
        run: list[tuple[bytes, Location]] = []
        for key, where in sorted(packs[pack], key=lambda one: one[1].offset):
            if run and at.reads_parts:
                begin, end = run[0][1].offset, run[-1][1].offset + run[-1][1].stored
                if where.offset - end > _GAP or where.offset + where.stored - begin > _RUN:
                    yield run
                    run = []
            run.append((key, where))
        yield run


def _fetch_run(at: RemoteStore, incoming: Incoming, run: list[tuple[bytes, Location]], tally: Tally) -> None:
    begin = run[0][1].offset
    end = max(where.offset + where.stored for _, where in run)
    tally.add(0)
    data = at.read_pack(run[0][1].pack, begin, end - begin)
    for key, where in run:
        stored = data[where.offset - begin : where.offset - begin + where.stored]
        try:
            verified(key, where.codec, stored, where.size)
        except ValueError as e:
            raise at.unusable(f"packs/{where.pack}", f"chunk {key.hex()[:16]}: {e}") from e
        incoming.put(key, where.size, where.codec, stored)
        tally.add(where.stored)
